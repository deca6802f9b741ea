"""The commands, and the command line made of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from elastictrain import __version__

COMMANDS: dict[str, str] = {
    "run": "run_command:run",
    "init": "init_command:init",
    "status": "status_command:status",
    "probe": "probe_command:probe",
    "events": "events_commands:events",
    "logs": "events_commands:logs",
    "incidents": "incidents_commands:app",
    "stop": "control_commands:stop",
    "checkpoint": "control_commands:checkpoint",
    "drain": "control_commands:drain",
    "resume": "control_commands:resume",
    "restart": "control_commands:restart",
    "checkpoints": "checkpoints_commands:app",
    "drill": "drill_command:drill",
    "service": "service_commands:app",
    "config": "config_commands:app",
}
"""Where each command is, in the order of the help. A module's `app` is a group of commands."""


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands. Making one takes time: `status` need not wait for all others to be made."""
    app = typer.Typer(
        name="elastictrain",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=names is COMMANDS,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Fault-tolerant elastic training for PyTorch: exact to the bit, no step lost.",
    )
    app.callback()(_root)
    for name in names:
        module, _, attribute = COMMANDS[name].partition(":")
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
