"""`elastictrain status`: what a job is doing, and why. Answers at once, with or without a supervisor."""

from __future__ import annotations

from typing import Annotated

import typer

from elastictrain.cli.options import JobDirArgument, JsonOption, StateDirOption


def status(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.1, help="Seconds between two looks, with --watch.")
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show what a job is doing, and why; where none is named, of all jobs: those under checkpoints/, and services.

    It reads the journal where no supervisor runs, and says so. Exit code, where a job is named:
    0 running, 3 not running or stopped, 4 recovering, 5 completed, 6 drained, 79 halted.
    """
    from elastictrain.cli.status_show import StatusRequest, show_status

    request = StatusRequest(job, state_dir, watch=watch, interval_s=interval_s, as_json=as_json)
    raise typer.Exit(show_status(request))
