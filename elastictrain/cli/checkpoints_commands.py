"""`elastictrain checkpoints`: what snapshots a job has, whether they are sound, and their weights for others to use."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from elastictrain.checkpoint.catalog import Candidate
from elastictrain.checkpoint.format import Damage
from elastictrain.checkpoint.memory_tier import LOCK_POLL_S
from elastictrain.cli.options import JobDirArgument, JsonOption, StateDirOption
from elastictrain.cli.snapshot_places import Place, choose, find_place
from elastictrain.errors import BusyError, SnapshotDamagedError, SnapshotError, StorageError, UsageError

app = typer.Typer(no_args_is_help=True, help="List, inspect, verify, prune and export a job's snapshots.")

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Look into this store, whichever job it belongs to.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", help="The snapshot of this global step. Default: the newest.")
]


BUSY_PATIENCE_S = 10.0
"""How long a snapshot that is just being overwritten is asked for again: a writer takes its slot in milliseconds."""


def _warn(text: str) -> None:
    typer.echo(f"elastictrain: {text}", err=True)


@app.command("list")
def list_(
    job: JobDirArgument = None, state_dir: StateDirOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List all snapshots, newest first, of both tiers."""
    place = find_place(job, state_dir, url, _warn)
    rows = [row for candidate in place.candidates() if (row := _row(candidate)) is not None]
    rows += [{"tier": "memory", "path": str(path), "damage": str(damage)} for path, damage in place.broken()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo(f"No snapshots in {place.describe()}.")
    for row in rows:
        if "damage" in row:
            typer.echo(f"{row.get('name', row['path'])}  {row['tier']}  DAMAGED: {row['damage']}")
            continue
        size = _size(row["size_bytes"])
        pinned = "  pinned" if row["pinned_by"] else ""
        typer.echo(
            f"step {row['global_step']:>8}  run {row['run_id']}  {row['tier']:<7}  {size:>12}  {row['created']}{pinned}"
        )


def _size(size_bytes: int) -> str:
    """In the largest unit of which there is at least one."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << exponent:
            return f"{size_bytes / (1 << exponent):,.1f} {unit}"
    return f"{size_bytes} B"


def _row(entry: tuple[Any, list[str]]) -> dict[str, Any] | None:
    """None for one that has been deleted since it was listed."""
    candidate, pinned_by = entry
    row = {"name": candidate.name, "global_step": candidate.global_step, "run_id": candidate.run_id}
    row |= {"tier": candidate.tier, "path": candidate.where, "pinned_by": pinned_by}
    try:
        manifest = candidate.read_manifest()
    except SnapshotError as error:
        return None if candidate.is_gone() else {**row, "damage": error.what}
    return {**row, "created": manifest.created, "size_bytes": manifest.size_bytes, "versions": manifest.versions}


@app.command()
def show(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    url: UrlOption = None,
    step: StepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one snapshot: counters, sizes, world size, versions, data order, and the digest of its model."""
    candidate = choose(find_place(job, state_dir, url, _warn), step, _warn)
    manifest, trainer = candidate.read_manifest(), candidate.read_trainer()
    counters = trainer.get("counters", {})
    fields = {
        "name": candidate.name,
        "job": manifest.job,
        "run_id": manifest.run_id,
        "global_step": manifest.global_step,
        "applied": counters.get("applied"),
        "skipped": counters.get("skipped"),
        "sample_position": counters.get("sample_position"),
        "epoch": trainer.get("epoch"),
        "model_digest": manifest.model_digest,
        "world_size": trainer.get("world_size"),
        "batch": trainer.get("batch"),
        "precision": trainer.get("precision"),
        "data_order": trainer.get("data_order"),
        "sizes": {
            **{name: entry.size_bytes for name, entry in manifest.files.items()},
            "total": manifest.size_bytes,
        },
        "versions": manifest.versions,
        "created": manifest.created,
        "tier": candidate.tier,
        "path": candidate.where,
    }
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    for key, value in fields.items():
        if isinstance(value, dict):
            value = ", ".join(
                f"{name} {item:,}" if key == "sizes" else f"{name} {item}" for name, item in value.items()
            )
        typer.echo(f"{key.replace('_', ' '):<16} {'–' if value is None else value}")


@app.command()
def verify(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    url: UrlOption = None,
    step: StepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte and compare it to what was written. Exit code 65 if anything is damaged.

    What a running job deletes or overwrites meanwhile is left out.
    """
    place = find_place(job, state_dir, url, _warn)
    rows = _verified(place, step)
    if step is None:
        for path, damage in place.broken():
            damages = [{"file": damage.file, "reason": damage.reason}]
            rows.append({"name": path.name, "global_step": None, "tier": "memory", "path": str(path)})
            rows[-1] |= {"sound": False, "damages": damages}
    if not rows:
        choose(place, step, _warn)  # explains that there is none
        raise BusyError("whatever was to be verified was overwritten or deleted meanwhile", "Try again.")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            typer.echo(f"{row['name']}  {row['tier']:<7}  {'sound' if row['sound'] else 'DAMAGED'}")
            for damage in row["damages"]:
                typer.echo(f"    {row['path']}/{damage['file']}: {damage['reason']}")
    if not all(row["sound"] for row in rows):
        raise typer.Exit(SnapshotDamagedError.exit_code)


def _verified(place: Place, step: int | None) -> list[dict[str, Any]]:
    """What has been found of each snapshot, newest first; of those that are still there when their turn comes."""
    rows: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + BUSY_PATIENCE_S
    # A job may take snapshots faster than they are read: then all of a list can be gone, and the next is looked at.
    while not rows and time.monotonic() < deadline_s:
        candidates = [c for c, _pins in place.candidates() if step is None or c.global_step == step]
        if not candidates:
            break
        for candidate in candidates:
            found = _verify_patiently(candidate)
            if found is not None:
                damages = [{"file": d.file, "reason": d.reason} for d in found]
                rows.append({"name": candidate.name, "global_step": candidate.global_step, "tier": candidate.tier})
                rows[-1] |= {"path": candidate.where, "sound": not damages, "damages": damages}
    return rows


def _verify_patiently(candidate: Candidate) -> list[Damage] | None:
    """As `Candidate.verify`. A slot that somebody has locked is soon free again, or holds another snapshot; one that
    stays locked (its writer is stopped) is left out, with a warning."""
    deadline_s = time.monotonic() + BUSY_PATIENCE_S
    while True:
        try:
            return candidate.verify()
        except BusyError as error:
            if time.monotonic() >= deadline_s:
                _warn(f"{candidate.name} is left out: {error.what}")
                return None
            time.sleep(LOCK_POLL_S)


@app.command()
def prune(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    url: UrlOption = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Default: checkpoint.keep_last, or 3.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete superfluous snapshots from the durable tier now, and leftovers of killed writers.

    The newest of each run is read first: nothing goes unless a newer one is sound. Pinned snapshots stay.
    """
    place = find_place(job, state_dir, url, _warn)
    deleted, kept, leftovers = place.prune(keep_last, dry_run=dry_run, warn=_warn)
    if as_json:
        fields = {"deleted": deleted, "kept": kept, "leftovers": leftovers, "dry_run": dry_run}
        typer.echo(json.dumps(fields, indent=2))
        return
    for name in [*deleted, *leftovers]:
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {name}")
    typer.echo(f"{len(kept)} kept.")


@app.command()
def export(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[JOB] DIR|FILE",
            help="The job, unless --state-dir or --url names it; and a folder, to get model.safetensors, or a file.",
        ),
    ],
    state_dir: StateDirOption = None,
    url: UrlOption = None,
    step: StepOption = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights, where the run keeps them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the model as one plain safetensors file that holds every name of its state dict."""
    from elastictrain.checkpoint.catalog import open_candidate
    from elastictrain.checkpoint.export import export_model

    if len(arguments) > 2:
        raise UsageError(f"export takes a job and a target, got {' '.join(arguments)}")
    target = Path(arguments[-1])
    job = arguments[0] if len(arguments) == 2 else None
    if target.suffix != ".safetensors":
        target = target / "model.safetensors"
    candidate = choose(find_place(job, state_dir, url, _warn), step, _warn)
    scratch = Path(tempfile.mkdtemp(prefix="elastictrain-export-"))
    try:
        with open_candidate(candidate, scratch) as reader:
            num_tensors = export_model(reader, target, use_ema=ema)
    except OSError as error:
        raise StorageError(f"{target}: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size_bytes = target.stat().st_size
    if as_json:
        fields = {"path": str(target), "name": candidate.name, "global_step": candidate.global_step}
        typer.echo(json.dumps({**fields, "tensors": num_tensors, "size_bytes": size_bytes, "ema": ema}, indent=2))
    else:
        typer.echo(f"{target}: {num_tensors} tensors of {candidate.name}, {size_bytes:,} bytes")
