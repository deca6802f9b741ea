"""Shows a run without waiting for whoever looks.

A terminal that is held (Ctrl-S), or a pipe that nobody reads, holds up neither the watch nor the end.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from elastictrain.cli.views import View
    from elastictrain.supervisor.output import Line

MAX_LINES_HELD = 100_000
"""Lines kept for a reader that does not read; more are left out. All are in the ranks' logs."""
SHOW_END_S = 5.0
"""How long to wait, at the end, for a reader to take the last lines."""


def own_stdout() -> TextIO:
    """Standard output for a thread of its own. `sys.stdout` is flushed when the program ends: a thread that is stuck in
    it would hold that up."""
    try:
        fd = os.dup(sys.stdout.fileno())
    except (OSError, io.UnsupportedOperation):
        return sys.stdout
    return open(fd, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: PTH123 - a descriptor


class Showing:
    """Shows lines on a thread of its own, from `with` to its end.

    Args:
        view: what shows them; belongs to the thread.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._summary: tuple[dict[str, Any], str] | None = None
        self._thread = Thread(target=self._run, name="showing", daemon=True)

    def show(self, line: Line) -> None:
        if self._lines.qsize() < MAX_LINES_HELD:
            self._lines.put(line)

    def summary(self, outcome: dict[str, Any], state_dir: str) -> None:
        """What to show after the last line."""
        self._summary = (outcome, state_dir)

    def _run(self) -> None:
        # Whoever read our output may be gone, a line may not be what it looks like: the training goes on.
        with suppress(Exception):
            with self._view:
                while (line := self._lines.get()) is not None:
                    with suppress(Exception):
                        self._view.show(line)
            if self._summary is not None:
                self._view.summary(*self._summary)

    def __enter__(self) -> Showing:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._lines.put(None)
        self._thread.join(SHOW_END_S)
