"""`elastictrain run`: train a job, from its start to its end."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrain.cli.options import DEFAULT_ROOT, JobArgument, SetOption
from elastictrain.cli.showing import Showing, own_stdout
from elastictrain.cli.views import JsonView, Output, PrettyView, View
from elastictrain.config import load_job
from elastictrain.core.identity import ALLOWABLE, REWIND
from elastictrain.errors import UsageError
from elastictrain.logs import make_logger

if TYPE_CHECKING:
    from elastictrain.supervisor.incarnation import Incarnation
    from elastictrain.supervisor.team import Assignment, Team


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
            "--fresh",
            help="Begin a new run, whatever snapshots there are. Those in the store are kept, and not looked at again; "
            "what is not durable yet is overwritten.",
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
            help=f"Let a snapshot differ from this run in NAME ({', '.join(n for n in ALLOWABLE if n != REWIND)}): "
            f"this run's value holds. {REWIND}: go on from an older one where the newest cannot be had. Repeatable.",
        ),
    ] = None,
    service: Annotated[
        bool,
        typer.Option("--service", help="After a halt, stay up until told to resume or to stop."),
    ] = False,
    stopped_code: Annotated[
        int,
        typer.Option(
            "--stopped-code",
            metavar="N",
            min=0,
            max=255,
            help="End with N rather than 0 when stopped before all steps are done: for a scheduler that starts a job "
            "again unless it ends with 0.",
        ),
    ] = 0,
    output: Annotated[
        Output,
        typer.Option(
            help="auto: pretty on a terminal, JSON lines elsewhere. pretty: for people. json: one event a line."
        ),
    ] = Output.AUTO,
) -> None:
    """Train a job; go on where it stopped.

    JOB is a job.toml, the folder of one, or an example by name: stdlib-lm, digits.

    A job that was stopped, however, goes on from its newest snapshot. When a rank fails or hangs, all go on from there
    by themselves; a job that leads nowhere is halted, with a diagnosis and exit code 79. Ctrl-C, or SIGTERM, lets all
    ranks finish their step, keeps the state and ends the run; a second one does not wait for storage.

    Example: elastictrain run stdlib-lm --set train.max_steps=50 --set elastic.nproc_per_node=1
    """
    # Imported here, so that `--help` and completion answer at once.
    import asyncio

    from elastictrain.checkpoint.secrets import redact_url
    from elastictrain.cli.lineage import find_source, with_patience
    from elastictrain.cli.state_dir import StartOptions, StateDir
    from elastictrain.core.lifecycle import State
    from elastictrain.core.past import Past
    from elastictrain.protocol import JobIdentity, RunSpec
    from elastictrain.supervisor.control import ControlSettings
    from elastictrain.supervisor.past import read_past
    from elastictrain.supervisor.record import Record
    from elastictrain.supervisor.service import serve
    from elastictrain.supervisor.supervisor import Supervisor

    unknown = [name for name in allow or [] if name not in ALLOWABLE]
    if unknown:
        raise UsageError(f"--allow {unknown[0]}: not one of {', '.join(ALLOWABLE)}")
    loaded = load_job(job, overrides or [])
    config = loaded.config
    state = StateDir(state_dir if state_dir is not None else DEFAULT_ROOT / config.name, _warn)
    kept = JobIdentity.read(state.path) if source is not None and not fresh else None
    options = StartOptions(
        fresh=fresh,
        source=with_patience(
            lambda: find_source(source, config.checkpoint.storage_options, _warn, kept.source if kept else None),
            config.checkpoint.storage_timeout_s,
            _warn,
            f"--from {redact_url(source)}: the run cannot begin without it.",
        )
        if source is not None
        else None,
        allowed_differences=tuple(allow or ()),
    )
    with state.locked():
        if config.elastic.has_peers:
            lineage = state.lineage(config, options)  # what is wrong here is said before other nodes hear of it
            prepared: list[Incarnation] = []
            is_new = not lineage.has_begun
        else:
            prepared = [state.prepare(loaded, options)]
            is_new = RunSpec.read(prepared[0].run_dir).begins_run

        def prepare(assignment: Assignment) -> Incarnation:
            return prepared.pop() if prepared else state.prepare(loaded, options.of_restart(), assignment)

        # A new run has no past, whatever else was in this directory.
        past = Past() if is_new else read_past(state.path, report_steps=config.metrics.every_steps)
        record = Record(state.path, config.name)
        team: Team | None = None
        if config.elastic.has_peers:
            from elastictrain.cli.nodes import make_team  # a job on one node need not wait for these imports

            team = make_team(loaded, state, lineage, record, _warn)
        settings = ControlSettings(config.supervisor.control_group, metrics_port=config.supervisor.metrics_port)
        first = state.last_number + (0 if prepared else 1)
        with closing(record), Showing(_view(output, config.name, first)) as showing:
            supervisor = Supervisor(
                config,
                prepare,
                state_dir=state.path,
                team=team,
                sink=record,
                show=showing.show,
                stay_up=service,
                past=past,
            )
            ending = asyncio.run(serve(supervisor, record, settings))
            if ending.error is None and ending.outcome is not None:
                showing.summary(ending.outcome, str(state.path))
    if ending.error is not None:
        raise ending.error
    if ending.state is State.STOPPED:
        raise typer.Exit(stopped_code)


def _warn(text: str) -> None:
    typer.echo(f"elastictrain: {text}", err=True)


def _view(output: Output, job_name: str, incarnation: int) -> View:
    stdout = own_stdout()
    if output is Output.PRETTY or (output is Output.AUTO and stdout.isatty()):
        from rich.console import Console

        width = None if stdout.isatty() else 200
        return PrettyView(Console(file=stdout, width=width, highlight=False), job_name)
    log = make_logger(stdout)

    def summary(fields: dict[str, Any]) -> None:
        log.info("summary", **{k: v for k, v in fields.items() if k != "kind"})
        stdout.flush()

    def printed(text: str, incarnation: int) -> None:
        log.info("printed", text=text, incarnation=incarnation)
        stdout.flush()

    return JsonView(printed, summary, incarnation, stdout)
