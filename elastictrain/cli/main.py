"""`elastictrain`: the commands, and the one place where errors become exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from elastictrain import __version__
from elastictrain.cli import checkpoints_commands, config_commands, init_command, run_command
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
app.add_typer(config_commands.app, name="config")
app.add_typer(checkpoints_commands.app, name="checkpoints")


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
