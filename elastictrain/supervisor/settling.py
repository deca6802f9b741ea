"""Makes durable, at the end of a job, what its last worker group has left in memory.

A worker group that fails, or makes room for another one, leaves its last step in the memory tier: the next one finds it
there, and has it made durable. Where none follows, since the job is stopped in between or halted, a machine that is
switched off, or a pod that is taken away, would take it along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
CLEAN_TIMEOUT_S = 5.0
"""How long to wait for whoever still reads the memory tier."""


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


async def settle(
    run_dir: Path,
    config: JobConfig,
    *,
    may_wait: Callable[[], bool],
    emit: Callable[..., None],
) -> Settled | None:
    """Has the newest snapshot of a run that this node has in memory made durable, and gives the memory back.

    Args:
        run_dir: of the last worker group.
        config: of the job.
        may_wait: whether to go on waiting for the store.
        emit: takes events.

    Returns:
        what became of it; None where there is nothing of the run in memory.
    """
    try:
        spec = RunSpec.read(run_dir)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it never came so far that a rank could have begun
    state_dir = Path(spec.state_dir)
    try:
        tiers = NodeTiers.of_job(config.checkpoint, job=config.name, state_dir=state_dir)
        newest, durable = await asyncio.to_thread(_newest, tiers, spec.run_id, DurableNote(state_dir))
    except (OSError, ElasticTrainError) as error:
        emit("snapshot_not_durable", at_step=None, kept_in=config.checkpoint.memory_path, last_error=str(error))
        return None
    if newest is None:
        return None
    if durable:  # by the persister of the last worker group, which goes on after its end
        await asyncio.to_thread(_give_back, tiers)
        return Settled(newest.global_step, durable)
    loop = asyncio.get_running_loop()

    def reported(report: Report) -> None:
        if report.event is not None:
            loop.call_soon_threadsafe(partial(emit, report.event[0], **report.event_fields))

    fence = Fence(spec.run_id, spec.incarnation, spec.group.attempt) if config.elastic.has_peers else None
    settings = PersisterSettings.of_job(config.checkpoint, state_dir, fence)
    if is_own_memory(settings):
        return None  # the store has gone with the process that wrote it
    persister = Persister(settings, reported)
    try:
        await asyncio.to_thread(persister.submit, newest)
        while not durable and not persister.has_failed(newest.global_step) and may_wait():
            durable = await asyncio.to_thread(persister.wait, newest.global_step, LOOK_S)
    finally:
        await asyncio.to_thread(persister.close, finish=True, timeout_s=LEAVE_S)
    if durable:
        await asyncio.to_thread(_give_back, tiers)
    else:
        last_error = persister.status.last_error
        emit("snapshot_not_durable", at_step=newest.global_step, kept_in=str(newest.path), last_error=last_error)
    return Settled(newest.global_step, durable)


def _newest(tiers: NodeTiers, run_id: str, note: DurableNote) -> tuple[MemorySnapshot | None, bool]:
    """The newest snapshot of a run in memory, and whether it is known to be durable."""
    found = [snapshot for tier in tiers.held for snapshot in tier.snapshots() if snapshot.run_id == run_id]
    newest = max(found, key=lambda snapshot: snapshot.global_step, default=None)
    durable_step = note.read(run_id)
    return newest, newest is not None and durable_step is not None and newest.global_step <= durable_step


def _give_back(tiers: NodeTiers) -> None:
    for tier in tiers.held:
        try:
            tier.clean(timeout_s=CLEAN_TIMEOUT_S)
        except (OSError, ElasticTrainError):
            continue  # it is durable: whoever comes next finds the rest, and cleans it
