"""What has to be the same on all nodes of a job: versions, job file, code. They compare it before they train."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elastictrain import __version__
from elastictrain.cli.job_dirs import DEFAULT_ROOT
from elastictrain.config import JobConfig, LoadedJob
from elastictrain.protocol import IDENTITY_FILE

DIGEST_LENGTH = 12
NAMED_FILES = 32
"""So many files of the job are compared by name: every node's record holds their digests, and is written often."""
MAX_SIBLINGS = 2000
"""So many Python files beside the task's own are compared: the job file may lie in a folder with everything in it."""
OTHER_CODE = "code"
_NO_CODE = frozenset({DEFAULT_ROOT.name, "__pycache__"})
OF_A_NODE = {
    "elastic": {"nproc_per_node", "nodes", "device", "threads_per_rank", "fast_restart", "rendezvous", "etcd"},
    "checkpoint": {"memory_path", "memory_budget_mb", "memory_tier"},
    "supervisor": {"control_group", "metrics_port", "keep_incarnations", "keep_incidents"},
    "metrics": {"tensorboard"},
}
"""Settings that may differ between nodes."""


def must_agree(job: LoadedJob, state_dir: Path) -> dict[str, str]:
    """By name, what the nodes compare; digests where it is long.

    Args:
        job: as it was loaded.
        state_dir: of this node; what lies there is no code of the job.
    """
    return {
        "elastictrain": __version__,
        "torch": _version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "job file": digest_of_config(job.config),
        **digest_of_code(job, state_dir),
    }


def digest_of_config(config: JobConfig) -> str:
    """Of the settings that the nodes share."""
    plain = config.model_dump(mode="json", exclude=OF_A_NODE)
    if config.elastic.reduction == "tree":
        plain["threads_per_rank"] = config.elastic.threads_per_rank  # it is part of the numbers that come out
    return _digest(json.dumps(plain, sort_keys=True).encode())


def digest_of_code(job: LoadedJob, state_dir: Path) -> dict[str, str]:
    """Of the Python files that the task is in or may import: one by one of the first `NAMED_FILES`, so that one that
    differs is named, and of all others together. The version stands for a task that ships with us."""
    if job.module_dir is None:
        return {OTHER_CODE: __version__}
    digests: dict[str, str] = {}
    others = hashlib.sha256()
    for file in _code_files(job.module_dir, job.config.task.partition(":")[0].partition(".")[0], state_dir):
        try:
            body = file.read_bytes()
        except OSError:
            continue  # a module from elsewhere on the path: its package's version is its own affair
        name = str(file.relative_to(job.module_dir))
        if len(digests) < NAMED_FILES:
            digests[name] = _digest(body)
        else:
            others.update(f"{name}\0{len(body)}\0".encode())
            others.update(body)
    return {**digests, OTHER_CODE: others.hexdigest()[:DIGEST_LENGTH]}


def _code_files(module_dir: Path, task_module: str, state_dir: Path) -> list[Path]:
    """Those of the task's own module or package, then its siblings, since the job file's folder is on the module path:
    the nearest first, `MAX_SIBLINGS` at most. The same on all nodes that have the same files."""
    root = module_dir / task_module
    own = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    known = set(own)
    siblings: list[Path] = []
    folders = [module_dir]
    seen = {state_dir.resolve()}
    while folders and len(siblings) < MAX_SIBLINGS:
        here = folders.pop(0)
        resolved = here.resolve()
        if resolved in seen:  # of the state directory, or where a link has led before
            continue
        seen.add(resolved)
        try:
            with os.scandir(here) as scan:
                entries = sorted((each.name, each.is_dir()) for each in scan)
        except OSError:
            continue
        names = {name for name, _ in entries}
        is_package = here != module_dir
        if is_package and names & {IDENTITY_FILE, "pyvenv.cfg"}:
            continue  # the state directory of another job, or a virtual environment
        modules = [
            name for name, is_dir in entries if not is_dir and name.endswith(".py") and _is_importable(name[:-3])
        ]
        if is_package and not modules:
            continue  # data, as a rule, and perhaps very much of it
        siblings += [here / name for name in modules if here / name not in known]
        folders += [here / name for name, is_dir in entries if is_dir and _is_importable(name) and name not in _NO_CODE]
    return own + siblings[:MAX_SIBLINGS]


def _is_importable(name: str) -> bool:
    return name.isidentifier()  # so it is not hidden either


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def node_name(host: str, state_dir: Path) -> str:
    """Unique within a job: two supervisors of one host have two state directories."""
    return f"{host}-{hashlib.sha256(str(state_dir).encode()).hexdigest()[:6]}"
