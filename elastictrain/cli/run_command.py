"""`elastictrain run`: train a job, from its start to its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elastictrain.cli.options import DEFAULT_ROOT, JobArgument, SetOption
from elastictrain.cli.views import JsonView, Output, PrettyView, View
from elastictrain.config import load_job
from elastictrain.core.identity import ALLOWABLE
from elastictrain.errors import UsageError
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
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Begin a new run, whatever snapshots there are. They are kept, and not looked at again."
        ),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL[@STEP]",
            help="Begin a new run with a snapshot of another: its store (a folder or an fsspec URL), or its state "
            "directory; the newest, or that of STEP.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="NAME",
            help=f"Let a snapshot differ from this run in NAME ({', '.join(ALLOWABLE)}). Repeatable.",
        ),
    ] = None,
    output: Annotated[
        Output,
        typer.Option(
            help="auto: pretty on a terminal, JSON lines elsewhere. pretty: for people. json: one event a line."
        ),
    ] = Output.AUTO,
) -> None:
    """Train a job; go on where it stopped.

    JOB is a job.toml, the folder of one, or an example by name: stdlib-lm, digits.

    A job that was stopped, however, goes on from its newest snapshot. Ctrl-C, or SIGTERM, lets all ranks finish their
    step, keeps the state and ends the run; a second one does not wait for storage.

    Example: elastictrain run stdlib-lm --set train.max_steps=50 --set elastic.nproc_per_node=1
    """
    # Imported here, so that `--help` and completion answer at once.
    from elastictrain.cli.launch import run_to_end
    from elastictrain.cli.lineage import find_source
    from elastictrain.cli.state_dir import StartOptions, StateDir

    unknown = [name for name in allow or [] if name not in ALLOWABLE]
    if unknown:
        raise UsageError(f"--allow {unknown[0]}: not one of {', '.join(ALLOWABLE)}")
    loaded = load_job(job, overrides or [])
    config = loaded.config
    state = StateDir(state_dir if state_dir is not None else DEFAULT_ROOT / config.name)
    options = StartOptions(
        fresh=fresh,
        source=find_source(source, config.checkpoint.storage_options) if source is not None else None,
        allowed_differences=tuple(allow or ()),
    )
    with state.locked():
        incarnation = state.prepare(loaded, options)
        with _view(output, config.name, incarnation.number) as view:
            outcome = run_to_end(incarnation, view.show)
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
