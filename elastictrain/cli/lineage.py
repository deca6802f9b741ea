"""Which run a start belongs to: that of its state directory, that of its store, or another one's continued.

A store that is down for a moment is waited for, and whoever started the run is told so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from elastictrain.checkpoint.catalog import Candidate, latest_run, newest_first
from elastictrain.checkpoint.durable_note import DurableNote
from elastictrain.checkpoint.memory_snapshot import OpenSnapshot
from elastictrain.checkpoint.patience import patiently
from elastictrain.checkpoint.secrets import redact_url
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.cli.snapshot_places import find_place
from elastictrain.errors import (
    BusyError,
    MissingInputError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotVersionError,
    StorageError,
    UnreadableFileError,
)
from elastictrain.protocol import IDENTITY_FILE, SNAPSHOTS_DIR, JobIdentity, SnapshotSource

T = TypeVar("T")


def _ignore(_text: str) -> None: ...


def with_patience(act: Callable[[], T], patience_s: float, warn: Callable[[str], None], otherwise: str) -> T:
    """Does what needs a store, again and again while that fails.

    Args:
        act: what to do.
        patience_s: how long to try.
        warn: is told of every failure that is followed by another try.
        otherwise: what else the user can do, if it never succeeds.

    Raises:
        StorageError: it failed to the end.
    """

    def tell(error: str, pause_s: float) -> None:
        warn(f"the store fails and is tried again in {pause_s:.1f} s, for {patience_s:g} s in all: {error}")

    try:
        return patiently(act, patience_s=patience_s, on_wait=tell)
    except StorageError as error:
        raise StorageError(error.what, f"{error.hint}\n{otherwise}") from error


def run_in_store(store: Store, *, rewinds: bool = False, warn: Callable[[str], None] = _ignore) -> JobIdentity | None:
    """The run that wrote last into a store: what a job goes on with on a machine that has never seen it.

    Args:
        store: the store.
        rewinds: pass over the snapshots that the store lists and does not give, as long as it gives one of each run.
        warn: is told of each that is passed over so.

    Raises:
        SnapshotError: there are snapshots, and none of their manifests can be used.
        StorageError: the store cannot be read, or does not give what decides.
    """
    told: set[str] = set()

    def passed_over(candidate: Candidate, error: StorageError) -> None:
        if candidate.name not in told:
            told.add(candidate.name)
            warn(f"{candidate.where} is passed over: {error.what}")

    candidates = newest_first(None, store)
    try:
        run_id = latest_run(candidates, passed_over if rewinds else None)
    except StorageError as error:
        if not rewinds:
            raise
        raise StorageError(
            error.what, f"{error.hint} Name what to begin with: --from URL@STEP; or begin a new run: --fresh.".strip()
        ) from error
    if run_id is None:
        if candidates:
            raise SnapshotError(
                f"there are {len(candidates)} snapshot(s) in {store.where}, but none of their manifests can be read",
                "`elastictrain checkpoints verify` says why; begin anew with --fresh.",
            )
        return None
    for candidate in candidates:
        if candidate.run_id == run_id:
            try:
                size = int(candidate.read_trainer()["batch"]["global_batch_size"])
            except (SnapshotError, UnreadableFileError, KeyError, TypeError, ValueError):
                continue
            except StorageError as error:
                if not rewinds:
                    raise
                passed_over(candidate, error)
                continue
            return JobIdentity(run_id, size)
    return JobIdentity(run_id, None)


def find_source(
    text: str,
    storage_options: Mapping[str, Any],
    warn: Callable[[str], None] = _ignore,
    kept: SnapshotSource | None = None,
) -> SnapshotSource:
    """The snapshot that `--from URL[@STEP]` names.

    Without a step it is the newest that is sound: what is damaged is found by reading it, and passed over. Of a state
    directory, both tiers count: what is in its memory tier alone is made durable now, in that job's store.

    Args:
        text: a store's URL or folder, or a state directory; then, optionally, `@` and a step.
        storage_options: for a store; a state directory says itself how its store is opened.
        warn: called for each snapshot that is passed over.
        kept: what the run of this start has begun with: if that is meant, it need not be looked for again.

    Raises:
        MissingInputError: there is no such snapshot.
        SnapshotDamagedError: there are some, and none of them can be read; or the one that was asked for is in the
            memory tier alone, and damaged.
        SnapshotVersionError: the newest was written by a newer program.
        StorageError: the store cannot be read, or takes no snapshot.
    """
    where, at, step_text = text.rpartition("@")
    if not at or not step_text.isdigit():
        where, step_text = text, ""
    text = redact_url(text)  # from here on it is for people
    step = int(step_text) if step_text else None
    folder = Path(where)
    if "://" not in where and (folder / IDENTITY_FILE).exists():
        return _of_state_dir(text, folder.absolute(), step, warn, kept)
    url = str(folder.absolute()) if "://" not in where else where
    store = open_store(url, storage_options)
    candidates = newest_first(None, store)
    run_id = latest_run(candidates)
    if candidates and run_id is None:
        raise _none_sound(text, store.where)
    found = _of_step(text, [c for c in candidates if c.run_id == run_id], step, store.where)
    if step is None and kept is not None and (kept.url, kept.run_id) == (url, run_id):
        return replace(kept, storage_options=None)
    for candidate in found:
        if step is not None or _is_sound(candidate, text, warn):
            return SnapshotSource(url, candidate.run_id, candidate.global_step)
    raise _none_sound(text, store.where)


def _of_state_dir(
    text: str, folder: Path, step: int | None, warn: Callable[[str], None], kept: SnapshotSource | None
) -> SnapshotSource:
    identity = JobIdentity.read(folder)
    place = find_place(None, folder, None, lambda told: warn(f"--from {text}: {told}"))
    candidates = [c for c, _ in place.candidates() if identity is not None and c.run_id == identity.run_id]
    durable = {c.global_step: c for c in candidates if c.tier == "durable"}
    url = place.config.url or str(folder / SNAPSHOTS_DIR)
    if "://" not in url:
        url = str(Path(url).absolute())
    options = place.config.storage_options
    found = _of_step(text, candidates, step, place.describe())
    if step is None and kept is not None and (kept.url, kept.run_id) == (url, found[0].run_id):
        return replace(kept, storage_options=options)
    for candidate in found:
        source = SnapshotSource(url, candidate.run_id, candidate.global_step, storage_options=options)
        stored = durable.pop(candidate.global_step, None)
        if stored is not None and (step is not None or _is_sound(stored, text, warn)):
            return source
        if candidate.memory is not None:
            try:
                with OpenSnapshot(candidate.memory.path, candidate.name) as opened:
                    place.store.put(opened)
                with contextlib.suppress(OSError):  # the note is for that job's own next start, which lists its store
                    DurableNote(folder).learn(candidate.run_id, candidate.global_step)
            except (SnapshotDamagedError, BusyError) as error:
                if step is not None:
                    raise
                _pass_over(candidate, text, error.what, warn)
            else:
                return source
    raise _none_sound(text, place.describe())


def _is_sound(candidate: Candidate, text: str, warn: Callable[[str], None]) -> bool:
    """Whether a stored snapshot can be used; else says why not.

    Raises:
        SnapshotVersionError: it was written by a newer program.
        StorageError: the store failed.
    """
    try:
        candidate.read_manifest()
    except SnapshotVersionError as error:
        raise SnapshotVersionError(f"--from {text}: {candidate.where}/{error.what}", error.hint) from error
    except (SnapshotError, UnreadableFileError) as error:
        _pass_over(candidate, text, error.what, warn)
        return False
    damages = candidate.verify()
    if damages != []:
        reason = "is gone" if damages is None else "; ".join(map(str, damages))
        _pass_over(candidate, text, reason, warn)
    return damages == []


def _pass_over(candidate: Candidate, text: str, reason: str, warn: Callable[[str], None]) -> None:
    warn(f"--from {text}: {candidate.where} is passed over: {reason}")


def _none_sound(text: str, where: str) -> SnapshotDamagedError:
    return SnapshotDamagedError(
        f"--from {text}: none of the snapshots in {where} can be read", "`elastictrain checkpoints verify` says why."
    )


def _of_step(text: str, candidates: list[Candidate], step: int | None, where: str) -> list[Candidate]:
    """Those of the step, or all where none was asked for; at least one."""
    if not candidates:
        raise MissingInputError(f"--from {text}: there are no snapshots in {where}")
    found = [c for c in candidates if step is None or c.global_step == step]
    if not found:
        steps = ", ".join(dict.fromkeys(str(c.global_step) for c in candidates[:10]))
        raise MissingInputError(f"--from {text}: there is no snapshot of step {step}", f"There are: {steps}.")
    return found
