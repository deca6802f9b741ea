"""The Kubernetes manifests, as the tests read them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
WORKLOADS = {"Job": "job.yaml", "StatefulSet": "statefulset.yaml"}


def documents(name: str) -> list[dict[str, Any]]:
    """The documents of a file."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def shared(kind: str) -> dict[str, Any]:
    """The one document of that kind in config.yaml."""
    (found,) = [document for document in documents("config.yaml") if document["kind"] == kind]
    return found


def workload(kind: str) -> dict[str, Any]:
    """The Job, or the StatefulSet."""
    (found,) = documents(WORKLOADS[kind])
    return found


def pod_spec(kind: str) -> dict[str, Any]:
    """What a pod of the Job, or of the StatefulSet, is made from."""
    spec: dict[str, Any] = workload(kind)["spec"]["template"]["spec"]
    return spec


def container(kind: str) -> dict[str, Any]:
    """Its one container."""
    (found,) = pod_spec(kind)["containers"]
    return found


def job_text() -> str:
    """job.toml, as the ConfigMap has it."""
    text: str = shared("ConfigMap")["data"]["job.toml"]
    return text


def elastic_section() -> dict[str, Any]:
    """[elastic] of job.toml, as the ConfigMap has it."""
    section: dict[str, Any] = tomllib.loads(job_text())["elastic"]
    return section
