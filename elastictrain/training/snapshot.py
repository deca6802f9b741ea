"""Takes snapshots beside the training: one copy into the memory tier, while the next forward and backward pass run.

Parameters and optimizer state do not change between one optimizer step and the next. So a snapshot copies at once only
what a forward pass may change (buffers, the task's own state), starts a thread on the rest, and lets the training go
on; the next optimizer step waits for what is left, and helps. On CUDA the copy runs on a stream of its own into the
memory tier's pages, page-locked, and the next update waits for it on the device. Hashing, the manifest and the
persister follow in the thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from elastictrain.checkpoint.format import Layout, layout
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.memory_tier import Declined, MemoryTier, SlotWriter
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule, is_due
from elastictrain.errors import ElasticTrainError, SnapshotError
from elastictrain.logs import Logger
from elastictrain.training.state import Captured, TrainingState

CHUNK_BYTES = 8 << 20
"""A copy is cut into pieces of this size, so that two threads can share it evenly."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where snapshots come from.

    Args:
        job: name of the job.
        run_id: lineage of the run, eight hex digits.
        versions: of elastictrain, torch, python.
    """

    job: str
    run_id: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes to move from one address to another."""

    target: int
    source: int
    size_bytes: int


class Stability:
    """Tells whether tensors were changed in place while they were copied beside a forward pass.

    Most parameters change in the optimizer step alone. Some change in a forward pass (an embedding with max_norm, a
    momentum encoder); torch counts every change in place, but for those by way of `.data`.

    Args:
        sources: the tensors by (file, name).
    """

    def __init__(self, sources: Mapping[tuple[str, str], Tensor]) -> None:
        self._sources = dict(sources)
        self._versions = {key: tensor._version for key, tensor in sources.items()}
        self._lock = threading.Lock()
        self._changed: list[tuple[str, str]] | None = None

    def changed(self) -> list[tuple[str, str]]:
        """Which have been changed by the first time that this was called: call it when the copy is over."""
        with self._lock:
            if self._changed is None:
                self._changed = [key for key, tensor in self._sources.items() if tensor._version != self._versions[key]]
            return self._changed


class CopyJob:
    """Copies of host memory that several threads can work on.

    `ctypes.memmove` releases the interpreter lock, and glibc's copy of large blocks goes around the caches.

    Args:
        pieces: plain memory.
        others: pairs of (target, source) that only torch can copy.
        stability: is asked before the copy is called done.
    """

    def __init__(self, pieces: list[_Piece], others: list[tuple[Tensor, Tensor]], stability: Stability) -> None:
        self._stability = stability
        self._pieces = deque(pieces)
        self._others = deque(others)
        self._left = len(pieces) + len(others)
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.error: Exception | None = None
        """What went wrong: the copy is of no use."""
        if not self._left:
            self.done.set()

    def work(self) -> None:
        """Copies until nothing is left to begin with. A copy that fails ends the job, see `error`."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever torch raises costs this snapshot, not the training
            self.error = error
            self.done.set()

    def _work(self) -> None:
        finished = 0
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                break
            ctypes.memmove(piece.target, piece.source, piece.size_bytes)
            finished += 1
        while True:
            try:
                target, source = self._others.popleft()
            except IndexError:
                break
            target.copy_(source)
            finished += 1
        with self._lock:
            self._left -= finished
            if self._left == 0:
                self._stability.changed()
                self.done.set()


class Taken(Enum):
    """What became of an attempt."""

    BEGUN = "begun"
    DECLINED = "declined"
    """All slots hold what is not durable yet; later there will be one."""
    FAILED = "failed"


class Snapshotter:
    """Takes this rank's snapshots.

    Args:
        state: what a snapshot holds.
        tiers: where it goes first; the next one where the one before has no room.
        persister: where it goes from there; None keeps it in the memory tier.
        schedule: when one is due.
        first: what the run began with.
        mean_time_between_failures_s: as seen so far.
        origin: what every manifest of this run says.
        device: what the run computes on.
        log: for events.
    """

    def __init__(
        self,
        state: TrainingState,
        tiers: Sequence[MemoryTier],
        persister: Persister | None,
        schedule: SnapshotSchedule,
        *,
        first: LastSnapshot,
        mean_time_between_failures_s: float,
        origin: Origin,
        device: torch.device,
        log: Logger,
    ) -> None:
        self._state = state
        self._tiers = list(tiers)
        self._persister = persister
        self._schedule = schedule
        self._mtbf_s = mean_time_between_failures_s
        self._last = first
        self._origin = origin
        self._log = log
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._committing: Future[None] | None = None
        self._copy: CopyJob | None = None
        self._specs: Any = None
        self._layouts: dict[str, Layout] = {}
        self._views: dict[tuple[int, str], tuple[memoryview, dict[str, Tensor]]] = {}
        self._unstable: set[tuple[str, str]] = set()
        self._stability: Stability | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device_copied: torch.cuda.Event | None = None
        self.last: MemorySnapshot | None = None
        """The newest complete snapshot of this process."""
        self.stall_s = 0.0
        """Seconds that training has waited for snapshots."""
        self.num_taken = 0

    # ---- what the loop calls

    def due(self, global_step: int) -> bool:
        """Whether a snapshot should be taken at this step."""
        return is_due(self._schedule, self._last, global_step=global_step, now_s=perf_counter(), mtbf_s=self._mtbf_s)

    @property
    def last_step(self) -> int:
        """The step of the newest snapshot begun, or that the run began with."""
        return self._last.global_step

    def take(self) -> Taken:
        """Begins a snapshot of the present step.

        The loop must call `before_change` before the optimizer's next step. A snapshot that cannot be written is
        reported and left out: training goes on.

        Raises:
            StateValueError: the state holds what no snapshot can; the next one could not either.
        """
        began_s = perf_counter()
        self.wait_committed()
        captured = self._state.capture()
        step = captured.counters.global_step
        specs = captured.specs()
        try:
            if specs != self._specs:
                self._layouts = {name: layout(tensors, None) for name, tensors in specs.items()}
                self._specs = specs
                self._forget_views()
            writer = self._begin()
            if isinstance(writer, Declined):
                self._log.warning("snapshot_left_out", at_step=step, reason=writer.reason)
                return Taken.DECLINED
            try:
                self._copy = self._start_copy(captured, writer)
            except BaseException:
                writer.abort()  # or its slot would stay locked, to the persister as well
                raise
        except (OSError, ElasticTrainError) as error:
            self._log.warning("snapshot_failed", at_step=step, error=str(error))
            self._last = replace(self._last, global_step=step, ended_s=perf_counter())  # not again at every step
            return Taken.FAILED
        self._committing = self._executor.submit(self._finish, captured, writer, self._copy, self._stability, began_s)
        now_s = perf_counter()
        self._last = replace(self._last, global_step=step, ended_s=now_s)
        self.stall_s += now_s - began_s
        self.num_taken += 1
        return Taken.BEGUN

    def before_change(self) -> None:
        """Waits until the state of the snapshot in progress has been copied: it is about to change."""
        if self._device_copied is not None:
            if self._stability is not None:
                self._stability.changed()
            torch.cuda.current_stream().wait_event(self._device_copied)
            self._device_copied = None
        if self._copy is None:
            return
        if not self._copy.done.is_set():
            began_s = perf_counter()
            self._copy.work()
            self._copy.done.wait()
            self.stall_s += perf_counter() - began_s
        self._copy = None

    def wait_committed(self) -> MemorySnapshot | None:
        """Waits until the snapshot in progress is complete in the memory tier; returns the newest complete one."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None
        return self.last

    def hand_over(self, snapshot: MemorySnapshot) -> None:
        """Takes a complete snapshot that was taken elsewhere for its newest, and has it made durable."""
        self.last = snapshot
        if self._persister is not None:
            self._persister.submit(snapshot)

    def give_up_last(self) -> None:
        """The newest snapshot has turned out to be damaged: its slot may be used again."""
        if self.last is not None:
            for tier in self._tiers:
                if tier.root == self.last.path.parent:
                    tier.discard(self.last)
        self.last = None

    def close(self) -> None:
        """Ends the thread; the snapshot in progress is completed."""
        self.wait_committed()
        self._executor.shutdown()
        self._forget_views()

    # ---- how

    def _begin(self) -> SlotWriter | Declined:
        """A slot of the first tier that has room; one that has none is not tried again."""
        while True:
            try:
                return self._tiers[0].begin(self._layouts)
            except (OSError, ElasticTrainError) as error:
                if len(self._tiers) == 1:
                    raise
                self._log.warning("memory_tier_given_up", error=str(error), instead=str(self._tiers[1].root))
                del self._tiers[0]
                self._forget_views()

    def _start_copy(self, captured: Captured, writer: SlotWriter) -> CopyJob | None:
        """Copies what is volatile, and begins on the rest."""
        now: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        watched: dict[tuple[str, str], Tensor] = {}
        for file, tensors in captured.files.items():
            volatile = captured.volatile.get(file, ())
            targets = self._targets(file, tensors, writer)
            for name, source in tensors.items():
                if name in volatile or (file, name) in self._unstable:
                    now.append((targets[name], source))
                else:
                    later.append((targets[name], source))
                    watched[file, name] = source
        self._stability = Stability(watched)
        if self._stream is not None:
            self._copy_on_device(now, later, writer)
            return None
        for target, source in now:
            target.copy_(source)
        return host_job(later, self._stability)

    def _targets(self, file: str, tensors: Mapping[str, Tensor], writer: SlotWriter) -> dict[str, Tensor]:
        """Tensors that are views of the slot's mapped file, by name: their order may be another at each snapshot."""
        buffer = writer.buffers[file]
        known = self._views.get((writer.index, file))
        if known is not None and known[0] is buffer:
            return known[1]
        if known is not None and self._stream is not None:
            _page_unlock(known[0])
        offsets = self._layouts[file].offsets
        views = {
            name: view_of(buffer, offsets[name][0], source.dtype, tuple(source.shape))
            for name, source in tensors.items()
        }
        if self._stream is not None:
            _page_lock(buffer)
        self._views[writer.index, file] = (buffer, views)
        return views

    def _forget_views(self) -> None:
        """Lets go of all slots: other files will be mapped."""
        if self._stream is not None:
            for buffer, _ in self._views.values():
                _page_unlock(buffer)
        self._views = {}

    def _copy_on_device(
        self, now: list[tuple[Tensor, Tensor]], later: list[tuple[Tensor, Tensor]], writer: SlotWriter
    ) -> None:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in now:
                target.copy_(source, non_blocking=True)
            volatile_copied = self._stream.record_event()
            for target, source in later:
                target.copy_(source, non_blocking=True)
            self._device_copied = self._stream.record_event()
        # The next forward pass may overwrite what is volatile, so it waits for that much, on the device.
        torch.cuda.current_stream().wait_event(volatile_copied)

    def _finish(
        self,
        captured: Captured,
        writer: SlotWriter,
        copy: CopyJob | None,
        stability: Stability | None,
        began_s: float,
    ) -> None:
        """In the thread: completes the copy, hashes, commits, hands over to the persister."""
        step = captured.counters.global_step
        try:
            if copy is not None:
                copy.work()
                copy.done.wait()
                if copy.error is not None:
                    raise copy.error
            if self._stream is not None:
                self._stream.synchronize()
            copied_s = perf_counter()
            if stability is not None and (changed := stability.changed()):
                # Copied at once from now on; this copy may hold some of the next step.
                self._unstable.update(changed)
                names = ", ".join(name for _, name in changed[:3])
                self._log.warning(
                    "snapshot_left_out", at_step=step, reason=f"a forward pass changed what was being copied: {names}"
                )
                writer.abort()
                return
            snapshot = writer.commit(
                job=self._origin.job,
                run_id=self._origin.run_id,
                global_step=step,
                versions=self._origin.versions,
                trainer=captured.trainer,
            )
        except Exception as error:  # noqa: BLE001 - whatever torch raises costs this snapshot, not the training
            self._log.warning("snapshot_failed", at_step=step, error=f"{type(error).__name__}: {error}")
            writer.abort()
            return
        # The thread's time is not all lost to training; where every core computes, it is.
        self._last = replace(self._last, ended_s=perf_counter(), cost_s=perf_counter() - began_s)
        self._log.info(
            "snapshot_taken",
            at_step=step,
            size_bytes=snapshot.manifest.size_bytes,
            copy_s=round(copied_s - began_s, 6),
            total_s=round(perf_counter() - began_s, 6),
        )
        self.hand_over(snapshot)


def host_job(copies: list[tuple[Tensor, Tensor]], stability: Stability) -> CopyJob:
    """Cuts copies of (target, source) on the host into pieces."""
    pieces: list[_Piece] = []
    others: list[tuple[Tensor, Tensor]] = []
    for target, source in copies:
        if not source.is_contiguous():
            others.append((target, source))
            continue
        size_bytes = source.numel() * source.element_size()
        to, origin = target.data_ptr(), source.data_ptr()
        for begin in range(0, size_bytes, CHUNK_BYTES):
            pieces.append(_Piece(to + begin, origin + begin, min(CHUNK_BYTES, size_bytes - begin)))
    return CopyJob(pieces, others, stability)


def view_of(buffer: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over part of a mapped file, without a copy."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _address_of(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def _page_unlock(buffer: memoryview) -> None:
    """Must come before the mapping goes: CUDA would go on believing in it."""
    torch.cuda.cudart().cudaHostUnregister(_address_of(buffer))


def _page_lock(buffer: memoryview) -> None:
    """Page-locks a mapped file for CUDA, so that copies into it run beside the computation."""
    code = torch.cuda.cudart().cudaHostRegister(_address_of(buffer), len(buffer), 0)
    if int(code) != 0:
        raise SnapshotError(
            f"CUDA cannot page-lock {len(buffer)} bytes of the memory tier: error {int(code)}",
            "Raise the limit of locked memory (ulimit -l), or set checkpoint.memory_tier = false.",
        )
