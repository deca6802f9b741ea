"""A run's state, out into files' tensors and plain JSON, and back into a run that has just been built."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from elastictrain.checkpoint.format import EMA_FILE, OPTIMIZER_FILE, STATE_FILE
from elastictrain.config.schema import DdpConfig, ModelConfig, ScalerConfig
from elastictrain.core.batch import BatchPlan
from elastictrain.core.identity import DataIdentity
from elastictrain.errors import StateValueError
from elastictrain.training.device import Place
from elastictrain.training.ema import Ema
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.session import Session
from elastictrain.training.state import TrainingState
from elastictrain.training.task import BoundTask
from elastictrain.training.trainee import Trainee

CPU, GPU = torch.device("cpu"), torch.device("meta")
"""What computes elsewhere than on the host; torch's stand-in for a device shows where a tensor is to go."""


class Task:
    def __init__(self, width: int = 3) -> None:
        self.kept: Any = None
        self.width = width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.Linear(self.width, 1))

    def train_data(self) -> list[int]:
        return [0, 1]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


class Run:
    """One rank's state, as a start builds it."""

    def __init__(
        self,
        make: Callable[[nn.Module], Optimizer] = lambda model: SGD(model.parameters(), lr=0.1),
        *,
        device: torch.device = CPU,
        model_device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        frozen: bool = False,
        seed: int = 0,
        width: int = 3,
    ) -> None:
        self.bound = BoundTask(Task, {"width": width})
        torch.manual_seed(seed)
        model = self.bound.build_model().to(model_device, dtype)
        replica = Replica(model, Place(device=model_device), ModelConfig(), DdpConfig())
        self.model = replica.module
        self.model.get_submodule("1").requires_grad_(not frozen)
        self.optimizer = make(self.model)
        self.ema = Ema(self.model, 0.5)
        trainee = Trainee(
            replica=replica,
            optimizer=self.optimizer,
            updater=None,  # type: ignore[arg-type]
            precision=Precision("fp32", CPU, ScalerConfig()),
            scheduler=None,
            ema=self.ema,
            channels_last=False,
        )
        session = Session(Place(device=device))
        self.state = TrainingState(session, self.bound, trainee, DataIdentity(0, 2, True), BatchPlan(2, 2))

    @property
    def task(self) -> Any:
        return self.bound.task

    def update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


def bring_over(old: Run, new: Run) -> dict[str, dict[str, Tensor]]:
    """All that a snapshot does, but for the files. Returns the tensors that it was read into."""
    captured = old.state.capture()
    trainer = json.loads(json.dumps(captured.trainer, allow_nan=False))
    targets = new.state.targets(trainer, captured.specs())
    for file, named in targets.items():
        for name, target in named.items():
            target.copy_(captured.files[file][name])
    new.state.load(trainer, targets)
    return targets


# ---- where tensors come back


def test_what_was_on_the_host_comes_back_there() -> None:
    """A generator's state on a GPU is refused by torch, at every start."""
    run = Run(device=GPU)
    generator = torch.Generator()
    run.task.kept = {"rng": generator.get_state(), "seen": torch.arange(3), "queue": torch.zeros(4, device=GPU)}
    captured = run.state.capture()
    rng, seen, queue = (f"state['task']['{name}']" for name in ("rng", "seen", "queue"))
    assert captured.trainer["on_host"] == {STATE_FILE: [rng, seen]}
    specs = captured.specs()
    targets = run.state.targets(json.loads(json.dumps(captured.trainer)), specs)[STATE_FILE]
    assert {name: tensor.device.type for name, tensor in targets.items()} == {rng: "cpu", seen: "cpu", queue: "meta"}
    targets[rng].copy_(captured.files[STATE_FILE][rng])
    generator.set_state(targets[rng])
    of_an_older_version = {key: value for key, value in captured.trainer.items() if key != "on_host"}
    before = run.state.targets(of_an_older_version, specs)[STATE_FILE]
    assert {tensor.device.type for tensor in before.values()} == {"meta"}


def test_a_run_on_the_host_says_nothing_of_it() -> None:
    run = Run()
    run.task.kept = {"seen": torch.arange(3)}
    assert "on_host" not in run.state.capture().trainer


def test_an_optimizers_own_tensors_on_the_host_come_back_there() -> None:
    """All but step counts, whose place follows from how the update is computed at this start."""
    run = Run(lambda model: Adam(model.parameters()), device=GPU, model_device=GPU)
    weight = run.model.get_parameter("0.weight")
    moments = {key: torch.empty_like(weight) for key in ("exp_avg", "exp_avg_sq")}
    run.optimizer.state[weight] = {"step": torch.tensor(1.0), **moments, "counts": torch.ones(3, 2)}
    captured = run.state.capture()
    assert captured.trainer["on_host"] == {OPTIMIZER_FILE: ["0.weight/counts"]}
    targets = run.state.targets(captured.trainer, captured.specs())[OPTIMIZER_FILE]
    assert {name: tensor.device.type for name, tensor in targets.items()} == {
        "0.weight/step": "cpu",
        "0.weight/exp_avg": "meta",
        "0.weight/exp_avg_sq": "meta",
        "0.weight/counts": "cpu",
    }


# ---- optimizers


class Odd(SGD):
    """Keeps all sorts of things for each parameter, and some for all."""

    def fill(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "history": [torch.full((2,), 2**40 + 1), torch.tensor([1 / 3], dtype=torch.float64)],
                    "tables": {"votes": torch.tensor([3]), 7: torch.tensor([0.1], dtype=torch.float64)},
                    "pair": (torch.tensor([True]), "second"),
                    "name": "momentum of old",
                    "ordered": OrderedDict([("b", 1), ("a", 2)]),
                    "raw": b"\x00\xff",
                    "none": None,
                    "low": torch.full_like(parameter, 1 / 3, dtype=torch.float64),
                    "a/b": torch.tensor([5]),
                    11: torch.tensor([6]),
                    "step": torch.tensor(4.0),
                }
        self.state["global"] = {"votes": torch.tensor([2**40 + 1]), "mode": "fast"}


def odd(model: nn.Module) -> Optimizer:
    return Odd(model.parameters(), lr=0.1)


def assert_same(one: Any, other: Any, path: str = "state") -> None:
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert set(one) == set(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}[{place}]")
    else:
        assert one == other, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_an_optimizer_keeps_comes_back_as_it_was(dtype: torch.dtype) -> None:
    """torch would convert tensors in lists to the parameter's dtype, and a string to the text of an iterator."""
    old, new = Run(odd, dtype=dtype), Run(odd, dtype=dtype, seed=1)
    old.optimizer.fill()  # type: ignore[attr-defined]
    bring_over(old, new)
    assert_same(dict(new.optimizer.state_dict()["state"]), dict(old.optimizer.state_dict()["state"]))


class Further(SGD):
    """Its state dictionary has a key of its own."""

    tempo = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "tempo": self.tempo, "marks": torch.tensor([2**40 + 1])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tempo, self.marks = state_dict["tempo"], state_dict["marks"]
        super().load_state_dict(state_dict)


def test_what_an_optimizer_adds_to_its_state_comes_back() -> None:
    old, new = (Run(lambda model: Further(model.parameters(), lr=0.1, momentum=0.9), seed=s) for s in (0, 1))
    old.update()
    old.optimizer.tempo = 0.25  # type: ignore[attr-defined]
    bring_over(old, new)
    assert new.optimizer.tempo == 0.25  # type: ignore[attr-defined]
    assert_same(new.optimizer.state_dict(), old.optimizer.state_dict())


class Counting(SGD):
    """Adam's first moment, with the number of steps as a plain number."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                state["average"].lerp_(parameter.grad, 0.1)
                parameter.data.sub_(state["average"] / (1 - 0.9 ** state["step"]), alpha=group["lr"])


def test_of_a_parameter_of_another_shape_an_optimizer_keeps_nothing() -> None:
    """With --allow model: it begins anew with it, as it did at first."""

    def counting(model: nn.Module) -> Optimizer:
        return Counting(model.parameters(), lr=0.1)

    old, new = Run(counting), Run(counting, seed=1, width=4)
    old.update()
    bring_over(old, new)
    new.update()
    steps = {name: new.optimizer.state[p]["step"] for name, p in new.model.named_parameters()}
    assert steps == {"0.weight": 1, "0.bias": 1, "1.weight": 1, "1.bias": 2}


def _hold(value: Any) -> Callable[[Run], None]:
    return lambda run: run.optimizer.state[run.model.get_parameter("0.weight")].update(value)


def _hold_for_all(run: Run) -> None:
    run.optimizer.state["all"] = object()


def _hold_no_dictionary(run: Run) -> None:
    run.optimizer.state[run.model.get_parameter("0.weight")] = [1]  # type: ignore[assignment]


def _hold_for_a_stranger(run: Run) -> None:
    run.optimizer.state[torch.zeros(5)] = {"step": 1}


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        (_hold({"thing": object()}), r"state\['optimizer'\]\['plain'\]\['0.weight'\]\['thing'\] is of type object"),
        (_hold({"deep": [{1}]}), r"\['0.weight'\]\['deep'\]\[0\] is of type set"),
        (_hold_for_all, r"state\['optimizer'\]\['shared'\]\['all'\] is of type object"),
        (_hold_no_dictionary, "the optimizer's state of 0.weight is of type list"),
        (_hold_for_a_stranger, r"a tensor of shape \[5\] that is in none of its groups"),
    ],
)
def test_what_an_optimizer_may_not_keep_is_refused_by_name(hold: Callable[[Run], None], said: str) -> None:
    run = Run()
    hold(run)
    with pytest.raises(StateValueError, match=said):
        run.state.capture()


# ---- averages


def test_averages_of_a_layer_that_is_trained_from_now_on_begin_with_its_weights() -> None:
    """Not with those of the build, which the snapshot's have just replaced."""
    old, new = Run(frozen=True), Run(seed=1)
    old.update()
    old.ema.update()
    targets = bring_over(old, new)
    assert sorted(targets[EMA_FILE]) == ["0.bias", "0.weight"]
    for name, average in new.ema.averages.items():
        expected = old.ema.averages[name] if name in old.ema.averages else old.model.get_parameter(name)
        assert torch.equal(average, expected), name
