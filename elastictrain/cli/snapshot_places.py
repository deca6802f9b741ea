"""Where a job's snapshots are: from a name, a path, a state directory or a URL to the two tiers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastictrain.checkpoint.catalog import Candidate, latest_run, newest_first
from elastictrain.checkpoint.format import Damage
from elastictrain.checkpoint.memory_note import MemoryNote
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.node_tiers import is_readable
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.cli.job_dirs import find_state_dir
from elastictrain.config import JobConfig, load_job
from elastictrain.config.schema import CheckpointConfig
from elastictrain.core.retention import Condition, Kept, superfluous
from elastictrain.errors import ElasticTrainError, MissingInputError, SnapshotDamagedError, StorageError, UsageError
from elastictrain.folders import numbered_folders
from elastictrain.protocol import RUNS_DIR, SNAPSHOTS_DIR, SPEC_FILE


@dataclass(frozen=True)
class Place:
    """The tiers of a job.

    Args:
        store: the durable one.
        tiers: the memory tier, wherever it has been, and the staging folder that takes its place; empty where only a
            store was named.
        config: settings of its last run, or the defaults.
    """

    store: Store
    tiers: tuple[MemoryTier, ...]
    config: CheckpointConfig

    def describe(self) -> str:
        """For people."""
        return " or ".join([self.store.where, *(str(tier.root) for tier in self.tiers)])

    def candidates(self) -> list[tuple[Candidate, list[str]]]:
        """All snapshots, newest first, with the owners of their pins."""
        found = newest_first(None, self.store)
        for tier in self.tiers:
            found += newest_first(tier, None)
        pins = self.store.pins()
        ordered = sorted(found, key=lambda c: (-c.global_step, c.run_id, c.tier != "memory"))
        return [(c, pins.get((c.run_id, c.global_step), []) if c.tier == "durable" else []) for c in ordered]

    def broken(self) -> list[tuple[Path, Damage]]:
        """What cannot even be named: slots with a damaged manifest."""
        return [entry for tier in self.tiers for entry in tier.damaged()]

    def prune(
        self, keep_last: int | None, *, dry_run: bool, warn: Callable[[str], None]
    ) -> tuple[list[str], list[str], list[str]]:
        """Applies retention to the store. Returns names: (deleted, kept, leftovers of killed writers).

        Args:
            keep_last: default: as the job has it.
            dry_run: delete nothing; the names are of what would go.
            warn: is told of leftovers that cannot be looked for: not every store lets its users ask.
        """
        condition: dict[str, Condition] = {}
        runs_settled: set[str] = set()
        snapshots = self.store.snapshots()
        for snapshot in snapshots:  # newest first: read until one of each run is sound
            condition[snapshot.name] = Condition.COMMITTED
            if snapshot.run_id not in runs_settled:
                damaged = bool(self.store.verify(snapshot.name))
                condition[snapshot.name] = Condition.DAMAGED if damaged else Condition.VERIFIED
                if not damaged:
                    runs_settled.add(snapshot.run_id)
        names = {(s.run_id, s.global_step): s.name for s in snapshots}
        doomed = superfluous(
            [Kept(s.run_id, s.global_step, condition[s.name]) for s in snapshots],
            keep_last=keep_last if keep_last is not None else self.config.keep_last,
            keep_every=self.config.keep_every,
            pins=self.store.pins(),
        )
        deleted = [names[(s.run_id, s.global_step)] for s in doomed]
        if dry_run:
            leftovers = self.store.leftovers()
        else:
            deleted = [name for name in deleted if self.store.delete_unless_pinned(name)]
            leftovers = self.store.clean_leftovers()
        try:
            for upload in self.store.dead_uploads() if dry_run else self.store.abort_dead_uploads():
                leftovers.append(upload)  # one by one: what is gone counts, whatever comes after it
        except StorageError as error:
            warn(error.what)
        return deleted, [s.name for s in snapshots if s.name not in deleted], leftovers


def find_place(
    job: str | None, state_dir: Path | None, url: str | None, warn: Callable[[str], None] = lambda _text: None
) -> Place:
    """The tiers of what the command line names.

    Args:
        job: name of a job (its state directory is checkpoints/<name>), or path of a job.toml or its folder, or an
            example's name.
        state_dir: a state directory.
        url: a store; if a job is named too, with that job's storage options.
        warn: is told of a place where the memory tier has been, and which cannot be looked into any more.

    Raises:
        UsageError: nothing, or too much, was named.
        MissingInputError: there is no such job.
    """
    if job is not None and state_dir is not None:
        raise UsageError("JOB and --state-dir name the same thing: give one of them")
    if job is None and state_dir is None:
        if url is None:
            raise UsageError("which job? Give JOB, --state-dir DIR or --url URL")
        return Place(open_store(url), (), CheckpointConfig())
    folder, config = _find_job(job, state_dir)
    settings = config.checkpoint if config is not None else CheckpointConfig()
    if url is not None:
        return Place(open_store(url, settings.storage_options), (), settings)
    store = open_store(settings.url or folder / SNAPSHOTS_DIR, settings.storage_options)
    name = config.name if config is not None else folder.name
    present = Path(settings.memory_path)
    earlier = [
        tier
        for path in MemoryNote(folder).paths()
        if path != present
        and is_readable(
            tier := MemoryTier.for_job(path, job=name, state_dir=folder),
            lambda where, reason: warn(f"{where} is passed over: {reason}"),
        )
    ]
    tiers = (MemoryTier.for_job(present, job=name, state_dir=folder), *earlier, MemoryTier.staging(folder))
    return Place(store, tiers, settings)


def _find_job(job: str | None, state_dir: Path | None) -> tuple[Path, JobConfig | None]:
    """(state directory, settings) of a job; the settings are those it last ran with, else those of its file."""
    path = find_state_dir(job, state_dir)
    config = _last_config(path)
    if config is None and job is not None:
        with contextlib.suppress(MissingInputError):  # named by its state directory
            config = load_job(job).config
    return path, config


def _last_config(state_dir: Path) -> JobConfig | None:
    """The settings of the state directory's last run."""
    for run in reversed(numbered_folders(state_dir / RUNS_DIR)):
        try:
            return JobConfig.model_validate(json.loads((run / SPEC_FILE).read_text())["config"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def choose(place: Place, step: int | None, warn: Callable[[str], None]) -> Candidate:
    """One snapshot: that of `step`, or the newest of the run that wrote last; the memory tier's if both have it.

    Args:
        place: where to look.
        step: of the snapshot; None for the newest whose manifest can be read.
        warn: is told of each newer one that is passed over.

    Raises:
        MissingInputError: there is none.
        SnapshotDamagedError: there are some, and no manifest of them can be read.
    """
    candidates = [candidate for candidate, _ in place.candidates()]
    if step is not None:
        candidates = [candidate for candidate in candidates if candidate.global_step == step]
    if not candidates:
        if step is None and (broken := place.broken()):
            raise SnapshotDamagedError(f"{broken[0][0]}/{broken[0][1]}")
        which = "snapshot" if step is None else f"snapshot of step {step}"
        raise MissingInputError(f"there is no {which} in {place.describe()}")
    run_id = latest_run(candidates)
    for candidate in candidates:
        if candidate.run_id == run_id:
            try:
                candidate.read_manifest()
            except ElasticTrainError as error:
                if step is None:
                    warn(f"{candidate.where} is passed over: {error.what}")
                    continue
                raise
            return candidate
    candidates[0].read_manifest()  # says what is wrong with the newest
    return candidates[0]
