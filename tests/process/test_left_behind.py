"""Ranks whose agent has died, or that the agent stops since another has failed: they keep their state, and are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastictrain import cgroups
from elastictrain.cli.state_dir import StateDir
from elastictrain.config import load_job
from elastictrain.core.phases import Phase
from elastictrain.heartbeat import Heartbeat, heartbeat_path, read_heartbeat
from elastictrain.protocol import OUTCOME_FILE, read_error_reports
from tests.process.helpers import ROOT, all_gone, descendants, wait_until, write_job
from tests.process.resume_helpers import assert_same_future, go, memory_of

TASK = "tests.process.parting_tasks:Grieved"
SLOW = "params.pause_s=0.1"
JOB: dict[str, Any] = {
    "params": {"model": "mixed", "scheduler": "cosine"},
    "train_section": {"max_steps": 12},
    "checkpoint": {"every_steps": 1000},
}


@dataclass
class Group:
    """Ranks under an agent of their own, without a supervisor."""

    folder: Path
    run_dir: Path
    agent: subprocess.Popen[bytes]

    def beat(self, rank: int) -> Heartbeat | None:
        return read_heartbeat(heartbeat_path(self.run_dir, rank))

    def is_in_step(self, step: int) -> bool:
        """All ranks have committed so many steps."""
        beats = [self.beat(rank) for rank in range(2)]
        return all(beat is not None and beat.first_step >= 0 and beat.step >= step for beat in beats)

    @property
    def furthest(self) -> int:
        return max(beat.step for rank in range(2) if (beat := self.beat(rank)) is not None)

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of the group, loaders included; the persister has a session of its own, and goes on."""
        return [p for p in descendants(self.agent.pid) if "elastictrain.checkpoint.persister" not in p.cmdline()]


@contextmanager
def started(folder: Path, *overrides: str, **job: Any) -> Iterator[Group]:
    """Starts the job of `go` under a real agent; whatever is left at the end is killed."""
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    write_job(
        folder,
        TASK,
        params=job.get("params", JOB["params"]),
        train={"global_batch_size": 4, "micro_batch_size": 2, **JOB["train_section"]},
        checkpoint={"memory_path": str(folder / "shm"), "keep_last": 2, **JOB["checkpoint"]},
        metrics={"every_steps": 1},
        supervisor={"teardown_timeout_s": 10.0},
    )
    loaded = load_job(str(folder), ["elastic.nproc_per_node=2", *overrides])
    incarnation = StateDir(folder / "state").prepare(loaded, None)
    output = (incarnation.run_dir / "output.txt").open("wb")
    agent = subprocess.Popen(
        [sys.executable, "-m", "elastictrain.training.agent", str(incarnation.run_dir)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RECORD_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output.close()
    children: list[psutil.Process] = []
    group = Group(folder, incarnation.run_dir, agent)
    try:
        wait_until(lambda: group.is_in_step(0))
        children = group.ranks
        yield group
    finally:
        agent.kill()
        agent.wait()
        wait_until(lambda: not cgroups.end(incarnation.run_dir) and cgroups.group_of(incarnation.run_dir) is None)
        for child in children:
            if child.is_running():
                child.kill()


def waits_for_long(beat: Heartbeat | None) -> bool:
    """It waits for the others, for longer than any step of these jobs takes."""
    return beat is not None and beat.phase is Phase.REDUCE and time.monotonic_ns() - beat.moved_ns > 1_500_000_000


def newest_in_memory(folder: Path) -> int:
    return memory_of(folder).snapshots()[0].global_step


def test_the_agent_is_killed(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    with started(cut, SLOW, "data.num_workers=1") as group:
        wait_until(lambda: group.is_in_step(3))
        ranks = group.ranks
        assert len(ranks) == 4, "two ranks, a loader process each"
        group.agent.kill()
        wait_until(lambda: all_gone(ranks))
        step = group.furthest
        reports = read_error_reports(group.run_dir)
    assert [(report.secondary, report.exit_code) for report in reports] == [(True, 70), (True, 70)]
    assert any("agent" in report.what for report in reports)
    assert max(report.kept_step or 0 for report in reports) == step
    assert newest_in_memory(cut) == step >= 3
    run = go(cut, 2, task=TASK, **JOB)
    whole = go(tmp_path / "whole", 2, task=TASK, **JOB)
    assert run.events("restored")[0]["global_step"] == step
    assert_same_future(run, cut, whole, tmp_path / "whole")


@pytest.mark.parametrize("place", [pytest.param("item", marks=pytest.mark.soak), "backward"])
def test_the_agent_is_killed_while_a_rank_hangs(tmp_path: Path, place: str) -> None:
    """One rank sleeps for ever, the other waits for it in a collective: a signal wakes the one, its end the other."""
    number = 9 if place == "item" else 3
    with started(tmp_path, f'params.grief=["{place}", "sleep", [1], {number}]') as group:
        wait_until(lambda: waits_for_long(group.beat(0)))
        ranks = group.ranks
        group.agent.kill()
        wait_until(lambda: all_gone(ranks))
        step = group.furthest  # it may have got on until it was told
        reports = {report.rank: report for report in read_error_reports(group.run_dir)}
    assert "the agent of this rank ended" in reports[1].what
    assert {report.kept_step for report in reports.values()} == {step}
    assert newest_in_memory(tmp_path) == step


def test_the_agent_stops_the_group(tmp_path: Path) -> None:
    """A rank fails while the other sleeps for ever, in no collective that could fail: the agent's SIGTERM is enough."""
    with started(tmp_path, 'params.grief=["loss", "sleep", [1], 3]') as group:
        wait_until(lambda: waits_for_long(group.beat(0)))
        rank_zero = group.beat(0)
        assert rank_zero is not None
        ranks = group.ranks
        os.kill(rank_zero.pid, signal.SIGKILL)
        assert group.agent.wait(60) == 1
        wait_until(lambda: all_gone(ranks))
        (report,) = read_error_reports(group.run_dir)
    assert (report.rank, report.secondary) == (1, True)
    assert "another rank of this node ended" in report.what
    assert report.kept_step == newest_in_memory(tmp_path) == group.furthest


def test_sigterm_by_a_user_finishes_the_step(tmp_path: Path) -> None:
    """The agent lives and nobody has failed: the run stops in order."""
    with started(tmp_path, SLOW) as group:
        wait_until(lambda: group.is_in_step(2))
        beat = group.beat(1)
        assert beat is not None
        os.kill(beat.pid, signal.SIGTERM)
        assert group.agent.wait(60) == 0
        assert read_error_reports(group.run_dir) == []
        assert group.furthest >= 2


def test_sigterm_to_everybody_is_sigterm_once(tmp_path: Path) -> None:
    """Who stops a whole control group tells agent and ranks: an agent that passed it on would be a second word, which
    means not to wait for storage."""
    with started(tmp_path, SLOW) as group:
        wait_until(lambda: group.is_in_step(2))
        for pid in [group.agent.pid, *(process.pid for process in group.ranks)]:
            os.kill(pid, signal.SIGTERM)
        assert group.agent.wait(60) == 0
        assert read_error_reports(group.run_dir) == []
        outcome = json.loads((group.run_dir / OUTCOME_FILE).read_text())
        assert outcome["reason"] == f"preempted (SIGTERM), snapshot of step {group.furthest} durable"


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_a_rank_that_holds_the_interpreter_lock_is_gone_as_well(tmp_path: Path) -> None:
    """Python code cannot run in it any more: the kernel's alarm ends it."""
    with started(tmp_path, 'params.grief=["loss", "lock", [1], 3]') as group:
        wait_until(lambda: waits_for_long(group.beat(0)))
        ranks = group.ranks
        group.agent.kill()
        wait_until(lambda: all_gone(ranks), 90.0)
        step = group.furthest
    assert newest_in_memory(tmp_path) == step, "the other kept it"
