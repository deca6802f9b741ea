"""`elastictrain incidents`: hangs, and the evidence they left: stacks, states of processes, last lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrain.cli.events_commands import brief
from elastictrain.cli.options import JsonOption, StateDirOption
from elastictrain.folders import numbered_folders
from elastictrain.protocol import INCIDENT_FILE, INCIDENTS_DIR
from elastictrain.supervisor.kept_files import read_incident

if TYPE_CHECKING:
    from elastictrain.cli.job_dirs import JobDir

_MAX_EVIDENCE_LINES = 200
_NUM_FRAMES = 6

app = typer.Typer(invoke_without_command=True, help="List hangs; show one's stacks and last lines.")


@app.callback()
def incidents(
    context: typer.Context,
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="As JOB of `elastictrain status`.")] = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the incidents of a job, oldest first."""
    context.obj = (job, state_dir)
    if context.invoked_subcommand is not None:
        return
    from elastictrain.cli.job_dirs import find_job_dir

    found = _incidents(find_job_dir(job, state_dir))
    rows = [{"incident": name, "path": str(path), **read_incident(path)} for name, path in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo("No incidents.")
    for row in rows:
        typer.echo(f"{row['incident']:>6}  {_headline(row)}")


@app.command()
def show(
    context: typer.Context,
    number: Annotated[str, typer.Argument(metavar="N", help="As `elastictrain incidents` lists it, such as 3.")],
    as_json: JsonOption = False,
    full: Annotated[bool, typer.Option("--full", help="Files in full length.")] = False,
) -> None:
    """Show one incident: what was found, and the evidence that was kept."""
    from elastictrain.cli.job_dirs import find_job_dir
    from elastictrain.errors import MissingInputError

    found = _incidents(find_job_dir(*context.obj))
    paths = [path for name, path in found if name == number.lstrip("0")]
    if not paths:
        names = ", ".join(name for name, _ in found) or "none"
        raise MissingInputError(f"there is no incident {number}", f"There are: {names}.")
    (path,) = paths
    found_files = (p for p in path.rglob("*") if p.is_file() and p.name != INCIDENT_FILE)
    # What /proc says is long, and looked at last.
    files = sorted(found_files, key=lambda p: (p.name.startswith("process-"), p))
    if as_json:
        evidence = {str(p.relative_to(path)): _read_text(p) for p in files}
        fields = {"incident": number, "path": str(path), **read_incident(path), "evidence": evidence}
        typer.echo(json.dumps(fields, indent=2))
        return
    fields = read_incident(path)
    typer.echo(f"incident {number}: {_headline(fields)}\n{path}\n")
    for key, value in fields.items():
        if key not in ("judged", "opened_at", "incident", "why"):
            typer.echo(f"{key.replace('_', ' '):<16} {brief(value)}")
    for judged in _judged(fields):
        typer.echo(f"\n---- {judged}")
    for file in files:
        lines = _read_text(file).splitlines()
        typer.echo(f"\n---- {file.relative_to(path)}")
        shown = lines if full else lines[-_MAX_EVIDENCE_LINES:]
        if len(shown) < len(lines):
            typer.echo(f"[{len(lines) - len(shown)} lines before; --full shows them]")
        typer.echo("\n".join(shown))


def _headline(fields: dict[str, Any]) -> str:
    """When, what and who, in a line; of an incident that says none of this, whatever it says."""
    opened_at, ranks = fields.get("opened_at"), fields.get("ranks")
    if not isinstance(opened_at, int | float) or not isinstance(ranks, list):
        return "  ".join(f"{k}={brief(v)}" for k, v in fields.items() if k not in ("incident", "path"))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(opened_at))
    who = "rank " + ", ".join(str(rank) for rank in ranks)
    stood_s, limit_s = brief(fields.get("stood_still_s")), brief(fields.get("limit_s"))
    group = f"incarnation {fields.get('incarnation')}"
    return f"{when}  {fields.get('kind')}  {group}  {who}: {fields.get('why')}, for {stood_s} s (limit {limit_s} s)"


def _judged(fields: dict[str, Any]) -> list[str]:
    """What was found of each rank, and its main thread's innermost frames."""
    found = []
    for rank in fields.get("judged") or []:
        if isinstance(rank, dict):
            facts = f"rank {rank.get('rank')}, process {rank.get('pid')} ({rank.get('process')}): {rank.get('health')}"
            where = f"step {rank.get('step')}, {rank.get('phase')}, for {brief(rank.get('stood_still_s'))} s"
            frames = "".join(f"\n     {frame}" for frame in (rank.get("stack") or [])[:_NUM_FRAMES])
            found.append(f"{facts}: {rank.get('why')}; {where}{frames}")
    return found


def _incidents(where: JobDir) -> list[tuple[str, Path]]:
    """(number, folder), oldest first."""
    return [(str(int(path.name)), path) for path in numbered_folders(where.path / INCIDENTS_DIR)]


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
