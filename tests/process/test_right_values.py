"""The right values of a training loop, each with the wrong value that a common mistake would give.

Every test runs our loop on real ranks with gloo, and looks at what the optimizer was given and what was reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.process.helpers import Trained, train
from tests.process.tasks import Samples, make_model

ORDERED = {"shuffle": False}
SCALER = {"init_scale": 1024.0}


def gradients(run: Trained, step: int = 0, rank: int = 0) -> dict[str, Tensor]:
    """What the optimizer was given in the step-th update."""
    return {name: torch.tensor(value) for name, value in run.recorded("gradients", rank)[step]["gradients"].items()}


def weights(run: Trained, rank: int = 0) -> dict[str, Any]:
    """The weights after the last update."""
    found: dict[str, Any] = run.recorded("weights", rank)[-1]["weights"]
    return found


def max_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def samples_of_steps(runs: Trained, world_size: int, microbatches_per_step: Sequence[int]) -> list[list[int]]:
    """The samples of each step over all ranks, in window order; the number of microbatches of each step is given."""
    by_rank = [iter(runs.recorded("microbatch", rank)) for rank in range(world_size)]
    steps = []
    for count in microbatches_per_step:
        ids: list[int] = []
        for rank in range(world_size):
            for _ in range(count // world_size + (rank < count % world_size)):
                ids += next(by_rank[rank])["indices"]
        steps.append(ids)
    assert all(next(rest, None) is None for rest in by_rank), "a rank did more microbatches than its share"
    return steps


# ---- 1, 2: accumulation


@pytest.fixture(scope="module")
def one_large_batch(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Steps of eight samples in one microbatch, on one rank."""
    return train(
        tmp_path_factory.mktemp("large"),
        "Regression",
        params={"model": "mlp"},
        train={"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 8},
    )


def test_two_microbatches_are_one_large_batch(tmp_path: Path, one_large_batch: Trained) -> None:
    two = train(
        tmp_path,
        "Regression",
        params={"model": "mlp"},
        train={"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 4},
    )
    whole, accumulated = gradients(one_large_batch), gradients(two)
    assert max_difference(whole, accumulated) <= 1e-7
    doubled = {name: 2 * value for name, value in whole.items()}
    assert max_difference(doubled, accumulated) > 1e-2, "without normalisation the gradient is exactly twice as large"
    assert two.losses == pytest.approx(one_large_batch.losses, rel=1e-6)


def test_two_microbatches_are_one_large_batch_to_1e_8_in_double_precision(tmp_path: Path) -> None:
    rows = [[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0]]
    whole = train(tmp_path / "1", "TokenMean", params={"rows": rows}, train=batch(4, 4), data=ORDERED)
    accumulated = train(tmp_path / "2", "TokenMean", params={"rows": rows}, train=batch(4, 2), data=ORDERED)
    expected = 59 / 8
    assert whole.recorded("gradients")[0]["gradient"] == pytest.approx(expected, abs=1e-12)
    assert abs(accumulated.recorded("gradients")[0]["gradient"] - expected) <= 1e-8, f"unnormalised: {2 * expected}"


def batch(global_batch_size: int, micro_batch_size: int, **more: Any) -> dict[str, Any]:
    return {
        "max_steps": 1,
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        **more,
    }


def test_four_equal_microbatches_are_not_four_times_the_gradient(tmp_path: Path) -> None:
    rows = [[3.0]] * 4
    run = train(tmp_path, "TokenMean", params={"rows": rows}, train=batch(4, 1))
    assert run.recorded("gradients")[0]["gradient"] == 3.0, "a sum over microbatches would give 12"
    assert run.losses == [3.0], "a sum would report 12"


def test_four_equal_microbatches_on_two_ranks(tmp_path: Path) -> None:
    run = train(tmp_path, "TokenMean", world_size=2, params={"rows": [[3.0]] * 4}, train=batch(4, 1))
    for rank in range(2):
        assert run.recorded("gradients", rank)[0]["gradient"] == 3.0, "6 without accumulation, 1.5 divided twice"
    assert run.losses == [3.0], "rank zero's share alone would be 1.5"


# ---- 3: unequal weights


@pytest.mark.parametrize("as_pair", [True, False], ids=["total and weight", "mean with Task.weight"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_token_with_gradient_4_and_three_with_0(tmp_path: Path, world_size: int, as_pair: bool) -> None:
    run = train(
        tmp_path,
        "TokenMean",
        world_size=world_size,
        params={"rows": [[4.0], [0.0, 0.0, 0.0]], "as_pair": as_pair},
        train=batch(2, 1),
        data=ORDERED,
    )
    for rank in range(world_size):
        assert run.recorded("gradients", rank)[0]["gradient"] == 1.0, "a mean of means would give 2.0"
    assert run.losses == [1.0], "a mean of means would report 2.0"
    assert run.metrics()[0]["weight"] == 4.0


def test_a_microbatch_that_weighs_nothing_counts_nothing(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "TokenMean",
        world_size=2,
        params={"rows": [[4.0, 2.0], []], "as_pair": True},
        train=batch(2, 1),
        data=ORDERED,
    )
    assert run.recorded("gradients")[0]["gradient"] == 3.0, "counted as one sample it would give 1.5"


def test_a_step_that_weighs_nothing_is_an_error(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "TokenMean",
        params={"rows": [[1.0], []], "as_pair": True},
        train=batch(1, 1, max_steps=2),
        data=ORDERED,
        expect_success=False,
    )
    assert run.codes == [78]
    assert "the samples of step 1 weigh nothing" in run.errors[0].what


# ---- 4: skipped updates


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_infinity_at_step_2_of_3(tmp_path: Path, implementation: str) -> None:
    run = train(
        tmp_path,
        "Regression",
        params={
            "optimizer": "adamw",
            "implementation": implementation,
            "gamma": 0.1,
            "infinite": [1],
            "eval_length": 1,
        },
        train=batch(1, 1, max_steps=3, precision="fp16"),
        scaler=SCALER,
        data=ORDERED,
    )
    at_end = run.metrics("eval")[-1]["values"]
    assert at_end["eval/lr"] == pytest.approx(0.1 * 0.1**2, rel=1e-12), "0.1 * 0.1**3 if the skipped step counted"
    assert at_end["eval/optimizer_step"] == 2, "3 if the optimizer counted the skipped step"
    assert at_end["eval/last_epoch"] == 2, "3 if the scheduler counted the skipped step"
    assert run.counters["global_step"] == 3, "2 if a skipped window did not count"
    assert run.counters["skipped"] == 1
    assert run.counters["applied"] == 2
    steps = run.metrics()
    assert [s["applied"] for s in steps] == [True, False, True]
    assert [s["lr"] for s in steps] == pytest.approx([0.1, 0.01, 0.01])
    assert [s["loss_scale"] for s in steps] == [1024.0, 1024.0, 512.0]


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_infinity_at_step_1(tmp_path: Path, implementation: str) -> None:
    run = train(
        tmp_path,
        "Regression",
        params={
            "optimizer": "adamw",
            "implementation": implementation,
            "gamma": 0.1,
            "infinite": [0],
            "eval_length": 1,
        },
        train=batch(1, 1, max_steps=1, precision="fp16"),
        data=ORDERED,
    )
    at_end = run.metrics("eval")[-1]["values"]
    assert at_end["eval/last_epoch"] == 0, "1 if the scheduler advances without an update"
    assert at_end["eval/lr"] == 0.1
    assert run.counters == {
        "global_step": 1,
        "applied": 0,
        "skipped": 1,
        "sample_position": 1,
        "consecutive_skips": 1,
    }


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip_norm", [{}, {"clip_norm": 1.0}], ids=["no clipping", "clipping"])
def test_without_a_scaler_a_gradient_that_is_not_finite_is_skipped_as_well(
    tmp_path: Path, implementation: str, precision: str, clip_norm: dict[str, float]
) -> None:
    run = train(
        tmp_path,
        "Regression",
        params={"optimizer": "adamw", "implementation": implementation, "infinite": [1], "eval_length": 1},
        train=batch(1, 1, max_steps=3, precision=precision, **clip_norm),
        data=ORDERED,
    )
    assert [s["applied"] for s in run.metrics()] == [True, False, True]
    at_end = run.metrics("eval")[-1]["values"]
    assert at_end["eval/optimizer_step"] == 2
    assert at_end["eval/loss"] == at_end["eval/loss"], "NaN: the bad gradient reached the weights"


def test_a_skip_is_agreed_by_all_ranks(tmp_path: Path) -> None:
    """The infinity is in rank one's samples alone."""
    run = train(
        tmp_path,
        "Regression",
        world_size=2,
        params={"infinite": [3], "optimizer": "adamw", "implementation": "fused"},
        train=batch(2, 1, max_steps=3, precision="fp16"),
        scaler=SCALER,
        data=ORDERED,
    )
    assert [s["applied"] for s in run.metrics()] == [True, False, True]
    assert weights(run, 0) == weights(run, 1), "a skip on one rank only would part the replicas"


def test_unchecked_gradients_are_not_skipped(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "Regression",
        params={"infinite": [0]},
        train=batch(1, 1, check_gradients=False),
        data=ORDERED,
    )
    assert run.counters["skipped"] == 0
    assert run.metrics()[0]["grad_norm"] is None, "nobody asked for the norm, so nobody should pay for it"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_too_many_skips_in_a_row_halt_with_the_scale_history(
    tmp_path: Path, precision: str, implementation: str
) -> None:
    run = train(
        tmp_path,
        "Regression",
        world_size=2,
        params={"infinite": list(range(4, 16)), "optimizer": "adamw", "implementation": implementation},
        train=batch(2, 1, max_steps=9, precision=precision, max_consecutive_skips=2),
        scaler=SCALER,
        data=ORDERED,
        expect_success=False,
    )
    assert 79 in run.codes
    first = run.errors[0]
    assert first.kind == "HaltError"
    assert "3 updates in a row were skipped, up to step 5" in first.what
    assert max(error.kept_step or 0 for error in run.errors) == 5, "the state is kept"
    if precision == "fp16":
        assert "1024 → 512 → 256" in first.what
    else:
        assert "scale" not in first.what


# ---- 6: schedules


def test_step_lr_20_on_four_ranks_decays_once_in_20_updates(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "Regression",
        world_size=4,
        params={"step_size": 20, "eval_length": 1},
        train=batch(8, 1, max_steps=20),
    )
    at_end = run.metrics("eval")[-1]["values"]
    assert at_end["eval/lr"] == pytest.approx(0.1 * 0.1), "per rank: 1e-5; per microbatch: 1e-9"
    assert at_end["eval/last_epoch"] == 20, "80 if it were stepped by every rank, 160 by every microbatch"
    assert {s["lr"] for s in run.metrics()} == {0.1}


# ---- 7, 8: the data order, and randomness

STEPS_OF_SIX = batch(6, 1, max_steps=6)


@pytest.fixture(scope="module")
def at_world_sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trained]:
    """The same job, with dropout, on one to four ranks: 16 samples in steps of six microbatches."""
    return {
        world_size: train(
            tmp_path_factory.mktemp(f"world{world_size}"),
            "Regression",
            world_size=world_size,
            params={"model": "dropout"},
            train=STEPS_OF_SIX,
        )
        for world_size in (1, 2, 3, 4)
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_steps_samples_are_the_same_at_any_world_size(at_world_sizes: dict[int, Trained], world_size: int) -> None:
    alone = samples_of_steps(at_world_sizes[1], 1, [6] * 6)
    assert samples_of_steps(at_world_sizes[world_size], world_size, [6] * 6) == alone
    in_order = [i for ids in alone for i in ids]
    assert sorted(in_order[:16]) == list(range(16)), "an epoch holds every sample once"
    assert in_order[:16] != in_order[16:32], "the second epoch repeats the first"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_and_weights_are_the_same_at_any_world_size(at_world_sizes: dict[int, Trained], world_size: int) -> None:
    alone, several = at_world_sizes[1], at_world_sizes[world_size]
    assert several.losses == pytest.approx(alone.losses, rel=1e-5), "the shares of the ranks do not add up"
    for name, value in weights(alone).items():
        torch.testing.assert_close(torch.tensor(weights(several)[name]), torch.tensor(value), rtol=1e-4, atol=1e-6)
    assert all(weights(several, rank) == weights(several) for rank in range(world_size)), "replicas have parted"


def draws(run: Trained, world_size: int) -> tuple[dict[tuple[int, int], Any], set[tuple[float, ...]]]:
    """What was drawn for each (epoch, sample), and the set of what was drawn in the forward passes."""
    seen: dict[tuple[int, int], Any] = {}
    lines = [line for rank in range(world_size) for line in run.recorded("microbatch", rank)]
    by_sample: dict[int, list[Any]] = {}
    for line in lines:
        for index, noise, more in zip(line["indices"], line["noise"], line["draws"], strict=True):
            by_sample.setdefault(index, []).append((*noise, *more))
    for index, values in by_sample.items():
        for number, value in enumerate(sorted(values)):
            seen[index, number] = value
    return seen, {tuple(line["drawn"]) for line in lines}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_numbers_belong_to_samples_and_microbatches(at_world_sizes: dict[int, Trained], world_size: int) -> None:
    samples_alone, passes_alone = draws(at_world_sizes[1], 1)
    samples_here, passes_here = draws(at_world_sizes[world_size], world_size)
    assert samples_here == samples_alone, "augmentation depends on who reads the sample"
    assert passes_here == passes_alone, "dropout depends on who computes the microbatch"
    assert len(passes_alone) == 36, "36 microbatches must draw 36 different numbers"
    assert len(set(samples_alone.values())) == len(samples_alone), "two samples, or two epochs, were augmented alike"


def test_forty_samples_two_ranks_each_once_in_an_epoch(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "Regression",
        world_size=2,
        params={"length": 40},
        train={"max_epochs": 1, "global_batch_size": 8, "micro_batch_size": 2},
    )
    ids = [[i for line in run.recorded("microbatch", rank) for i in line["indices"]] for rank in range(2)]
    assert [len(mine) for mine in ids] == [20, 20], "40 each if the ranks did not share the epoch"
    assert sorted(ids[0] + ids[1]) == list(range(40))
    assert run.counters["global_step"] == 5


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_workers_change_nothing(tmp_path: Path, at_world_sizes: dict[int, Trained], num_workers: int) -> None:
    run = train(
        tmp_path,
        "Regression",
        world_size=2,
        params={"model": "dropout"},
        train=STEPS_OF_SIX,
        data={"num_workers": num_workers},
    )
    assert run.losses == at_world_sizes[2].losses, "bitwise: who reads a sample must not matter"
    assert weights(run) == weights(at_world_sizes[2])
    assert draws(run, 2) == draws(at_world_sizes[2], 2)


def test_a_second_run_is_bitwise_the_first(tmp_path: Path, at_world_sizes: dict[int, Trained]) -> None:
    again = train(
        tmp_path, "Regression", world_size=2, params={"model": "dropout"}, train={**STEPS_OF_SIX, "deterministic": True}
    )
    assert again.losses == at_world_sizes[2].losses
    assert weights(again) == weights(at_world_sizes[2])


def test_a_steps_line_in_the_metrics_is_complete(at_world_sizes: dict[int, Trained]) -> None:
    for run in at_world_sizes.values():
        steps = run.metrics()
        assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6], "one line per step, by rank zero alone"
        assert all(line["applied"] is True and line["samples"] == 6 and line["weight"] == 6.0 for line in steps)
        assert len(run.metrics("report")) == 1
        assert run.metrics("summary")[0]["counters"]["sample_position"] == 36


# ---- uneven shares and short windows


@pytest.mark.parametrize("world_size", [2, 3])
def test_five_microbatches_on_ranks_that_do_not_divide(tmp_path: Path, world_size: int) -> None:
    job: dict[str, Any] = {"params": {"model": "mlp"}, "train": batch(10, 2)}
    alone = train(tmp_path / "alone", "Regression", **job)
    several = train(tmp_path / "several", "Regression", world_size=world_size, **job)
    for rank in range(world_size):
        difference = max_difference(gradients(alone), gradients(several, rank=rank))
        assert difference < 1e-6, "a mean over ranks would weigh the rank with fewer microbatches too much"
    assert several.losses == pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_short_last_window_weighs_exactly(tmp_path: Path, world_size: int) -> None:
    """Nine samples in steps of eight: the second window of each epoch has one sample, for one of the ranks."""
    job: dict[str, Any] = {
        "params": {"model": "mlp", "length": 9, "optimizer": "adamw"},
        "train": {"max_epochs": 2, "global_batch_size": 8, "micro_batch_size": 2},
        "data": {"epoch_tail": "partial"},
    }
    alone = train(tmp_path / "alone", "Regression", **job)
    several = train(tmp_path / "several", "Regression", world_size=world_size, **job)
    assert [line["samples"] for line in several.metrics()] == [8, 1, 8, 1]
    assert samples_of_steps(several, world_size, [4, 1, 4, 1]) == samples_of_steps(alone, 1, [4, 1, 4, 1])
    for step in range(4):
        for rank in range(world_size):
            difference = max_difference(gradients(alone, step), gradients(several, step, rank))
            assert difference < 1e-5, "ranks without work must add nothing, and divide nothing"
    assert several.losses == pytest.approx(alone.losses, rel=1e-5)


def test_a_dataset_smaller_than_the_world(tmp_path: Path) -> None:
    """Every window is short: the first step already is one without a backward pass on some ranks."""
    job: dict[str, Any] = {
        "params": {"length": 2},
        "train": {"max_steps": 3, "global_batch_size": 3, "micro_batch_size": 1},
        "data": {"epoch_tail": "partial"},
    }
    alone = train(tmp_path / "alone", "Regression", **job)
    several = train(tmp_path / "several", "Regression", world_size=3, **job)
    assert several.losses == pytest.approx(alone.losses, rel=1e-6)
    assert weights(several, 2) == weights(several, 0)


# ---- 10: evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_of_five_samples(tmp_path: Path, world_size: int) -> None:
    run = train(
        tmp_path,
        "Regression",
        world_size=world_size,
        params={"eval_length": 5, "lr": 1e-9},
        train=batch(4, 1),
        eval={"micro_batch_size": 2},
    )
    seen = [line["indices"] for rank in range(world_size) for line in run.recorded("evaluated", rank)]
    assert seen == [[0, 1], [2, 3], [4]], "a sampler that pads would show a sample twice"
    values = run.metrics("eval")[-1]["values"]
    assert values["eval/index"] == 2.0, "padded to six: 1.67 or 2.33; a mean of means: 2.33; rank zero alone: less"
    assert not any(line["training"] for rank in range(world_size) for line in run.recorded("evaluated", rank))


def test_evaluation_leaves_the_training_as_it_was(tmp_path: Path) -> None:
    """With BatchNorm and dropout: an evaluation in train mode, or one that draws numbers, would show in the losses."""
    for model in ("batchnorm", "dropout"):
        job: dict[str, Any] = {
            "world_size": 2,
            "params": {"model": model, "eval_length": 5},
            "train": batch(8, 4, max_steps=6),
        }
        with_eval = train(tmp_path / model / "with", "Regression", **job, eval={"every_steps": 2})
        without = train(tmp_path / model / "without", "Regression", **job, eval={"at_end": False})
        assert len(with_eval.metrics("eval")) == 3
        assert not without.metrics("eval")
        assert with_eval.losses == without.losses
        assert weights(with_eval) == weights(without)


def test_evaluation_by_epochs(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "Regression",
        params={"length": 6, "eval_length": 1},
        train={"max_epochs": 4, "global_batch_size": 4, "micro_batch_size": 4},
        eval={"every_epochs": 2, "at_end": False},
    )
    assert [line["step"] for line in run.metrics("eval")] == [3, 6], "12 and 24 samples are 2 and 4 epochs of 6"


# ---- 9: the full-batch gradient, from plain torch


def test_the_loops_gradient_is_that_of_plain_torch(tmp_path: Path) -> None:
    run = train(
        tmp_path, "Regression", world_size=2, params={"model": "mlp", "length": 8, "lr": 0.5}, train=batch(8, 2)
    )
    after = {name: torch.tensor(value) for name, value in weights(run).items()}
    given = gradients(run)
    model = make_model("mlp")
    model.load_state_dict({name: after[name] + 0.5 * given[name] for name in after})
    data = Samples(8)
    x = torch.stack([data[i]["x"] for i in range(8)])
    y = torch.stack([data[i]["y"] for i in range(8)])
    F.mse_loss(model(x).squeeze(1), y).backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max_difference(given, plain) < 1e-6  # type: ignore[arg-type]
