"""The snapshot at failure: what a rank leaves behind when it ends by an exception.

In data-parallel training every rank holds the whole state, consistent at its last committed step unless it fails in
the middle of an update. So whoever survives a failure writes that state into the node's memory tier before it goes: the
local rank zero, or any other where that one died. They go one after the other, and who finds the step, or a later one,
kept already leaves at once; where ranks disagree by a step the newest wins.

That holds for the step that a life began with, too, as soon as it is restored: the node that this one has it from may
be the one that has just been lost, with the only memory tier that held it.

Nothing in here raises: what ended the rank is what counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.core.phases import Phase
from elastictrain.errors import ElasticTrainError
from elastictrain.logs import Logger
from elastictrain.training.session import Session
from elastictrain.training.shadow import Shadow
from elastictrain.training.snapshot import Snapshotter
from elastictrain.training.snapshot_writer import Origin, SnapshotWriter
from elastictrain.training.state import TrainingState


@dataclass(frozen=True, slots=True)
class Parted:
    """What was left behind.

    Args:
        step: of the newest snapshot of this run on this node.
        path: where it is.
        is_ours: this rank wrote it; else it was there already.
    """

    step: int
    path: Path
    is_ours: bool


class Parting:
    """Takes a rank's last snapshot.

    Args:
        session: where the rank stands.
        state: what a snapshot holds.
        shadow: what has moved since the last commit, as it was.
        tiers: where it goes; the next one where the one before has no room.
        first_step: the step that this life begins with.
        is_durable: that step is in the durable tier; or it is the begin of the run, which needs no keeping.
        origin: what every manifest of this run says.
        patience_s: how long to wait for another rank that writes, and for a slot.
        log: for events.
    """

    def __init__(
        self,
        session: Session,
        state: TrainingState,
        shadow: Shadow,
        tiers: Sequence[MemoryTier],
        *,
        first_step: int,
        is_durable: bool,
        origin: Origin,
        patience_s: float,
        log: Logger,
    ) -> None:
        self._session = session
        self._state = state
        self._shadow = shadow
        self._tiers = list(tiers)
        self._snapshotter: Snapshotter | None = None
        self._first_step = first_step
        self._is_durable = is_durable
        self._origin = origin
        self._patience_s = patience_s
        self._log = log

    def stand_beside(self, snapshotter: Snapshotter) -> None:
        """From now on this takes the regular snapshots of this rank."""
        self._snapshotter = snapshotter

    def keep(self) -> Parted | None:
        """Sees to it that the last committed step is in the memory tier; None if it cannot be, or need not."""
        began_s = perf_counter()
        step = self._session.global_step
        try:
            if self._snapshotter is not None:
                self._snapshotter.wait_committed()  # it may be the very step; and its slot is free again
            if self._session.phase is Phase.EXIT or (step == self._first_step and self._has_first_step()):
                return None
            if not self._session.abandon_step():
                self._log.warning("snapshot_at_failure_left_out", at_step=step, reason="it failed in an update")
                return None
            with self._shadow.beside():
                parted = self._keep(step)
        except BaseException as error:  # noqa: BLE001 - a failure in here must not hide the first one
            reason = error.what if isinstance(error, ElasticTrainError) else f"{type(error).__name__}: {error}"
            self._log.warning("snapshot_at_failure_left_out", at_step=step, reason=reason)
            return None
        self._log.info(
            "snapshot_at_failure",
            at_step=parted.step,
            tier=str(parted.path.parent),
            is_ours=parted.is_ours,
            seconds=round(perf_counter() - began_s, 6),
        )
        return parted

    def _has_first_step(self) -> bool:
        """Whether the step that this life began with outlives this process, and every other node. The durable tier is
        not asked: it may be slow."""
        if self._is_durable:
            return True
        newest = self._newest_kept()
        return newest is not None and newest.global_step >= self._first_step

    def _keep(self, step: int) -> Parted:
        deadline_s = time.monotonic() + self._patience_s
        with self._alone():
            newest = self._newest_kept()
            for tier in self._tiers:
                if newest is not None and tier.root == newest.path.parent:
                    tier.newest = newest  # another rank may have written it: its slot is not to be touched
            if newest is not None and newest.global_step >= step:
                return Parted(newest.global_step, newest.path, is_ours=False)
            captured = self._state.capture(self._shadow)
            # Nothing is to be page-locked for this one copy, and nothing trains beside it.
            writer = SnapshotWriter(self._tiers, self._origin, stream=None, log=self._log)
            snapshot = writer.write(captured, deadline_s=deadline_s)
        if self._snapshotter is not None:
            self._snapshotter.hand_over(snapshot)
        return Parted(snapshot.global_step, snapshot.path, is_ours=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps the node's other ranks out. Without a lock to be had two ranks may write the same: no harm."""
        with contextlib.ExitStack() as stack:
            for tier in self._tiers:
                try:
                    stack.enter_context(tier.alone(self._patience_s))
                    break
                except (OSError, ElasticTrainError):
                    continue
            yield

    def _newest_kept(self) -> MemorySnapshot | None:
        kept = [s for tier in self._tiers for s in _snapshots_in(tier) if s.run_id == self._origin.run_id]
        return max(kept, key=lambda snapshot: snapshot.global_step, default=None)


def _snapshots_in(tier: MemoryTier) -> list[MemorySnapshot]:
    try:
        return tier.snapshots()
    except (OSError, ElasticTrainError):
        return []
