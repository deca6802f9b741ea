"""A job's state directory: everything the job writes is in it, and one process at a time works with it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from elastictrain.checkpoint.store import Store, open_store
from elastictrain.cli.lineage import run_in_store
from elastictrain.config import JobConfig, LoadedJob
from elastictrain.core.batch import resolve_batch
from elastictrain.core.snapshot_interval import mean_time_between_failures_s
from elastictrain.errors import BusyError, StateDirError
from elastictrain.protocol import (
    BOARD_FILE,
    LOCK_FILE,
    RUNS_DIR,
    SNAPSHOTS_DIR,
    JobIdentity,
    RunSpec,
    SnapshotSource,
    StopBoard,
)
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.past import read_past
from elastictrain.supervisor.pruning import prune


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
        """The same for the worker groups after the first: a new run is begun once."""
        return StartOptions(allowed_differences=self.allowed_differences)


class StateDir:
    """A job's state directory.

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

    def prepare(self, job: LoadedJob, options: StartOptions | None = None) -> Incarnation:
        """Everything that a start needs: the job's identity, and the folder of the next incarnation.

        Raises:
            ConfigError: the batch sizes do not fit together or the number of ranks.
            StorageError: the store of snapshots cannot be reached.
        """
        options = options if options is not None else StartOptions()
        return self._new_incarnation(job, self._identify(job.config, options), options)

    def _identify(self, config: JobConfig, options: StartOptions) -> JobIdentity:
        """The job's identity: kept from its first start, adopted from its snapshots where this directory is new (a
        replaced node), or made now."""
        kept = JobIdentity.read(self.path)
        run_id, kept_size, source = None, None, None
        if kept is not None:
            run_id, kept_size, source = kept.run_id, kept.global_batch_size, kept.source
        elif (
            not options.fresh
            and options.source is None
            and (found := run_in_store(self._open_store(config))) is not None
        ):
            run_id, kept_size = found.run_id, found.global_batch_size
        goes_on = (
            kept is not None
            and kept.source is not None
            and options.source is not None
            and (kept.source.url, kept.source.run_id) == (options.source.url, options.source.run_id)
        )
        if options.fresh or (options.source is not None and not goes_on):
            run_id, source = None, options.source
        batch = resolve_batch(
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            accumulation_steps=config.train.accumulation_steps,
            world_size=config.elastic.nproc_per_node,
            kept_global_batch_size=kept_size if run_id is not None else None,
        )
        identity = JobIdentity(
            run_id=run_id or secrets.token_hex(4),
            global_batch_size=batch.global_batch_size if config.train.global_batch_size is None else None,
            source=source,
        )
        if options.source is not None and not goes_on:
            # Before anything of the new run is durable, the old run's retention must not take its beginning away. The
            # pin comes first: a run that knows its source can rely on it.
            open_store(options.source.url, config.checkpoint.storage_options).pin(
                options.source.run_id, options.source.global_step, identity.run_id
            )
        if identity != kept:
            identity.write(self.path)
        return identity

    def _open_store(self, config: JobConfig) -> Store:
        return open_store(config.checkpoint.url or self.path / SNAPSHOTS_DIR, config.checkpoint.storage_options)

    def _new_incarnation(self, job: LoadedJob, identity: JobIdentity, options: StartOptions) -> Incarnation:
        """Lays out the folder of the next incarnation."""
        number = max(self._numbers(), default=0) + 1
        run_dir = self.path / RUNS_DIR / f"{number:04d}"
        run_dir.mkdir()
        StopBoard.create(run_dir / BOARD_FILE)
        RunSpec(
            incarnation=number,
            state_dir=str(self.path),
            job_dir=str(job.module_dir) if job.module_dir is not None else None,
            config=job.config.model_dump(mode="json"),
            kept_global_batch_size=identity.global_batch_size,
            run_id=identity.run_id,
            source=identity.source,
            allowed_differences=list(options.allowed_differences),
            begins_run=not self._has_started(identity.run_id),
            mean_time_between_failures_s=self._mean_time_between_failures_s(job.config),
        ).write(run_dir)
        kept = job.config.supervisor
        prune(self.path, keep_incarnations=kept.keep_incarnations, keep_incidents=kept.keep_incidents)
        return Incarnation(run_dir, number, job.config.elastic.nproc_per_node)

    def _has_started(self, run_id: str) -> bool:
        """Whether an earlier incarnation here was of this run."""
        for number in self._numbers():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if RunSpec.read(self.path / RUNS_DIR / f"{number:04d}").run_id == run_id:
                    return True
        return False

    def _numbers(self) -> list[int]:
        return [int(p.name) for p in (self.path / RUNS_DIR).iterdir() if p.name.isdigit()]

    def _mean_time_between_failures_s(self, config: JobConfig) -> float:
        """From the lives of the worker groups so far, as the journal has them: by a clock that nobody sets."""
        past = read_past(self.path, report_steps=config.metrics.every_steps)
        return mean_time_between_failures_s(past.uptime_s, past.num_failures)
