"""`elastictrain events` and `logs`: what happened to a job, and what its ranks printed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrain.cli.options import JobDirArgument, StateDirOption

if TYPE_CHECKING:
    from elastictrain.cli.job_dirs import JobDir

_POLL_S = 0.2

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
        typer.Option("--kind", metavar="KIND", help="Only these kinds: rank_failed,halted. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show what happened to a job, oldest first; from its journal, or from a running supervisor."""
    from elastictrain.cli.job_dirs import find_job_dir

    where = find_job_dir(job, state_dir)
    kinds = frozenset(name for names in kind or () for name in names.split(",") if name)
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
    from elastictrain.supervisor.journal_reader import JournalReader, as_json

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
    from elastictrain.supervisor.journal_reader import JournalReader, as_json

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
            f"{key}={brief(value)}"
            for key, value in event.items()
            if key not in ("id", "time_s", "event") and value != ""
        )
        typer.echo(f"{stamp}.{millis:03d}  {event['event']:<19}  {rest}".rstrip())
    sys.stdout.flush()


def brief(value: Any) -> str:
    """A value in a line of text."""
    match value:
        case str():
            return value
        case float():
            return f"{value:.4g}"
        case dict():
            return "{" + ", ".join(f"{key}: {brief(item)}" for key, item in value.items()) + "}"
        case list() if any(isinstance(item, dict | list | float) for item in value):
            return "[" + ", ".join(brief(item) for item in value) + "]"
        case _:
            return json.dumps(value)


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
    from elastictrain.supervisor.kept_files import rank_logs

    where = find_job_dir(job, state_dir)
    runs = [r for r in where.runs if incarnation is None or int(r.name) == incarnation]
    having = [run for run in runs if rank_logs(run, rank)]
    if not having and not (follow and incarnation is None):
        which = f"rank {rank}" if rank is not None else "any rank"
        among = f"incarnation {incarnation}" if incarnation is not None else "an incarnation"
        raise MissingInputError(f"there is no log of {which} of {among} in {where.path}")
    tails: dict[Path, _Tail] = {}
    for path in rank_logs(having[-1], rank).values() if having else []:
        tails[path] = _Tail(path)
        for line in _last_lines(path, tails[path].take(), last):
            _print_line(path, line, alone=rank is not None)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            newest = [r for r in where.runs if incarnation is None or int(r.name) == incarnation][-1:]
            for path in [p for run in newest for p in rank_logs(run, rank).values()]:
                tails.setdefault(path, _Tail(path))
            for path, tail in list(tails.items()):
                for line in tail.take():
                    _print_line(path, line, alone=rank is not None)
                if path.parent not in newest:
                    del tails[path]
            time.sleep(_POLL_S)


class _Tail:
    """Reads a growing file by whole lines, also over the moment when it is put aside and a new one begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""

    def take(self) -> list[str]:
        """The lines that were completed since the last call."""
        from elastictrain.supervisor.rank_log import earlier

        data = b""
        for path in (earlier(self._path), self._path):
            with contextlib.suppress(OSError), path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if path != self._path and inode != self._inode:
                    continue
                file.seek(self._offset if inode == self._inode else 0)
                data += file.read()
                self._inode, self._offset = inode, file.tell()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def _last_lines(path: Path, lines: list[str], last: int) -> list[str]:
    """The newest of a log, of which the newest file has these lines."""
    from elastictrain.supervisor.rank_log import earlier

    if len(lines) < last:
        with contextlib.suppress(OSError):
            lines = [*earlier(path).read_text(errors="replace").splitlines(), *lines]
    return lines[-last:] if last else []


def _print_line(path: Path, line: str, *, alone: bool) -> None:
    typer.echo(line if alone else f"{path.stem.replace('rank-', 'rank ')}: {line}")
    sys.stdout.flush()
