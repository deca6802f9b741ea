"""The supervisor over processes that play agent and ranks: every hang, every command, every deadline, without torch."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from elastictrain.config.schema import JobConfig
from elastictrain.core.lifecycle import State
from elastictrain.errors import BusyError, HaltError, IllegalTransitionError, StorageError
from elastictrain.protocol import BOARD_FILE, RUNS_DIR, StopBoard
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.supervisor import Ending, Supervisor
from elastictrain.supervisor.team import Assignment
from tests.process.test_supervisor import Kept, ours, until

SLOW_S = 4.0
"""A limit that a busy machine keeps."""


class Played(Incarnation):
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.process.played", str(self.run_dir), str(self.num_ranks)]


@dataclass(frozen=True, slots=True)
class Play:
    """How it went."""

    ending: Ending
    kept: Kept
    state: Path

    def fields(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.kept.events if name == kind]

    @property
    def causes(self) -> list[str]:
        return [fields["cause"] for fields in self.fields("incarnation_ended")]


Script = Callable[[Supervisor, Kept], Awaitable[None]]


def play(
    state: Path,
    *faults: tuple[int, int, str],
    steps: int = 30,
    ranks: int = 2,
    script: Script | None = None,
    stay_up: bool = False,
    plan: dict[str, Any] | None = None,
    **supervisor: Any,
) -> Play:
    """Plays a job to its end."""
    (state / RUNS_DIR).mkdir(parents=True, exist_ok=True)
    plan = {"steps": steps, "faults": [list(fault) for fault in faults], **(plan or {})}
    (state / "plan.json").write_text(json.dumps(plan))
    limits = {"min_step_timeout_s": 1.5, "exit_timeout_s": 1.5, "teardown_timeout_s": 1.0, "backoff_s": 0.05}
    config = JobConfig.model_validate(
        {
            "name": "played",
            "task": "played:Task",
            "train": {"max_steps": steps, "global_batch_size": 4, "micro_batch_size": 2},
            "elastic": {"nproc_per_node": ranks, "fast_restart": False},
            "data": {"shuffle": False},
            "supervisor": {**limits, "startup_timeout_s": SLOW_S, **supervisor},
        }
    )

    def prepare(_assignment: Assignment) -> Incarnation:
        number = len(list((state / RUNS_DIR).iterdir())) + 1
        run_dir = state / RUNS_DIR / f"{number:04d}"
        run_dir.mkdir()
        StopBoard.create(run_dir / BOARD_FILE)
        return Played(run_dir, number, ranks)

    kept = Kept()

    async def scenario() -> Ending:
        made = Supervisor(config, prepare, state_dir=state, sink=kept, stay_up=stay_up)
        running = asyncio.create_task(made.run())
        if script is not None:
            await script(made, kept)
        return await asyncio.wait_for(running, 90)

    ending = asyncio.run(scenario())
    assert not ours(state), "somebody was left behind"
    return Play(ending, kept, state)


def test_nothing_happens(tmp_path: Path) -> None:
    done = play(tmp_path)
    assert done.ending.state is State.COMPLETED
    assert done.causes == ["complete"]
    kinds = [kind for kind in done.kept.kinds() if kind != "progress"]
    assert kinds == [
        "supervisor_started", "incarnation_started", "training_started", "ranks_training", "incarnation_ended",
        "completed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "blamed", "says"),
    [
        ([(1, 10, "stop")], [1], "its process is stopped"),
        ([(0, 10, "sleep")], [0], "it stands still in forward"),
        ([(0, 10, "sleep"), (1, 10, "sleep"), (2, 10, "sleep")], [0, 1, 2], "it stands still in forward"),
        ([(2, -1, "sleep")], [2], "it stands still in init"),
        ([(2, -2, "sleep")], [2], "it has sent no heartbeat"),
    ],
    ids=["stopped", "asleep", "all asleep", "at the start", "before the first heartbeat"],
)
def test_a_hang(tmp_path: Path, faults: list[tuple[int, int, str]], blamed: list[int], says: str) -> None:
    done = play(tmp_path, *faults, ranks=3)
    assert done.ending.state is State.COMPLETED
    (incident,) = done.fields("incident_opened")
    assert (incident["ranks"], incident["why"]) == (blamed, says)
    assert incident["stood_still_s"] - incident["limit_s"] > 0
    assert [fields["rank"] for fields in done.fields("rank_killed")] == blamed
    assert f"rank {blamed[0]} hung: {says}" in done.causes[0]
    assert done.causes[1:] == ["complete"]
    folder = Path(incident["folder"])
    assert {f"stacks-{rank}.txt" for rank in range(3)} <= {path.name for path in folder.iterdir()}
    if says.startswith("it stands still"):
        assert "strike" in (folder / f"stacks-{blamed[0]}.txt").read_text()


def test_a_hang_at_the_end_undoes_nothing(tmp_path: Path) -> None:
    done = play(tmp_path, (1, -3, "sleep"))
    assert done.ending.state is State.COMPLETED
    assert done.causes == ["complete"]
    assert done.fields("incident_opened")[0]["phase"] == "exit"


def test_a_stopped_agent_does_not_hold_up_the_end(tmp_path: Path) -> None:
    done = play(tmp_path, (1, 10, "stop agent"))
    assert done.ending.state is State.COMPLETED


def test_killed_again_and_again_but_getting_on(tmp_path: Path) -> None:
    done = play(tmp_path, *((rank % 2, 5 + rank, "kill") for rank in range(5)), max_failures=1)
    assert done.ending.state is State.COMPLETED
    assert len(done.causes) == 6
    assert all("SIGKILL" in cause for cause in done.causes[:-1])
    assert [fields["delay_s"] for fields in done.fields("restart_planned")] == [0.0] * 5


def test_the_same_step_again_and_again(tmp_path: Path) -> None:
    done = play(tmp_path, (1, 7, "kill"), plan={"always": True})
    assert done.ending.state is State.HALTED
    assert isinstance(done.ending.error, HaltError)
    assert done.ending.error.exit_code == 79
    assert "step 8 fails: 3 times in a row" in done.ending.reason
    assert "samples 28, 29, 30, 31 (epoch 0)" in done.ending.reason
    assert len(done.causes) == 3


@pytest.mark.parametrize("stay_up", [False, True])
def test_never_as_far_as_a_step(tmp_path: Path, stay_up: bool) -> None:
    """A service that never trained has failed to start: it does not wait for a `resume`."""
    done = play(tmp_path, (1, -1, "kill"), plan={"always": True}, max_failures=3, stay_up=stay_up)
    assert done.ending.state is State.HALTED
    assert "4 failures without progress" in done.ending.reason


def test_a_child_that_takes_no_notice_is_ended(tmp_path: Path) -> None:
    play(tmp_path, (0, 3, "child"))  # `play` looks for it


def test_commands(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, kept: Kept) -> None:
        with pytest.raises(BusyError, match="starting"):
            await supervisor.checkpoint(1.0)
        await until(lambda: supervisor.state is State.TRAINING)
        assert await supervisor.checkpoint(10.0) >= 1
        view = supervisor.view(time.monotonic())
        assert (view.state, view.incarnation, view.world_size) == (State.TRAINING, 1, 2)
        assert [rank.device for rank in view.ranks] == ["played", "played"]
        json.dumps(asdict(view))
        await supervisor.restart("to see it work")
        assert supervisor.state is State.RECOVERING
        await until(lambda: supervisor.state is State.TRAINING)
        await supervisor.drain()
        assert supervisor.state is State.DRAINED
        await until(lambda: not ours(tmp_path))
        with pytest.raises(IllegalTransitionError):
            await supervisor.restart("nothing runs")
        await supervisor.resume()
        await until(lambda: supervisor.state is State.TRAINING)
        await supervisor.stop("enough")

    done = play(tmp_path, steps=10**6, script=script)
    assert done.ending.state is State.STOPPED
    assert [fields["reason"] for fields in done.fields("restart_planned")] == ["to see it work"]
    assert len(done.causes) == 3
    assert not done.fields("rank_failed")


def test_a_restart_cuts_a_pause_short(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, kept: Kept) -> None:
        await until(lambda: any(f["delay_s"] > 100 for kind, f in kept.events if kind == "restart_planned"))
        assert supervisor.state is State.RECOVERING
        (tmp_path / "plan.json").write_text(json.dumps({"steps": 30, "faults": []}))
        await supervisor.restart("the cause is gone")

    done = play(
        tmp_path, (1, 7, "kill"), plan={"always": True}, script=script, backoff_s=300.0, max_backoff_s=300.0
    )  # play waits for less than that
    assert done.ending.state is State.COMPLETED
    assert [fields["reason"] for fields in done.fields("restart_planned")][-1] == "the cause is gone"
    assert len(done.causes) == 3


def test_a_snapshot_that_was_asked_for_and_a_group_that_ends(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, kept: Kept) -> None:
        await until(lambda: supervisor.state is State.TRAINING)
        asked = asyncio.create_task(supervisor.checkpoint(60.0))
        await until(lambda: supervisor.state is State.RECOVERING)
        with pytest.raises(StorageError, match="the worker group ended before a snapshot of step"):
            await asked
        await supervisor.stop("enough")

    done = play(tmp_path, (1, 60, "kill"), steps=10**6, script=script, plan={"keeps": False})
    assert done.ending.state is State.STOPPED


def test_a_halt_waits(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, kept: Kept) -> None:
        await until(lambda: supervisor.state is State.HALTED)
        (tmp_path / "plan.json").write_text(json.dumps({"steps": 30, "faults": []}))
        await supervisor.resume()

    done = play(tmp_path, (1, 7, "kill"), plan={"always": True}, script=script, stay_up=True)
    assert done.ending.state is State.COMPLETED
    assert done.ending.error is None


@pytest.mark.parametrize("place", [10, -1])
def test_a_stop_is_in_time(tmp_path: Path, place: int) -> None:
    """Also with a rank that hangs, in a step or before the first."""
    took_s = 0.0

    async def script(supervisor: Supervisor, kept: Kept) -> None:
        nonlocal took_s
        await until((tmp_path / "struck-0").exists)
        began_s = time.monotonic()
        await supervisor.stop("enough")
        await until(lambda: supervisor.state is State.STOPPED)
        took_s = time.monotonic() - began_s

    done = play(tmp_path, (1, place, "sleep"), steps=10**6, script=script, min_step_timeout_s=60.0, stop_timeout_s=2.5)
    assert done.ending.state is State.STOPPED
    assert done.ending.error is None
    assert took_s < 6.0
    assert not done.fields("incident_opened")
