"""Snapshots at failure: whatever ends a rank, no committed step is lost, and the numbers are those of a quiet run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint.faults import POINTS
from elastictrain.checkpoint.format import MANIFEST_FILE
from elastictrain.heartbeat import heartbeat_paths, read_heartbeat
from elastictrain.protocol import read_error_reports
from tests.process.helpers import DEADLINE_S, Trained, start_cli, wait_until
from tests.process.resume_helpers import KILLED, assert_same_future, go, memory_of, steps_in, store_of

TASK = "tests.process.parting_tasks:Grieved"
NEVER = {"every_steps": 1000}
EVERYTHING: dict[str, Any] = {
    "params": {"model": "mixed", "scheduler": "cosine", "infinite": [3]},
    "train_section": {"max_steps": 12, "precision": "fp16"},
    "scaler": {"init_scale": 1024.0, "growth_interval": 3},
    "model": {"ema_decay": 0.9},
}
"""BatchNorm and dropout, float16 with a scale that grows and shrinks, a scheduler, an average, skipped updates."""


def grieve(
    folder: Path,
    *grief: Any,
    world_size: int = 2,
    fault: str = "",
    loses_memory: bool = False,
    every_steps: int = 1,
    **options: Any,
) -> Trained:
    """A life that comes to grief; it reports metrics every so many steps."""
    overrides = [
        f"metrics.every_steps={every_steps}",
        f"params.grief={list(grief)!r}".replace("'", '"'),
        f"params.fault={fault!r}",
        f"params.lost={str(folder / 'shm') if loses_memory else ''!r}",
    ]
    options.setdefault("checkpoint", NEVER)
    return go(folder, world_size, task=TASK, overrides=overrides, expect_success=False, **options)


def live(folder: Path, world_size: int = 2, **options: Any) -> Trained:
    options.setdefault("checkpoint", NEVER)
    return go(folder, world_size, task=TASK, **options)


def newest_in_memory(folder: Path) -> int:
    return memory_of(folder).snapshots()[0].global_step


def began_at(run: Trained) -> int:
    (event,) = run.events("restored")
    assert event["from_tier"] == "memory"
    step: int = event["global_step"]
    return step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return live(folder, **EVERYTHING), folder


@pytest.mark.parametrize(
    "griefs",
    [
        # (place, kind, ranks, call): steps that this life has committed on a rank that survives; None where the
        # number of calls does not tell: a skipped update is no call of "update", a first batch is looked at ahead.
        [
            (("loss", "kill", [0], 2), 1),
            (("loss", "raise", [1], 3), 2),
            (("backward", "kill", [1], 2), 1),
            (("update", "kill", [0], 1), None),
            (("item", "raise", [0], 5), None),
        ],
        [
            (("loss", "raise", [0], 3), 2),
            (("loss", "kill", [1], 2), 1),
            (("backward", "raise", [0], 2), 1),
            (("update", "raise", [1], 2), None),
            (("item", "raise", [1], 4), 1),
        ],
    ],
    ids=["kill-first", "raise-first"],
)
def test_no_step_is_lost_and_no_bit(
    tmp_path: Path, undisturbed: tuple[Trained, Path], griefs: list[tuple[tuple[Any, ...], int | None]]
) -> None:
    step = 0
    for grief, num_committed in griefs:
        run = grieve(tmp_path, *grief, **EVERYTHING)
        assert 0 not in run.codes, run.output
        if step:
            assert began_at(run) == step
        furthest = max(report.step for report in run.errors)
        if num_committed is not None:
            assert furthest == step + num_committed
        assert furthest > step
        step = furthest
        assert step in [report.kept_step for report in run.errors], run.output
        assert newest_in_memory(tmp_path) == step, run.output
    run = live(tmp_path, **EVERYTHING)
    assert began_at(run) == step
    assert_same_future(run, tmp_path, *undisturbed)


@pytest.mark.parametrize("place", ["eval_data", "loss", "backward"])
def test_what_was_restored_outlives_the_memory_that_it_was_in(
    tmp_path: Path, undisturbed: tuple[Trained, Path], place: str
) -> None:
    """A node that joins has its state from another, which alone has it in memory. When that one loses its power before
    they have done a step together, whoever is left keeps what it was given."""
    run = grieve(tmp_path, "loss", "raise", [1], 3, **EVERYTHING)
    assert newest_in_memory(tmp_path) == 2, run.output
    run = grieve(tmp_path, place, "kill", [0], 1, loses_memory=True, **EVERYTHING)
    (event,) = run.events("snapshot_at_failure", rank=1)
    assert (event["at_step"], event["is_ours"]) == (2, True)
    assert [report.kept_step for report in run.errors] == [2]
    run = live(tmp_path, **EVERYTHING)
    assert began_at(run) == 2
    assert_same_future(run, tmp_path, *undisturbed)


def test_a_stop_before_the_first_step_keeps_what_was_restored(tmp_path: Path) -> None:
    """The supervisor has the ranks leave, rather than end at once, where they have something to keep."""
    run = grieve(tmp_path, "loss", "raise", [1], 3)
    assert newest_in_memory(tmp_path) == 2, run.output
    overrides = ["--set", "elastic.nproc_per_node=2", "--set", 'params.grief=["eval_data", "sleep", [0, 1], 1]']
    run_dir = tmp_path / "state" / "runs" / "0002"

    def both_restored() -> bool:
        beats = [read_heartbeat(path) for path in heartbeat_paths(run_dir).values()]
        return [beat.step for beat in beats if beat is not None] == [2, 2]

    with start_cli("run", tmp_path / "job.toml", "--state-dir", tmp_path / "state", *overrides) as process:
        wait_until(both_restored)
        for manifest in (tmp_path / "shm").rglob(MANIFEST_FILE):
            manifest.unlink()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert [report.kept_step for report in read_error_reports(run_dir)].count(2) >= 1
    assert steps_in(store_of(tmp_path))[0] == 2, "no worker group follows: the supervisor has it made durable"
    assert not memory_of(tmp_path).snapshots()


def test_rows_that_the_first_forward_pass_has_rescaled(tmp_path: Path) -> None:
    """They are kept as they were given."""
    options: dict[str, Any] = {"params": {"model": "embedded"}, "train_section": {"max_steps": 5}}
    whole = live(tmp_path / "whole", 1, **options)
    cut = tmp_path / "cut"
    grieve(cut, "loss", "raise", [0], 5, world_size=1, **options)
    run = grieve(cut, "loss", "raise", [0], 2, world_size=1, loses_memory=True, **options)
    assert [event["at_step"] for event in run.events("snapshot_at_failure")] == [2], run.output
    run = live(cut, 1, **options)
    assert began_at(run) == 2
    assert_same_future(run, cut, whole, tmp_path / "whole")


@pytest.mark.parametrize("place", ["eval_data", "loss"])
def test_the_begin_of_a_run_needs_no_keeping(tmp_path: Path, place: str) -> None:
    run = grieve(tmp_path, place, "raise", [0, 1], 1)
    assert [report.kept_step for report in run.errors] == [None, None]
    assert run.events("snapshot_at_failure") == run.events("snapshot_at_failure", rank=1) == []
    assert memory_of(tmp_path).snapshots() == []


def test_what_is_durable_needs_no_keeping(tmp_path: Path) -> None:
    train_section = {"max_steps": 3}
    live(tmp_path, train_section=train_section)
    assert steps_in(store_of(tmp_path)) == [3]
    run = grieve(tmp_path, "loss", "raise", [0, 1], 1, train_section={"max_steps": 6})
    assert [event["from_tier"] for event in run.events("restored")] == ["durable"]
    assert [report.kept_step for report in run.errors] == [None, None]
    assert memory_of(tmp_path).snapshots() == []


@pytest.mark.parametrize("kind", ["embedded", "extra_state", "complex64"])
@pytest.mark.parametrize("own_state", ["", "good"])
def test_what_a_forward_pass_has_moved(tmp_path: Path, kind: str, own_state: str) -> None:
    """In the step in flight two of three microbatches have moved what is kept."""
    options: dict[str, Any] = {
        "params": {"model": kind, "own_state": own_state},
        "train_section": {"max_steps": 5, "global_batch_size": 6},
    }
    whole = live(tmp_path / "whole", 1, **options)
    run = grieve(tmp_path / "cut", "loss", "raise", [0], 8, world_size=1, **options)
    assert newest_in_memory(tmp_path / "cut") == 2, run.output
    run = live(tmp_path / "cut", 1, **options)
    assert began_at(run) == 2
    assert_same_future(run, tmp_path / "cut", whole, tmp_path / "whole")


def test_every_step_has_its_line(tmp_path: Path) -> None:
    """Also those since the last report: the loss is that of the rank that wrote it, and says so."""
    run = grieve(tmp_path, "loss", "kill", [0], 5, every_steps=3, train_section={"max_steps": 6})
    lines = {line["step"]: line for line in run.metrics()}
    assert list(lines) == [1, 2, 3, 4]
    assert [line.get("partial", False) for line in lines.values()] == [False, False, False, True]
    run = grieve(tmp_path, "loss", "raise", [0], 4, world_size=1, every_steps=3)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert "partial" not in run.metrics()[-1], "one rank knows the whole loss"


def test_lines_that_a_killed_rank_had_not_got_to_are_written_by_another(tmp_path: Path) -> None:
    """They were reported, so every rank knows them in full; nobody does those steps again."""
    params = {"lines_from": 3}
    run = grieve(tmp_path, "loss", "kill", [0], 5, every_steps=2, train_section={"max_steps": 6}, params=params)
    assert newest_in_memory(tmp_path) == 4, run.output
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    assert not any("partial" in line for line in run.metrics())


@pytest.mark.parametrize("behind", [0, pytest.param(1, marks=pytest.mark.long)])
def test_of_two_ranks_that_are_a_step_apart_the_one_ahead_counts(tmp_path: Path, behind: int) -> None:
    """One fails with the third reduction in its hands; the other commits it, and fails in the fourth. Both live, and
    keep what they have, the one that is behind first."""
    options: dict[str, Any] = {"train_section": {"max_steps": 6}}
    whole = live(tmp_path / "whole", **options)
    cut = tmp_path / "cut"
    run = grieve(cut, "reduced", "raise", [behind], 3, **options)
    ahead = 1 - behind
    assert {report.rank: (report.step, report.kept_step) for report in run.errors} == {behind: (2, 2), ahead: (3, 3)}
    kept = [run.events("snapshot_at_failure", rank=rank)[0] for rank in (behind, ahead)]
    assert [(event["at_step"], event["is_ours"]) for event in kept] == [(2, True), (3, True)]
    assert [snapshot.global_step for snapshot in memory_of(cut).snapshots()] == [3, 2]
    run = live(cut, **options)
    assert began_at(run) == 3
    assert_same_future(run, cut, whole, tmp_path / "whole")


def test_all_ranks_at_once(tmp_path: Path) -> None:
    """Nobody is left to keep anything: the last regular snapshot counts."""
    run = grieve(tmp_path, "loss", "kill", [0, 1], 7, checkpoint={"every_steps": 2})
    assert run.codes == [KILLED, KILLED]
    assert run.errors == []
    newest = newest_in_memory(tmp_path)
    assert newest in (4, 6), "that of step 4 is complete before the next begins; whether the next one was is chance"
    assert began_at(live(tmp_path, train_section={"max_steps": 7})) == newest


def test_it_becomes_durable(tmp_path: Path) -> None:
    """The stand-in has no persister; the next life has, even if it does not get far."""
    run = grieve(tmp_path, "loss", "kill", [0], 2)
    (event,) = run.events("snapshot_at_failure", rank=1)
    assert (event["at_step"], event["is_ours"]) == (1, True)
    run = grieve(tmp_path, "loss", "raise", [0, 1], 1)
    assert run.events("snapshot_at_failure") == [], "nothing has been committed that was not kept"
    wait_until(lambda: 1 in steps_in(store_of(tmp_path)))


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("memory.")])
def test_killed_while_writing(tmp_path: Path, point: str) -> None:
    options: dict[str, Any] = {"params": {"model": "mixed"}, "train_section": {"max_steps": 6}}
    grieve(tmp_path, "loss", "raise", [0], 5, world_size=1, **options)
    assert newest_in_memory(tmp_path) == 2
    run = grieve(tmp_path, "loss", "raise", [0], 5, world_size=1, fault=f"{point}:1:kill", **options)
    assert run.codes == [KILLED]
    assert ["struck" in report.what for report in run.errors] == [True], "the cause is known all the same"
    assert run.errors[0].kept_step is None
    assert began_at(live(tmp_path, 1, **options)) == (4 if point == "memory.committed" else 2)


def test_another_rank_finishes_what_a_killed_one_began(tmp_path: Path) -> None:
    run = grieve(tmp_path, "loss", "raise", [0], 3, fault="memory.filled:1:kill")
    assert run.codes == [KILLED, 70]
    assert [report.kept_step for report in run.errors] == [None, 2]
    assert newest_in_memory(tmp_path) == 2


def test_no_room_in_the_memory_tier(tmp_path: Path) -> None:
    """Then it is staged in the state directory, as regular snapshots are."""
    options: dict[str, Any] = {
        "params": {"model": "wide", "hidden": 200_000},
        "checkpoint": {**NEVER, "memory_budget_mb": 1},
        "train_section": {"max_steps": 4},
    }
    run = grieve(tmp_path, "loss", "kill", [0], 3, **options)
    (event,) = run.events("snapshot_at_failure", rank=1)
    assert event["tier"].endswith("staging")
    assert "memory_budget_mb" in run.events("memory_tier_given_up", rank=1)[0]["error"]
    assert began_at(live(tmp_path, **options)) == 2


def test_no_room_at_all(tmp_path: Path) -> None:
    """It is said; the cause and the exit code are those of the failure."""
    only_staging = {**NEVER, "memory_tier": False}
    fault = "memory.begin:1:raise"
    run = grieve(tmp_path, "loss", "raise", [0], 5, world_size=1, fault=fault, checkpoint=only_staging)
    assert run.codes == [70]
    (report,) = run.errors
    assert (report.what, report.kept_step) == ("RuntimeError: struck", None)
    (event,) = run.events("snapshot_at_failure_left_out")
    assert "memory.begin" in event["reason"]


def test_in_an_update_there_is_nothing_to_keep(tmp_path: Path) -> None:
    run = grieve(tmp_path, "update", "raise", [0], 3, world_size=1, checkpoint={"every_steps": 2})
    (event,) = run.events("snapshot_at_failure_left_out")
    assert "update" in event["reason"]
    assert newest_in_memory(tmp_path) == 2, "the regular one"
