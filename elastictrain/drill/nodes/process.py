"""A program on a node, as whoever started it holds it.

`nsenter` stands between the two: it cannot enter a PID namespace itself, so it starts the program as its child there,
waits for it, and ends as that ends. Signals must therefore go to the child.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from typing import IO, Any

import psutil

DEADLINE_S = 60.0
POLL_S = 0.01


def wait_until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Waits until `condition()` is true and returns its value.

    Raises:
        TimeoutError: it was not, for `deadline_s`.
    """
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {deadline_s} s: {condition}")
        time.sleep(POLL_S)
    return value


class NodeProcess:
    """A program that was started on a node."""

    def __init__(self, nsenter: subprocess.Popen[Any]) -> None:
        self._nsenter = nsenter
        self.args = nsenter.args

    @property
    def stdout(self) -> IO[Any] | None:
        return self._nsenter.stdout

    @property
    def outside(self) -> psutil.Process | None:
        """The program, as this machine numbers it; None if it has ended."""

        def look() -> tuple[psutil.Process | None] | None:
            if self._nsenter.poll() is not None:
                return (None,)
            try:
                children = psutil.Process(self._nsenter.pid).children()
            except psutil.NoSuchProcess:
                return None
            return (children[0],) if children else None

        found: tuple[psutil.Process | None] = wait_until(look)
        return found[0]

    def send_signal(self, number: signal.Signals) -> None:
        """To the program itself; nothing happens if it has ended."""
        program = self.outside
        if program is not None:
            try:
                program.send_signal(number)
            except psutil.NoSuchProcess:
                return
        if number is signal.SIGCONT:
            self.wake_go_between()

    def wake_go_between(self) -> None:
        """`nsenter` stops itself when the program is stopped; it does not see that the program goes on."""
        if self._nsenter.poll() is None:
            self._nsenter.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Exit status; minus the number of the signal it died of; None while it runs."""
        return self._nsenter.poll()

    def wait(self, deadline_s: float = 60.0) -> int:
        return self._nsenter.wait(deadline_s)

    def close(self) -> None:
        """After the node is gone: nothing of the go-between is left either."""
        self.wake_go_between()
        self._nsenter.wait()
        if self._nsenter.stdout is not None:
            self._nsenter.stdout.close()
