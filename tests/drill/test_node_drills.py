"""`elastictrain drill` of faults of several nodes: real nodes, real deaths, cuts and joins."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastictrain.core.node_faults import NODE_FAULTS
from tests.drill.drills import DEADLINE_S, assert_exact, assert_nothing_left, drill, processes_of, tiny_job
from tests.nodes.possible import skip_unless_possible
from tests.process.helpers import run_cli, start_cli, wait_until, write_task

STEPS = 12
TINY: dict[str, Any] = {"world_size": 1, "train": {"max_steps": STEPS}}
WORLDS = {
    "kill-node": "2 → 1",
    "cut-link": "2 → 1 → 2",
    "join-node": "1 → 2",
    "kill-store": "2",
    "pause-etcd-leader": "3",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["join-node"], marks=pytest.mark.long, id="one"),
        pytest.param(list(NODE_FAULTS), marks=pytest.mark.soak, id="every"),
    ],
)
def test_faults_of_several_nodes(tmp_path: Path, names: list[str]) -> None:
    skip_unless_possible()
    names = [name for name in names if name != "pause-etcd-leader" or shutil.which("etcd")]
    drilled = drill(tmp_path, *names, **TINY, elastic={"reduction": "tree"})
    assert list(drilled.rows) == names, drilled.finished.stderr
    for name, row in drilled.rows.items():
        assert_exact(row)
        assert row["why"] == f"world size {WORLDS[name]}"
        assert row["injected_at"].endswith(f", after step {STEPS // 2}"), row
        assert row["recovered_s"] > 0, row
        if name != "pause-etcd-leader":  # no node has to know who leads
            assert 0 < row["detected_s"] < row["recovered_s"], row
    assert drilled.finished.code == 0
    scratch = tmp_path / "scratch"
    assert [path.name for path in scratch.iterdir() if path.is_dir()] == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_bits_that_may_differ_between_world_sizes_are_not_compared(tmp_path: Path) -> None:
    """The job begins with more nodes than it can go on with all the same; where the world stays, bits are compared."""
    skip_unless_possible()
    drilled = drill(tmp_path, "kill-node", "kill-store", **TINY, options=("--nodes", "3"))
    lost, kept = drilled.rows["kill-node"], drilled.rows["kill-store"]
    assert drilled.finished.code == 0, drilled.document
    assert (lost["verdict"], lost["bitwise_equal"], lost["difference"]) == ("holds", None, "")
    assert (lost["steps_lost"], lost["samples_repeated"], lost["samples_skipped"]) == (0, 0, 0)
    assert "world size 3 → 2" in lost["why"]
    assert "bits may differ" in lost["why"]
    assert_exact(kept)
    assert kept["why"] == "world size 3"


WORLDLY = """
import os
from tests.process.faulty import Task

class MyTask(Task):
    def loss(self, model, batch):
        return super().loss(model, batch) * (1.0 + 1e-3 * int(os.environ["WORLD_SIZE"]))
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_job_whose_numbers_depend_on_the_world_size_fails_and_says_where(tmp_path: Path) -> None:
    skip_unless_possible()
    write_task(tmp_path, WORLDLY)
    job = tiny_job(tmp_path, **TINY, elastic={"reduction": "tree"})
    job.write_text(job.read_text().replace("tests.process.faulty:Task", "task:MyTask"))
    scratch = tmp_path / "scratch"
    finished = run_cli("drill", "kill-node", job, "--scratch", scratch, "--json", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert finished.code == 1, finished.stderr
    (row,) = json.loads(finished.stdout)["rows"]
    assert (row["verdict"], row["bitwise_equal"]) == ("fails", False)
    assert row["difference"].startswith(f"step {STEPS // 2 + 1} ("), row
    # What is left of it can be read like any other.
    assert row["folder"] == str(scratch / "kill-node")
    events = run_cli("events", "--state-dir", scratch / "kill-node" / "state-node0", cwd=tmp_path)
    assert events.code == 0
    assert "worker_group_abandoned" in events.stdout
    assert_nothing_left(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_interrupted_drill_on_nodes_leaves_nothing(tmp_path: Path) -> None:
    skip_unless_possible()
    job = tiny_job(tmp_path, world_size=1)
    scratch = tmp_path / "scratch"
    with start_cli("drill", "kill-node", job, "--steps", "2000", "--scratch", scratch, cwd=tmp_path) as process:
        wait_until(lambda: list(scratch.rglob("metrics.jsonl")), 120.0)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len([p for p in below if p.is_running() and "init.py" in " ".join(p.cmdline())]) >= 3, (
            "network and nodes"
        )
        process.send_signal(signal.SIGINT)
        process.wait(120)
        assert process.returncode == 128 + signal.SIGINT
        assert [p for p in below if p.is_running()] == []
    assert_nothing_left(tmp_path)


def test_a_machine_that_cannot_have_nodes_refuses_and_does_not_hold(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, world_size=1)
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    finished = run_cli(
        *("drill", "kill-node", job, "--scratch", tmp_path / "scratch"), cwd=tmp_path, under=("env", f"PATH={nowhere}")
    )
    assert finished.code == 1, finished.stderr
    assert "refused" in finished.stdout
    assert "need root" in finished.stdout or "apt-get install" in finished.stdout
    assert "Traceback" not in finished.stderr
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kil-node", "JOB"], "did you mean kill-node"),
        (["kill-rank", "JOB", "--nodes", "2"], "none of these faults is one of several nodes"),
        (["pause-etcd-leader", "JOB", "--nodes", "2"], "it needs 3 nodes at least"),
        (["kill-node", "JOB", "--nodes", "9"], "a step has 4 microbatch(es), too few for 9 nodes"),
        (["cut-link", "JOB", "--at-step", "14"], "there must be 3 steps after the fault"),
        (["soak", "kill-node", "JOB"], "in a run of its own"),
        (["kill-node", "--live", "nobody"], "in a run of its own"),
    ],
)
def test_what_cannot_be_is_refused_with_a_word(tmp_path: Path, words: list[str], said: str) -> None:
    job = tiny_job(tmp_path, world_size=1)
    finished = run_cli("drill", *(str(job) if word == "JOB" else word for word in words), cwd=tmp_path)
    assert (finished.code, finished.stdout) == (64, ""), finished.stderr
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr


def test_the_list_has_them_as_a_group_of_their_own(tmp_path: Path) -> None:
    lines = run_cli("drill", "list", cwd=tmp_path).stdout.splitlines()
    group = next(place for place, line in enumerate(lines) if line.startswith("several nodes"))
    named = [line.split()[0] for line in lines[group + 1 :] if line[:1].strip()]
    assert named == list(NODE_FAULTS)
