"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastictrain.cli.job_dirs import DEFAULT_ROOT as DEFAULT_ROOT


def _complete_job(incomplete: str) -> list[str]:
    from elastictrain.config.find import example_jobs

    return [name for name in example_jobs() if name.startswith(incomplete)]


JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job.toml, its folder, or an example by name (stdlib-lm, digits).",
        autocompletion=_complete_job,
    ),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of job.toml, such as train.max_steps=200. Repeatable; the last one wins.",
    ),
]

JobDirArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="The job: its name, as a folder in checkpoints/ or as a service; its job.toml; or the folder of one.",
    ),
]
StateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="The job's state directory, instead of JOB.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
