"""`elastictrain run`: train a job, from its start to its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elastictrain.cli.options import DEFAULT_ROOT, JobArgument, SetOption
from elastictrain.cli.views import JsonView, Output, PrettyView, View
from elastictrain.config import load_job
from elastictrain.logs import make_logger


def run(
    job: JobArgument,
    overrides: SetOption = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="Where everything this run writes goes. Default: checkpoints/<job>.",
        ),
    ] = None,
    output: Annotated[
        Output,
        typer.Option(
            help="auto: pretty on a terminal, JSON lines elsewhere. pretty: for people. json: one event a line."
        ),
    ] = Output.AUTO,
) -> None:
    """Train a job.

    JOB is a job.toml, the folder of one, or an example by name: stdlib-lm, digits.

    Ctrl-C, or SIGTERM, lets all ranks finish their step and ends the run in good order.

    Example: elastictrain run stdlib-lm --set train.max_steps=50 --set elastic.nproc_per_node=1
    """
    # Imported here, so that `--help` and completion answer at once.
    from elastictrain.cli.launch import StateDir, run_to_end

    loaded = load_job(job, overrides or [])
    name = loaded.config.name
    state = StateDir(state_dir if state_dir is not None else DEFAULT_ROOT / name)
    with state.locked():
        incarnation = state.new_incarnation(loaded)
        with _view(output, name, incarnation.number) as view:
            outcome = run_to_end(incarnation, view.show)
        if loaded.config.train.global_batch_size is None:
            state.keep_global_batch_size(outcome["global_batch_size"])
        view.summary(outcome, str(state.path))


def _view(output: Output, job_name: str, incarnation: int) -> View:
    if output is Output.PRETTY or (output is Output.AUTO and sys.stdout.isatty()):
        from rich.console import Console

        width = None if sys.stdout.isatty() else 200
        return PrettyView(Console(width=width, highlight=False), job_name)
    log = make_logger(sys.stdout, incarnation=incarnation)

    def summary(fields: dict[str, Any]) -> None:
        log.info("summary", **{k: v for k, v in fields.items() if k not in ("kind", "incarnation")})

    return JsonView(lambda text: log.info("printed", text=text), summary)
