"""An evaluation that was interrupted is done again when the run goes on from its step; one that was not, is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.cli.state_dir import StartOptions
from elastictrain.core.window import EpochTail, WindowPlan
from elastictrain.training.metrics_tail import BLOCK_BYTES
from elastictrain.training.past_evaluation import find_evaluation
from tests.process.helpers import Trained, read_metrics, wait_until
from tests.process.resume_helpers import assert_same_trace, go, memory_of

TASK = "tests.process.faulty:Task"
JOB: dict[str, Any] = {"task": TASK, "data": {"shuffle": False}, "train_section": {"max_steps": 6}}


BARE: dict[str, Any] = {"expect_success": False}


def killing(folder: Path, kind: str, *, evaluated: bool = False) -> Callable[[list[Any]], None]:
    """Kills the ranks where they stand still, once the snapshot of step 3 is complete, and, if so, its evaluation."""

    def kill(ranks: list[Any]) -> None:
        if kind != "kill":
            return
        wait_until(lambda: any(folder.glob("struck-*")))
        wait_until(lambda: any(s.global_step == 3 for s in memory_of(folder).snapshots()))
        wait_until(lambda: not evaluated or read_metrics(folder / "state", "eval"))
        for rank in ranks:
            rank.kill()

    return kill


def start(folder: Path, faults: list[Any], world_size: int = 1, *, expect_success: bool = True, **more: Any) -> Trained:
    folder.mkdir(exist_ok=True)
    params = {"faults": faults, "marks": str(folder), "eval_length": 8}
    job = {"eval": {"every_steps": 3}, **JOB, **more}
    return go(folder, world_size, params=params, expect_success=expect_success, **job)


def evaluations(run: Trained) -> list[tuple[int, str]]:
    return [(line["step"], repr(line["values"])) for line in run.metrics("eval")]


@pytest.mark.parametrize("kind", ["kill", "raise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_interrupted(tmp_path: Path, kind: str, world_size: int) -> None:
    """In the middle of the evaluation of step 3, after its snapshot; then, where the next start goes on from it, it is
    done first of all. The values are those of a run that nothing happened to."""
    whole = start(tmp_path / "whole", [], world_size)
    last = world_size - 1
    fault = ["metrics", "sleep" if kind == "kill" else kind, last, 4 * last + 2]
    cut = start(tmp_path / "cut", [fault], world_size, while_running=killing(tmp_path / "cut", kind), **BARE)
    assert any(cut.codes)
    assert evaluations(cut) == []
    run = start(tmp_path / "cut", [], world_size)
    assert run.events("restored")[0]["global_step"] == 3
    assert [event["step"] for event in run.events("evaluated")] == [3, 6]
    assert evaluations(run) == evaluations(whole)
    assert [step for step, _ in evaluations(run)] == [3, 6]
    assert_same_trace(run, whole)


def test_done_before_the_failure(tmp_path: Path) -> None:
    """Killed in the step after it: the snapshot is of the evaluated step, and the evaluation is not done again."""
    whole = start(tmp_path / "whole", [])
    folder = tmp_path / "cut"
    cut = start(folder, [["loss", "sleep", 0, 3]], while_running=killing(folder, "kill", evaluated=True), **BARE)
    assert [step for step, _ in evaluations(cut)] == [3]
    run = start(tmp_path / "cut", [])
    assert run.events("restored")[0]["global_step"] == 3
    assert evaluations(run) == evaluations(whole)


def test_at_the_end(tmp_path: Path) -> None:
    """Interrupted, it is done at the next start; once it is there, no further start repeats it, and all report it."""
    only_at_end = {"eval": {"at_end": True}}
    cut = start(tmp_path / "cut", [["metrics", "kill", 0, 4]], expect_success=False, **only_at_end)
    assert evaluations(cut) == []
    summaries = []
    for _ in range(2):
        run = start(tmp_path / "cut", [], **only_at_end)
        assert [step for step, _ in evaluations(run)] == [6]
        assert run.outcome is not None
        summaries.append(run.outcome["summary"]["evaluation"])
    assert summaries[0] == summaries[1]
    assert summaries[0].keys() == {"eval/loss"}


def test_by_epochs(tmp_path: Path) -> None:
    """Six samples an epoch: steps 3 and 6 of four samples end epochs 2 and 4."""
    options: dict[str, Any] = {"task": "tests.process.resume_tasks:Resumable", "eval": {"every_epochs": 2}}
    params = {"length": 6, "eval_length": 3}
    whole = go(tmp_path / "whole", params=params, train_section={"max_steps": 6}, **options)
    assert [step for step, _ in evaluations(whole)] == [3, 6]
    cut = tmp_path / "cut"
    go(cut, params=params, train_section={"max_steps": 3}, **{**options, "eval": {"at_end": False}})
    run = go(cut, params=params, train_section={"max_steps": 6}, **options)
    assert evaluations(run) == evaluations(whole), "that of step 3 was due, and had not been done"


def test_a_fresh_run_in_the_same_folder_has_evaluated_nothing(tmp_path: Path) -> None:
    start(tmp_path, [])
    fresh = StartOptions(fresh=True)
    cut = start(tmp_path, [["metrics", "kill", 0, 4]], options=fresh, expect_success=False)
    assert len(evaluations(cut)) == 2
    run = start(tmp_path, [])
    assert [step for step, _ in evaluations(run)] == [3, 6, 3, 6]


def line(step: int, run_id: str = "0badcafe", kind: str = "eval") -> str:
    return json.dumps({"kind": kind, "step": step, "run_id": run_id, "values": {"eval/loss": step / 10, "nan": "NaN"}})


def test_lines_are_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert find_evaluation(path, "0badcafe", 1) is None
    path.write_text("")
    assert find_evaluation(path, "0badcafe", 1) is None
    filler = line(9, kind="step") + "\n"
    lines = [
        line(10),
        line(20),
        filler * (BLOCK_BYTES // len(filler) + 9),
        line(30),
        line(20, "another0"),
        '{"kind": "ev',
    ]
    path.write_text("\n".join(lines))
    found = find_evaluation(path, "0badcafe", 20)
    assert found is not None
    assert found["eval/loss"] == 2.0
    assert found["nan"] != found["nan"]
    assert find_evaluation(path, "0badcafe", 10) is not None
    assert find_evaluation(path, "0badcafe", 30) is not None
    assert find_evaluation(path, "0badcafe", 25) is None


@given(st.integers(1, 40), st.integers(1, 10), st.sampled_from(EpochTail), st.integers(1, 60))
def test_where_the_last_window_began(length: int, batch: int, tail: EpochTail, num_steps: int) -> None:
    """For the windows of a run: as many epochs lay behind its beginning as behind the position before."""
    if tail is EpochTail.DROP and length < batch:
        return
    plan = WindowPlan(length, batch, 1, tail)
    position = 0
    for _ in range(num_steps):
        window = plan.window_at(position)
        assert plan.start_of(window.stop) == window.start
        assert plan.epochs_done(window.start) == plan.epochs_done(position)
        position = window.stop
