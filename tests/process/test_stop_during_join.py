"""A stop, or a drain, while a node joins: no worker group follows, so the state must not be left in memory alone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elastictrain.core.lifecycle import State
from elastictrain.protocol import BOARD_FILE, RUNS_DIR, Group, StopBoard
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.supervisor import Supervisor
from elastictrain.supervisor.team import Assignment
from tests.process.test_lost_agent import CONFIG, Others
from tests.process.test_supervisor import Kept


class Played(Incarnation):
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.process.played", str(self.run_dir), "1"]


async def stop(supervisor: Supervisor) -> None:
    supervisor.stop_with_all("enough")


async def drain(supervisor: Supervisor) -> None:
    await supervisor.drain()
    await supervisor.stop("enough")


@pytest.mark.parametrize("ask", [stop, drain])
def test_it_takes_back_that_the_next_worker_group_finds_the_state_in_memory(
    tmp_path: Path, ask: Callable[[Supervisor], Awaitable[None]]
) -> None:
    run_dir = tmp_path / RUNS_DIR / "0001"
    run_dir.mkdir(parents=True)
    (tmp_path / "plan.json").write_text(json.dumps({"steps": 100_000, "faults": []}))
    StopBoard.create(run_dir / BOARD_FILE)
    board = StopBoard(run_dir / BOARD_FILE)
    words: list[bool] = []
    tasks: list[asyncio.Task[None]] = []

    async def join_and_ask() -> None:
        supervisor.regroup("C joins")
        words.append(board.is_passing_on)
        await ask(supervisor)

    class Joined(Kept):
        def append(self, kind: str, fields: Any) -> None:
            super().append(kind, fields)
            if kind == "ranks_training":
                tasks.append(asyncio.get_running_loop().create_task(join_and_ask()))

    def prepare(_assignment: Assignment) -> Incarnation:
        return Played(run_dir, 1, 1, Group("first"))

    supervisor = Supervisor(CONFIG, prepare, state_dir=tmp_path, team=Others(False), sink=Joined())
    ending = asyncio.run(supervisor.run())
    assert ending.state is State.STOPPED
    assert words == [True]
    assert board.asked
    assert not board.is_passing_on
    board.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_stop_that_was_heard_from_another_node_is_no_first_one(tmp_path: Path, times: int) -> None:
    """Who stops the job on all nodes, one after the other, has asked each of them once."""
    run_dir = tmp_path / RUNS_DIR / "0001"
    run_dir.mkdir(parents=True)
    (tmp_path / "plan.json").write_text(json.dumps({"steps": 100_000, "faults": []}))
    StopBoard.create(run_dir / BOARD_FILE)
    board = StopBoard(run_dir / BOARD_FILE)
    hurries: list[bool] = []
    tasks: list[asyncio.Task[None]] = []

    async def stop_everywhere() -> None:
        supervisor.stop_with_all("enough")
        for _ in range(times):
            await supervisor.stop("enough")
            hurries.append(board.hurry)

    class Told(Kept):
        def append(self, kind: str, fields: Any) -> None:
            super().append(kind, fields)
            if kind == "ranks_training":
                tasks.append(asyncio.get_running_loop().create_task(stop_everywhere()))

    def prepare(_assignment: Assignment) -> Incarnation:
        return Played(run_dir, 1, 1, Group("first"))

    supervisor = Supervisor(CONFIG, prepare, state_dir=tmp_path, team=Others(False), sink=Told())
    ending = asyncio.run(supervisor.run())
    assert ending.state is State.STOPPED
    assert hurries == [False, True][:times]
    board.close()
