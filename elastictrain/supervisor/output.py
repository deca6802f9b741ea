"""What the ranks print: read as it comes, kept in a file per rank, told apart into events and the user's own prints."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastictrain.protocol import output_pipe, rank_log
from elastictrain.supervisor.rank_log import RankLog

READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
NUM_LAST_LINES = 50


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the workers that is an event."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of the workers that is not an event: the user's own print, or a warning of a library."""

    text: str


Line = Event | Printed


def parse_line(line: str) -> Line:
    """Tells events from prints."""
    text = line.rstrip("\n")
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError:
            return Printed(text)
        if isinstance(fields, dict) and isinstance(fields.get("event"), str):
            return Event(fields["event"], fields)
    return Printed(text)


class RankOutput:
    """Reads one local rank's pipe while an event loop runs.

    The pipe is ours, not the agent's, so a rank's last words arrive whatever becomes of the agent; and it is a pipe,
    not a file, so that a full disk costs the log and never the rank that prints.

    Args:
        run_dir: folder of the incarnation.
        local_rank: whose output.
        on_line: gets every line.
    """

    def __init__(self, run_dir: Path, local_rank: int, on_line: Callable[[Line], None]) -> None:
        self._pipe = output_pipe(run_dir, local_rank)
        self._on_line = on_line
        self._rest = b""
        self._fd: int | None = None
        self._log = RankLog(rank_log(run_dir, local_rank))
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)

    def open(self) -> None:
        """Makes the pipe and begins to read; needs a running event loop."""
        os.mkfifo(self._pipe, 0o600)
        # Opened for writing as well: so the pipe has no end as long as we want to read.
        self._fd = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> bool:
        """Takes what is there; False if there was nothing."""
        assert self._fd is not None
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        self._log.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._tell(line)
        return True

    def _tell(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self.last_lines.append(text)
        self._on_line(parse_line(text))

    def close(self) -> None:
        """Takes what is left, once the rank is gone."""
        if self._fd is None:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        while self._read():
            pass
        if self._rest:
            self._tell(self._rest)
            self._rest = b""
        os.close(self._fd)
        self._fd = None
        self._pipe.unlink(missing_ok=True)
        self._log.close()
