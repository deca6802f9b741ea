"""`elastictrain`: the commands, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from elastictrain import __version__
from elastictrain.errors import ElasticTrainError

_COMMANDS: dict[str, str] = {
    "run": "run_command:run",
    "init": "init_command:init",
    "status": "status_command:status",
    "events": "events_commands:events",
    "logs": "events_commands:logs",
    "incidents": "incidents_commands:app",
    "stop": "control_commands:stop",
    "checkpoint": "control_commands:checkpoint",
    "drain": "control_commands:drain",
    "resume": "control_commands:resume",
    "restart": "control_commands:restart",
    "checkpoints": "checkpoints_commands:app",
    "service": "service_commands:app",
    "config": "config_commands:app",
}
"""Where each command is, in the order of the help. A module's `app` is a group of commands."""


def build_app(names: Iterable[str] = _COMMANDS) -> typer.Typer:
    """The command line with these commands. Making one takes time: `status` need not wait for all others to be made."""
    app = typer.Typer(
        name="elastictrain",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Fault-tolerant elastic training for PyTorch: exact to the bit, no step lost.",
    )
    app.callback()(_root)
    for name in names:
        module, _, attribute = _COMMANDS[name].partition(":")
        found = getattr(import_module(f"elastictrain.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elastictrain {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Fault-tolerant elastic training for PyTorch: exact to the bit, no step lost."""


def main() -> None:
    """The console script: errors that we can explain are explained, without a traceback."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    is_completing = any(name.endswith("_COMPLETE") for name in os.environ)
    app = build_app([asked] if asked in _COMMANDS and not is_completing else _COMMANDS)
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
