"""deploy/slurm/train.sbatch under a real Slurm: told to make room, preempted, killed, cancelled, and done."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from elastictrain.drill.nodes.etcd import free_ports
from elastictrain.supervisor.address import find_address
from tests.drill.paced import GLOBAL_BATCH, HURRY_FILE, STEPS_FILE
from tests.drill.slurm_cluster import Slurm, skip_unless_possible
from tests.process.helpers import ROOT, wait_until
from tests.process.test_supervisor import events

SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
PROGRAM = """#!/bin/sh
case $SLURMD_NODENAME in node0) way=c10d ;; *) way=etcd ;; esac
[ {num_nodes} -eq 1 ] || set -- "$@" --set "elastic.rendezvous=$way://127.0.0.1:{port}"
exec {python} -m elastictrain.cli.main "$@"
"""
STEPS = 5000
ENOUGH = 15
DEADLINE_S = 180.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    skip_unless_possible()
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), num_nodes=2)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Job:
    """A job, as its user sees it.

    Args:
        slurm: where it runs.
        folder: of job.toml, and of everything that is written.
        num_nodes: of the allocation. All are this host: the first serves the store, and the others go to it as they
            would to etcd, or each of them would take itself for the first.
        task: what is different from the paced task.
    """

    def __init__(self, slurm: Slurm, folder: Path, num_nodes: int = 1, **task: Any) -> None:
        self.slurm = slurm
        self.folder = folder
        self.num_nodes = num_nodes
        (folder / "shm").mkdir(parents=True)
        program = folder / "elastictrain"
        program.write_text(PROGRAM.format(python=sys.executable, port=free_ports(1)[0], num_nodes=num_nodes))
        program.chmod(0o755)
        fields = {
            "name": "job",
            "task": "tests.drill.paced:Task",
            "params": {"folder": str(folder), "pause_s": 0.05},
            "train": {
                "max_steps": STEPS,
                "global_batch_size": GLOBAL_BATCH,
                "micro_batch_size": GLOBAL_BATCH // num_nodes,
            },
            "data": {"shuffle": False},
            "elastic": {"device": "cpu", "threads_per_rank": 1},
            "metrics": {"tensorboard": False},
            "checkpoint": {"memory_path": str(folder / "shm"), "every_steps": 10},
            **task,
        }
        (folder / "job.toml").write_text(tomli_w.dumps(fields))
        self.environment = {
            "ELASTICTRAIN": str(program),
            "ELASTICTRAIN_STATE": str(folder / "state"),
            "PYTHONPATH": str(ROOT),
        }
        self.id = ""

    def submit(self) -> None:
        command = [
            "sbatch",
            "--parsable",
            f"--nodes={self.num_nodes}",
            "--exclusive",
            f"--chdir={self.folder}",
            str(SCRIPT),
            "job.toml",
        ]
        self.id = self.slurm.run(*command, environment=self.environment)

    def show(self) -> dict[str, str]:
        return self.slurm.show(self.id)

    def log(self) -> str:
        return (self.folder / f"train-{self.id}.log").read_text()

    def steps(self) -> list[int]:
        path = self.folder / STEPS_FILE
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)[1] for line in lines if line.endswith("\n")]

    def state_dir(self, node: int) -> Path:
        return self.folder / "state" / "train" / f"node-{node}"

    def kill_supervisor(self, node: int) -> None:
        address = find_address(self.state_dir(node))
        assert address is not None
        assert address.pid is not None
        psutil.Process(address.pid).kill()

    def trains(self, restarts: int, after: int = 0) -> None:
        """Waits until it has been queued again so often, and has trained on since `after` lines."""
        running = ("RUNNING", restarts)
        wait_until(lambda: ((now := self.show())["JobState"], int(now["Restarts"])) == running, DEADLINE_S)
        after = max(after, len(self.steps()))
        wait_until(lambda: len(self.steps()) >= after + ENOUGH, DEADLINE_S)
        assert self.show()["JobState"] == "RUNNING"

    def ends(self) -> dict[str, str]:
        """What is known of it when it is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        found: dict[str, str] = wait_until(lambda: (now := self.show())["JobState"] in over and now, DEADLINE_S)
        return found


def test_whatever_slurm_does_it_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path)
    job.submit()
    job.trains(restarts=0)

    # The time is nearly over: --signal does to the script what this does.
    slurm.run("scancel", "--signal=TERM", "--batch", job.id)
    before = len(job.steps())
    job.trains(restarts=1, after=before)

    # Somebody more important wants all nodes. Slurm tells the tasks, and not the script.
    before = len(job.steps())
    options = ["--parsable", "--nodes=2", "--partition=high", "--exclusive", "--output=/dev/null"]
    urgent = slurm.run("sbatch", *options, "--wrap=sleep 600")
    wait_until(lambda: slurm.show(urgent)["JobState"] == "RUNNING", DEADLINE_S)
    # The node is given on at once; the old job's end may still be on its way into the books.
    wait_until(lambda: (job.show()["JobState"], int(job.show()["Restarts"])) == ("PENDING", 2), DEADLINE_S)
    slurm.run("scancel", urgent)
    job.trains(restarts=2, after=before)
    steps = job.steps()
    assert steps == list(range(len(steps))), "none done twice, none left out"

    # The supervisor is killed: at most what came after the newest snapshot is done again.
    before = len(job.steps())
    job.kill_supervisor(0)
    job.trains(restarts=3, after=before + 20)

    # Whoever cancels it does not want it back, until it is submitted again.
    slurm.run("scancel", job.id)
    assert job.ends()["JobState"] == "CANCELLED"
    assert "the supervisor of the first node ended with 80" in job.log()
    assert "not queued again: the allocation is COMPLETING" in job.log()
    before = len(job.steps())
    job.submit()
    job.trains(restarts=0, after=before)
    assert job.steps()[before] == job.steps()[before - 1] + 1

    (tmp_path / HURRY_FILE).touch()
    end = job.ends()
    assert (end["JobState"], end["ExitCode"]) == ("COMPLETED", "0:0")
    assert set(job.steps()) == set(range(STEPS))


@pytest.mark.parametrize(
    ("task", "code"),
    [({"task": "tests.drill.paced:Tusk"}, 78), ({"supervisor": {"same_step_failures": 1}}, 79)],
    ids=["a mistake", "halted"],
)
def test_what_no_restart_mends_is_not_queued_again(slurm: Slurm, tmp_path: Path, task: Any, code: int) -> None:
    if code == 79:
        task = {**task, "params": {"folder": str(tmp_path), "fail_at": 3}}
    job = Job(slurm, tmp_path, **task)
    job.submit()
    end = job.ends()
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", f"{code}:0", "0")


# ---- several nodes


def is_in_group_of(world_size: int, state_dir: Path) -> bool:
    """The last worker group that this node was in has so many ranks."""
    return [event["world_size"] for event in events(state_dir, "incarnation_started")][-1:] == [world_size]


def test_several_nodes_go_on_and_end_with_the_first(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, num_nodes=2)

    def trains_on_both(restarts: int, after: int = 0) -> None:
        job.trains(restarts, after)
        for node in range(2):
            wait_until(partial(is_in_group_of, 2, job.state_dir(node)), DEADLINE_S)
        job.trains(restarts)

    job.submit()
    trains_on_both(restarts=0)

    # The time is nearly over: all keep their state, though they have two steps of the allocation.
    slurm.run("scancel", "--signal=TERM", "--batch", job.id)
    before = len(job.steps())
    trains_on_both(restarts=1, after=before)
    assert "the supervisor of the first node ended with 80" in job.log()
    assert "those of the others ended with 80" in job.log()
    assert "stops the others" not in job.log()
    steps = job.steps()
    assert steps == list(range(len(steps))), "none done twice, none left out"

    # The first: with it goes the store, and what is left is stopped, so that Slurm can queue it again.
    job.kill_supervisor(0)
    before = len(job.steps())
    trains_on_both(restarts=2, after=before + 20)
    assert "the supervisor of the first node ended with 137" in job.log()
    assert "stops the others, which have no store any more" in job.log()
    assert job.log().count("those of the others ended with 80") == 2

    # Another node than the first: the job goes on without it.
    job.kill_supervisor(1)
    wait_until(partial(is_in_group_of, 1, job.state_dir(0)), DEADLINE_S)
    job.trains(restarts=2)

    (tmp_path / HURRY_FILE).touch()
    end = job.ends()
    assert (end["JobState"], end["ExitCode"]) == ("COMPLETED", "0:0")
    assert "those of the others ended with 137" in job.log()
    assert set(job.steps()) == set(range(STEPS))


RAISES = """
import os
from tests.drill.paced import Task as Paced


class Task(Paced):
    def loss(self, model, batch):
        if os.environ["SLURMD_NODENAME"] == "node0" and int(batch["index"][0]) > 5:
            raise RuntimeError("this step fails here")
        return super().loss(model, batch)
"""


def test_what_halts_the_first_node_is_what_the_job_ends_with(slurm: Slurm, tmp_path: Path) -> None:
    """It counts the failures; to the others they are somebody else's, and they end with 80, as they are told to."""
    job = Job(slurm, tmp_path, num_nodes=2, task="task:Task", supervisor={"same_step_failures": 1})
    (tmp_path / "task.py").write_text(RAISES)
    job.submit()
    end = job.ends()
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "79:0", "0")
    assert "those of the others ended with 80" in job.log()


def test_without_a_job_file(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.run("sbatch", "--parsable", f"--output={tmp_path}/log", str(SCRIPT))
    wait_until(lambda: slurm.show(job)["JobState"] == "FAILED", DEADLINE_S)
    assert slurm.show(job)["ExitCode"] == "64:0"
    assert "usage: sbatch train.sbatch job.toml" in (tmp_path / "log").read_text()
