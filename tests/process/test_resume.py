"""A run that is stopped, however and wherever, has the same future as one that nothing happened to, bit for bit.

The loss trace (loss, gradient norm, learning rate, outcome, loss scale of every step) and everything the last snapshot
holds (model, optimizer, averages, scheduler, scaler, counters, the task's own state) are compared.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.process.resume_helpers import (
    KILLED,
    assert_same_future,
    go,
    kept,
    nothing_left,
    samples,
    steps_in,
    store_of,
    trace,
)

TAILS: dict[str, dict[str, Any]] = {
    "continue": {
        "params": {"model": "dropout", "scheduler": "step", "infinite": [3], "implementation": "fused"},
        "train_section": {"precision": "fp16"},
        "scaler": {"init_scale": 1024.0, "growth_interval": 2},
        "model": {"ema_decay": 0.8},
    },
    "partial": {"params": {"model": "dropout", "scheduler": "sequential"}, "model": {"ema_decay": 0.5}},
    "drop": {"params": {"model": "dropout", "scheduler": "onecycle"}},
}


@pytest.mark.parametrize("tail", TAILS)
def test_stopped_at_every_step_of_three_epochs(tmp_path: Path, tail: str) -> None:
    """Eleven samples in windows of four: steps in mid-epoch, at and over the epoch's end. Each start does one step. The
    loss scale grows in mid-count and shrinks, averages and schedules move."""
    options: dict[str, Any] = {"data": {"epoch_tail": tail}, **TAILS[tail]}
    whole = go(tmp_path / "whole", **options)
    num_steps = {"continue": 9, "partial": 9, "drop": 6}[tail]
    assert whole.counters["global_step"] == num_steps
    for step in range(1, num_steps + 1):
        run = go(tmp_path / "cut", **options, overrides=["params.stop_after=1"])
        assert run.counters["global_step"] == step
        assert run.outcome is not None
        assert run.outcome["complete"] is (step == num_steps)
        if step > 1:
            restored = run.events("restored")[0]
            assert (restored["global_step"], restored["from_tier"]) == (step - 1, "durable")
        assert nothing_left(tmp_path / "cut")
    assert_same_future(run, tmp_path / "cut", whole, tmp_path / "whole")
    assert samples(run) == samples(whole), "no sample is seen twice, none is left out"
    if tail == "continue":
        assert whole.counters["skipped"] == 3, "once in each epoch"
        scales = [float(values[4]) for values in trace(whole).values()]
        changes = [after - before for before, after in pairwise(scales)]
        assert min(changes) < 0 < max(changes), "the scale has grown and shrunk"


def test_killed_at_every_step_of_three_epochs(tmp_path: Path) -> None:
    """As above, by kill -9 in the second update of each start: the memory tier has what the first one left."""
    options: dict[str, Any] = {"params": {"model": "mixed", "scheduler": "step", "job_folder": str(tmp_path / "cut")}}
    whole = go(tmp_path / "whole", **options)
    tiers = []
    for _ in range(10):
        run = go(tmp_path / "cut", **options, overrides=["params.kill_after=2"], expect_success=False)
        tiers += [event["from_tier"] for event in run.events("restored")]
        if run.codes == [0]:
            break
        assert run.codes == [KILLED], run.output
    assert run.outcome is not None
    assert run.outcome["complete"]
    assert "memory" in tiers
    assert len(tiers) == 8
    assert_same_future(run, tmp_path / "cut", whole, tmp_path / "whole")
    assert nothing_left(tmp_path / "cut")


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16, sgd with momentum, StepLR": {
        "params": {"optimizer": "momentum", "scheduler": "step"},
        "train_section": {"precision": "bf16"},
    },
    "adam fused, cosine, averages": {
        "params": {"optimizer": "adam", "implementation": "fused", "scheduler": "cosine", "eval_length": 3},
        "model": {"ema_decay": 0.8},
        "eval": {"every_steps": 1},
    },
    "adam foreach, one cycle": {
        "params": {"optimizer": "adam", "implementation": "foreach", "scheduler": "onecycle"},
    },
    "adamw for-loop, sequential, tied weights": {
        "params": {"optimizer": "adamw", "scheduler": "sequential", "model": "tied"},
        "model": {"ema_decay": 0.5},
    },
    "lambda, loader workers": {
        "params": {"optimizer": "sgd", "scheduler": "lambda", "model": "dropout"},
        "data": {"num_workers": 2},
    },
    "an optimizer that counts in integers, milestones": {
        "params": {"optimizer": "voting", "model": "linear", "scheduler": "multistep"},
    },
    "fp16, growing and shrinking scale": {
        "params": {"infinite": [3], "implementation": "fused", "scheduler": "step"},
        "train_section": {"precision": "fp16"},
        "scaler": {"init_scale": 1024.0, "growth_interval": 3},
    },
    "the task's own state, adafactor": {"params": {"own_state": "good", "optimizer": "adafactor"}},
    "extra state of a module": {"params": {"model": "extra_state"}},
    "complex and unsigned buffers": {"params": {"model": "complex64", "optimizer": "sgd"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_stopped_and_killed(tmp_path: Path, name: str) -> None:
    """Stopped after two updates, killed in the third after that, then to the end: two resumes in a row, one from
    each tier."""
    options = VARIANTS[name]
    whole = go(tmp_path / "whole", **options)
    cut = tmp_path / "cut"
    stopped = go(cut, **options, overrides=["params.stop_after=2"])
    assert stopped.outcome is not None
    assert not stopped.outcome["complete"]
    killed = go(cut, **options, overrides=["params.kill_after=3"], expect_success=False)
    assert killed.codes == [KILLED], killed.output
    run = go(cut, **options)
    assert_same_future(run, cut, whole, tmp_path / "whole")
    if "fp16" in name:
        assert whole.counters["skipped"] == 3, "once in each epoch"
        assert len({values[4] for values in trace(whole).values()}) >= 3, "the scale has grown and shrunk"


@pytest.mark.parametrize("kind", ["mixed", "batchnorm"])
def test_two_ranks_with_batchnorm(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"params": {"model": kind}, "eval": {"at_end": False}}
    whole = go(tmp_path / "whole", 2, **options)
    cut = tmp_path / "cut"
    go(cut, 2, **options, overrides=["params.stop_after=2"])
    killed = go(cut, 2, **options, overrides=["params.kill_after=3", "params.on_ranks=[1]"], expect_success=False)
    assert killed.codes[1] == KILLED
    run = go(cut, 2, **options)
    assert_same_future(run, cut, whole, tmp_path / "whole")


@pytest.mark.long
def test_a_compiled_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": {"compile": True, "compile_backend": "aot_eager", "ema_decay": 0.9}}
    whole = go(tmp_path / "whole", **options)
    for stop in (3, 2):
        go(tmp_path / "cut", **options, overrides=[f"params.stop_after={stop}"])
    run = go(tmp_path / "cut", **options)
    assert [event["global_step"] for event in run.events("restored")][-1] == 5
    assert_same_future(run, tmp_path / "cut", whole, tmp_path / "whole")
    assert not any("_orig_mod" in name for name in kept(tmp_path / "cut")["state"]["optimizer"]["plain"])


def test_stopped_by_the_limit_of_an_earlier_start(tmp_path: Path) -> None:
    """The schedule does not hang on the limit here; one that does is laid out anew for the new limit."""
    whole = go(tmp_path / "whole", params={"scheduler": "step"})
    for limit in (2, 3, 7):
        run = go(tmp_path / "cut", params={"scheduler": "step"}, overrides=[f"train.max_steps={limit}"])
        assert run.counters["global_step"] == limit
    again = go(tmp_path / "cut", params={"scheduler": "step"}, overrides=["train.max_steps=7"])
    assert again.counters["global_step"] == 7, "nothing is left to do, and nothing is done"
    assert len(again.metrics()) == 7
    run = go(tmp_path / "cut", params={"scheduler": "step"})
    assert_same_future(run, tmp_path / "cut", whole, tmp_path / "whole")


def test_a_schedule_over_the_whole_run_is_laid_out_for_the_new_limit(tmp_path: Path) -> None:
    go(tmp_path, params={"scheduler": "onecycle"}, overrides=["train.max_steps=4"])
    run = go(tmp_path, params={"scheduler": "onecycle"})
    assert run.counters["global_step"] == 9
    rates = [line["lr"] for line in run.metrics()]
    assert rates[-1] < rates[-2] < rates[-3], "it comes down at the new end"


@pytest.mark.parametrize("name", ["warm cosine", "warm polynomial"])
def test_a_schedule_within_a_schedule_is_laid_out_for_the_new_limit(tmp_path: Path, name: str) -> None:
    """Its rate had come down to zero, and all that follows from that one would be zero as well; the run goes on at the
    rates that it would have had with this limit from the start."""
    whole = go(tmp_path / "whole", params={"scheduler": name})
    # The rate of the step after the last, which is what a run goes on with, is zero with this limit.
    go(tmp_path / "cut", params={"scheduler": name}, overrides=["train.max_steps=5"])
    run = go(tmp_path / "cut", params={"scheduler": name})
    rates = [[line["lr"] for line in which.metrics() if line["step"] > 5] for which in (run, whole)]
    assert len(rates[0]) == 4
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)
    assert not run.events("schedule_goes_on_from_last_rate")


def test_a_schedule_that_cannot_be_laid_out_anew_is_named(tmp_path: Path) -> None:
    go(tmp_path, params={"scheduler": "own"}, overrides=["train.max_steps=4"])
    longer = go(tmp_path, params={"scheduler": "own"}, overrides=["train.max_steps=6"])
    (event,) = longer.events("schedule_goes_on_from_last_rate")
    assert event["scheduler"] == "Own"


def test_a_run_of_which_nothing_is_left_to_do(tmp_path: Path) -> None:
    whole = go(tmp_path)
    before = kept(tmp_path)
    again = go(tmp_path)
    assert again.outcome is not None
    assert again.outcome["complete"]
    assert again.losses == whole.losses
    assert kept(tmp_path) == before
    assert steps_in(store_of(tmp_path)) == [9, 8] or steps_in(store_of(tmp_path))[0] == 9
    assert nothing_left(tmp_path)


def test_tensors_of_the_task_are_kept_under_their_names_in_whatever_order_they_come(tmp_path: Path) -> None:
    """Two tensors of one shape that a task gives in another order each time must not change places."""
    for stop in (4, 5):
        run = go(tmp_path, params={"own_state": "turning"}, overrides=[f"params.stop_after={stop}"])
    loaded = run.recorded("loaded")
    assert len(loaded) == 1
    assert all((line["one"], line["two"]) == ([1.0] * 3, [2.0] * 3) for line in loaded)


def test_state_that_cannot_be_kept_is_refused_with_its_path(tmp_path: Path) -> None:
    run = go(tmp_path, params={"own_state": "bad"}, expect_success=False)
    assert run.codes == [78]
    assert "state['task']['deep'][0]['thing'] is of type object" in run.errors[0].what


def test_a_dtype_that_cannot_be_kept_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    """Not reported as a snapshot that failed: it would fail at every step, and a run would end with nothing kept."""
    run = go(tmp_path, params={"model": "complex128"}, expect_success=False)
    assert run.codes == [78], run.output
    assert "turn" in run.errors[0].what
    assert "complex128" in run.errors[0].what


def test_a_schedule_that_needs_a_metric_is_refused_at_the_start(tmp_path: Path) -> None:
    run = go(tmp_path, params={"scheduler": "plateau"}, expect_success=False)
    assert run.codes == [78]
    assert "ReduceLROnPlateau" in run.errors[0].what
    assert run.metrics() == []
