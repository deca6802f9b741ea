"""Starts the worker group of a job and follows it to its end.

The parent starts the agent in a session of its own, reads its output line by line, and explains how it ended. A Ctrl-C
reaches the parent only; it asks the ranks to stop through the stop board, which needs no signal and no answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from elastictrain.errors import WorkerFailedError
from elastictrain.protocol import BOARD_FILE, OUTCOME_FILE, StopBoard, read_error_reports


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the workers that is an event."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of the workers that is not an event: the user's own print, or a warning of a library."""

    text: str


def parse_line(line: str) -> Event | Printed:
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


STOP_GRACE_S = 10.0
"""Between being told to hurry and being killed."""


class Incarnation:
    """One life of a job's worker group.

    Args:
        run_dir: its folder.
        number: from 1, never reused within a state directory.
        stop_deadline_s: after this time a stop that was asked for is enforced.
    """

    def __init__(self, run_dir: Path, number: int, stop_deadline_s: float) -> None:
        self.run_dir = run_dir
        self.number = number
        self._stop_deadline_s = stop_deadline_s
        self._agent: subprocess.Popen[str] | None = None
        self._board = StopBoard(run_dir / BOARD_FILE)
        self._enforcers: list[threading.Timer] = []

    def start(self) -> None:
        """Starts the agent."""
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # Without a limit every rank of a node would take all its cores; a rank sets its own share of threads.
        env.setdefault("OMP_NUM_THREADS", "1")
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "elastictrain.training.agent", str(self.run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            env=env,
            start_new_session=True,
        )

    def lines(self) -> Iterator[Event | Printed]:
        """What the workers say, until they are gone."""
        assert self._agent is not None
        assert self._agent.stdout is not None
        for line in self._agent.stdout:
            yield parse_line(line)

    def ask_to_stop(self) -> None:
        """Has the ranks finish their step, keep their state and end; asked again, not wait for storage."""
        if self._board.asked:
            self._board.ask_to_hurry()
            return
        self._board.ask()
        self._enforce_after(self._stop_deadline_s, self._board.ask_to_hurry)
        self._enforce_after(self._stop_deadline_s + STOP_GRACE_S, self.kill)

    def _enforce_after(self, delay_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        timer.start()
        self._enforcers.append(timer)

    def wait(self) -> dict[str, Any]:
        """Waits for the end.

        Returns:
            the outcome that rank zero wrote.

        Raises:
            ElasticTrainError: the first cause among the ranks' reports.
        """
        assert self._agent is not None
        code = self._agent.wait()
        outcome = self.run_dir / OUTCOME_FILE
        reports = read_error_reports(self.run_dir)
        if reports:
            raise reports[0].as_error()
        if outcome.exists():
            decoded: dict[str, Any] = json.loads(outcome.read_text())
            return decoded
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise WorkerFailedError(
            f"a rank or the agent {how} without a report: killed, or out of memory",
            f"The agent's log: {self.run_dir / 'logs' / 'agent.log'}",
        )

    def kill(self) -> None:
        """Ends the agent, and with it all ranks, at once."""
        for timer in self._enforcers:
            timer.cancel()
        if self._agent is not None and self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()


@contextmanager
def stopping_on_signals(incarnation: Incarnation) -> Iterator[None]:
    """SIGINT and SIGTERM ask the ranks to stop, a second one to hurry; a third SIGINT ends them."""
    count = 0

    def handle(signum: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        incarnation.ask_to_stop()
        if signum == signal.SIGINT and count >= 3:
            incarnation.kill()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_to_end(incarnation: Incarnation, show: Any) -> dict[str, Any]:
    """Runs an incarnation, handing every line to `show`.

    Raises:
        ElasticTrainError: why it failed.
    """
    try:
        with stopping_on_signals(incarnation):
            incarnation.start()
            for line in incarnation.lines():
                show(line)
            return incarnation.wait()
    finally:
        incarnation.kill()
