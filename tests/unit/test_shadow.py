"""`Shadow`: what forward passes move, as it was at the commit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastictrain.training.shadow import Shadow
from elastictrain.training.task import BoundTask

CPU = torch.device("cpu")


class Bare:
    """A task without state."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def train_data(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()


class Keeping(Bare):
    """A task with a tensor and a list that it goes on writing to."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.memory = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "memory": self.memory, "pair": (1, b"x")}


def shadow_of(module: nn.Module, task: type = Bare) -> Shadow:
    return Shadow(module, BoundTask(task, {}), CPU)


def first_step(shadow: Shadow) -> None:
    shadow.keep(0)
    shadow.observe()


def test_nothing_to_hold_costs_nothing() -> None:
    shadow = shadow_of(nn.Linear(2, 2))
    assert shadow.is_needed, "only the first step shows"
    first_step(shadow)
    assert not shadow.is_needed


def test_statistics_that_torch_does_not_count() -> None:
    """A normalisation layer writes to its buffers behind torch's count."""
    norm = nn.BatchNorm1d(2)
    shadow = shadow_of(nn.Sequential(OrderedDict(norm=norm)))
    first_step(shadow)
    norm(torch.randn(4, 2))
    shadow.keep(1)
    then = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    norm(torch.randn(4, 2))
    kept = shadow.tensors()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(kept[f"norm.{name}"], then[name])
        assert not torch.equal(kept[f"norm.{name}"], norm.state_dict()[name])
    assert shadow.step == 1
    assert list(shadow.lost()) == []


class Odd(nn.Module):
    """Buffers that stand still, are replaced, are changed uncounted; one that is not kept; and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.still: Tensor
        self.replaced: Tensor
        self.uncounted: Tensor
        for name in ("still", "replaced", "uncounted"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self) -> None:
        self.replaced = self.replaced + 1
        self.uncounted.data.add_(1)


def test_every_way_to_change_a_buffer() -> None:
    module = Odd()
    shadow = shadow_of(module)
    shadow.keep(0)
    module()
    shadow.observe()
    for step in (1, 2):
        shadow.keep(step)
        module()
        kept = shadow.tensors()
        assert sorted(kept) == ["replaced", "still", "uncounted"]
        assert (kept["replaced"][0], kept["uncounted"][0], kept["still"][0]) == (step, step, 0)
    still = shadow.tensors()["still"]
    shadow.keep(3)
    assert shadow.tensors()["still"] is still


def test_a_frozen_parameter_that_moves_after_all() -> None:
    """The first time it is lost, and said to be; then it is held."""
    module = Odd()
    shadow = shadow_of(module)
    first_step(shadow)
    shadow.keep(1)
    module.frozen.add_(1)
    assert list(shadow.lost()) == ["frozen"]
    shadow.keep(2)
    assert list(shadow.lost()) == []
    module.frozen.add_(1)
    assert shadow.tensors()["frozen"].tolist() == [2, 2]


def test_rows_that_an_embedding_rescales() -> None:
    """From the first step on: a node that has just joined may have to keep what it was given."""
    embedding = nn.Embedding(3, 2, max_norm=0.1)
    shadow = shadow_of(nn.Sequential(OrderedDict(rows=embedding)))
    for step in range(2):
        shadow.keep(step)
        then = embedding.weight.detach().clone()
        embedding(torch.tensor([step]))
        assert torch.equal(shadow.tensors()["rows.weight"], then)
        assert not torch.equal(embedding.weight, then)
        shadow.observe()
    assert list(shadow.lost()) == []


class Decaying(nn.Module):
    """A weight that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.5)


def test_a_trained_parameter_that_forward_passes_change() -> None:
    """What it was before the first of them is lost, and said to be; then it is held."""
    module = Decaying()
    shadow = shadow_of(module)
    shadow.keep(0)
    assert list(shadow.lost()) == []
    module()
    assert list(shadow.lost()) == ["weight"]
    shadow.observe()
    assert list(shadow.lost()) == ["weight"]
    shadow.keep(1)
    assert list(shadow.lost()) == []
    module()
    assert shadow.tensors()["weight"].tolist() == [0.5, 0.5]


def test_the_state_of_a_task_is_a_copy() -> None:
    bound = BoundTask(Keeping, {})
    shadow = Shadow(nn.Linear(2, 2), bound, CPU)
    first_step(shadow)
    task = bound.task
    task.seen.append(1)
    task.memory += 1
    shadow.keep(1)
    task.seen.append(2)
    task.memory += 1
    kept = shadow.plain().task
    assert (kept["seen"], kept["memory"].tolist(), kept["pair"]) == ([1], [1, 1], (1, b"x"))
    assert shadow.is_needed


def test_copies_that_were_interrupted_are_of_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = shadow_of(nn.BatchNorm1d(2))
    first_step(shadow)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shadow.keep(1)
    assert shadow.step is None
