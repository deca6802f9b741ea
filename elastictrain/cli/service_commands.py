"""`elastictrain service`: jobs as systemd services."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from elastictrain.cli.service_units import Installation

SETTLE_S = 60.0
"""The launcher, which sees to it, has less (`supervisor.teardown_timeout_s`, by default 10)."""
SETTLE_LOOK_S = 0.05

app = typer.Typer(no_args_is_help=True, help="Run jobs as systemd services: elastictrain@NAME runs NAME.toml.")

UserOption = Annotated[bool, typer.Option("--user", help="For this user's service manager, not the machine's.")]
RootOption = Annotated[
    Path | None,
    typer.Option("--root", metavar="DIR", help="Write below DIR, as for an image; no service manager is told."),
]
CommandOption = Annotated[
    str | None,
    typer.Option("--bin", metavar="PATH", help="The elastictrain to start. Default: the one that runs now."),
]
ConfigDirOption = Annotated[
    str | None,
    typer.Option("--config-dir", metavar="DIR", help="Where job files are. Default: /etc/elastictrain."),
]
StopTimeoutOption = Annotated[
    int,
    typer.Option(
        "--stop-timeout",
        metavar="S",
        min=1,
        help="Seconds a job may take to stop: at least half a minute over checkpoint.preempt_deadline_s.",
    ),
]


@app.command()
def install(
    user: UserOption = False,
    root: RootOption = None,
    command: CommandOption = None,
    config_dir: ConfigDirOption = None,
    stop_timeout_s: StopTimeoutOption = 180,
) -> None:
    """Write the unit files, and tell systemd. Starts nothing."""
    from elastictrain.errors import StateDirError

    installation = _installation(user, command, config_dir, stop_timeout_s)
    base = _base(user, root)
    try:
        for relative, text in installation.files().items():
            path = base / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o644)
            typer.echo(f"wrote {path}")
    except OSError as error:
        raise StateDirError(
            f"{error.filename} cannot be written: {error.strerror}", "Use sudo, or --user for a service of your own."
        ) from error
    if root is None:
        if not user:
            _tell("systemd-sysusers", str(base / "etc/sysusers.d/elastictrain.conf"))
            _tell("systemd-tmpfiles", "--create", str(base / "etc/tmpfiles.d/elastictrain.conf"))
        _tell(*_systemctl(user), "daemon-reload")
    if root is None and not user and command is None:
        _warn_of_hidden(installation.command)
    jobs_in = installation.jobs_in.replace("%E", "~/.config")
    systemctl = " ".join(_systemctl(user))
    typer.echo(
        f"\nNext: put a job into {jobs_in}/NAME.toml, its task's module beside it, then\n\n"
        f"    {systemctl} enable --now elastictrain@NAME    # returns when the ranks train\n"
        "    elastictrain status NAME"
    )


@app.command()
def show(
    user: UserOption = False,
    command: CommandOption = None,
    config_dir: ConfigDirOption = None,
    stop_timeout_s: StopTimeoutOption = 180,
) -> None:
    """Show what `install` would write, and where."""
    base = _base(user, None)
    for relative, text in _installation(user, command, config_dir, stop_timeout_s).files().items():
        typer.echo(f"######## {base / relative}\n{text}")


@app.command()
def uninstall(user: UserOption = False, root: RootOption = None) -> None:
    """Remove what `install` wrote. Jobs, their files and their state stay."""
    from elastictrain.errors import StateDirError

    base = _base(user, root)
    for relative in _installation(user, None, None, 1).files():
        path = base / relative
        try:
            path.unlink()
            typer.echo(f"removed {path}")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StateDirError(f"{path} cannot be removed: {error.strerror}", "Use sudo.") from error
    if root is None:
        _tell(*_systemctl(user), "daemon-reload")


@app.command(hidden=True)
def settle(state_dir: Annotated[Path, typer.Option("--state-dir", metavar="DIR", help="Of the job.")]) -> None:
    """Wait until a supervisor that is gone has left no rank behind: each keeps its last step first.

    The unit runs it as ExecStopPost, before systemd kills the rest of a service's processes.
    """
    import time

    from elastictrain.leftovers import leftovers

    deadline_s = time.monotonic() + SETTLE_S
    while any(leftovers(state_dir.absolute())) and time.monotonic() < deadline_s:
        time.sleep(SETTLE_LOOK_S)


def _installation(user: bool, command: str | None, config_dir: str | None, stop_timeout_s: int) -> Installation:
    from elastictrain.cli.service_units import Installation, this_installation
    from elastictrain.errors import UsageError

    if command is not None and not Path(command).is_absolute():
        raise UsageError(f"--bin {command}: must be an absolute path, since systemd looks nowhere")
    if config_dir is not None and not Path(config_dir).is_absolute():
        raise UsageError(f"--config-dir {config_dir}: must be an absolute path")
    words = (command,) if command is not None else this_installation()
    return Installation(words, user=user, config_dir=config_dir, stop_timeout_s=stop_timeout_s)


def _base(user: bool, root: Path | None) -> Path:
    if root is not None:
        return root.absolute()
    if not user:
        return Path("/")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _warn_of_hidden(command: tuple[str, ...]) -> None:
    from elastictrain.cli.service_units import hidden_part

    hidden = hidden_part(command)
    if hidden is not None:
        typer.echo(
            f"warning: the services will not start: they run as the user elastictrain, who may not enter {hidden}. "
            "Install elastictrain where all may, such as /opt, and use its `service install`.",
            err=True,
        )


def _systemctl(user: bool) -> list[str]:
    return ["systemctl", "--user"] if user else ["systemctl"]


def _tell(*command: str) -> None:
    """Asks a tool of systemd; what it cannot do is said, and is no failure of ours: the files are in place."""
    if shutil.which(command[0]) is None:
        typer.echo(f"not run, since it is not here: {' '.join(command)}", err=True)
        return
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        typer.echo(f"{' '.join(command)} failed: {said[-1] if said else done.returncode}", err=True)
