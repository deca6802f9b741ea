"""Starts the worker group of a job and follows it to its end.

The parent lays out the incarnation's folder, starts the agent in a session of its own (a Ctrl-C reaches the parent
only, which then asks the agent politely, once), reads its output line by line, and explains how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from elastictrain.config import LoadedJob
from elastictrain.errors import BusyError, ElasticTrainError, StateDirError, WorkerFailedError
from elastictrain.protocol import (
    BOARD_FILE,
    IDENTITY_FILE,
    LOCK_FILE,
    OUTCOME_FILE,
    RUNS_DIR,
    RunSpec,
    StopBoard,
    read_error_reports,
    write_json,
)


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


class Incarnation:
    """One life of a job's worker group.

    Args:
        run_dir: its folder.
        number: from 1, never reused within a state directory.
    """

    def __init__(self, run_dir: Path, number: int) -> None:
        self.run_dir = run_dir
        self.number = number
        self._agent: subprocess.Popen[str] | None = None
        self._asked_to_stop = False

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
        """Has the ranks finish their step and end. Asked once: a second signal to the agent restarts its grace."""
        if self._agent is not None and not self._asked_to_stop:
            self._asked_to_stop = True
            self._agent.send_signal(signal.SIGTERM)

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
        if self._agent is not None and self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()


class StateDir:
    """A job's state directory: everything the job writes is in it.

    Args:
        path: made if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            (self.path / RUNS_DIR).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateDirError(
                f"the state directory {self.path} cannot be made: {error.strerror}",
                "Name another with --state-dir DIR.",
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for this process.

        Raises:
            BusyError: another process has it.
        """
        lock = FileLock(self.path / LOCK_FILE)
        owner = self.path / f"{LOCK_FILE}.pid"
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            pid = owner.read_text().strip() if owner.exists() else "unknown"
            raise BusyError(
                f"{self.path} is in use by process {pid}",
                "Stop that run first, or give this one another --state-dir.",
            ) from error
        except OSError as error:
            raise StateDirError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            owner.write_text(f"{os.getpid()}\n")
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()

    def kept_global_batch_size(self) -> int | None:
        """What an earlier start fixed; None before the first."""
        path = self.path / IDENTITY_FILE
        if not path.exists():
            return None
        try:
            return int(json.loads(path.read_text())["global_batch_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateDirError(f"{path} cannot be read: {error}", "Restore it, or use another --state-dir.") from error

    def keep_global_batch_size(self, size: int) -> None:
        write_json(self.path / IDENTITY_FILE, {"global_batch_size": size})

    def new_incarnation(self, job: LoadedJob) -> Incarnation:
        """Lays out the folder of the next incarnation."""
        numbers = [int(p.name) for p in (self.path / RUNS_DIR).iterdir() if p.name.isdigit()]
        number = max(numbers, default=0) + 1
        run_dir = self.path / RUNS_DIR / f"{number:04d}"
        run_dir.mkdir()
        StopBoard.create(run_dir / BOARD_FILE)
        kept = self.kept_global_batch_size() if job.config.train.global_batch_size is None else None
        RunSpec(
            incarnation=number,
            state_dir=str(self.path),
            job_dir=str(job.module_dir) if job.module_dir is not None else None,
            config=job.config.model_dump(mode="json"),
            kept_global_batch_size=kept,
        ).write(run_dir)
        return Incarnation(run_dir, number)


@contextmanager
def stopping_on_signals(incarnation: Incarnation) -> Iterator[None]:
    """SIGINT and SIGTERM ask the ranks to stop; a third SIGINT ends them."""
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
    except ElasticTrainError:
        raise
    finally:
        incarnation.kill()
