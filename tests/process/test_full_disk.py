"""A state directory whose disk is full, and a journal that is damaged, under a job that runs: it trains on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastictrain.protocol import JOURNAL_FILE
from tests.process.helpers import run_cli, start_cli, wait_until
from tests.process.test_supervisor import write_faulty

pytestmark = pytest.mark.long


def status(state: Path) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(run_cli("status", "--state-dir", state, "--json").stdout)
    return decoded


def trains_on(state: Path) -> dict[str, Any]:
    """Waits until it is twenty steps further than now, in the same worker group; its status."""
    before = status(state)
    reached, incarnation = before["global_step"] or 0, before["incarnation"]
    wait_until(lambda: (status(state)["global_step"] or 0) > reached + 20)
    now = status(state)
    assert (now["state"], now["incarnation"], now["num_restarts"]) == ("training", incarnation, before["num_restarts"])
    return now


def test_the_record_suffers_the_training_does_not(tmp_path: Path, small_disk: Path) -> None:
    state = small_disk / "state"
    path = write_faulty(
        tmp_path,
        params={"pause_s": 0.02},
        train={"max_steps": 10**6},
        checkpoint={"url": str(tmp_path / "store"), "every_steps": 50},
        metrics={"every_steps": 1, "tensorboard": False},
        supervisor={"backoff_s": 300.0, "max_backoff_s": 300.0, "max_failures": 100},
    )
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until(lambda: (state / JOURNAL_FILE).exists() and status(state)["state"] == "training")
        fill(small_disk / "filler")
        wait_until(lambda: status(state)["journal"]["state"] == "degraded")
        now = trains_on(state)
        assert "disk is full" in now["journal"]["reason"]
        assert "disk is full" in run_cli("status", "--state-dir", state).stdout

        # No worker group can be laid out now. It waits; with room again, whoever wants need not.
        os.kill(now["ranks"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: "cannot be written: No space left on device" in status(state)["reason"])
        assert status(state)["state"] == "recovering"
        (small_disk / "filler").unlink()
        wait_until(lambda: status(state)["journal"]["state"] == "ok")
        assert run_cli("restart", "--state-dir", state).code == 0
        wait_until(lambda: status(state)["state"] == "training")
        assert status(state)["num_restarts"] >= 1

        for part in (JOURNAL_FILE, f"{JOURNAL_FILE}-wal"):
            with (state / part).open("r+b") as file:
                file.write(os.urandom((state / part).stat().st_size))
        wait_until(lambda: "set aside" in status(state)["journal"]["reason"])
        now = trains_on(state)
        assert now["journal"]["state"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    stopped = status(state)
    assert (stopped["state"], stopped["daemon_running"]) == ("stopped", False)


def fill(path: Path) -> None:
    """Until nothing fits."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
