"""Takes snapshots beside the training: one copy into the memory tier, while the next forward and backward pass run.

Parameters and optimizer state do not change between one optimizer step and the next. So a snapshot copies at once only
what a forward pass may change (buffers, the task's own state), leaves the rest to a thread, and lets the training go
on; the next optimizer step waits for what is left, and helps. On CUDA the copy runs on a stream of its own into the
memory tier's pages, page-locked, and the next update waits for it on the device. Hashing, the manifest and the
persister follow in the thread. When to take one is decided here; how it is written, by `snapshot_writer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from time import perf_counter

import torch

from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.memory_tier import Declined, MemoryTier
from elastictrain.checkpoint.persister_client import Persister, PersisterStatus
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule, is_due
from elastictrain.errors import ElasticTrainError
from elastictrain.logs import Logger
from elastictrain.training.snapshot_writer import Filling, Origin, SnapshotWriter, StateMovedError
from elastictrain.training.state import Captured, TrainingState

RETRY_S = 1.0
"""After a refusal, how long the next attempt waits where no persister reports anything: somebody else read the slot."""


class Taken(Enum):
    """What became of an attempt."""

    BEGUN = "begun"
    DECLINED = "declined"
    """All slots hold what is not durable yet; later there will be one."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why there is to be no attempt for a while.

    Args:
        outcome: of the last one.
        at_s: when that was.
        persister: where durability stood then: once it has moved there may be a slot.
        error: what failed, where that has been said to whoever asks; else "".
    """

    outcome: Taken
    at_s: float
    persister: PersisterStatus | None
    error: str = ""


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
        self._persister = persister
        self._schedule = schedule
        self._mtbf_s = mean_time_between_failures_s
        self._last = first
        self._log = log
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._writer = SnapshotWriter(tiers, origin, stream=stream, log=log)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._working: Future[None] | None = None
        """What the thread is at."""
        self._num_slots_wanted = 0
        """The thread is to have the memory for so many snapshots allocated, and may stop then."""
        self._is_prepared = False
        self._filling: Filling | None = None
        """The snapshot in progress, until the state may change."""
        self._is_asked = False
        """One is wanted whether or not it is due, until it has begun. The thread asks, too: one was begun in vain."""
        self._refusal: _Refusal | None = None
        """Of the last attempt; None once one has begun."""
        self.last: MemorySnapshot | None = None
        """The newest complete snapshot of this process."""
        self.stall_s = 0.0
        """Seconds that training has waited for snapshots."""
        self.num_taken = 0

    # ---- what the loop calls

    def due(self, global_step: int) -> bool:
        """Whether a snapshot should be taken at this step. Not at every step anew where one has been refused."""
        # An optimizer has all its state after its first update only, and with fp16 the first ones are usually skipped.
        if not self._is_prepared and self._state.num_updates:
            self.prepare()
        now_s = perf_counter()
        last = self._last
        due = is_due(self._schedule, last, global_step=global_step, now_s=now_s, mtbf_s=self._mtbf_s)
        wanted = due or (self._is_asked and global_step > last.global_step)
        if not wanted or self._refusal is None or (due and self._refusal.outcome is Taken.FAILED):
            return wanted
        return now_s - self._refusal.at_s >= RETRY_S or self._persister_status() != self._refusal.persister

    def ask(self) -> None:
        """Has a snapshot taken as soon as there is a slot for it, due or not. What fails meanwhile is said once."""
        if not self._is_asked and self._refusal is not None:
            self._refusal = replace(self._refusal, error="")  # who asks now has not heard of it
        self._is_asked = True

    @property
    def last_step(self) -> int:
        """The step of the newest snapshot begun, or that the run began with."""
        return self._last.global_step

    def prepare(self) -> None:
        """Has the memory of the first snapshots allocated in the thread, which takes several times as long as a copy:
        neither training nor those snapshots are to wait for it. One that comes before that is done has to.

        Raises:
            StateValueError: the state holds what no snapshot can.
        """
        began_s = perf_counter()
        self._wait_for_thread(num_slots_wanted=0)
        captured = self._state.capture()
        self._writer.lay_out(captured)
        self._is_prepared = True
        self._num_slots_wanted = 2
        self._working = self._executor.submit(self._make_room, captured)
        self.stall_s += perf_counter() - began_s

    def take(self) -> Taken:
        """Begins a snapshot of the present step.

        The loop must call `before_change` before the optimizer's next step. A snapshot that cannot be written is
        reported and left out: training goes on.

        Raises:
            StateValueError: the state holds what no snapshot can; the next one could not either.
        """
        began_s = perf_counter()
        self._wait_for_thread(num_slots_wanted=1)
        try:
            slot = self._writer.reserve()
        except (OSError, ElasticTrainError) as error:
            return self._failed(error)
        if isinstance(slot, Declined):
            return self._declined(slot)
        try:
            captured = self._state.capture()
            self._writer.lay_out(captured)
        except BaseException:
            if slot is not None:
                slot.abort()
            raise
        try:
            filling = self._writer.begin(captured, slot)
        except (OSError, ElasticTrainError) as error:
            return self._failed(error)
        if isinstance(filling, Declined):
            return self._declined(filling)
        step = filling.global_step
        self._is_asked = False
        self._refusal = None
        self._filling = filling
        self._last = replace(self._last, global_step=step, ended_s=perf_counter())  # the thread's from here on
        # The thread sees to the other slots, after this one.
        self._is_prepared = self._is_prepared or self._state.num_updates > 0
        self._num_slots_wanted = 2
        self._working = self._executor.submit(self._finish, filling, captured, began_s)
        self.stall_s += perf_counter() - began_s
        self.num_taken += 1
        return Taken.BEGUN

    def _failed(self, error: Exception) -> Taken:
        step, text = self._state.global_step, str(error)
        if not self._is_asked or self._refusal is None or self._refusal.error != text:
            self._log.warning("snapshot_failed", at_step=step, error=text)
        self._last = replace(self._last, global_step=step, ended_s=perf_counter())  # not again at every step
        self._refusal = _Refusal(Taken.FAILED, perf_counter(), self._persister_status(), text)
        return Taken.FAILED

    def _declined(self, declined: Declined) -> Taken:
        if self._refusal is None or self._refusal.outcome is not Taken.DECLINED:  # once, until one has begun
            self._log.warning("snapshot_left_out", at_step=self._state.global_step, reason=declined.reason)
        self._refusal = _Refusal(Taken.DECLINED, perf_counter(), self._persister_status())
        return Taken.DECLINED

    def _persister_status(self) -> PersisterStatus | None:
        return self._persister.status if self._persister is not None else None

    def before_change(self) -> None:
        """Waits until the state of the snapshot in progress has been copied: it is about to change."""
        if self._filling is None:
            return
        began_s = perf_counter()
        self._filling.before_change()
        self._filling = None
        self.stall_s += perf_counter() - began_s

    def wait_committed(self) -> MemorySnapshot | None:
        """Waits until the snapshot in progress is complete in the memory tier; returns the newest complete one."""
        self._wait_for_thread(num_slots_wanted=0)
        return self.last

    def hand_over(self, snapshot: MemorySnapshot) -> None:
        """Takes a complete snapshot that was taken elsewhere for its newest, and has it made durable."""
        self.last = snapshot
        if self._persister is not None:
            self._persister.submit(snapshot)

    def give_up_last(self) -> None:
        """The newest snapshot has turned out to be damaged: its slot may be used again."""
        if self.last is not None:
            self._writer.discard(self.last)
        self.last = None

    def close(self) -> None:
        """Ends the thread; the snapshot in progress is completed."""
        self.wait_committed()
        self._executor.shutdown()
        self._writer.close()

    def _wait_for_thread(self, *, num_slots_wanted: int) -> None:
        if self._working is not None:
            self._num_slots_wanted = num_slots_wanted
            self._working.result()
            self._working = None

    def _make_room(self, captured: Captured) -> None:
        """In the thread."""
        self._writer.make_room(captured, lambda num_ready: num_ready < self._num_slots_wanted)

    def _finish(self, filling: Filling, captured: Captured, began_s: float) -> None:
        """In the thread: completes the copy, hashes, commits, hands over to the persister."""
        step = filling.global_step
        try:
            filling.complete()
            copied_s = perf_counter()
            snapshot = filling.commit()
        except StateMovedError as error:
            self._log.warning("snapshot_left_out", at_step=step, reason=str(error))
            self._is_asked = True  # at the next step: what has moved is known now, and the next one due may be far
            return
        except Exception as error:  # noqa: BLE001 - whatever torch raises costs this snapshot, not the training
            self._log.warning("snapshot_failed", at_step=step, error=f"{type(error).__name__}: {error}")
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
        self._make_room(captured)  # it may have come before that was done
