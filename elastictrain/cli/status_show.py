"""Reads and shows the status of jobs. Loads neither typer nor pydantic: it is to answer at once."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastictrain.cli.job_dirs import JobDir


@dataclass(frozen=True)
class StatusRequest:
    """What `elastictrain status` was asked.

    Args:
        job: as named; None for all.
        state_dir: instead of a job.
        watch: again and again.
        interval_s: between two looks.
        as_json: for machines.
    """

    job: str | None = None
    state_dir: Path | None = None
    watch: bool = False
    interval_s: float = 1.0
    as_json: bool = False


def parse_plain(arguments: Sequence[str]) -> StatusRequest | None:
    """The usual forms of the arguments of `status`; None for all others, also for wrong ones."""
    job: str | None = None
    state_dir: Path | None = None
    watch = as_json = False
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--json":
            as_json = True
        elif word in ("--watch", "-w"):
            watch = True
        elif word == "--state-dir" and rest and not rest[0].startswith("-"):
            state_dir = Path(rest.pop(0))
        elif word and not word.startswith("-") and job is None:
            job = word
        else:
            return None
    return StatusRequest(job, state_dir, watch=watch, as_json=as_json)


def show_status(request: StatusRequest) -> int:
    """Shows what was asked for, on standard output.

    Returns:
        the exit code: 0 where no job was named, else that of its state.

    Raises:
        ElasticTrainError: there is no such job.
    """
    from elastictrain.cli.job_dirs import all_job_dirs, find_job_dir, hidden_job_dirs
    from elastictrain.core.status import EXIT_CODES

    one = request.job is not None or request.state_dir is not None
    jobs = [find_job_dir(request.job, request.state_dir)] if one else all_job_dirs()
    if not one:
        for path in hidden_job_dirs():
            print(f"{path} is not for this user to see: join its group, or use sudo", file=sys.stderr)
    documents: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):
        if request.watch:
            _watch(jobs, documents, as_json=request.as_json, one=one, interval_s=request.interval_s)
        else:
            documents += _read(jobs)
            _print(documents, as_json=request.as_json, one=one)
    return EXIT_CODES.get(documents[-1]["state"], 0) if one and documents else 0


def _read(jobs: list[JobDir]) -> list[dict[str, Any]]:
    from elastictrain.cli.daemon import status_of

    return [status_of(job) for job in jobs]


def _print(documents: list[dict[str, Any]], *, as_json: bool, one: bool) -> None:
    if as_json:
        print(json.dumps(documents[0] if one else documents, indent=2))
        return
    from rich.console import Console

    from elastictrain.cli.status_view import render, render_list

    console = Console(highlight=False)
    if one or len(documents) == 1:
        console.print(render(documents[0]))
    elif documents:
        console.print(render_list(documents))
    else:
        console.print(
            "No job has run here: there is no state directory in checkpoints/, nor is there one of a service."
        )


def _watch(jobs: list[JobDir], last: list[dict[str, Any]], *, as_json: bool, one: bool, interval_s: float) -> None:
    """Until interrupted; `last` holds the newest documents."""
    if as_json:
        while True:
            last[:] = _read(jobs)
            print(json.dumps(last[0] if one else last), flush=True)
            time.sleep(interval_s)
    from rich.console import Console
    from rich.live import Live

    from elastictrain.cli.status_view import render, render_list

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            last[:] = _read(jobs)
            live.update(render(last[0]) if len(last) == 1 else render_list(last), refresh=True)
            time.sleep(interval_s)
