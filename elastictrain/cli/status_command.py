"""`elastictrain status`: what a job is doing, and why. Answers at once, with or without a supervisor."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrain.cli.options import JobDirArgument, JsonOption, StateDirOption

if TYPE_CHECKING:
    from elastictrain.cli.job_dirs import JobDir


def status(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.1, help="Seconds between two looks, with --watch.")
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show what a job is doing, and why; all jobs under checkpoints/ where none is named.

    It reads the journal where no supervisor runs, and says so. Exit code, where a job is named:
    0 running, 3 not running or stopped, 4 recovering, 5 completed, 6 drained, 79 halted.
    """
    from elastictrain.cli.job_dirs import all_job_dirs, find_job_dir
    from elastictrain.core.status import EXIT_CODES

    one = job is not None or state_dir is not None
    jobs = [find_job_dir(job, state_dir)] if one else all_job_dirs()
    documents: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):
        if watch:
            _watch(jobs, documents, as_json=as_json, one=one, interval_s=interval_s)
        else:
            documents += _read(jobs)
            _print(documents, as_json=as_json, one=one)
    if one and documents:
        raise typer.Exit(EXIT_CODES.get(documents[-1]["state"], 0))


def _read(jobs: list[JobDir]) -> list[dict[str, Any]]:
    from elastictrain.cli.daemon import status_of

    return [status_of(job) for job in jobs]


def _print(documents: list[dict[str, Any]], *, as_json: bool, one: bool) -> None:
    if as_json:
        typer.echo(json.dumps(documents[0] if one else documents, indent=2))
        return
    from rich.console import Console

    from elastictrain.cli.status_view import render, render_list

    console = Console(highlight=False)
    if one or len(documents) == 1:
        console.print(render(documents[0]))
    elif documents:
        console.print(render_list(documents))
    else:
        console.print("No job has run here: there is no state directory in checkpoints/.")


def _watch(jobs: list[JobDir], last: list[dict[str, Any]], *, as_json: bool, one: bool, interval_s: float) -> None:
    """Until interrupted; `last` holds the newest documents."""
    if as_json:
        while True:
            last[:] = _read(jobs)
            typer.echo(json.dumps(last[0] if one else last))
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
