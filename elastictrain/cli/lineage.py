"""Which run a start belongs to: that of its state directory, that of its store, or another one's continued."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastictrain.checkpoint.catalog import latest_run, newest_first
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.errors import MissingInputError, SnapshotError
from elastictrain.protocol import IDENTITY_FILE, SNAPSHOTS_DIR, JobIdentity, SnapshotSource


def run_in_store(store: Store) -> JobIdentity | None:
    """The run that wrote last into a store: what a job goes on with on a machine that has never seen it."""
    candidates = newest_first(None, store)
    run_id = latest_run(candidates)
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
            except (SnapshotError, KeyError, TypeError, ValueError):
                continue
            return JobIdentity(run_id, size)
    return JobIdentity(run_id, None)


def find_source(text: str, storage_options: Mapping[str, Any]) -> SnapshotSource:
    """The snapshot that `--from URL[@STEP]` names.

    Args:
        text: a store's URL or folder, or a state directory; then, optionally, `@` and a step.
        storage_options: for the store.

    Raises:
        MissingInputError: there is no such snapshot.
    """
    url, at, step_text = text.rpartition("@")
    if not at or not step_text.isdigit():
        url, step_text = text, ""
    run_id = None
    path = Path(url)
    if "://" not in url and path.is_dir():
        path = path.absolute()
        if (path / IDENTITY_FILE).exists():
            identity = JobIdentity.read(path)
            run_id = identity.run_id if identity is not None else None
            path = path / SNAPSHOTS_DIR
        url = str(path)
    store = open_store(url, storage_options)
    candidates = newest_first(None, store)
    run_id = run_id or latest_run(candidates)
    of_run = [c for c in candidates if c.run_id == run_id]
    if not of_run:
        raise MissingInputError(f"--from {text}: there are no snapshots in {store.where}")
    if not step_text:
        return SnapshotSource(url, of_run[0].run_id, of_run[0].global_step)
    step = int(step_text)
    if all(c.global_step != step for c in of_run):
        steps = ", ".join(str(c.global_step) for c in of_run[:10])
        raise MissingInputError(f"--from {text}: there is no snapshot of step {step}", f"There are: {steps}.")
    return SnapshotSource(url, of_run[0].run_id, step)
