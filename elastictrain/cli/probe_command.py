"""`elastictrain probe live|ready`: what an orchestrator asks, again and again, and reads from the exit code."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from elastictrain.cli.options import JobDirArgument, StateDirOption

NOT_READY_CODE = 1
ANSWER_TIMEOUT_S = 5.0


class Probe(StrEnum):
    """What is asked."""

    LIVE = "live"
    READY = "ready"


def probe(
    what: Annotated[
        Probe,
        typer.Argument(
            metavar="live|ready",
            help="live: the supervisor answers, whatever it is doing. ready: its ranks train.",
        ),
    ],
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, help="How long to wait for its answer.")
    ] = ANSWER_TIMEOUT_S,
) -> None:
    """Ask whether a supervisor lives, or whether its ranks train. For probes of Kubernetes and the like.

    Exit code: 0 yes, 1 not ready, 66 nothing has run there, 69 no supervisor runs, or it does not answer. Unlike
    `status`, this never reads the journal: what a dead supervisor left says nothing about a living one.
    """
    from elastictrain.cli.daemon import require_daemon
    from elastictrain.cli.job_dirs import find_job_dir

    now = require_daemon(find_job_dir(job, state_dir)).get("/status", timeout_s)
    # A probe's output is kept with the pod's events.
    typer.echo(f"{now['state']}: {now['reason']}")
    if what is Probe.READY and now["state"] != "training":
        raise typer.Exit(NOT_READY_CODE)
