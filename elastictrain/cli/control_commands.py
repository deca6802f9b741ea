"""`elastictrain stop | checkpoint | drain | resume | restart`: what a running supervisor can be told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from elastictrain.cli.options import JobDirArgument, JsonOption, StateDirOption

_STOP_TIMEOUT_S = 300.0
_COMMAND_TIMEOUT_S = 300.0
_ANSWER_MARGIN_S = 5.0

ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the journal, and shown.")]


def stop(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    reason: ReasonOption = "on request",
    wait: Annotated[bool, typer.Option(help="Wait until the supervisor has ended.")] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, help="How long to wait.")
    ] = _STOP_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Have the ranks finish their step, keep their state and end; the supervisor ends too.

    The next start goes on from there. A service that systemd runs stays stopped until it is started again.
    """
    from elastictrain.cli.daemon import Daemon, require_daemon
    from elastictrain.cli.job_dirs import find_job_dir
    from elastictrain.errors import NotRunningError, UnresponsiveError

    where = find_job_dir(job, state_dir)
    deadline_s = time.monotonic() + timeout_s
    try:
        require_daemon(where).post("/stop", {"reason": reason}, timeout_s if wait else 1.0)
    except UnresponsiveError:
        if wait:
            raise
    except NotRunningError:
        if Daemon.find(where) is not None or not _has_stopped(where):
            raise
    while wait and Daemon.find(where) is not None:
        if time.monotonic() > deadline_s:
            raise UnresponsiveError(
                f"{where.name} has not stopped within {timeout_s:g} s", "`elastictrain status` says what it is doing."
            )
        time.sleep(0.05)
    _say("stopped" if wait else "told to stop", where.name, {}, as_json=as_json)


def _has_stopped(where: Any) -> bool:
    """It may end before its answer is read."""
    from elastictrain.cli.daemon import status_of

    age_s = status_of(where)["last_event_age_s"]
    return status_of(where)["state"] in ("stopped", "completed") and age_s is not None and age_s < _ANSWER_MARGIN_S


def checkpoint(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, help="How long to wait until it is durable.")
    ] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Take a snapshot now, and wait until it is durable."""
    answer, name = _tell(job, state_dir, "/checkpoint", {"timeout_s": timeout_s}, timeout_s + _ANSWER_MARGIN_S)
    _say(f"snapshot of step {answer['global_step']} is durable", name, answer, as_json=as_json)


def drain(job: JobDirArgument = None, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Keep the state, leave the rendezvous, and stay down until `resume`: before maintenance of this node."""
    answer, name = _tell(job, state_dir, "/drain", {}, _COMMAND_TIMEOUT_S)
    _say("drained", name, answer, as_json=as_json)


def resume(job: JobDirArgument = None, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Go on after a drain, or after a halt."""
    answer, name = _tell(job, state_dir, "/resume", {}, _COMMAND_TIMEOUT_S)
    _say("goes on", name, answer, as_json=as_json)


def restart(
    job: JobDirArgument = None,
    state_dir: StateDirOption = None,
    reason: ReasonOption = "on request",
    as_json: JsonOption = False,
) -> None:
    """End the worker group, its state kept, and start a new one."""
    answer, name = _tell(job, state_dir, "/restart", {"reason": reason}, _COMMAND_TIMEOUT_S)
    _say("restarts its worker group", name, answer, as_json=as_json)


def _tell(
    job: str | None, state_dir: Path | None, path: str, body: dict[str, Any], timeout_s: float
) -> tuple[dict[str, Any], str]:
    from elastictrain.cli.daemon import require_daemon
    from elastictrain.cli.job_dirs import find_job_dir

    where = find_job_dir(job, state_dir)
    answer: dict[str, Any] = require_daemon(where).post(path, body, timeout_s)
    return answer, where.name


def _say(what: str, name: str, answer: dict[str, Any], *, as_json: bool) -> None:
    typer.echo(json.dumps({"job": name, **answer}) if as_json else f"{name}: {what}")
