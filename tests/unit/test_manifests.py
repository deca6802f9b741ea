"""The Kubernetes manifests: valid by the API's own schemas, and of one mind with the job file and with each other."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import typer

from elastictrain.cli.app import build_app
from elastictrain.cli.service_units import Installation
from elastictrain.config import load_job
from elastictrain.supervisor.settings import STOP_GRACE_S, stop_timeout_s
from tests.manifests import (
    FOLDER,
    WORKLOADS,
    container,
    documents,
    elastic_section,
    job_text,
    pod_spec,
    shared,
    workload,
)

OLDEST = "1.31"
"""The first in which a Job's successPolicy is not behind a gate that is closed by default."""
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
KINDS = sorted(WORKLOADS)
SIGTERM_S = 30.0
"""Between the hook's end and SIGKILL: a snapshot may still be on its way to a slow store."""


def size_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_the_api_takes_them(path: Path, version: str) -> None:
    for document in documents(path.name):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_validation_finds_a_key_that_does_not_exist() -> None:
    wrong = copy.deepcopy(workload("Job"))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_the_job_file_is_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(job_text())
    assert load_job(str(tmp_path), ["checkpoint.url=s3://bucket/train"]).config.name == "train"


@pytest.mark.parametrize("kind", KINDS)
def test_the_job_file_and_the_pods_are_of_one_mind(kind: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(job_text())
    config = load_job(str(tmp_path)).config
    spec, pod, main = workload(kind)["spec"], pod_spec(kind), container(kind)

    num_pods = {spec["replicas"]} if kind == "StatefulSet" else {spec["completions"], spec["parallelism"]}
    assert num_pods == {int(elastic_section()["nodes"].partition(":")[2])}
    gpus = re.search(r"# nvidia.com/gpu: (\d+)", (FOLDER / WORKLOADS[kind]).read_text())
    assert gpus is not None
    assert int(gpus[1]) == config.elastic.nproc_per_node

    service = shared("Service")
    endpoint = urlsplit(elastic_section()["rendezvous"])
    assert endpoint.hostname == f"{workload(kind)['metadata']['name']}-0.{service['metadata']['name']}"
    assert {endpoint.port} == {main["ports"][0]["containerPort"], service["spec"]["ports"][0]["port"]}
    assert (spec["serviceName"] if kind == "StatefulSet" else pod["subdomain"]) == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"], "pods meet before they are ready"
    assert service["spec"]["clusterIP"] == "None"
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert shared("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels

    assert pod["terminationGracePeriodSeconds"] >= stop_timeout_s(config) + SIGTERM_S
    assert f"by {STOP_GRACE_S + SIGTERM_S:.0f} s at least" in job_text()


@pytest.mark.parametrize("kind", KINDS)
def test_mounts_and_memory(kind: str) -> None:
    spec, pod, main = workload(kind)["spec"], pod_spec(kind), container(kind)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    assert {mount["name"] for mount in main["volumeMounts"]} == set(volumes) | claims
    tier = volumes["memory-tier"]["emptyDir"]
    assert tier["medium"] == "Memory"
    assert size_bytes(tier["sizeLimit"]) < size_bytes(main["resources"]["limits"]["memory"])
    assert {mount["mountPath"] for mount in main["volumeMounts"] if mount["name"] == "memory-tier"} == {
        tomllib.loads(job_text())["checkpoint"]["memory_path"]
    }
    assert volumes["job"]["configMap"]["name"] == shared("ConfigMap")["metadata"]["name"]
    assert main["envFrom"] == [{"secretRef": {"name": shared("Secret")["metadata"]["name"]}}]
    assert "CHECKPOINT_URL" in shared("Secret")["stringData"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_may_do_little(kind: str) -> None:
    """The restricted level of the Pod Security Standards, and a root file system that nobody writes to."""
    pod, main = pod_spec(kind), container(kind)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


def test_the_exit_codes_are_those_of_the_systemd_unit() -> None:
    """What a restart does not mend is the same everywhere; what a stop ends with is no failure."""
    unit = "\n".join(Installation(("/usr/bin/elastictrain",)).files().values())
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert prevented is not None
    rules = workload("Job")["spec"]["podFailurePolicy"]["rules"]
    by_action = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert by_action["FailJob"] == [int(code) for code in prevented[1].split()]
    for kind in KINDS:
        args = container(kind)["args"]
        assert [args[args.index("--stopped-code") + 1]] == [str(code) for code in by_action["Ignore"]]


def test_both_start_the_same_pod() -> None:
    pods = {}
    for kind in KINDS:
        pod: dict[str, Any] = copy.deepcopy(pod_spec(kind))
        pod.pop("restartPolicy", None)
        pod.pop("subdomain", None)
        pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "state"]
        pod["containers"][0]["args"] = [arg for arg in pod["containers"][0]["args"] if arg != "--service"]
        pods[kind] = pod
    assert pods["Job"] == pods["StatefulSet"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_exist(kind: str) -> None:
    """Each by the command line's own parser, without being carried out."""
    main = container(kind)
    commands = [main["command"] + main["args"], main["lifecycle"]["preStop"]["exec"]["command"]]
    commands += [main[f"{which}Probe"]["exec"]["command"] for which in ("startup", "liveness", "readiness")]
    app = typer.main.get_command(build_app())
    for program, name, *args in commands:
        assert program == "elastictrain"
        command = app.commands[name]
        context = command.make_context(name, list(args), resilient_parsing=False)
        assert str(context.params["state_dir"]) == "/state/train"
