"""What job.toml can switch on: none of it may change what is computed, but where it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.helpers import Trained, train
from tests.process.test_right_values import batch, gradients, max_difference, weights


def run(folder: Path, world_size: int = 2, *, kind: str = "mlp", **job: Any) -> Trained:
    params = {"model": kind, **job.pop("params", {})}
    settings = batch(8, 2, max_steps=3) | job.pop("train", {})
    return train(folder, "Regression", world_size=world_size, params=params, train=settings, **job)


@pytest.mark.parametrize(
    ("model", "section"),
    [
        ("dropout", {"model": {"activation_checkpointing": ["0", "1", "2"]}}),
        ("conv", {"model": {"channels_last": True}}),
        ("mlp", {"model": {"compile": True, "compile_backend": "aot_eager"}}),
        ("mlp", {"ddp": {"gradient_as_bucket_view": False}}),
        ("mlp", {"ddp": {"find_unused_parameters": True}}),
    ],
    ids=["activation checkpointing", "channels_last", "compile", "no bucket view", "find_unused"],
)
def test_an_option_that_only_costs_or_saves(tmp_path: Path, model: str, section: dict[str, Any]) -> None:
    plain = run(tmp_path / "plain", kind=model)
    with_option = run(tmp_path / "option", kind=model, **section)
    for step in range(3):
        assert max_difference(gradients(plain, step), gradients(with_option, step)) < 1e-5
    assert with_option.losses == pytest.approx(plain.losses, rel=1e-5)
    assert weights(with_option, 1) == weights(with_option, 0)


def test_parameters_without_a_gradient_in_some_microbatches(tmp_path: Path) -> None:
    """Which of two layers a microbatch uses depends on its sample; a rank may end with the one it did not begin with.

    Reduced only where the last microbatch used them, a rank's earlier gradients would stay its own.
    """
    job: dict[str, Any] = {"kind": "branches", "train": {"micro_batch_size": 1, "max_steps": 4}}
    alone = run(tmp_path / "alone", 1, **job)
    several = run(tmp_path / "several", 2, **job, ddp={"find_unused_parameters": True})
    for step in range(4):
        for rank in range(2):
            assert max_difference(gradients(alone, step), gradients(several, step, rank)) < 1e-5, f"step {step}"


def test_parameters_that_only_an_earlier_microbatch_used(tmp_path: Path) -> None:
    """In order, each rank's share is samples 0 1 and 2 3: the layer for even samples is never used in a last one."""
    job: dict[str, Any] = {
        "kind": "branches",
        "train": {"global_batch_size": 4, "micro_batch_size": 1, "max_steps": 3},
        "data": {"shuffle": False},
    }
    alone = run(tmp_path / "alone", 1, **job)
    several = run(tmp_path / "several", 2, **job, ddp={"find_unused_parameters": True})
    for step in range(3):
        for rank in range(2):
            difference = max_difference(gradients(alone, step), gradients(several, step, rank))
            assert difference < 1e-5, "the earlier microbatch's gradient was not reduced"


def test_averaged_weights(tmp_path: Path) -> None:
    """Evaluation uses the averages, and training goes on with the weights."""
    job: dict[str, Any] = {"params": {"eval_length": 4}, "train": {"max_steps": 4}}
    plain = run(tmp_path / "plain", **job)
    averaged = run(tmp_path / "ema", **job, eval={"every_steps": 2}, model={"ema_decay": 0.5})
    assert averaged.losses == plain.losses, "averaging is a bystander"
    values, with_weights = averaged.metrics("eval")[-1]["values"], plain.metrics("eval")[-1]["values"]
    assert values["eval/loss"] != with_weights["eval/loss"], "the weights were evaluated, not their averages"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_a_scope(tmp_path: Path, precision: str, world_size: int) -> None:
    plain = run(tmp_path / "fp32", world_size)
    mixed = run(tmp_path / precision, world_size, train={"precision": precision}, scaler={"init_scale": 256.0})
    seen = mixed.recorded("microbatch")
    assert {line["dtype"] for line in seen} == {"torch.bfloat16" if precision == "bf16" else "torch.float16"}
    assert {line["parameter_dtype"] for line in seen} == {"torch.float32"}, "parameters must stay in single precision"
    assert mixed.losses == pytest.approx(plain.losses, rel=0.05)
    assert ("loss_scale" in mixed.metrics()[0]) is (precision == "fp16"), "bf16 needs no scaler"
    assert mixed.counters["applied"] == 3


def test_the_loss_scale_grows(tmp_path: Path) -> None:
    grown = run(
        tmp_path,
        1,
        train={"precision": "fp16"},
        scaler={"init_scale": 16.0, "growth_interval": 1, "growth_factor": 4.0},
    )
    assert [line["loss_scale"] for line in grown.metrics()] == [16.0, 64.0, 256.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_lessons_process_shape(tmp_path: Path, world_size: int) -> None:
    shaped = run(tmp_path, world_size)
    wrappers = {line["wrapper"] for rank in range(world_size) for line in shaped.recorded("microbatch", rank)}
    assert wrappers == {"Sequential" if world_size == 1 else "DistributedDataParallel"}


def test_the_lessons_optimizer_steps(tmp_path: Path) -> None:
    """Four microbatches, an effective batch of two: two updates, not four."""
    steps = train(tmp_path, "Regression", train=batch(2, 1, max_steps=2), params={"length": 4})
    assert len(steps.recorded("microbatch")) == 4
    assert len(steps.recorded("weights")) == 2


@pytest.mark.parametrize("norm", ["loose", "tight"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_sees_the_whole_windows_gradient(tmp_path: Path, world_size: int, norm: str) -> None:
    limit = 1e6 if norm == "loose" else 1e-3
    plain = run(tmp_path / "plain", world_size)
    clipped = run(tmp_path / "clipped", world_size, train={"clip_norm": limit})
    true_norm = torch.cat([g.flatten() for g in gradients(plain).values()]).norm().item()
    assert clipped.metrics()[0]["grad_norm"] == pytest.approx(true_norm, rel=1e-5), "the norm before clipping"
    given = torch.cat([g.flatten() for g in gradients(clipped).values()]).norm().item()
    assert given == pytest.approx(min(true_norm, limit), rel=1e-4), "clipped per microbatch it would be larger"


def test_a_model_that_depends_on_the_rank_is_named(tmp_path: Path) -> None:
    failed = run(tmp_path, params={"rank_bias": True}, expect_success=False)
    assert failed.codes == [70, 70], "DistributedDataParallel alone would overwrite it and train on"
    assert failed.errors[0].kind == "ReplicaMismatchError"
    assert "0.weight on rank(s) 1 differs from rank 0" in failed.errors[0].what


def test_the_cause_is_reported_not_its_consequence(tmp_path: Path) -> None:
    failed = run(tmp_path, 3, params={"raise_on_rank": 1}, expect_success=False)
    assert all(code != 0 for code in failed.codes)
    assert failed.errors[0].rank == 1
    assert "RuntimeError: rank 1 has had enough" in failed.errors[0].what
    assert "tasks.py" in failed.errors[0].hint, "the user's own line"
    assert all(report.secondary for report in failed.errors[1:]), "a peer's gloo error is a consequence"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_norm_remark(tmp_path: Path, num_workers: int) -> None:
    remarked = run(tmp_path, kind="batchnorm", data={"num_workers": num_workers})
    about = [event["about"] for event in remarked.events("advice")]
    assert about == ["batchnorm_small_microbatch"]
    assert not remarked.events("advice", rank=1), "said once, not once per rank"


def test_drop_with_fewer_samples_than_a_step(tmp_path: Path) -> None:
    """With max_steps alone the windows would cross the epochs' ends and leave out samples at random."""
    failed = run(tmp_path, 1, params={"length": 5}, data={"epoch_tail": "drop"}, expect_success=False)
    assert failed.codes == [65]
    assert "5 samples, fewer than one global batch of 8" in failed.errors[0].what


def test_a_static_graph_with_one_microbatch_per_rank(tmp_path: Path) -> None:
    job: dict[str, Any] = {"train": {"micro_batch_size": 4, "max_steps": 3}}
    plain = run(tmp_path / "plain", **job)
    static = run(tmp_path / "static", **job, ddp={"static_graph": True})
    assert static.losses == plain.losses
    assert weights(static) == weights(plain)


@pytest.mark.parametrize(
    "job",
    [
        {"train": {"micro_batch_size": 2}},
        {"train": {"micro_batch_size": 4}, "params": {"length": 9}, "data": {"epoch_tail": "partial"}},
    ],
    ids=["accumulation", "short windows"],
)
def test_a_static_graph_that_torch_would_reduce_wrongly_is_refused(tmp_path: Path, job: dict[str, Any]) -> None:
    """torch ends in an internal assertion, or, worse, leaves gradients of later steps unreduced."""
    failed = run(tmp_path, **job, ddp={"static_graph": True}, expect_success=False)
    assert failed.codes == [78, 78]
    assert "ddp.static_graph" in failed.errors[0].what
