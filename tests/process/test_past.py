"""A new supervisor knows what happened to those before it, and no clock makes it believe otherwise."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from elastictrain.cli.state_dir import StartOptions, StateDir
from elastictrain.config import load_job
from elastictrain.core.events import Moment
from elastictrain.core.snapshot_interval import PRIOR_MTBF_S
from elastictrain.protocol import JOURNAL_FILE, RUNS_DIR, RunSpec
from elastictrain.supervisor.clock import read_clock
from elastictrain.supervisor.journal import Journal
from elastictrain.supervisor.past import read_past
from tests.process.helpers import read_metrics, run_cli
from tests.process.test_supervisor import RUN_DEADLINE_S, events, write_faulty

POISONED = 5


@pytest.mark.long
def test_a_step_that_kills_the_supervisor_halts_the_job(tmp_path: Path) -> None:
    """Whoever starts it again and again, as systemd does, is told in the end; and a person may try once more."""
    state = tmp_path / "state"
    faults = [("loss", "supervisor", 1, POISONED)]
    path = write_faulty(tmp_path, faults, params={"always": True}, supervisor={"same_step_failures": 2})
    command = ("run", path, "--state-dir", state, "--output", "json", "--service")
    for _ in range(2):
        assert run_cli(*command, deadline_s=RUN_DEADLINE_S).code == -9
    halted = run_cli(*command, deadline_s=RUN_DEADLINE_S)
    assert halted.code == 79, halted.stdout + halted.stderr
    diagnosis = halted.stderr
    assert f"steps {POISONED + 1} to" in diagnosis or f"step {POISONED + 1} fails" in diagnosis, diagnosis
    assert "2 times in a row" in diagnosis
    assert "the supervisor ended without a word in incarnation 2" in diagnosis
    assert "It holds samples 20, 21, 22, 23 (epoch 0)" in diagnosis
    assert len(events(state, "incarnation_started")) == 2, "no third group was started"
    assert [event.get("left_step") for event in events(state, "supervisor_started")] == [None, POISONED, POISONED]
    assert run_cli("status", "--state-dir", state).code == 79
    path = write_faulty(tmp_path)
    mended = run_cli("run", path, "--state-dir", state, "--output", "json", deadline_s=RUN_DEADLINE_S)
    assert mended.code == 0, mended.stderr
    assert events(state, "incarnation_started")[-1]["incarnation"] > 2
    assert max(line["step"] for line in read_metrics(state)) == 12


def test_a_new_run_has_no_past(tmp_path: Path) -> None:
    state = tmp_path / "state"
    path = write_faulty(tmp_path, supervisor={"same_step_failures": 2})
    state.mkdir()
    journal = Journal(state / JOURNAL_FILE)
    for number in (1, 2):
        journal.append("supervisor_started", {"pid": 1})
        journal.append("incarnation_started", {"incarnation": number})
        journal.append("restored", {"global_step": 3})
    journal.close()
    assert len(read_past(state, report_steps=10).counted(time.monotonic())) == 2
    ran = run_cli("run", path, "--state-dir", state, "--output", "json", "--fresh", deadline_s=RUN_DEADLINE_S)
    assert ran.code == 0, ran.stderr


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_the_time_between_failures_does_not_change_with_the_clock(tmp_path: Path, jump_s: float) -> None:
    """Neither with what the wall clock said when things happened, nor with what the files say about it."""
    loaded = load_job(str(write_faulty(tmp_path)))
    state = StateDir(tmp_path / "state")
    state.prepare(loaded).close()
    wrong_s, boot_s = 0.0, 1000.0
    now = read_clock()

    def clock() -> Moment:
        return Moment(now.time_s + boot_s + wrong_s, boot_s, now.boot_id)

    journal = Journal(state.path / JOURNAL_FILE, clock=clock)
    journal.append("supervisor_started", {"pid": 1})
    journal.append("incarnation_started", {"incarnation": 1})
    boot_s, wrong_s = 1500.0, jump_s
    journal.append("incarnation_ended", {"incarnation": 1, "kind": "signal", "cause": "x", "lived_s": 500.0})
    journal.append("incarnation_started", {"incarnation": 2})
    boot_s, wrong_s = 1600.0, -jump_s
    journal.append("progress", {"incarnation": 2, "step": 3})
    journal.close()
    for found in (state.path / RUNS_DIR).rglob("*"):
        os.utime(found, (time.time() + jump_s,) * 2)
    second = state.prepare(loaded, StartOptions().of_restart())
    second.close()
    assert RunSpec.read(second.run_dir).mean_time_between_failures_s == (PRIOR_MTBF_S + 600.0) / 3
