"""Makes durable, at the end of a job, what its last worker group has left in memory.

A worker group that fails, or makes room for another one, leaves its last step in the memory tier: the next one finds it
there, and has it made durable. Where none follows, since the job is stopped in between or halted, a machine that is
switched off, or a pod that is taken away, would take it along.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastictrain.checkpoint.durable_note import DurableNote
from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.node_tiers import NodeTiers
from elastictrain.checkpoint.persist_loop import PersisterSettings, Report
from elastictrain.checkpoint.persister_client import Persister, is_own_memory
from elastictrain.config.schema import JobConfig
from elastictrain.errors import ElasticTrainError
from elastictrain.protocol import RunSpec

LOOK_S = 0.1
"""How often a wait for storage looks whether somebody wants no more waiting."""
LEAVE_S = 0.5
"""How long to wait, at the end, for an idle persister to leave."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What was left in memory.

    Args:
        step: of the newest snapshot.
        durable: it is in the durable tier, verified.
    """

    step: int
    durable: bool

    def __str__(self) -> str:
        return f"snapshot of step {self.step} {'durable' if self.durable else 'in the memory tier only'}"


class Settling:
    """What the last worker group has left in memory, and how long its store is waited for.

    Args:
        config: of the job.
        emit: takes events.
    """

    def __init__(self, config: JobConfig, emit: Callable[..., None]) -> None:
        self._config = config
        self._emit = emit
        self._run_dir: Path | None = None
        self._asked_s: float | None = None
        self._hurries = False

    def is_left_by(self, run_dir: Path | None) -> None:
        """A worker group has ended; None where it has left nothing that is wanted."""
        self._run_dir = run_dir

    def asked_to_end(self) -> None:
        """Somebody waits for the end: the time for the store, of the ranks and of this, counts from the first time."""
        if self._asked_s is None:
            self._asked_s = time.monotonic()

    def hurry(self) -> None:
        """Nobody wants to wait for storage any more."""
        self._hurries = True

    def goes_on(self) -> None:
        """The job goes on: nobody waits."""
        self._asked_s, self._hurries = None, False

    async def settle(self, is_wanted: Callable[[], bool]) -> Settled | None:
        """Has the newest snapshot of the run that this node has in memory made durable, and gives the memory back.

        Args:
            is_wanted: whether it is to go on.

        Returns:
            what became of it; None where there is nothing of the run in memory.
        """
        run_dir, self._run_dir = self._run_dir, None
        began_s = self._asked_s if self._asked_s is not None else time.monotonic()
        deadline_s = began_s + self._config.checkpoint.preempt_deadline_s

        def may_wait() -> bool:
            return is_wanted() and not self._hurries and time.monotonic() < deadline_s

        if run_dir is None or not may_wait():
            return None
        try:
            spec = RunSpec.read(run_dir)
        except (OSError, ValueError, KeyError, TypeError):
            return None  # it never came so far that a rank could have begun
        try:
            return await self._settle(spec, may_wait)
        except (OSError, ElasticTrainError) as error:
            why = error.what if isinstance(error, ElasticTrainError) else str(error)
            where = self._config.checkpoint.memory_path
            self._emit("snapshot_not_durable", at_step=None, kept_in=where, last_error=why)
            return None

    async def _settle(self, spec: RunSpec, may_wait: Callable[[], bool]) -> Settled | None:
        config, state_dir = self._config.checkpoint, Path(spec.state_dir)
        tiers = NodeTiers.of_job(config, job=self._config.name, state_dir=state_dir)
        tell = self._from_threads()
        tiers = await asyncio.to_thread(
            tiers.readable, lambda where, reason: tell("snapshot_passed_over", where=where, reason=reason)
        )
        newest, durable = await asyncio.to_thread(_newest, tiers, spec.run_id, DurableNote(state_dir))
        if newest is None:
            return None
        if not durable:  # the persister of the last worker group goes on after its end, and may have done it
            fence = Fence(spec.run_id, spec.incarnation, spec.group.attempt) if self._config.elastic.has_peers else None
            settings = PersisterSettings.of_job(config, state_dir, fence)
            if is_own_memory(settings):
                return None  # the store has gone with the process that wrote it
            durable = await self._persist(newest, settings, may_wait)
        if durable:
            await asyncio.to_thread(tiers.give_back, tell)
        return Settled(newest.global_step, durable)

    async def _persist(self, newest: MemorySnapshot, settings: PersisterSettings, may_wait: Callable[[], bool]) -> bool:
        tell = self._from_threads()

        def reported(report: Report) -> None:
            if report.event is not None:
                tell(report.event[0], **report.event_fields)

        durable = False
        persister = Persister(settings, reported)
        try:
            await asyncio.to_thread(persister.submit, newest)
            while not durable and not persister.has_failed(newest.global_step) and may_wait():
                durable = await asyncio.to_thread(persister.wait, newest.global_step, LOOK_S)
        finally:
            await asyncio.to_thread(persister.close, finish=True, timeout_s=LEAVE_S)
        if not durable:
            why = persister.status.last_error or "there was no time"
            self._emit("snapshot_not_durable", at_step=newest.global_step, kept_in=str(newest.path), last_error=why)
        return durable

    def _from_threads(self) -> Callable[..., None]:
        """Takes events in any thread."""
        loop = asyncio.get_running_loop()

        def tell(kind: str, /, **fields: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: of a persister that was left to itself
                loop.call_soon_threadsafe(partial(self._emit, kind, **fields))

        return tell


def _newest(tiers: NodeTiers, run_id: str, note: DurableNote) -> tuple[MemorySnapshot | None, bool]:
    """The newest snapshot of a run in memory, and whether it is known to be durable."""
    found = [snapshot for tier in tiers.held for snapshot in tier.snapshots() if snapshot.run_id == run_id]
    newest = max(found, key=lambda snapshot: snapshot.global_step, default=None)
    durable_step = note.read(run_id)
    return newest, newest is not None and durable_step is not None and newest.global_step <= durable_step
