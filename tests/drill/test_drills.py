"""`elastictrain drill` on whole jobs: every fault really happens, to real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from elastictrain.core.fault_table import BY_NAME, TABLE
from elastictrain.core.faults import Expect, Fault
from elastictrain.core.soak import soakable
from tests.drill.drills import (
    Drilled,
    assert_exact,
    assert_nothing_left,
    assert_resumed,
    drill,
    processes_of,
    tiny_job,
)
from tests.process.helpers import run_cli, start_cli, wait_until, write_task


@pytest.mark.long
def test_a_killed_rank(tmp_path):
    drilled = drill(tmp_path, "kill-rank")
    row = drilled.rows["kill-rank"]
    assert_resumed(row)
    assert row["injected_at"] == "rank 1, after step 9, forward"
    assert drilled.finished.code == 0
    scratch = tmp_path / "scratch"
    assert json.loads((scratch / "drill.json").read_text()) == drilled.document
    assert "| kill-rank | rank 1, after step 9, forward |" in (scratch / "drill.md").read_text()
    assert [path.name for path in scratch.iterdir() if path.is_dir()] == []


# ---- what is refused, and what is interrupted, leaves nothing


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["kil-rank", "JOB"], 64, "did you mean kill-rank"),
        (["kill-rank"], 64, "give the faults and then the job"),
        (["soak"], 64, "give the job"),
        (["soak", "oom-kill", "JOB"], 64, "a soak cannot have oom-kill"),
        (["soak", "all", "oom-kill", "JOB"], 64, "a soak cannot have oom-kill"),
        (["soak", "JOB", "--for", "soon"], 64, "not a duration"),
        (["kill-rank", "no-such-job"], 66, "no file no-such-job"),
        (["kill-rank", "JOB", "--steps", "3"], 64, "at least 8 steps"),
        (["kill-rank", "JOB", "--at-step", "16"], 64, "the fault must be after step"),
        (["kill-rank", "JOB", "--set", "train.max_step=3"], 78, "did you mean max_steps"),
        (["nan-loss", "JOB", "--set", "train.check_gradients=false"], 64, "check_gradients = false"),
        (["kill-rank", "JOB", "--scratch", "/proc/here"], 73, "cannot be written"),
        (["kill-rank", "JOB", "--report", "/proc/here"], 73, "cannot be written"),
        (["kill-rank", "--live", "nobody"], 66, "there is no job nobody"),
    ],
)
def test_what_cannot_be_is_refused_with_a_word(tmp_path, words, code, said):
    job = tiny_job(tmp_path)
    finished = run_cli("drill", *(str(job) if word == "JOB" else word for word in words), cwd=tmp_path)
    assert (finished.code, finished.stdout) == (code, ""), finished.stderr
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr
    assert_nothing_left(tmp_path)


def test_a_scratch_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "mine").touch()
    finished = run_cli("drill", "kill-rank", tiny_job(tmp_path), "--scratch", tmp_path / "scratch", cwd=tmp_path)
    assert finished.code == 64
    assert "not empty" in finished.stderr
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["mine"]


def test_a_job_that_does_not_run_undisturbed_is_named(tmp_path):
    write_task(tmp_path, "class MyTask: pass")
    finished = run_cli("drill", "all", tmp_path, "--scratch", tmp_path / "scratch", cwd=tmp_path)
    assert finished.code == 70
    assert "does not even run undisturbed" in finished.stderr
    assert "MyTask has no method model" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert_nothing_left(tmp_path)


def test_what_was_asked_for_and_cannot_be_had_does_not_hold(tmp_path):
    """Only who may mount a file system can have a full one."""
    job = tiny_job(tmp_path)
    may_not = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"] if os.geteuid() == 0 else []
    scratch = tmp_path / "scratch"
    finished = run_cli("drill", "disk-full", job, "--json", "--scratch", scratch, cwd=tmp_path, under=may_not)
    document = json.loads(finished.stdout)
    assert document["rows"][0]["verdict"] == "refused"
    assert "Operation not permitted" in document["rows"][0]["why"]
    assert (document["holds"], document["refused"], document["fails"]) == (False, ["disk-full"], [])
    assert finished.code == 1
    assert "1 of 1 drill(s) do not hold: disk-full" in finished.stderr
    assert json.loads((scratch / "drill.json").read_text()) == document
    assert_nothing_left(tmp_path)


@pytest.mark.long
def test_a_killed_drill_leaves_nothing_but_its_scratch_folder(tmp_path):
    """What it had started ends by itself, and gives back its memory."""
    job = tiny_job(tmp_path)
    with start_cli("drill", "kill-rank", job, "--steps", "800", "--scratch", tmp_path / "scratch", cwd=tmp_path) as it:
        wait_until(lambda: list((tmp_path / "shm").rglob("manifest.json")))
        it.kill()
        wait_until(lambda: not processes_of(tmp_path))
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_an_interrupted_drill_leaves_nothing(tmp_path, signum):
    job = tiny_job(tmp_path)
    scratch = tmp_path / "scratch"
    # A reference of half a minute, at least, with its first snapshot an eighth of the way.
    with start_cli("drill", "kill-rank", job, "--steps", "800", "--scratch", scratch, cwd=tmp_path) as process:
        wait_until(lambda: list((tmp_path / "shm").rglob("manifest.json")))
        assert len(processes_of(tmp_path)) >= 4, "drill, supervisor, agent, ranks"
        process.send_signal(signum)
        time.sleep(0.02)  # an impatient second one: it must not cut the cleaning up short
        process.send_signal(signum)
        process.wait(60)
        assert process.returncode == 128 + signum
    assert_nothing_left(tmp_path)


# ---- all of them


@pytest.fixture(scope="module", params=list(Expect), ids=lambda expect: expect.name)
def drilled(request, tmp_path_factory) -> Drilled:
    """All faults after which the same must follow, in one drill: they share its reference."""
    names = [fault.name for fault in TABLE if fault.expect is request.param]
    return drill(tmp_path_factory.mktemp("all"), *names)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_fault(drilled: Drilled):
    assert drilled.rows
    for name, row in drilled.rows.items():
        check_row(BY_NAME[name], row, drilled.document)


def check_row(fault: Fault, row: dict[str, Any], document: dict[str, Any]) -> None:
    """What must follow on each kind of fault."""
    if row["verdict"] == "refused":
        assert os.geteuid() != 0, row
        assert fault.name in ("oom-kill", "disk-full")
        return
    match fault.expect:
        case Expect.RESUME:
            assert_resumed(row)
        case Expect.FALL_BACK:
            assert row["verdict"] == "holds", row
            assert 0 < row["steps_lost"] <= document["snapshot_every_steps"]
        case Expect.UNDISTURBED:
            assert row["verdict"] == "holds", row
            assert row["steps_lost"] == 0
        case Expect.SKIP:
            assert row["verdict"] == "holds", row
            assert row["recovered_s"] is None
        case Expect.HALT:
            assert_exact(row)


@pytest.mark.soak
def test_where_every_process_is_started_anew(tmp_path):
    """It takes longer, and loses nothing either."""
    drilled = drill(tmp_path, "kill-agent", options=("--set", "elastic.fast_restart=false"))
    assert_resumed(drilled.rows["kill-agent"])


@pytest.mark.long
def test_a_lone_rank_that_dies_may_lose_what_came_after_its_snapshot(tmp_path):
    drilled = drill(tmp_path, "kill-rank", world_size=1)
    row = drilled.rows["kill-rank"]
    assert (row["verdict"], row["bitwise_equal"], drilled.finished.code) == ("holds", True, 0), row
    assert row["steps_lost"] <= drilled.document["snapshot_every_steps"]


@pytest.mark.long
def test_a_difference_is_found_and_named(tmp_path):
    """A task whose loss depends on which worker group it is: no drill of it can hold."""
    write_task(
        tmp_path,
        """
        import os
        from tests.process.faulty import Task

        class MyTask(Task):
            def loss(self, model, batch):
                return super().loss(model, batch) * (1 + 1e-6 * ("0001" not in os.environ["ELASTICTRAIN_RUN_DIR"]))
        """,
    )
    job = tiny_job(tmp_path)
    job.write_text(job.read_text().replace("tests.process.faulty:Task", "task:MyTask"))
    finished = run_cli(
        "drill", "kill-rank", job, "--scratch", tmp_path / "scratch", "--json", cwd=tmp_path, deadline_s=300
    )
    assert finished.code == 1
    row = json.loads(finished.stdout)["rows"][0]
    assert (row["bitwise_equal"], row["verdict"]) == (False, "fails")
    assert row["difference"].startswith("step ")
    assert "tensor " in row["difference"]
    assert_nothing_left(tmp_path)


# ---- a soak

SOAK_SEED = 3
"""Has every kind in three minutes."""


@pytest.mark.longest
@pytest.mark.parametrize(
    ("for_s", "has_all"),
    [pytest.param(30, False, marks=pytest.mark.long), pytest.param(180, True, marks=pytest.mark.soak)],
)
@pytest.mark.timeout(1200)
def test_a_soak(tmp_path, for_s, has_all):
    """Every failure loses a second or so, and never a step or a bit; in three minutes every kind has its turn."""
    drilled = drill(tmp_path, "soak", options=("--for", f"{for_s}s", "--mtbf", "12s", "--seed", str(SOAK_SEED)))
    row, document = drilled.rows["soak"], drilled.document
    assert_exact(row)
    assert document["faults"] == len(document["strikes"]) == sum(document["drawn"].values())
    assert {*document["drawn"], *document["not_drawn"]} == {fault.name for fault in soakable()}
    assert not (has_all and document["not_drawn"])
    assert all(strike["recovered_s"] > strike["detected_s"] > 0 for strike in document["strikes"])
    assert 0 < document["goodput"] < 1
