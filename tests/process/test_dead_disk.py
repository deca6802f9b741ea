"""Snapshots on a file system that has died: real, and as dead as NFS without its server."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.conftest import DeadDisk
from tests.process.helpers import run_cli, start_cli, wait_until
from tests.process.test_supervisor import RUN_DEADLINE_S, events, ours, write_faulty

pytestmark = pytest.mark.long


def status(state: Path) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(run_cli("status", "--state-dir", state, "--json").stdout)
    return decoded


def durable_steps(state: Path) -> list[int]:
    return [event["at_step"] for event in events(state, "snapshot_durable")]


def test_training_goes_on_while_the_store_is_dead(tmp_path: Path, mortal_disk: DeadDisk) -> None:
    """The persister is stuck, the ranks are not: nobody is blamed, status says why nothing gets durable, and when the
    store is back, so are its snapshots."""
    state = tmp_path / "state"
    path = write_faulty(
        tmp_path,
        params={"pause_s": 0.02},
        train={"max_steps": 10**6},
        checkpoint={"url": str(mortal_disk.path), "every_steps": 20, "storage_timeout_s": 2.0},
    )
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until(lambda: durable_steps(state))
        assert status(state)["snapshots"]["store_error"] is None
        mortal_disk.die()
        wait_until(lambda: events(state, "persister_stalled"))
        dead_at = durable_steps(state)[-1]
        told = status(state)
        assert "the store moved nothing for" in told["snapshots"]["store_error"]["error"]
        assert "the store moved nothing for" in run_cli("status", "--state-dir", state).stdout
        stuck = [p for p in psutil.process_iter() if is_stuck(p)]
        assert stuck, "nobody waits for the dead file system: it is not dead"
        reached = told["global_step"]
        wait_until(lambda: status(state)["global_step"] > reached + 100)
        now = status(state)
        assert (now["state"], now["incarnation"], now["num_incidents"]) == ("training", 1, 0)
        assert now["snapshots"]["durable"]["step"] == dead_at
        assert now["snapshots"]["memory"]["step"] > reached
        mortal_disk.come_back()
        wait_until(lambda: durable_steps(state)[-1] > reached)
        assert status(state)["snapshots"]["store_error"] is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert status(state)["num_restarts"] == 0


def is_stuck(process: psutil.Process) -> bool:
    """Whether a thread of a persister waits in the kernel, where no signal reaches it."""
    try:
        if "elastictrain.checkpoint.persister" not in process.cmdline():
            return False
        return any(
            Path(f"/proc/{process.pid}/task/{thread.id}/stat").read_text().rsplit(")", 1)[1].split()[0] == "D"
            for thread in process.threads()
        )
    except (psutil.Error, OSError):
        return False


def test_a_rank_whose_memory_tier_is_dead_is_found_in_its_snapshot(tmp_path: Path, mortal_disk: DeadDisk) -> None:
    """Where the rank itself is stuck, it hangs: found by the limit of a snapshot, named, and got over once that is
    possible at all."""
    state = tmp_path / "state"
    path = write_faulty(
        tmp_path,
        params={"pause_s": 0.02},
        train={"max_steps": 10**6},
        checkpoint={"memory_path": str(mortal_disk.path), "every_steps": 20},
        supervisor={"snapshot_timeout_s": 2.0},
    )
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until(lambda: len(durable_steps(state)) > 1)
        mortal_disk.die()
        wait_until(lambda: events(state, "incident_opened"))
        (incident,) = events(state, "incident_opened")
        assert (incident["ranks"], incident["phase"], incident["limit_s"]) == ([0], "snapshot", 2.0)
        assert incident["why"] == "it stands still in snapshot"
        mortal_disk.come_back()
        wait_until(lambda: len(events(state, "ranks_training")) > 1, RUN_DEADLINE_S)
        first, *_ = events(state, "incarnation_ended")
        assert "rank 0 hung: it stands still in snapshot" in first["cause"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until(lambda: not ours(state))
