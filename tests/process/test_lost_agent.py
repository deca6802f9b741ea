"""Whose failure it is: of an agent without ranks that ends, or hangs; of ends that every node blames on others."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.config.schema import JobConfig
from elastictrain.core.lifecycle import State
from elastictrain.procs import read_stat
from elastictrain.protocol import BOARD_FILE, EXITS_FILE, RUNS_DIR, ErrorReport, Group, RunSpec, StopBoard, write_json
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.supervisor import Supervisor
from elastictrain.supervisor.team import Alone, Assignment
from tests.process.test_supervisor import Kept

CONFIG = JobConfig.model_validate(
    {
        "name": "played",
        "task": "played:Task",
        "train": {"max_steps": 5, "global_batch_size": 4, "micro_batch_size": 2},
        "elastic": {"nproc_per_node": 1, "fast_restart": False},
        "supervisor": {"backoff_s": 0.05},
    }
)


class Others(Alone):
    """Other nodes, of which all that matters here is whether one has ended."""

    def __init__(self, have_ended: bool) -> None:
        self._have_ended = have_ended

    async def others_ended(self) -> bool:
        return self._have_ended


class FirstFails(Incarnation):
    """The first agent ends with exit code 1, as torch's does when its store is gone; the next trains."""

    def command(self) -> list[str]:
        if self.number == 1:
            return [sys.executable, "-c", "raise SystemExit(1)"]
        return [sys.executable, "-m", "tests.process.played", str(self.run_dir), "1"]


@pytest.mark.parametrize("others_ended", [True, False])
def test_whose_failure_it_is(tmp_path: Path, others_ended: bool) -> None:
    (tmp_path / RUNS_DIR).mkdir()
    (tmp_path / "plan.json").write_text(json.dumps({"steps": 5, "faults": []}))
    kept = Kept()

    def prepare(_assignment: Assignment) -> Incarnation:
        number = len(list((tmp_path / RUNS_DIR).iterdir())) + 1
        run_dir = tmp_path / RUNS_DIR / f"{number:04d}"
        run_dir.mkdir()
        StopBoard.create(run_dir / BOARD_FILE)
        group = Group("first", node=1, num_nodes=2, world_size=2) if number == 1 else None
        return FirstFails(run_dir, number, 1, group)

    supervisor = Supervisor(CONFIG, prepare, state_dir=tmp_path, team=Others(others_ended), sink=kept)
    ending = asyncio.run(supervisor.run())
    assert ending.state is State.COMPLETED
    ends = [fields for kind, fields in kept.events if kind == "incarnation_ended"]
    assert [end["kind"] for end in ends] == ["" if others_ended else "agent", ""]
    assert "on another node" in ends[0]["cause"] or not others_ended


class NeverMeets(Incarnation):
    """Ends as where no rank reaches any other: each takes it for another one's failure."""

    def command(self) -> list[str]:
        report = ErrorReport(0, "WorkerFailedError", "a collective failed: no route", "", 70, 0, secondary=True)
        report.write(self.run_dir)
        write_json(self.run_dir / EXITS_FILE, {0: {"pid": 1, "exit_code": 70}})
        return [sys.executable, "-c", "raise SystemExit(1)"]


def test_what_every_node_blames_on_another_does_not_go_on_for_ever(tmp_path: Path) -> None:
    kept = Kept()
    config = CONFIG.model_copy(
        update={"supervisor": CONFIG.supervisor.model_copy(update={"max_failures": 2, "same_step_failures": 100})}
    )

    def prepare(_assignment: Assignment) -> Incarnation:
        number = kept.kinds().count("incarnation_ended") + 1
        run_dir = tmp_path / RUNS_DIR / f"{number:04d}"
        run_dir.mkdir(parents=True)
        StopBoard.create(run_dir / BOARD_FILE)
        return NeverMeets(run_dir, number, 1, Group("nobody", node=1, num_nodes=2, world_size=2))

    supervisor = Supervisor(config, prepare, state_dir=tmp_path, team=Others(True), sink=kept)
    ending = asyncio.run(supervisor.run())
    assert ending.state is State.HALTED
    kinds = [fields["kind"] for kind, fields in kept.events if kind == "incarnation_ended"]
    assert kinds == [""] * 4, "one more than another node with failures of its own could have had"
    assert "4 worker groups in a row" in ending.reason
    assert ending.error is not None
    assert "GLOO_SOCKET_IFNAME" in ending.error.hint


class FirstHangs(Incarnation):
    """The first agent is ours; the next trains."""

    def command(self) -> list[str] | None:
        if self.number == 1:
            return None
        return [sys.executable, "-m", "tests.process.played", str(self.run_dir), "1"]


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """The kernel takes connections, and nobody answers: as where the agent that serves a store is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_an_agent_that_is_stuck_in_a_call_of_the_store_is_killed_after_its_limit(
    tmp_path: Path, silent: socket.socket
) -> None:
    """torch knows no limit for it, and a signal that asks is not heard in there."""
    (tmp_path / RUNS_DIR).mkdir()
    (tmp_path / "plan.json").write_text(json.dumps({"steps": 5, "faults": []}))
    kept = Kept()
    limits = CONFIG.supervisor.model_copy(update={"startup_timeout_s": 10.0})
    config = CONFIG.model_copy(update={"supervisor": limits})
    incarnations: list[Incarnation] = []

    def prepare(_assignment: Assignment) -> Incarnation:
        number = len(incarnations) + 1
        run_dir = tmp_path / RUNS_DIR / f"{number:04d}"
        run_dir.mkdir()
        StopBoard.create(run_dir / BOARD_FILE)
        group = Group("first", node=1, num_nodes=2, first_rank=1, world_size=2, store_port=silent.getsockname()[1])
        if number == 1:
            RunSpec(
                incarnation=1,
                group=group,
                state_dir=str(tmp_path),
                job_dir=None,
                config=config.model_dump(mode="json"),
                kept_global_batch_size=None,
                run_id="0" * 8,
                source=None,
                allowed_differences=[],
                mean_time_between_failures_s=3600.0,
            ).write(run_dir)
        incarnations.append(FirstHangs(run_dir, number, 1, group if number == 1 else None))
        return incarnations[-1]

    supervisor = Supervisor(config, prepare, state_dir=tmp_path, team=Others(have_ended=False), sink=kept)
    ending = asyncio.run(supervisor.run())
    assert ending.state is State.COMPLETED
    ends = [fields for kind, fields in kept.events if kind == "incarnation_ended"]
    assert "no heartbeat" in ends[0]["cause"], ends
    assert len(ends) == 2
    pid = incarnations[0].agent_pid
    assert pid is not None
    stat = read_stat(pid)
    assert stat is None or stat.state == "Z"
