"""Pods made from the Kubernetes manifests: probes, hook, exit codes, and the pod that takes another's place."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.drill.container import skip_unless_possible
from tests.drill.paced import GLOBAL_BATCH, HURRY_FILE, STEPS_FILE
from tests.drill.pod import Pod
from tests.manifests import job_text
from tests.process.helpers import wait_until

STEPS = 400
SHARED = "/snapshots"

pytestmark = pytest.mark.timeout(600)


def job(**params: Any) -> str:
    """The manifests' job.toml, with a small task that writes into the shared volume."""
    fields = tomllib.loads(job_text())
    fields |= {"task": "tests.drill.paced:Task", "params": {"folder": SHARED, **params}, "data": {"shuffle": False}}
    fields["train"] = {"max_steps": STEPS, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH}
    fields["elastic"] |= {"device": "cpu", "threads_per_rank": 1}
    fields["metrics"] = {"tensorboard": False}
    fields["supervisor"] = {"same_step_failures": 1}
    return tomli_w.dumps(fields)


@contextmanager
def pod(kind: str, folder: Path, job_toml: str, shared: Path) -> Iterator[Pod]:
    """A pod that has been started."""
    skip_unless_possible()
    made = Pod(kind, folder, job_toml, {"CHECKPOINT_URL": f"{SHARED}/train"}, {SHARED: shared})
    try:
        made.start()
        wait_until(lambda: made.is_running and made.probe("startup") == 0, 120)
        yield made
    finally:
        made.destroy()


def steps(shared: Path) -> list[int]:
    """All steps that were begun, in order."""
    path = shared / STEPS_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)[1] for line in lines]


@pytest.mark.long
def test_a_pod_is_deleted_and_another_takes_its_place(tmp_path: Path) -> None:
    """It begins with empty volumes, finds the run in the store, and goes on without a step done twice or left out."""
    shared = tmp_path / "shared"
    with pod("Job", tmp_path / "first", job(pause_s=0.05), shared) as first:
        wait_until(lambda: first.probe("readiness") == 0, 120)
        assert first.probe("liveness") == 0
        assert first.delete() == (0, 80)
    before = steps(shared)
    assert 0 < len(before) < STEPS // 2
    with pod("Job", tmp_path / "second", job(pause_s=0.05), shared) as second:
        (shared / HURRY_FILE).touch()
        assert second.wait() == 0
    assert steps(shared) == list(range(STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["Job", "StatefulSet"])
def test_a_job_that_is_halted(kind: str, tmp_path: Path) -> None:
    """A Job's pod ends, with the code that has the Job fail; a StatefulSet's stays up for somebody to look."""
    shared = tmp_path / "shared"
    with pod(kind, tmp_path / "pod", job(pause_s=0.05, fail_at=40), shared) as made:
        wait_until(lambda: made.probe("readiness") == 0, 120)
        if kind == "Job":
            assert made.wait() == 79
            return
        wait_until(lambda: made.exec(["elastictrain", "status", "--state-dir", "/state/train"]) == 79, 120)
        assert made.probe("readiness") == 1
        assert made.probe("liveness") == 0
        assert made.delete()[1] == 80
