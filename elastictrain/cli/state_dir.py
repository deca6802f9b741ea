"""A job's state directory: everything the job writes is in it, and one process at a time works with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from elastictrain.checkpoint.store import Store, open_store
from elastictrain.cli.lineage import run_in_store, with_patience
from elastictrain.config import JobConfig, LoadedJob
from elastictrain.core.batch import resolve_batch
from elastictrain.core.identity import REWIND
from elastictrain.core.membership import Lineage, Plan
from elastictrain.core.snapshot_interval import mean_time_between_failures_s
from elastictrain.errors import BusyError, StateDirError, StorageError
from elastictrain.folders import last_number, numbered_folders
from elastictrain.protocol import (
    BOARD_FILE,
    LOCK_FILE,
    RUNS_DIR,
    SNAPSHOTS_DIR,
    Group,
    JobIdentity,
    RunSpec,
    SnapshotSource,
    StopBoard,
)
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.past import read_past
from elastictrain.supervisor.pruning import prune
from elastictrain.supervisor.team import Assignment

FENCE_PATIENCE_S = 5.0
"""How long a start waits for what the store knows of worker groups on other nodes."""


def group_of(plan: Plan, place: int) -> Group:
    """The worker group of a plan, as the node at a place sees it."""
    members = plan.members
    if len(members) == 1:
        return Group.alone(plan.attempt, world_size=plan.world_size, host=members[0].host)
    return Group(
        plan.attempt,
        node=place,
        num_nodes=len(members),
        first_rank=plan.first_rank_of(place),
        world_size=plan.world_size,
        address=members[place].address,
        store_host=members[0].address,
        store_port=members[0].store_port,
        hosts=tuple(member.host for member in members),
        addresses=tuple(member.address for member in members),
    )


def _identity(
    config: JobConfig, run_id: str, kept_size: int | None, source: SnapshotSource | None, world_size: int
) -> JobIdentity:
    """The identity of a job whose first worker group has, or had, so many ranks.

    Raises:
        ConfigError: the batch sizes do not fit together or the number of ranks.
    """
    batch = resolve_batch(
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        accumulation_steps=config.train.accumulation_steps,
        world_size=world_size,
        kept_global_batch_size=kept_size,
    )
    return JobIdentity(
        run_id=run_id,
        global_batch_size=batch.global_batch_size if config.train.global_batch_size is None else None,
        source=source,
    )


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What the command line says about where to begin.

    Args:
        fresh: begin a new run, whatever snapshots there are.
        source: begin with a snapshot of another run.
        allowed_differences: names of what a snapshot may have differently.
    """

    fresh: bool = False
    source: SnapshotSource | None = None
    allowed_differences: tuple[str, ...] = ()

    def of_restart(self) -> StartOptions:
        """The same for the worker groups after the first: a new run is begun once, an older snapshot accepted once."""
        return StartOptions(allowed_differences=tuple(name for name in self.allowed_differences if name != REWIND))


class StateDir:
    """A job's state directory.

    Args:
        path: made if missing.
        warn: is told of a store that fails and is tried again.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = lambda _text: None) -> None:
        self.path = path.absolute()
        self._warn = warn
        self._fenced_number = 0
        self._source: SnapshotSource | None = None
        """As this start of this node names it."""
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
                f"{self.path} is in use by process {pid}", "Stop that run first, or give this one another --state-dir."
            ) from error
        except OSError as error:
            raise StateDirError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            owner.write_text(f"{os.getpid()}\n")
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()

    def prepare(
        self, job: LoadedJob, options: StartOptions | None = None, assignment: Assignment | None = None
    ) -> Incarnation:
        """Everything that a start needs: the job's identity, and the folder of the next incarnation.

        Args:
            job: as it was loaded.
            options: where to begin.
            assignment: what several nodes have agreed on; default: this one is alone.

        Raises:
            ConfigError: the batch sizes do not fit together or the number of ranks.
            StorageError: the store of snapshots cannot be reached.
        """
        options = options if options is not None else StartOptions()
        if assignment is None or assignment.plan is None:
            number = self.last_number + 1
            group = Group.alone(
                f"{job.config.name}-{number}-{secrets.token_hex(3)}",
                world_size=job.config.elastic.nproc_per_node,
                host=socket.gethostname(),
            )
            return self._new_incarnation(job, self._identify(job.config, options), options, number, group)
        plan = assignment.plan
        identity = self._adopt(job.config, plan)
        group = group_of(plan, assignment.place)
        return self._new_incarnation(
            job, identity, options, plan.number, group, listener=assignment.listener, has_begun=plan.lineage.has_begun
        )

    def lineage(self, config: JobConfig, options: StartOptions) -> Lineage:
        """The run that this node would go on with, for the nodes to agree on one.

        Raises:
            StorageError: the store of snapshots cannot be reached.
        """
        run_id, kept_size, source, goes_on = self._run_of(config, options)
        run_id = run_id or secrets.token_hex(4)
        self._source = source
        if options.source is not None and not goes_on:
            self._pin(options.source, run_id, config)
        self._note_fence(config, run_id)
        return Lineage(
            run_id,
            kept_size,
            source.url if source is not None else "",
            source.run_id if source is not None else "",
            source.global_step if source is not None else 0,
            is_asked_for=options.fresh or (options.source is not None and not goes_on),
            has_begun=self._has_started(run_id),
        )

    def _adopt(self, config: JobConfig, plan: Plan) -> JobIdentity:
        """Takes on what the nodes have agreed on."""
        lineage = plan.lineage
        source = None
        if lineage.source_url:
            source = SnapshotSource(lineage.source_url, lineage.source_run_id, lineage.source_step)
            # Other nodes are told no credentials: each has those of its own job file, or of its own --from.
            kept = JobIdentity.read(self.path)
            for known in (self._source, kept.source if kept is not None else None):
                if known is not None and replace(known, storage_options=None) == source:
                    source = known
                    break
        identity = _identity(config, lineage.run_id, lineage.global_batch_size, source, plan.world_size)
        self._keep(identity)
        return identity

    def _run_of(
        self, config: JobConfig, options: StartOptions
    ) -> tuple[str | None, int | None, SnapshotSource | None, bool]:
        """The run to go on with: kept from its first start, adopted from its snapshots where this directory is new (a
        replaced node), or None for a new one; its batch, its source, and whether it is the one of `options.source`."""
        kept = JobIdentity.read(self.path)
        run_id, kept_size, source = None, None, None
        if kept is not None:
            run_id, kept_size, source = kept.run_id, kept.global_batch_size, kept.source
        elif (
            not options.fresh and options.source is None and (found := self._run_in_store(config, options)) is not None
        ):
            run_id, kept_size = found.run_id, found.global_batch_size
        goes_on = (
            kept is not None
            and kept.source is not None
            and options.source is not None
            and (kept.source.url, kept.source.run_id) == (options.source.url, options.source.run_id)
        )
        if goes_on and source is not None and options.source is not None:
            # The credentials of its store may be others by now.
            source = replace(source, storage_options=options.source.storage_options)
        if options.fresh or (options.source is not None and not goes_on):
            run_id, kept_size, source = None, None, options.source
        return run_id, kept_size, source, goes_on

    def _identify(self, config: JobConfig, options: StartOptions) -> JobIdentity:
        """The job's identity, on one node."""
        run_id, kept_size, source, goes_on = self._run_of(config, options)
        run_id = run_id or secrets.token_hex(4)
        identity = _identity(config, run_id, kept_size, source, config.elastic.nproc_per_node)
        if options.source is not None and not goes_on:
            # Before anything of the new run is durable, the old run's retention must not take its beginning away. The
            # pin comes first: a run that knows its source can rely on it.
            self._pin(options.source, run_id, config)
        self._keep(identity)
        return identity

    def _keep(self, identity: JobIdentity) -> None:
        if identity != JobIdentity.read(self.path):
            identity.write(self.path)

    def _store(self, config: JobConfig) -> Store:
        return open_store(config.checkpoint.url or self.path / SNAPSHOTS_DIR, config.checkpoint.storage_options)

    def _run_in_store(self, config: JobConfig, options: StartOptions) -> JobIdentity | None:
        store = self._store(config)
        try:
            return with_patience(
                lambda: run_in_store(store),
                config.checkpoint.storage_timeout_s,
                self._warn,
                f"To go on from what else the store has: --allow {REWIND}. "
                "To begin a new run without a look at it: --fresh.",
            )
        except StorageError:
            if REWIND not in options.allowed_differences:
                raise
            return run_in_store(store, rewinds=True, warn=self._warn)

    def _pin(self, source: SnapshotSource, owner: str, config: JobConfig) -> None:
        store = open_store(source.url, source.options_of(config.checkpoint.storage_options))
        with_patience(
            lambda: store.pin(source.run_id, source.global_step, owner),
            config.checkpoint.storage_timeout_s,
            self._warn,
            "The snapshot to begin with must be marked as needed in its store, so that it is not deleted.",
        )

    def _new_incarnation(
        self,
        job: LoadedJob,
        identity: JobIdentity,
        options: StartOptions,
        number: int,
        group: Group,
        *,
        listener: socket.socket | None = None,
        has_begun: bool = False,
    ) -> Incarnation:
        """Lays out the folder of the next incarnation."""
        run_dir = self.path / RUNS_DIR / f"{number:04d}"
        run_dir.mkdir()
        StopBoard.create(run_dir / BOARD_FILE)
        RunSpec(
            incarnation=number,
            group=group,
            state_dir=str(self.path),
            job_dir=str(job.module_dir) if job.module_dir is not None else None,
            config=job.config.model_dump(mode="json"),
            kept_global_batch_size=identity.global_batch_size,
            run_id=identity.run_id,
            source=identity.source,
            allowed_differences=list(options.allowed_differences),
            begins_run=not has_begun and not self._has_started(identity.run_id),
            mean_time_between_failures_s=self._mean_time_between_failures_s(job.config),
        ).write(run_dir)
        kept = job.config.supervisor
        prune(self.path, keep_incarnations=kept.keep_incarnations, keep_incidents=kept.keep_incidents)
        return Incarnation(run_dir, number, job.config.elastic.nproc_per_node, group, listener)

    def _has_started(self, run_id: str) -> bool:
        """Whether an earlier incarnation here was of this run."""
        for run_dir in numbered_folders(self.path / RUNS_DIR):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if RunSpec.read(run_dir).run_id == run_id:
                    return True
        return False

    def _note_fence(self, config: JobConfig, run_id: str) -> None:
        """Worker groups on other nodes have numbers too, and this directory may be newer than they are. A store that
        cannot be reached now costs nothing but this: the other nodes know their numbers."""

        def look() -> None:
            with contextlib.suppress(StorageError):
                fence = self._store(config).read_fence(run_id)
                self._fenced_number = fence.incarnation if fence is not None else 0

        # In a thread of its own: nobody can say how long a client goes on trying.
        looking = threading.Thread(target=look, name="fence", daemon=True)
        looking.start()
        looking.join(FENCE_PATIENCE_S)

    @property
    def last_number(self) -> int:
        """Of the incarnations so far, also of those on other nodes that have begun, where it was looked for; 0 before
        the first."""
        return max(last_number(self.path / RUNS_DIR), self._fenced_number)

    def _mean_time_between_failures_s(self, config: JobConfig) -> float:
        """From the lives of the worker groups so far, as the journal has them: by a clock that nobody sets."""
        past = read_past(self.path, report_steps=config.metrics.every_steps)
        return mean_time_between_failures_s(past.uptime_s, past.num_failures)
