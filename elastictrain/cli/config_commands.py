"""`elastictrain config`: check a job.toml, show it resolved, print its schema."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import tomli_w
import typer

from elastictrain.checkpoint.secrets import redact_options, redact_url
from elastictrain.cli.options import JobArgument, SetOption
from elastictrain.config import JobConfig, LoadedJob, load_job
from elastictrain.errors import TaskError

app = typer.Typer(no_args_is_help=True, help="Check a job.toml, show it resolved, print its schema.")


@app.command()
def check(job: JobArgument, overrides: SetOption = None) -> None:
    """Check that a job.toml is valid, and that its task can be imported and has what a task must have.

    The task's module is imported, in a process of its own; nothing of it is run. Says what is wrong, and where; exit
    code 78 if anything is.
    """
    loaded = load_job(job, overrides or [])
    _check_task(loaded)
    typer.echo(f"{loaded.path}: ok")


@app.command()
def show(
    job: JobArgument,
    overrides: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show a job with all defaults and overrides applied, as a job.toml that would give the same run."""
    config = load_job(job, overrides or []).config
    plain = _without_none(config.model_dump(mode="json", exclude_defaults=changed))
    _hide_secrets(plain)
    typer.echo(json.dumps(plain, indent=2) if as_json else tomli_w.dumps(plain), nl=as_json)


@app.command()
def schema() -> None:
    """Print the JSON Schema of job.toml: every key, its type, default and meaning."""
    typer.echo(json.dumps(JobConfig.model_json_schema(), indent=2))


def _check_task(job: LoadedJob) -> None:
    """Imports the task elsewhere: it may do anything, and it needs torch."""
    request = {
        "task": job.config.task,
        "module_dir": str(job.module_dir) if job.module_dir is not None else None,
        "params": job.config.model_dump(mode="json")["params"],
    }
    checking = subprocess.run(
        [sys.executable, "-m", "elastictrain.training.check"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        found = json.loads(checking.stdout)
    except ValueError:
        raise TaskError(
            f"{job.path}: task = {job.config.task!r}: importing it ended the process with exit code "
            f"{checking.returncode}",
            checking.stderr.rstrip(),
        ) from None
    if found:
        raise TaskError(f"{job.path}: {found['what']}", found["hint"])


def _hide_secrets(plain: dict[str, Any]) -> None:
    """Credentials of a store are not shown, neither in its options nor in its URL."""
    checkpoint = plain.get("checkpoint", {})
    if "url" in checkpoint:
        checkpoint["url"] = redact_url(checkpoint["url"])
    if "storage_options" in checkpoint:
        checkpoint["storage_options"] = redact_options(checkpoint["storage_options"])


def _without_none(value: Any) -> Any:
    """TOML has no null: a key that is unset is left out."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
