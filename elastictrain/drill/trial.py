"""One run of the job in a scratch state directory of its own: started, started again, waited for, cleared away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elastictrain.armed import ArmedFault, DrillDir, boot_clock_s
from elastictrain.checkpoint.catalog import Candidate, newest_first
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.core.events import Event
from elastictrain.core.faults import Fault
from elastictrain.core.trajectory import RankTrace, read_trace
from elastictrain.drill.launch import CLEAR_TIMEOUT_S
from elastictrain.drill.settings import DrillJob
from elastictrain.errors import ElasticTrainError, StorageError
from elastictrain.procs import adopt_orphans, command_of, reap_orphans
from elastictrain.protocol import JOURNAL_FILE, METRICS_FILE
from elastictrain.supervisor.journal_reader import JournalReader

POLL_S = 0.01
STDERR_LINES = 20


@dataclass(frozen=True, slots=True)
class Said:
    """One event that the supervisor or a rank printed.

    Args:
        at_s: when it arrived here, of `boot_clock_s`.
        name: of the event.
        fields: all of it.
    """

    at_s: float
    name: str
    fields: dict[str, Any]


class Trial:
    """A run with armed faults, or without.

    Args:
        job: what to run.
        folder: of its own; made.
        fault: whose settings it takes; None for an undisturbed run.
        armed: what is to happen to the ranks.
    """

    def __init__(self, job: DrillJob, folder: Path, fault: Fault | None, armed: list[ArmedFault]) -> None:
        self.job = job
        self.folder = folder
        self.fault = fault
        self.state_dir = folder / "state"
        self.store_path = folder / "store"
        self.store_path.mkdir(parents=True)
        self.drill = DrillDir(self.state_dir)
        self.drill.arm(armed)
        self.said: list[Said] = []
        adopt_orphans()  # what outlives its supervisor stays below this process, and is found when the run is closed
        self._others = children()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._began_s = 0.0
        self.started_s = 0.0
        """When the supervisor was last started, of `boot_clock_s`."""

    # ---- its supervisor

    def start(self) -> None:
        """Starts the supervisor; again, if it has ended. On the main thread, with which it would die (prctl(2))."""
        arguments = self.job.arguments(self.state_dir, self.store_path, self.fault)
        env = {key: value for key, value in os.environ.items() if key != "RUNTIME_DIRECTORY"}
        self.started_s = boot_clock_s()
        with (self.folder / "stderr.txt").open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "elastictrain.drill.launch"),
                    *(str(os.getpid()), str(self.state_dir), self.job.name, self.job.config.checkpoint.memory_path),
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                env=env,
                # A Ctrl-C is for the drill, which ends what it has started.
                start_new_session=True,
            )
        self._began_s = self._began_s or time.monotonic()
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with (self.folder / "output.jsonl").open("a") as copy:
            for line in process.stdout:
                copy.write(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    fields = json.loads(line)
                    self.said.append(Said(boot_clock_s(), fields["event"], fields))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def wall_s(self) -> float:
        """Since the first start."""
        return time.monotonic() - self._began_s

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def wait_end(self, deadline_s: float) -> int | None:
        """Waits for the supervisor to end; returns its exit code, None if it has not by `deadline_s`."""
        self.wait_for(lambda: self.exit_code is not None, deadline_s)
        if self.exit_code is not None and self._reader is not None:
            self._reader.join(CLEAR_TIMEOUT_S)
        reap_orphans(frozenset({self.pid}))
        return self.exit_code

    def wait_for(self, condition: Callable[[], Any], deadline_s: float) -> bool:
        """Waits until `condition()` is true; False if the supervisor ended first, or `deadline_s` came.

        Args:
            condition: asked again and again.
            deadline_s: of `time.monotonic`.
        """
        while True:
            ended = self.exit_code is not None
            if condition():
                return True
            if ended or time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)

    def wait_fired(self, fault_id: str, deadline_s: float) -> bool:
        """As `wait_for`, that a fault has happened."""
        return self.wait_for(lambda: self.drill.fired_at_s(fault_id) is not None, deadline_s)

    # ---- what it left

    def events(self, kinds: Collection[str] = ()) -> list[Event]:
        """The journal, also while the supervisor writes it; what it holds back for the moment is missing."""
        with contextlib.suppress(StorageError):
            return JournalReader(self.state_dir / JOURNAL_FILE).read(kinds=kinds)
        return []

    def said_named(self, name: str) -> list[Said]:
        return [said for said in list(self.said) if said.name == name]

    def traces(self) -> list[RankTrace]:
        return [read_trace(incarnation, rank, lines) for incarnation, rank, lines in self.drill.traces()]

    def reached_step(self) -> int:
        """The furthest step that a rank has committed so far."""
        return max((step for trace in self.traces() for step in trace.committed), default=0)

    def step_lines(self) -> list[dict[str, Any]]:
        """Every step's line in metrics.jsonl, in the order in which they were written."""
        lines = []
        with contextlib.suppress(OSError):
            for text in (self.state_dir / METRICS_FILE).read_text().splitlines():
                with contextlib.suppress(ValueError):
                    line = json.loads(text)
                    if line["kind"] == "step":
                        lines.append(line)
        return lines

    def store(self) -> Store:
        return open_store(str(self.store_path))

    def tiers(self) -> list[MemoryTier]:
        memory_path = Path(self.job.config.checkpoint.memory_path)
        memory = MemoryTier.for_job(memory_path, job=self.job.name, state_dir=self.state_dir)
        return [memory, MemoryTier.staging(self.state_dir)]

    def durable(self) -> list[Candidate]:
        """All complete snapshots in the store, newest first."""
        return newest_first(None, self.store())

    def kept(self) -> list[Candidate]:
        """The same of every tier."""
        found = [*(c for tier in self.tiers() for c in newest_first(tier, None)), *self.durable()]
        return sorted(found, key=lambda candidate: -candidate.global_step)

    def last_words(self) -> str:
        """What it printed last, for a message."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "stderr.txt").read_text().splitlines()
            return "\n".join(lines[-STDERR_LINES:])
        return ""

    # ---- the end

    def wait_gone(self) -> frozenset[int]:
        """Waits, once the supervisor has ended, for what may outlive it: a persister that finishes its snapshot.

        Returns:
            the processes that are there all the same.
        """
        deadline_s = time.monotonic() + CLEAR_TIMEOUT_S
        pids: frozenset[int] = frozenset()
        while self.exit_code is not None and (pids := children() - self._others - {self.pid}):
            if time.monotonic() > deadline_s:
                break
            reap_orphans(self._others)
            time.sleep(POLL_S)
        return pids

    def leftovers(self) -> str:
        """What should be gone by now, where the supervisor has ended by itself, in words: processes; and memory, where
        the run is complete and all of it durable."""
        if self.exit_code is None:
            return ""
        found = [f"process {pid} ({' '.join(command_of(pid))})" for pid in sorted(self.wait_gone())]
        if self.exit_code == 0:
            found += [str(tier.root) for tier in self.tiers() if tier.root.is_dir() and any(tier.root.iterdir())]
        return ", ".join(found)

    def close(self) -> None:
        """Ends every process of the run and gives back its memory; the folder stays. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait()
        end_descendants(self._others)
        if self._reader is not None:
            self._reader.join(CLEAR_TIMEOUT_S)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
            self._process = None
        for tier in self.tiers():
            with contextlib.suppress(ElasticTrainError):
                tier.clean(CLEAR_TIMEOUT_S)

    def remove(self) -> None:
        """Removes the folder too."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def children() -> frozenset[int]:
    """Pids of this process's children."""
    return frozenset(process.pid for process in psutil.Process().children())


def end_descendants(spare: frozenset[int] = frozenset()) -> None:
    """Kills whatever is left below this process, which must have adopted orphans, and waits until it is gone.

    Args:
        spare: children that are left alone, with all that is below them.
    """
    deadline_s = time.monotonic() + CLEAR_TIMEOUT_S
    while (mine := children() - spare) and time.monotonic() < deadline_s:
        for pid in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for below in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        below.kill()
        reap_orphans(spare)
        time.sleep(POLL_S)
