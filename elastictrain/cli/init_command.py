"""`elastictrain init`: a new job to edit, which runs as it is."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from elastictrain.errors import StateDirError

FILES = {"job.toml": "job.toml.template", "task.py": "task.py.template"}


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make the job in; made if missing.")],
) -> None:
    """Make a new job: a commented job.toml and a task.py to edit. Both run as they are."""
    templates = resources.files("elastictrain") / "cli" / "templates"
    present = [name for name in FILES if (directory / name).exists()]
    if present:
        raise StateDirError(
            f"{directory} already has {' and '.join(present)}",
            "Nothing was written. Name another folder, or move them away.",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, template in FILES.items():
            (directory / name).write_text((templates / template).read_text())
    except OSError as error:
        raise StateDirError(f"{directory} cannot be written: {error.strerror}") from error
    typer.echo(f"Made {directory / 'job.toml'} and {directory / 'task.py'}. Next:\n\n    elastictrain run {directory}")
