"""What has to be the same on all nodes of a job: versions, job file, code. They compare it before they train."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elastictrain import __version__
from elastictrain.config import JobConfig, LoadedJob

DIGEST_LENGTH = 12
OF_A_NODE = {
    "elastic": {"nproc_per_node", "nodes", "device", "threads_per_rank", "fast_restart", "rendezvous", "etcd"},
    "checkpoint": {"memory_path", "memory_budget_mb", "memory_tier"},
    "supervisor": {"control_group", "metrics_port", "keep_incarnations", "keep_incidents"},
    "metrics": {"tensorboard"},
}
"""Settings that may differ between nodes."""


def must_agree(job: LoadedJob) -> dict[str, str]:
    """By name, what the nodes compare; digests where it is long."""
    return {
        "elastictrain": __version__,
        "torch": _version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "job file": digest_of_config(job.config),
        "code": digest_of_code(job),
    }


def digest_of_config(config: JobConfig) -> str:
    """Of the settings that the nodes share."""
    plain = config.model_dump(mode="json", exclude=OF_A_NODE)
    if config.elastic.reduction == "tree":
        plain["threads_per_rank"] = config.elastic.threads_per_rank  # it is part of the numbers that come out
    return _digest(json.dumps(plain, sort_keys=True).encode())


def digest_of_code(job: LoadedJob) -> str:
    """Of the Python files of the task's module or package; the version stands for a task that ships with us."""
    if job.module_dir is None:
        return __version__
    root = job.module_dir / job.config.task.partition(":")[0].partition(".")[0]
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    hashed = hashlib.sha256()
    for file in files:
        try:
            body = file.read_bytes()
        except OSError:
            continue  # a module from elsewhere on the path: its package's version is its own affair
        hashed.update(f"{file.relative_to(job.module_dir)}\0{len(body)}\0".encode())
        hashed.update(body)
    return hashed.hexdigest()[:DIGEST_LENGTH]


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
