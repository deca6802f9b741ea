"""`elastictrain events`, `logs`, `incidents`: what happened to a job, in more and more detail."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrain.cli.options import JobDirArgument, JsonOption, StateDirOption

if TYPE_CHECKING:
    from elastictrain.cli.job_dirs import JobDir

_POLL_S = 0.2
_MAX_EVIDENCE_LINES = 200

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")]


# ---- events


def events(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    follow: FollowOption = False,
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=0, help="Only the newest N.")] = 50,
    since: Annotated[
        int | None, typer.Option("--since", metavar="ID", min=0, help="All after the event of this id.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only this kind, such as rank_failed. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show what happened to a job, oldest first; from its journal, or from a running supervisor."""
    from elastictrain.cli.job_dirs import find_job_dir

    where = find_job_dir(job, state_dir)
    kinds = frozenset(kind or ())
    with contextlib.suppress(KeyboardInterrupt):
        seen = since or 0
        for event in _known_events(where, since, kinds, last):
            seen = max(seen, event["id"])
            _print_event(event, as_json=as_json)
        if follow:
            for event in _following_events(where, seen, kinds):
                _print_event(event, as_json=as_json)


def _known_events(where: JobDir, since: int | None, kinds: frozenset[str], last: int) -> list[dict[str, Any]]:
    """From the supervisor, which also has what its journal could not take; else from the journal."""
    from elastictrain.cli.daemon import Daemon
    from elastictrain.errors import ElasticTrainError
    from elastictrain.protocol import JOURNAL_FILE
    from elastictrain.supervisor.journal import JournalReader, as_json

    limit = None if since is not None else last
    daemon = Daemon.find(where)
    if daemon is not None:
        with contextlib.suppress(ElasticTrainError):
            found: list[dict[str, Any]] = daemon.get(
                f"/events?since={since or 0}&kind={_quoted(kinds)}" + (f"&limit={limit}" if limit is not None else "")
            )
            return found
    return [as_json(event) for event in JournalReader(where.path / JOURNAL_FILE).read(since or 0, kinds, limit)]


def _following_events(where: JobDir, since: int, kinds: frozenset[str]) -> Iterator[dict[str, Any]]:
    """For ever: from the supervisor while there is one, and from the journal between two of them."""
    from elastictrain.cli.daemon import Daemon
    from elastictrain.errors import StorageError
    from elastictrain.protocol import JOURNAL_FILE
    from elastictrain.supervisor.journal import JournalReader, as_json

    while True:
        daemon = Daemon.find(where)
        if daemon is not None:
            for event in daemon.stream(f"/events?follow=1&since={since}&kind={_quoted(kinds)}"):
                since = event["id"]
                yield event
        with contextlib.suppress(StorageError):  # what the supervisor wrote while it ended
            for found in JournalReader(where.path / JOURNAL_FILE).read(since, kinds):
                since = found.id
                yield as_json(found)
        time.sleep(_POLL_S)


def _quoted(kinds: frozenset[str]) -> str:
    from urllib.parse import quote

    return quote(",".join(sorted(kinds)))


def _print_event(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event))
    else:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_s"]))
        millis = int(event["time_s"] % 1 * 1000)
        rest = "  ".join(
            f"{key}={_brief(value)}" for key, value in event.items() if key not in ("id", "time_s", "event")
        )
        typer.echo(f"{stamp}.{millis:03d}  {event['event']:<19}  {rest}".rstrip())
    sys.stdout.flush()


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


# ---- logs


def logs(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.")] = None,
    incarnation: Annotated[
        int | None, typer.Option("--incarnation", metavar="N", min=1, help="That of this one. Default: the newest.")
    ] = None,
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=0, help="Only the newest N lines.")] = 50,
    follow: FollowOption = False,
) -> None:
    """Show what the ranks of this node printed. With --follow, that of later worker groups too."""
    from elastictrain.cli.job_dirs import find_job_dir
    from elastictrain.errors import MissingInputError

    where = find_job_dir(job, state_dir)
    runs = [r for r in where.runs if incarnation is None or int(r.name) == incarnation]
    having = [run for run in runs if _rank_logs(run, rank)]
    if not having and not (follow and incarnation is None):
        which = f"rank {rank}" if rank is not None else "any rank"
        among = f"incarnation {incarnation}" if incarnation is not None else "an incarnation"
        raise MissingInputError(f"there is no log of {which} of {among} in {where.path}")
    tails: dict[Path, _Tail] = {}
    for path in _rank_logs(having[-1], rank) if having else []:
        tails[path] = _Tail(path)
        for line in _last_lines(tails[path].take(), last):
            _print_line(path, line, alone=rank is not None)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            newest = [r for r in where.runs if incarnation is None or int(r.name) == incarnation][-1:]
            for path in [p for run in newest for p in _rank_logs(run, rank)]:
                tails.setdefault(path, _Tail(path))
            for path, tail in list(tails.items()):
                for line in tail.take():
                    _print_line(path, line, alone=rank is not None)
                if path.parent not in newest:
                    del tails[path]
            time.sleep(_POLL_S)


class _Tail:
    """Reads a growing file by whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def take(self) -> list[str]:
        """The lines that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def _rank_logs(run: Path, rank: int | None) -> list[Path]:
    """Files of an incarnation, by rank."""
    found = [(p.stem.removeprefix("rank-"), p) for p in run.glob("rank-*.log")]
    numbered = sorted((int(number), p) for number, p in found if number.isdigit())
    return [p for number, p in numbered if rank is None or number == rank]


def _last_lines(lines: list[str], last: int) -> list[str]:
    return lines[-last:] if last else []


def _print_line(path: Path, line: str, *, alone: bool) -> None:
    typer.echo(line if alone else f"{path.stem.replace('rank-', 'rank ')}: {line}")
    sys.stdout.flush()


# ---- incidents

incidents_app = typer.Typer(
    invoke_without_command=True, help="List hangs and failures that left evidence; show one's stacks and last lines."
)


@incidents_app.callback()
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
    rows = [{"incident": name, "path": str(path), **_read_incident(path)} for name, path in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo("No incidents.")
    for row in rows:
        facts = "  ".join(f"{k}={_brief(v)}" for k, v in row.items() if k not in ("incident", "path"))
        typer.echo(f"{row['incident']:>6}  {facts or row['path']}")


@incidents_app.command()
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
    paths = [path for name, path in found if name == number or name.lstrip("0") == number.lstrip("0")]
    if not paths:
        names = ", ".join(name for name, _ in found) or "none"
        raise MissingInputError(f"there is no incident {number}", f"There are: {names}.")
    path = paths[-1]
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != _INCIDENT_FILE)
    if as_json:
        evidence = {str(p.relative_to(path)): _read_text(p) for p in files}
        fields = {"incident": number, "path": str(path), **_read_incident(path), "evidence": evidence}
        typer.echo(json.dumps(fields, indent=2))
        return
    typer.echo(str(path))
    for key, value in _read_incident(path).items():
        typer.echo(f"{key.replace('_', ' '):<16} {_brief(value)}")
    for file in files:
        lines = _read_text(file).splitlines()
        typer.echo(f"\n---- {file.relative_to(path)}")
        shown = lines if full else lines[-_MAX_EVIDENCE_LINES:]
        if len(shown) < len(lines):
            typer.echo(f"[{len(lines) - len(shown)} lines before; --full shows them]")
        typer.echo("\n".join(shown))


_INCIDENT_FILE = "incident.json"


def _incidents(where: JobDir) -> list[tuple[str, Path]]:
    """(name, folder): of the job, and of its incarnations, these named run/number."""
    own = [(p.name, p) for p in (where.path / "incidents").glob("*") if p.is_dir() and p.name.isdigit()]
    found = sorted((int(name), str(int(name)), p) for name, p in own)
    of_runs = [
        (int(p.name), f"{int(run.name)}/{int(p.name)}", p)
        for run in where.runs
        for p in sorted((run / "incidents").glob("*"))
        if p.is_dir() and p.name.isdigit()
    ]
    return [(name, path) for _, name, path in [*found, *of_runs]]


def _read_incident(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads((path / _INCIDENT_FILE).read_text())
    except (OSError, ValueError) as error:
        return {"damaged": f"{_INCIDENT_FILE} cannot be read: {error}"}
    return fields if isinstance(fields, dict) else {"damaged": f"{_INCIDENT_FILE} is not an object"}


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
