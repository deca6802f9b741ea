"""Finds a job, reads it, applies `--set`, and explains what is wrong with it: file, line, key, nearest valid key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from elastictrain.config.find import default_name, find_job
from elastictrain.config.locate import find_line
from elastictrain.config.schema import JobConfig
from elastictrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job, and where it came from.

    Args:
        config: the validated job.
        path: its file.
        module_dir: folder to put on the module path; None for an example that ships in the package.
    """

    config: JobConfig
    path: Path
    module_dir: Path | None


def load_job(target: str, overrides: Sequence[str] = ()) -> LoadedJob:
    """Loads and validates a job.

    Args:
        target: path of a job.toml, or of its folder, or the name of an example.
        overrides: `key.path=value` strings, applied in order; values are TOML, or else plain strings.

    Raises:
        MissingInputError: no such job.
        ConfigError: everything that is wrong with it, one line each.
    """
    path, is_example = find_job(target)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", "Strings need quotes; tables are [name].") from error
    raw.setdefault("name", default_name(path, is_example=is_example))
    overridden: set[tuple[str, ...]] = set()
    for override in overrides:
        overridden.add(_apply_override(raw, override))
    try:
        config = JobConfig.model_validate(raw)
    except ValidationError as error:
        problems = [_explain(problem, path, text, overridden) for problem in error.errors()]
        raise ConfigError("\n".join(problems), "`elastictrain config schema` lists every key.") from error
    return LoadedJob(config, path, None if is_example else path.parent)


def _apply_override(raw: dict[str, Any], override: str) -> tuple[str, ...]:
    dotted, equals, literal = override.partition("=")
    keys = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {dotted}: not of the form key.path=value", "For example: --set train.max_steps=200")
    try:
        value = tomllib.loads(f"value = {literal}")["value"]
    except tomllib.TOMLDecodeError:
        value = literal.strip()
    table = raw
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {dotted}: {'.'.join(keys[:depth])} is a value, not a table")
    table[keys[-1]] = value
    return keys


def _explain(problem: Mapping[str, Any], path: Path, text: str, overridden: set[tuple[str, ...]]) -> str:
    """One line for one pydantic problem."""
    keys = tuple(str(part) for part in problem["loc"])
    section = _section_of(keys)
    known = keys[: len(keys) if problem["type"] == "extra_forbidden" else _depth_of(keys)]
    where = str(path)
    if any(keys[: len(o)] == o or o[: len(known)] == known for o in overridden):
        where = "--set"
    elif line := find_line(text, keys):
        where = f"{path}:{line}"
    name = ".".join(known) or "job"
    match problem["type"]:
        case "extra_forbidden":
            message = f"unknown key {name}"
            if section is not None:
                valid = list(section.model_fields)
                near = difflib.get_close_matches(keys[-1], valid, n=1)
                message += f"; did you mean {near[0]}?" if near else _elsewhere(keys[-1], valid)
        case "missing":
            message = f"missing key {name}"
        case _:
            # What is wrong about a store may hold its key.
            is_secret = keys[:2] in (("checkpoint", "url"), ("checkpoint", "storage_options"))
            got = "" if is_secret or isinstance(problem["input"], dict) else f", got {problem['input']!r}"
            detail = str(problem["msg"]).removeprefix("Value error, ")
            message = f"{name}: {detail[0].lower() + detail[1:]}{got}"
    return f"{where}: {message}"


def _elsewhere(key: str, valid: Sequence[str]) -> str:
    for section, field in _sections():
        if key in field.model_fields:
            return f"; did you mean {section}.{key}?"
    return f"; valid here: {', '.join(valid)}"


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in JobConfig.model_fields.items():
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                yield name, candidate


def _section_of(keys: tuple[str, ...]) -> type[BaseModel] | None:
    if len(keys) <= 1:
        return JobConfig
    return dict(_sections()).get(keys[0])


def _depth_of(keys: tuple[str, ...]) -> int:
    """How much of a pydantic location are keys of the file; the rest are branches of a union."""
    return min(len(keys), 2 if keys and keys[0] in dict(_sections()) else 1)
