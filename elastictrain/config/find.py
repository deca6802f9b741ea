"""Finds a job's file, by path, by folder, or as an example, and its name; without the schema, which loads slowly."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from pathlib import Path

from elastictrain.errors import ConfigError, MissingInputError

JOB_FILE = "job.toml"


def example_jobs() -> dict[str, Path]:
    """The jobs that ship in the package, by name."""
    root = Path(str(resources.files("elastictrain") / "examples"))
    return {path.parent.name.replace("_", "-"): path for path in sorted(root.glob(f"*/{JOB_FILE}"))}


def find_job(target: str) -> tuple[Path, bool]:
    """The file of a job named by path, by folder, or as an example.

    Returns:
        (path, is_example)

    Raises:
        MissingInputError: there is no such job.
    """
    path = Path(target)
    if path.is_file():
        return path.resolve(), False
    if (path / JOB_FILE).is_file():
        return (path / JOB_FILE).resolve(), False
    examples = example_jobs()
    if target in examples:
        return examples[target], True
    near = difflib.get_close_matches(target, examples, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    missing = (
        f"{path} has no {JOB_FILE}" if path.is_dir() else f"there is no file {target}, nor an example of that name"
    )
    raise MissingInputError(missing, f"{hint}Examples: {', '.join(examples)}. `elastictrain init DIR` makes a new job.")


def default_name(path: Path, *, is_example: bool) -> str:
    """The name of a job whose file does not say."""
    if is_example:
        return path.parent.name.replace("_", "-")
    return path.parent.name if path.name == JOB_FILE else path.stem


def read_name(target: str) -> str:
    """The name of a job, of whose file nothing else need be right.

    Raises:
        MissingInputError: there is no such job.
        ConfigError: its file cannot be read.
    """
    path, is_example = find_job(target)
    try:
        name = tomllib.loads(path.read_text()).get("name")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return name if isinstance(name, str) else default_name(path, is_example=is_example)
