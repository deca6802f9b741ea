"""Parts of the training loop, one at a time, in this process."""

from __future__ import annotations

import json
import random
from collections import namedtuple
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from elastictrain.config.schema import DdpConfig, ModelConfig, OptimizerConfig, ScalerConfig
from elastictrain.core.phases import Phase
from elastictrain.core.seeds import Stream, derive
from elastictrain.core.window import WindowPlan
from elastictrain.errors import IllegalTransitionError, TaskError, UsageError
from elastictrain.protocol import StopBoard
from elastictrain.training import vote
from elastictrain.training.data import FetchFailed, SeededReader, batches, to_device
from elastictrain.training.device import Place
from elastictrain.training.ema import Ema
from elastictrain.training.inspection import counted_elements
from elastictrain.training.losses import split_loss
from elastictrain.training.metrics import json_line
from elastictrain.training.precision import Precision
from elastictrain.training.randomness import Generators
from elastictrain.training.replica import Replica
from elastictrain.training.schedules import schedule_horizons
from elastictrain.training.session import Session
from elastictrain.training.update import Updater, make_optimizer

CPU = torch.device("cpu")


def precision(mode: str, scale: float = 1024.0) -> Precision:
    return Precision(mode, CPU, ScalerConfig(init_scale=scale))


def session(**options: Any) -> Session:
    return Session(Place(), board=StopBoard(None), **options)


def test_a_rank_that_was_told_to_stop_itself_does_not_rely_on_a_next_worker_group() -> None:
    board = StopBoard(None)
    rank = Session(Place(), board=board)
    board.pass_on()
    assert rank.passes_on
    rank.request_stop("SIGTERM")
    assert not rank.passes_on


def test_a_vote_fails_after_as_long_as_the_other_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(vote.dist, "new_group", lambda **options: asked.append(options))
    monkeypatch.setattr(vote.dist, "all_reduce", lambda *_, **__: None)
    vote.StopVote(Place(device=torch.device("cuda")), timeout_s=12.0).begin(False)
    assert asked == [{"backend": "gloo", "timeout": timedelta(seconds=12)}]


# ---- 5: clipping, and the other ends of a step


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_a_norm_of_a_half_under_a_limit_of_one_is_left_alone(implementation: Any) -> None:
    """Scale 1024, true norm 0.5. Clipped before unscaling, the norm would be 512 and the gradient 512 times smaller."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    amp = precision("fp16")
    optimizer = make_optimizer(
        model, OptimizerConfig(name="sgd", lr=1, weight_decay=0, implementation=implementation), CPU
    )
    amp.backward(model(torch.tensor([[0.3, 0.4]])).sum())
    assert model.weight.grad is not None
    assert model.weight.grad.norm().item() == pytest.approx(512)
    result = Updater(optimizer, amp, clip_norm=1.0, check_gradients=True).apply()
    assert result.grad_norm is not None
    assert result.grad_norm.item() == pytest.approx(0.5)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.3, -0.4]]))
    assert result.applied() if callable(result.applied) else result.applied


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_a_norm_above_the_limit_is_brought_to_it(mode: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    amp = precision(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    amp.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    result = Updater(optimizer, amp, clip_norm=1.0, check_gradients=True).apply()
    assert result.grad_norm is not None
    assert result.grad_norm.item() == pytest.approx(5.0)
    assert model.weight.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert model.weight.grad is None, "the next window's gradient would be added to this one's"


# ---- the lesson's first example


def test_autocast_is_a_scope_and_parameters_stay_single() -> None:
    model = nn.Linear(3, 1)
    x = torch.ones(2, 3)
    for mode, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        policy = precision(mode)
        with policy.autocast():
            assert model(x).dtype == dtype
        assert model(x).dtype == torch.float32, "autocast outlived its scope"
        assert (policy.scaler is not None) is (mode == "fp16")
    assert model.weight.dtype == torch.float32


# ---- the session


def test_an_illegal_phase_leaves_the_phase_as_it_was() -> None:
    here = session()
    with pytest.raises(IllegalTransitionError, match="optimizer cannot follow init"):
        here.enter(Phase.OPTIMIZER)
    assert here.phase is Phase.INIT


def test_counters_move_in_commit_alone() -> None:
    here = session()
    plan = WindowPlan(length=10, global_batch_size=4, micro_batch_size=2)
    with pytest.raises(UsageError, match="commit without a step"):
        here.commit(applied=True)
    step = here.begin_step(plan)
    assert step is not None
    for microbatch in step.microbatches:
        here.enter(Phase.DATA)
        here.begin_microbatch(microbatch)
        here.enter(Phase.BACKWARD)
    here.enter(Phase.OPTIMIZER)
    assert here.in_update
    assert here.global_step == 0
    settled: list[bool] = []
    here.on_settled(lambda applied, _counters: settled.append(applied))
    here.commit(applied=lambda: False)
    assert (here.global_step, here.sample_position, settled) == (1, 4, []), "the outcome is asked for late"
    assert here.counters.skipped == 1
    assert settled == [False]
    assert not here.in_update


def test_a_stop_ends_before_the_next_step() -> None:
    here = session()
    plan = WindowPlan(length=10, global_batch_size=4, micro_batch_size=2)
    here.request_stop("enough")
    assert here.begin_step(plan) is None
    assert here.stop_reason == "enough"


# ---- reading


class Noisy:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if index == 7:
            raise ValueError("lucky")
        return index, torch.rand(()).item(), random.random(), float(np.random.random())


def reader(**options: Any) -> SeededReader:
    settings = {"seed": 3, "stream": Stream.SAMPLE, "shuffle": False, "seed_samples": True}
    return SeededReader(Noisy(), **(settings | options))


def test_a_sample_draws_the_same_wherever_it_is_read() -> None:
    together = reader().__getitems__((0, 5))
    assert isinstance(together, list)
    assert [reader().__getitems__((i, i + 1))[0] for i in range(5)] == together  # type: ignore[index]
    next_epoch = reader().__getitems__((10, 15))
    assert isinstance(next_epoch, list)
    assert not {row[1:] for row in together} & {row[1:] for row in next_epoch}, "an epoch repeats the augmentation"


def test_evaluation_samples_draw_the_same_every_time() -> None:
    evaluation = reader(stream=Stream.EVAL_SAMPLE, shuffle=True)
    assert evaluation.__getitems__((0, 3)) == evaluation.__getitems__((10, 13))


def test_a_sample_that_fails_is_named() -> None:
    failed = reader().__getitems__((15, 20))
    assert isinstance(failed, FetchFailed)
    assert (failed.index, failed.epoch) == (7, 1)
    message = str(failed.as_error(step=4))
    assert "sample 7 (epoch 1, step 4): ValueError: lucky" in message


def test_a_collate_that_fails_is_named() -> None:
    def collate(_samples: list[Any]) -> Any:
        raise TypeError("ragged")

    stream = batches(reader(), collate, [(0, 2)], num_workers=0, prefetch_batches=1, pin_memory=False)
    failed = next(stream)
    assert isinstance(failed, FetchFailed)
    assert "collate raised TypeError: ragged" in failed.what


def test_generators_are_left_as_they_were() -> None:
    generators = Generators(CPU)
    generators.seed(5)
    expected = (torch.rand(()).item(), random.random(), np.random.random())
    generators.seed(5)
    with generators.kept():
        generators.seed(1)
        torch.rand(3)
    assert (torch.rand(()).item(), random.random(), np.random.random()) == expected


def test_batches_keep_their_shape_on_the_way_to_the_device() -> None:
    pair = namedtuple("pair", "x y")
    batch = {"a": [torch.ones(1), "text"], "b": pair(torch.zeros(2), 3), "c": (torch.ones(1), None)}
    moved = to_device(batch, CPU, non_blocking=False)
    assert moved["b"] == batch["b"] or isinstance(moved["b"], pair)
    assert moved["a"][1] == "text"
    assert moved["c"][1] is None
    image = to_device(torch.ones(1, 2, 3, 3), CPU, non_blocking=False, channels_last=True)
    assert image.is_contiguous(memory_format=torch.channels_last)


# ---- small parts


def test_the_average_moves_by_the_decay() -> None:
    model = nn.Linear(1, 1)
    ema = Ema(model, 0.9)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    ema.update()
    torch.testing.assert_close(ema.averages["weight"], before + 0.1)
    kept = model.weight.detach().clone()
    with ema.swapped_in():
        torch.testing.assert_close(model.weight.detach(), before + 0.1)
    assert torch.equal(model.weight.detach(), kept)


@pytest.mark.parametrize("value", [None, 3.0, [torch.ones(())], (1.0, 2), (torch.ones(()), "x"), torch.ones(2)])
def test_what_is_not_a_loss(value: Any) -> None:
    with pytest.raises(TaskError, match=r"T\.loss\(\) returned"):
        split_loss(value, "T.loss()")


def test_what_is_a_loss() -> None:
    mean, weight = split_loss(torch.ones(1, 1), "")
    assert (mean.shape, weight) == (torch.Size([]), None)
    total, weight = split_loss((torch.ones(()), 3), "")
    assert weight == 3.0
    assert isinstance(split_loss((total, torch.tensor(3)), "")[1], Tensor)


def test_metrics_are_json_whatever_the_numbers() -> None:
    record = {"loss": float("nan"), "values": {"a": float("inf"), "b": -float("inf"), "c": 1.5}}
    assert json.loads(json_line(record)) == {"loss": "NaN", "values": {"a": "Infinity", "b": "-Infinity", "c": 1.5}}


def test_masks_are_counted() -> None:
    assert counted_elements({"x": torch.ones(2), "mask": torch.tensor([1, 0, 1])}) == (2, "'mask' is a mask")
    found = counted_elements([torch.ones(2), torch.tensor([1, -100, -100])])
    assert found is not None
    assert found[0] == 1
    assert counted_elements([torch.ones(3), torch.tensor([1, 2])]) is None


def test_horizons_of_chained_schedules_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
    chained = torch.optim.lr_scheduler.ChainedScheduler([cosine])
    assert schedule_horizons(chained) == {"CosineAnnealingLR.T_max": 80}


@pytest.mark.parametrize("first_draw_at", [0, 3, 700])
def test_a_dataset_that_draws_late_is_seeded_all_the_same(first_draw_at: int) -> None:
    """Samples that draw from `random` or NumPy get their own seed's numbers, also where the samples before drew
    nothing, so that seeding looked superfluous until then."""

    class Late:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> tuple[float, ...]:
            if index < first_draw_at:
                return (0.0,)
            return (random.random(), float(np.random.random()), float(torch.rand(())))

    def read(start: int, stop: int) -> list[tuple[float, ...]]:
        reader = SeededReader(Late(), seed=5, stream=Stream.SAMPLE, shuffle=False, seed_samples=True)
        return [s for a in range(start, stop, 7) for s in reader.__getitems__((a, min(a + 7, stop)))]

    everything = read(0, 1000)
    generators = Generators(torch.device("cpu"))
    for index in (first_draw_at, first_draw_at + 1, 999):
        generators.seed(derive(5, Stream.SAMPLE, 0, index))
        expected = (random.random(), float(np.random.random()), float(torch.rand(())))
        assert everything[index] == expected, "drawn from the sequence that tells draws, not from the sample's seed"
    assert read(500, 1000) == everything[500:]


# ---- compiling


class Own(nn.Sequential):
    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) + 1


@pytest.mark.parametrize("kind", [nn.Sequential, Own])
def test_a_model_is_compiled_also_where_its_forward_is_torchs_own(kind):
    model = kind(nn.Linear(3, 2), nn.GELU())
    batch = torch.randn(4, 3)
    expected, names = model(batch), list(model.state_dict())
    counters.clear()
    replica = Replica(model, Place(), ModelConfig(compile=True, compile_backend="eager"), DdpConfig())
    assert torch.equal(replica.forward_module(batch), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["stats"]["calls_captured"] >= 2
    assert list(replica.module.state_dict()) == names
