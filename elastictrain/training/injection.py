"""Makes faults happen to this rank, where a drill has armed some: `elastictrain.armed`, `core.faults`.

A session that nobody drills is a plain `Session`: what is here costs it nothing, for it is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from elastictrain.armed import CLOCK_JUMPS_S, ArmedFault, DrillDir, boot_clock_s
from elastictrain.checkpoint import faults as write_path
from elastictrain.core.faults import Action
from elastictrain.core.phases import Phase
from elastictrain.core.seeds import Stream
from elastictrain.core.window import WindowPlan
from elastictrain.protocol import RunSpec
from elastictrain.training.data import SeededReader, Span
from elastictrain.training.device import Place
from elastictrain.training.session import Session, Step
from elastictrain.training.task import BoundTask

SLOW_STEPS = 5
"""Steps in a row that a slow rank is slow in."""
SLOW_FACTOR = 5.0
"""How slow: so many times the longest step so far."""
SLOW_AT_LEAST_S = 0.25
HOLD_POLL_S = 0.002
_HOG_BYTES = 1 << 24
_FOREVER_S = 10**6

_IN_LOSS = frozenset({Action.HANG_IN_LOSS, Action.HANG_HOLDING_GIL, Action.RAISE_IN_LOSS, Action.NAN_LOSS})
_CONTRIBUTED = frozenset({Phase.REDUCE, Phase.OPTIMIZER})
"""In the first of these a rank has consumed its share of the window."""
_IN_DATASET = frozenset({Action.RAISE_IN_DATASET, Action.DIE_IN_DATASET})


def make_session(spec: RunSpec, place: Place, *, seed: int, group_timeout_s: float) -> Session:
    """This rank's session; where its state directory is drilled, one that injects and traces."""
    folder = DrillDir(Path(spec.state_dir))
    armed = folder.armed()
    if armed is None:
        return Session(place, seed=seed, group_timeout_s=group_timeout_s)
    return DrilledSession(
        place, folder, armed, incarnation=spec.incarnation, seed=seed, group_timeout_s=group_timeout_s
    )


class DrilledSession(Session):
    """A session with faults in it.

    Args:
        place: rank, world size, device.
        folder: what is shared with the drill.
        armed: the faults, of all ranks.
        incarnation: of the worker group.
        seed: the run's seed.
        group_timeout_s: see `Session`.
    """

    def __init__(
        self,
        place: Place,
        folder: DrillDir,
        armed: list[ArmedFault],
        *,
        incarnation: int,
        seed: int,
        group_timeout_s: float,
    ) -> None:
        self._drill = folder
        self._agent_pid = os.getppid()
        self._mine = [fault for fault in armed if fault.rank == place.rank]
        self._trace = os.open(
            folder.trace_path(incarnation, place.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._in_loss: ArmedFault | None = None
        self._written_step = -1
        self._step_began_s: float | None = None
        self._longest_step_s = 0.0
        self._slow_s = 0.0
        super().__init__(place, seed=seed, group_timeout_s=group_timeout_s)

    # ---- what happens when

    def enter(self, phase: Phase) -> None:
        before = self.phase
        if phase in _CONTRIBUTED and self._step is not None and self._written_step != self._step.index:
            # Before the reduction, and so before anybody can commit the step: one that is in a snapshot has been
            # written down by all who did it.
            self._written_step = self._step.index
            self._write_down("consumed", self._step)
        super().enter(phase)
        if phase is Phase.READY:
            self._ready(before)
        for fault in self._mine:
            if fault.phase is phase and self._is_due(fault):
                self._strike(fault)

    def _ready(self, before: Phase) -> None:
        now_s = time.monotonic()
        if before is Phase.INIT:
            self._line({"kind": "began", "step": self.global_step, "position": self.sample_position})
        elif before is Phase.COMMIT:
            self._line({"kind": "committed", "step": self.global_step})
            if self._step_began_s is not None:
                self._longest_step_s = max(self._longest_step_s, now_s - self._step_began_s)
        self._step_began_s = now_s

    def _is_due(self, fault: ArmedFault) -> bool:
        step = self.global_step
        match fault.action:
            case Action.SLOW:  # once a step, whatever the number of its microbatches
                is_first = self._step is not None and self._microbatch == self._step.microbatches[0].index
                return is_first and fault.step <= step < fault.step + SLOW_STEPS
            case Action.DIE_IN_SNAPSHOT:  # not after every step there is a snapshot
                return step >= fault.step
        return step == fault.step

    def _strike(self, fault: ArmedFault) -> None:
        if fault.action in _IN_DATASET:
            return  # where the sample is read, which may be ahead of the step: `DrilledReader`
        if fault.action in _IN_LOSS:
            self._in_loss = fault  # `drilled_loss` takes it from here
            return
        if fault.action is Action.KILL_LOADER:
            self._kill_loader(fault)
            return
        # Before the fault is claimed: the drill takes a supervisor that was started after that for another one.
        supervisor_pid = self._drill.supervisor_pid() if fault.action is Action.KILL_SUPERVISOR else 0
        first = self._drill.claim(fault.id)
        if fault.action is Action.SLOW:
            if first:
                self._slow_s = max(SLOW_AT_LEAST_S, (SLOW_FACTOR - 1) * self._longest_step_s)
            time.sleep(self._slow_s)
            return
        if not first:
            return
        match fault.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.SEGFAULT:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a drill leaves no files behind
                ctypes.string_at(0)
            case Action.OOM:
                _run_out_of_memory(Path(fault.path))
            case Action.DIE_IN_SNAPSHOT:
                write_path.arm("memory.manifest:1:kill")
            case Action.CLOCK_BACK | Action.CLOCK_FORWARD:
                _shift_clock(CLOCK_JUMPS_S[fault.action])
            case Action.KILL_AGENT:
                _kill(self._agent_pid)
            case Action.KILL_SUPERVISOR:
                _kill(supervisor_pid)
            case Action.HOLD:
                while not self._drill.is_released(fault.id):
                    self.beat()  # who holds is not hung, however long that takes
                    time.sleep(HOLD_POLL_S)

    def _kill_loader(self, fault: ArmedFault) -> None:
        workers = [child for child in multiprocessing.active_children() if child.daemon and child.pid is not None]
        if workers and self._drill.claim(fault.id):
            os.kill(workers[0].pid or 0, signal.SIGKILL)

    # ---- in the loss

    def drilled_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The user's loss, with what happens in it."""

        def drilled(model: Any, batch: Any) -> Any:
            fault, self._in_loss = self._in_loss, None
            if fault is None or not (self._drill.claim(fault.id) or fault.repeats):
                return loss(model, batch)
            match fault.action:
                case Action.HANG_IN_LOSS:
                    time.sleep(_FOREVER_S)
                case Action.HANG_HOLDING_GIL:
                    _hang_holding_gil()
                case Action.NAN_LOSS:
                    return _made_nan(loss(model, batch))
            raise RuntimeError("the drill raise-in-loss raises this")

        return drilled

    # ---- in the dataset

    def span_faults(self, plan: WindowPlan) -> list[tuple[ArmedFault, int]]:
        """Faults in the dataset, each with the sample position at which it happens: the first one that its rank reads
        in its step."""
        found = []
        for fault in self._mine:
            if fault.action in _IN_DATASET:
                position = 0
                for _ in range(fault.step):
                    position = plan.window_at(position).stop
                share = plan.window_at(position).share(self.place.rank, self.place.world_size)
                if share:
                    found.append((fault, share[0].start))
        return found

    @property
    def drill(self) -> DrillDir:
        return self._drill

    # ---- the trace

    def _write_down(self, kind: str, step: Step) -> None:
        spans = [(m.start, m.stop) for m in step.microbatches]
        self._line(
            {"kind": kind, "step": step.index + 1, "window": [step.window.start, step.window.stop], "spans": spans}
        )

    def _line(self, fields: dict[str, Any]) -> None:
        # One write, so that a killed rank leaves whole lines; no fsync: the page cache outlives the process.
        os.write(self._trace, (json.dumps({**fields, "at_s": boot_clock_s()}) + "\n").encode())


def drill_task(session: Session, task: BoundTask) -> None:
    """Puts faults into the task's loss, where there are any."""
    if isinstance(session, DrilledSession):
        task.loss = session.drilled_loss(task.loss)


def make_reader(session: Session, plan: WindowPlan, dataset: Any, *, shuffle: bool, seed_samples: bool) -> SeededReader:
    """The reader of the training data; with faults in it, where there are any."""
    settings: dict[str, Any] = {
        "seed": session.seed,
        "stream": Stream.SAMPLE,
        "shuffle": shuffle,
        "seed_samples": seed_samples,
    }
    if isinstance(session, DrilledSession) and (found := session.span_faults(plan)):
        return DrilledReader(dataset, session.drill, found, **settings)
    return SeededReader(dataset, **settings)


class DrilledReader(SeededReader):
    """A reader whose dataset comes to grief at certain sample positions. Not at certain samples: one that is read in
    every epoch is to be safe in all but the fault's.

    Args:
        dataset: as of any reader.
        folder: what is shared with the drill.
        found: faults, and the sample positions at which they happen.
        settings: as of any reader.
    """

    def __init__(self, dataset: Any, folder: DrillDir, found: list[tuple[ArmedFault, int]], **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self._struck = [
            (position, FaultyDataset(dataset, folder, fault, self._wanted((position, position + 1))[0][1]))
            for fault, position in found
        ]

    def _dataset_for(self, span: Span) -> Any:
        struck = [dataset for position, dataset in self._struck if span[0] <= position < span[1]]
        return struck[-1] if struck else self._dataset


class FaultyDataset:
    """The user's dataset, with one sample that cannot be read.

    Args:
        dataset: the user's.
        folder: what is shared with the drill.
        fault: what happens.
        index: at which sample.
    """

    def __init__(self, dataset: Any, folder: DrillDir, fault: ArmedFault, index: int) -> None:
        self._dataset, self._folder, self._fault, self._index = dataset, folder, fault, index

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__" and hasattr(self._dataset, name):
            return self._read_many
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index == self._index:
            self._strike()
        return self._dataset[index]

    def _read_many(self, indices: list[int]) -> Any:
        if self._index in indices:
            self._strike()
        return self._dataset.__getitems__(indices)

    def _strike(self) -> None:
        first = self._folder.claim(self._fault.id)
        if self._fault.action is Action.DIE_IN_DATASET:
            os.kill(os.getpid(), signal.SIGKILL)
        if first:
            raise OSError(errno.EIO, "the drill raise-in-dataset raises this")


def _kill(pid: int) -> None:
    """Kills another process; in a soak it may be gone already, for an earlier fault."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _made_nan(result: Any) -> Any:
    """The same loss, as NaN; gradients become NaN with it."""
    if isinstance(result, tuple):
        total, weight = result
        return total * float("nan"), weight
    assert isinstance(result, Tensor)
    return result * float("nan")


def _hang_holding_gil() -> None:
    """PyDLL keeps the interpreter lock; a mutex, unlike a sleep, is not woken by a signal."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def _shift_clock(jump_s: float) -> None:
    """This process's time.time(); the supervisor's follows in `drill.launch`."""
    real = time.time
    time.time = lambda: real() + jump_s


def _run_out_of_memory(cgroup: Path) -> None:
    """Moves into a cgroup with little memory and takes more, until the kernel ends this process."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    hoard = []
    with contextlib.suppress(MemoryError):
        while True:
            hoard.append(bytearray(os.urandom(1)) * _HOG_BYTES)
