"""`elastictrain`: the commands, and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from elastictrain import __version__
from elastictrain.cli import (
    checkpoints_commands,
    config_commands,
    control_commands,
    events_commands,
    init_command,
    run_command,
    service_commands,
    status_command,
)
from elastictrain.errors import ElasticTrainError

app = typer.Typer(
    name="elastictrain",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fault-tolerant elastic training for PyTorch: exact to the bit, no step lost.",
)
app.command("run")(run_command.run)
app.command("init")(init_command.init)
app.command("status")(status_command.status)
app.command("events")(events_commands.events)
app.command("logs")(events_commands.logs)
app.add_typer(events_commands.incidents_app, name="incidents")
app.command("stop")(control_commands.stop)
app.command("checkpoint")(control_commands.checkpoint)
app.command("drain")(control_commands.drain)
app.command("resume")(control_commands.resume)
app.command("restart")(control_commands.restart)
app.add_typer(config_commands.app, name="config")
app.add_typer(checkpoints_commands.app, name="checkpoints")
app.add_typer(service_commands.app, name="service")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elastictrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Fault-tolerant elastic training for PyTorch: exact to the bit, no step lost."""


def main() -> None:
    """The console script: errors that we can explain are explained, without a traceback."""
    try:
        app()
    except ElasticTrainError as error:
        _explain(error)
        sys.exit(error.exit_code)


def _explain(error: ElasticTrainError) -> None:
    lines = error.what.splitlines() or [""]
    sys.stderr.write(f"elastictrain: error: {lines[0]}\n")
    for line in lines[1:]:
        sys.stderr.write(f"                     {line}\n")
    for line in error.hint.splitlines():
        sys.stderr.write(f"  {line}\n")


if __name__ == "__main__":
    main()
