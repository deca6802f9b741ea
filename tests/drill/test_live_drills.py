"""`elastictrain drill NAME --live`: faults on a job that runs for real."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from elastictrain.checkpoint.catalog import newest_first
from elastictrain.checkpoint.format import MODEL_FILE
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.store import open_store
from elastictrain.core.fault_table import TABLE
from elastictrain.drill.outside import damage_file
from tests.drill.drills import (
    tiny_job,
)
from tests.process.helpers import run_cli, start_cli, wait_until

EVERY = [fault.name for fault in TABLE if fault.is_live]


@pytest.mark.soak
@pytest.mark.parametrize("names", [["kill-rank"], EVERY], ids=["one", "every"])
def test_a_running_job_survives(tmp_path, names):
    job = tiny_job(
        tmp_path,
        train={"max_steps": 1_000_000},
        data={"num_workers": 1 if "kill-loader-worker" in names else 0},
        metrics={"every_steps": 1000},  # nobody reads what it says meanwhile
    )
    state = tmp_path / "state"
    with start_cli("run", job, "--state-dir", state, "--output", "json", cwd=tmp_path) as running:
        assert running.stdout is not None
        wait_until(lambda: '"snapshot_durable"' in running.stdout.readline())  # type: ignore[union-attr]
        for name in names:
            finished = run_cli("drill", name, "--state-dir", state, "--yes", "--json", cwd=tmp_path)
            row = json.loads(finished.stdout)["rows"][0]
            assert row["recovered_s"] > row["detected_s"] > 0, row
            assert (row["steps_lost"], row["verdict"], finished.code) == (0, "holds", 0), row
        refused = {
            "preempt": "preempt cannot be done to a running job",
            "clock-back": "clock-back cannot be done to a running job",
            "clock-jump": "one fault at a time",
            "all": "one fault at a time",
        }
        pids = rank_pids(tmp_path)
        for name, said in refused.items():
            finished = run_cli("drill", name, "--state-dir", state, "--yes", cwd=tmp_path)
            assert (finished.code, finished.stdout) == (64, "")
            assert said in finished.stderr
        unanswered = run_cli("drill", "kill-rank", "--state-dir", state, cwd=tmp_path)
        assert unanswered.code == 1, "nobody said yes"
        assert rank_pids(tmp_path) == pids
        running.send_signal(signal.SIGTERM)
        running.wait(60)


def rank_pids(folder: Path) -> list[int]:
    finished = run_cli("status", "--state-dir", folder / "state", "--json", cwd=folder)
    return [rank["pid"] for rank in json.loads(finished.stdout)["ranks"]]


@pytest.mark.long
def test_a_running_job_of_one_rank_loses_what_came_after_its_snapshot_and_that_is_said(tmp_path):
    job = tiny_job(tmp_path, world_size=1, train={"max_steps": 1_000_000}, checkpoint={"every_steps": 20})
    state = tmp_path / "state"
    with start_cli("run", job, "--state-dir", state, "--output", "json", cwd=tmp_path) as running:
        assert running.stdout is not None
        wait_until(lambda: '"snapshot_durable"' in running.stdout.readline())  # type: ignore[union-attr]
        finished = run_cli("drill", "kill-rank", "--state-dir", state, "--yes", "--json", cwd=tmp_path)
        row = json.loads(finished.stdout)["rows"][0]
        assert (row["verdict"], finished.code) == ("holds", 0), row
        # The next snapshot may have been on its way.
        assert 0 <= row["steps_lost"] < 2 * 20, row
        assert not row["steps_lost"] or f"{row['steps_lost']} step(s) done again" in row["why"]
        running.send_signal(signal.SIGTERM)
        running.wait(60)


@pytest.mark.long
def test_a_running_job_that_goes_back_beyond_its_newest_snapshot_fails_the_drill(tmp_path):
    """All its snapshots but one are damaged behind its back, while its rank is stopped and takes no new one."""
    job = tiny_job(
        tmp_path,
        world_size=1,
        train={"max_steps": 1_000_000},
        checkpoint={"every_steps": 10},
        supervisor={"step_timeout_s": 300.0},
    )
    state = tmp_path / "state"
    with start_cli("run", job, "--state-dir", state, "--output", "json", cwd=tmp_path) as running:
        assert running.stdout is not None
        for _ in range(3):
            wait_until(lambda: '"snapshot_durable"' in running.stdout.readline())  # type: ignore[union-attr]
        status = json.loads(run_cli("status", "--state-dir", state, "--json", cwd=tmp_path).stdout)
        psutil.Process(status["ranks"][0]["pid"]).suspend()
        tier = MemoryTier.for_job(tmp_path / "shm", job="job", state_dir=state)
        store = open_store(str(state / "snapshots"))
        # What the rank has taken is on its way to the store.
        wait_until(lambda: tier.snapshots()[0].global_step == store.snapshots()[0].global_step)
        kept = newest_first(tier, store)
        for candidate in kept:
            if candidate.global_step > kept[-1].global_step:
                damage_file(Path(candidate.where.removeprefix("file://")) / MODEL_FILE, truncate=True)
        finished = run_cli("drill", "kill-rank", "--state-dir", state, "--yes", "--json", cwd=tmp_path)
        row = json.loads(finished.stdout)["rows"][0]
        assert (row["verdict"], finished.code) == ("fails", 1), row
        assert (
            f"the newest snapshot was of step {kept[0].global_step}, and step {kept[-1].global_step} was" in row["why"]
        )
        running.send_signal(signal.SIGTERM)
        running.wait(60)
