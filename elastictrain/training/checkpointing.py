"""One rank's part in keeping the run: where its snapshots are, what to begin with, what to leave behind at the end.

Rank zero is the authority: it alone takes regular snapshots and makes them durable. Every node's local rank zero can
read its node's memory tier at a start. Every rank can write into it when it fails.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep

import torch

from elastictrain import __version__
from elastictrain.checkpoint.durable_note import DurableNote
from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.memory_note import MemoryNote
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot
from elastictrain.checkpoint.node_tiers import NodeTiers
from elastictrain.checkpoint.persist_loop import PersisterSettings, Report
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.checkpoint.secrets import redact_url
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.config.schema import JobConfig
from elastictrain.core.identity import HYPERPARAMETERS
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule
from elastictrain.errors import SnapshotError, StorageError
from elastictrain.logs import Logger
from elastictrain.protocol import SNAPSHOTS_DIR, RunSpec, SnapshotSource
from elastictrain.training.memory_return import is_stored
from elastictrain.training.parting import Parted, Parting
from elastictrain.training.restore import Lookup, Restored, Restorer
from elastictrain.training.scratch import scratch_folder
from elastictrain.training.session import Session
from elastictrain.training.shadow import Shadow
from elastictrain.training.snapshot import Snapshotter, Taken
from elastictrain.training.snapshot_writer import Origin
from elastictrain.training.state import TrainingState

WAIT_SLICE_S = 0.1
"""How often a wait for storage looks whether it was told to hurry."""
ORDERS_S = 2.0
"""How long a supervisor may take to hear from those of other nodes what a stop is for: it asks twice a second."""
ORDERS_LOOK_S = 0.005
PERSISTER_LEAVE_S = 0.5
"""How long to wait, at the end, for an idle persister to leave."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left behind at the end.

    Args:
        step: of the newest snapshot; None if there is none.
        durable: it is in the durable tier, verified.
    """

    step: int | None
    durable: bool


class Checkpointing:
    """A rank's snapshots.

    Args:
        spec: what the parent decided.
        config: the job.
        session: this rank's session.
        log: for events.
    """

    def __init__(self, spec: RunSpec, config: JobConfig, session: Session, log: Logger) -> None:
        self._spec = spec
        self._config = config.checkpoint
        self._has_peers = config.elastic.has_peers
        self._session = session
        self._log = log
        place = session.place
        state_dir = Path(spec.state_dir)
        self._url = self._config.url or str(state_dir / SNAPSHOTS_DIR)
        self._tiers = NodeTiers.of_job(self._config, job=config.name, state_dir=state_dir)
        self._parting_patience_s = config.supervisor.teardown_timeout_s / 2
        self._store: Store | None = None
        if place.is_rank_zero:
            self._store = open_store(
                self._url, self._config.storage_options, verify_uploads=self._config.verify_uploads
            )
        self._origin = Origin(
            config.name,
            spec.run_id,
            {"elastictrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        )
        self._durable_at_start: int | None = None
        self._deadline_s: float | None = None
        self._persister: Persister | None = None
        self._snapshotter: Snapshotter | None = None
        self._parting: Parting | None = None

    # ---- the start

    def restore(self, state: TrainingState) -> Restored | None:
        """Brings the newest snapshot of this run into `state`, or that of the run it comes from. Collective.

        Returns:
            what was found; None for a fresh start.
        """
        began_s = perf_counter()
        allowed = frozenset(self._spec.allowed_differences)
        restorer = Restorer(
            self._session.place,
            allowed=allowed,
            on_passed_over=self._passed_over,
            on_wait=self._waiting_for_store,
            on_incomplete=self._incomplete,
            progress=lambda _num_bytes: self._session.beat(),
        )
        is_local_zero = self._session.place.local_rank == 0
        if is_local_zero:
            self._tiers = self._tiers.readable(self._passed_over)
            self._note_memory()
        with scratch_folder(Path(self._spec.state_dir)) as scratch:
            own = Lookup(
                self._tiers.held if is_local_zero else (),
                self._store,
                self._spec.run_id,
                scratch,
                self._config.storage_timeout_s,
                begins_run=self._spec.begins_run,
                note=DurableNote(Path(self._spec.state_dir)) if is_local_zero else None,
            )
            restored = restorer.restore(state, own)
            source = self._spec.source
            if restored is None and source is not None:
                store = self._open_source(source) if self._store is not None else None
                restored = restorer.restore(
                    state,
                    Lookup((), store, source.run_id, scratch, self._config.storage_timeout_s, step=source.global_step),
                )
                if restored is None:
                    raise SnapshotError(
                        f"the snapshot of step {source.global_step} to begin with is not in "
                        f"{redact_url(source.url)} any more",
                        "Name another with --from.",
                    )
            elif restored is not None and restored.tier == "durable":
                self._durable_at_start = restored.counters.global_step
        if restored is None:
            return None
        self._log.info(
            "restored",
            from_tier=restored.tier,
            global_step=restored.counters.global_step,
            sample_position=restored.counters.sample_position,
            written_by_world_size=restored.world_size,
            seconds=round(perf_counter() - began_s, 4),
        )
        if self._session.place.is_rank_zero:
            self._report_hyperparameters(restored)
            for name in state.not_laid_out_anew:
                self._log.warning(
                    "schedule_goes_on_from_last_rate",
                    scheduler=name,
                    hint="Its length has changed, and its rate by the new one cannot be computed from the step alone: "
                    "keep the length, or define _get_closed_form_lr.",
                )
        return restored

    def _note_memory(self) -> None:
        """Before anything is written there: a start with another `memory_path` is to find it."""
        note = MemoryNote(Path(self._spec.state_dir))
        try:
            if self._config.memory_tier:
                note.add(Path(self._config.memory_path))
        except OSError as error:
            self._log.warning("memory_not_noted", where=str(note.path), error=error.strerror)

    def _report_hyperparameters(self, restored: Restored) -> None:
        """Says which of two values holds: the one in job.toml is not always the one the run goes by."""
        own = HYPERPARAMETERS in self._spec.allowed_differences
        hint = {} if own else {"hint": f"To train on with the job's value: --allow {HYPERPARAMETERS}."}
        for changed in restored.hyperparameters:
            self._log.warning(
                "hyperparameter_differs",
                key=changed.name,
                snapshot=changed.kept,
                job=changed.now,
                holds="job" if own else "snapshot",
                **hint,
            )

    def _passed_over(self, where: str, reason: str) -> None:
        self._log.warning("snapshot_passed_over", where=where, reason=reason)

    def _incomplete(self, where: str, reason: str) -> None:
        self._log.warning("snapshot_incomplete", where=where, reason=reason)

    def _waiting_for_store(self, error: str, pause_s: float) -> None:
        self._session.beat()  # waiting is no hang
        self._log.warning("store_retrying", error=error, pause_s=round(pause_s, 3))

    def hold(self, state: TrainingState, shadow: Shadow, restored: Restored | None) -> None:
        """From now on there is something to keep at a failure: the session stands at the step that was restored."""
        self._parting = Parting(
            self._session,
            state,
            shadow,
            self._tiers.written,
            first_step=self._session.global_step,
            is_durable=restored is None or restored.tier == "durable",
            origin=self._origin,
            patience_s=self._parting_patience_s,
            log=self._log,
        )

    def begin(self, state: TrainingState, restored: Restored | None) -> Snapshotter | None:
        """Begins with regular snapshots. After `hold`.

        Returns:
            what takes those of this rank; None on the ranks that take none.
        """
        if self._session.place.is_rank_zero:
            first_step = restored.counters.global_step if restored is not None else 0
            self._snapshotter = self._begin_snapshots(state, restored, first_step)
            if self._parting is not None:
                self._parting.stand_beside(self._snapshotter)
        return self._snapshotter

    def _begin_snapshots(self, state: TrainingState, restored: Restored | None, first_step: int) -> Snapshotter:
        config = self._config
        self._persister = Persister(
            PersisterSettings.of_job(
                config,
                Path(self._spec.state_dir),
                Fence(self._spec.run_id, self._spec.incarnation, self._spec.group.attempt) if self._has_peers else None,
            ),
            self._reported,
        )
        if self._has_peers:
            self._persister.begin()
        snapshotter = Snapshotter(
            state,
            self._tiers.written,
            self._persister,
            SnapshotSchedule(config.every_steps, config.every_s, config.is_auto, config.max_overhead),
            first=LastSnapshot(first_step, perf_counter()),
            mean_time_between_failures_s=self._spec.mean_time_between_failures_s,
            origin=self._origin,
            device=self._session.place.device,
            log=self._log,
        )
        if restored is not None and restored.in_memory is not None:
            for tier in self._tiers.held:
                if tier.root == restored.in_memory.path.parent:
                    tier.newest = restored.in_memory
            snapshotter.hand_over(restored.in_memory)
        if state.num_updates:  # the state is whole: its memory can be had before the first step ends
            snapshotter.prepare()
        return snapshotter

    def _reported(self, report: Report) -> None:
        match report.event:
            case name, is_warning:
                (self._log.warning if is_warning else self._log.info)(name, **report.event_fields)

    # ---- the end

    def part(self) -> Parted | None:
        """After a failure: keeps the last committed step in the memory tier.

        Returns:
            what is there; None if nothing could be kept, or nothing had to be.
        """
        parted = self._parting.keep() if self._parting is not None else None
        self._parting = None
        return parted

    def finish(self, *, complete: bool) -> Kept:
        """Keeps the state of the last step, durably if there is time: without limit at the end of a run, until the
        deadline once somebody asks to stop, not at all when told to hurry.
        """
        if self._snapshotter is None or self._persister is None:
            if complete and self._session.place.local_rank == 0:
                self._end(clean=self._is_superfluous())
            return Kept(None, durable=False)
        if not complete:
            self._deadline_s = monotonic() + self._config.preempt_deadline_s
        step = self._session.global_step
        newest = self._last_step_in_memory(self._snapshotter, self._persister, step)
        passes_on = not complete and self._passes_on()
        if newest is None:
            durable = self._durable_at_start == step
            self._end(clean=durable and not passes_on)
            return Kept(step if durable else None, durable)
        if passes_on:
            self._end(clean=False)
            return Kept(newest.global_step, durable=False)
        durable = self._wait_for_durable(self._persister, newest)
        if not durable and self._persister.has_failed(step) and self._may_wait():
            # Somebody has damaged it, or taken it away; the state itself is still here.
            self._snapshotter.give_up_last()
            newest = self._last_step_in_memory(self._snapshotter, self._persister, step) or newest
            durable = self._wait_for_durable(self._persister, newest)
        if durable:
            self._release_source()
        else:
            self._log.warning(
                "snapshot_not_durable",
                at_step=newest.global_step,
                kept_in=str(newest.path),
                store=redact_url(self._url),
                last_error=self._persister.status.last_error,
            )
        self._end(clean=durable and newest.global_step == step)
        return Kept(newest.global_step, durable)

    def _passes_on(self) -> bool:
        """Whether the next worker group follows at once. Where it was another node that stopped this one, the
        supervisor of this one may not have heard of it yet."""
        deadline_s = monotonic() + ORDERS_S
        while self._session.awaits_orders and monotonic() < deadline_s:
            sleep(ORDERS_LOOK_S)
            self._session.beat()
        return self._session.passes_on or self._session.awaits_orders

    def _last_step_in_memory(self, snapshotter: Snapshotter, persister: Persister, step: int) -> MemorySnapshot | None:
        """The newest snapshot of this life, that of `step` if it can be had; waits for a slot where it may."""
        newest = snapshotter.wait_committed()
        if newest is None and self._durable_at_start == step:
            return None
        while newest is None or newest.global_step != step:
            taken = snapshotter.take()
            newest = snapshotter.wait_committed()
            if taken is not Taken.DECLINED or not self._may_wait():
                break
            persister.wait(step, WAIT_SLICE_S)
            self._session.beat()
        return newest

    def _wait_for_durable(self, persister: Persister, newest: MemorySnapshot) -> bool:
        """Waits for the store as long as it may, and as there is something to wait for."""
        durable = persister.wait(newest.global_step, 0.0)
        while not durable and self._may_wait() and not persister.has_failed(newest.global_step):
            durable = persister.wait(newest.global_step, WAIT_SLICE_S)
            self._session.beat()
        return durable

    def _is_superfluous(self) -> bool:
        """Whether what this node, which is not rank zero's, has kept at a failure is needed no longer."""
        if not any(tier.root.is_dir() for tier in self._tiers.held):
            return False
        step = self._session.global_step
        stored = is_stored(
            lambda: open_store(self._url, self._config.storage_options),
            self._spec.run_id,
            step,
            patience_s=self._config.storage_timeout_s,
            beat=self._session.beat,
        )
        if not stored:
            self._log.warning("memory_kept", at_step=step, why=f"{redact_url(self._url)} does not show it from here")
        return stored

    def _end(self, *, clean: bool) -> None:
        """Closes; memory that holds nothing but what is durable is given back."""
        self.close()
        if clean:
            self._tiers.give_back(self._log.warning)

    def _may_wait(self) -> bool:
        if self._deadline_s is None and self._session.stop_asked:
            self._deadline_s = monotonic() + self._config.preempt_deadline_s
        return not self._session.hurry and (self._deadline_s is None or monotonic() < self._deadline_s)

    def _release_source(self) -> None:
        """A run that has durable snapshots of its own needs the other run's no longer."""
        source = self._spec.source
        if source is None:
            return
        try:
            self._open_source(source).unpin(source.run_id, source.global_step, self._spec.run_id)
        except StorageError as error:  # the other run keeps a snapshot too many: nothing that this one should fail for
            self._log.warning("source_not_released", url=redact_url(source.url), error=error.what)

    def _open_source(self, source: SnapshotSource) -> Store:
        return open_store(source.url, source.options_of(self._config.storage_options))

    def close(self) -> None:
        """Lets go of everything. What the persister was asked for it goes on with, after this process as well."""
        self._parting = None
        if self._snapshotter is not None:
            self._snapshotter.close()
            self._snapshotter = None
        if self._persister is not None:
            self._persister.close(finish=True, timeout_s=PERSISTER_LEAVE_S)
            self._persister = None
        for tier in self._tiers.held:
            tier.close()
