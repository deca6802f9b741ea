"""Schedules that are laid out for another length at a later start."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from elastictrain.training.schedules import load_scheduler

Make = Callable[[Optimizer, int], Any]

SCHEDULES: dict[str, Make] = {
    "cosine": CosineAnnealingLR,
    "polynomial": lambda o, n: PolynomialLR(o, n, power=2.0),
    "one cycle": lambda o, n: OneCycleLR(o, 0.3, total_steps=n + 1),
    "warm-up, cosine": lambda o, n: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, n - 2, eta_min=0.01)], milestones=[2]
    ),
    "warm-up, polynomial": lambda o, n: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=2), PolynomialLR(o, n - 2)], milestones=[2]
    ),
    "warm-up by a function, cosine": lambda o, n: SequentialLR(
        o, [LambdaLR(o, lambda step: (step + 1) / n), CosineAnnealingLR(o, n // 2)], milestones=[n // 2]
    ),
    "milestones by the length": lambda o, n: SequentialLR(
        o,
        [LinearLR(o, 0.1, total_iters=n // 3), ConstantLR(o, 1.0), PolynomialLR(o, n - 2 * (n // 3))],
        milestones=[n // 3, 2 * (n // 3)],
    ),
    "a sequence in a sequence": lambda o, n: SequentialLR(
        o,
        [
            SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), PolynomialLR(o, 9)], milestones=[2]),
            ConstantLR(o, 0.5, total_iters=3),
        ],
        milestones=[n - 3],
    ),
    "a sequence by the length in a sequence": lambda o, n: SequentialLR(
        o,
        [
            SequentialLR(o, [LinearLR(o, 0.1, total_iters=n // 2), PolynomialLR(o, n)], milestones=[n // 2]),
            ConstantLR(o, 0.5, total_iters=3),
        ],
        milestones=[n - 3],
    ),
    "drops": lambda o, n: MultiStepLR(o, [n // 2, n - 2]),
    "chain": lambda o, n: ChainedScheduler([LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, n), StepLR(o, 3)]),
}


def _optimizer(*, as_tensor: bool = False) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.2}, {"params": [nn.Parameter(torch.ones(1))]}]
    if as_tensor:
        for group, rate in zip(groups, (0.2, 0.1), strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float64)
    return SGD(groups, lr=0.1, momentum=0.9)


def _rates(optimizer: Optimizer, scheduler: Any, num_steps: int) -> list[list[float]]:
    """The rates of the next updates."""
    found = []
    for _ in range(num_steps):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def _gone_on(make: Make, at: int, before: int, after: int, *, as_tensor: bool = False) -> tuple[list[Any], list[Any]]:
    """Rates after `at` steps of a run that was laid out for `before` steps, and from there on for `after`; and those of
    one that was so from the start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR's own, of its `step(epoch)`
        first = _optimizer(as_tensor=as_tensor)
        scheduler = make(first, before)
        _rates(first, scheduler, at)
        second = _optimizer(as_tensor=as_tensor)
        later = make(second, after)
        second.load_state_dict(first.state_dict())
        assert load_scheduler(later, scheduler.state_dict()) == []
        assert list(later.get_last_lr()) == [group["lr"] for group in second.param_groups]
        third = _optimizer(as_tensor=as_tensor)
        whole = make(third, after)
        _rates(third, whole, at)
        return _rates(second, later, after - at), _rates(third, whole, after - at)


NOT_COMPUTED: dict[str, Make] = {
    "a chain with a floor": lambda o, n: ChainedScheduler([ConstantLR(o), CosineAnnealingLR(o, n, eta_min=0.01)]),
    "a chain in a sequence": lambda o, n: SequentialLR(
        o, [ChainedScheduler([StepLR(o, 3), CosineAnnealingLR(o, n)]), ConstantLR(o)], milestones=[n]
    ),
}


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_the_new_length_wherever_it_changes(name: str, at: int) -> None:
    """Also where the old one has come to its end, and to a rate of zero."""
    mine, theirs = _gone_on(SCHEDULES[name], at, 8, 12)
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-15)
    assert mine[0] != [0.0, 0.0]


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_unchanged_length_changes_no_bit(name: str, at: int) -> None:
    mine, theirs = _gone_on(SCHEDULES[name], at, 12, 12)
    assert mine == theirs


def test_what_is_to_come_changes_no_bit_of_what_is() -> None:
    """A warm-up that does not hang on the length goes on as it would have."""
    mine, theirs = _gone_on(SCHEDULES["warm-up, cosine"], 1, 8, 12)
    assert mine[0] == theirs[0]


def test_rates_that_are_tensors_stay_the_same_tensors() -> None:
    """Compiled and captured updates hold them."""
    mine, theirs = _gone_on(SCHEDULES["warm-up, cosine"], 8, 8, 12, as_tensor=True)
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    optimizer = _optimizer(as_tensor=True)
    state = CosineAnnealingLR(_optimizer(as_tensor=True), 8).state_dict()
    scheduler, rate = CosineAnnealingLR(optimizer, 12), optimizer.param_groups[0]["lr"]
    load_scheduler(scheduler, state)
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_what_can_only_go_on_from_its_last_rate_is_named(name: str) -> None:
    """It keeps that rate, and is silent where its length is as it was."""
    make = NOT_COMPUTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first, second = _optimizer(), _optimizer()
        scheduler, later = make(first, 8), make(second, 12)
        _rates(first, scheduler, 4)
        second.load_state_dict(first.state_dict())
        assert load_scheduler(later, scheduler.state_dict()) == ["CosineAnnealingLR"]
        assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in first.param_groups]
        assert load_scheduler(make(_optimizer(), 8), scheduler.state_dict()) == []


@pytest.mark.parametrize("name", [*NOT_COMPUTED, "by a factor of one's own"])
def test_another_rate_to_start_from_is_no_other_length(name: str) -> None:
    """With --allow hyperparameters: the last rate is in proportion to the new one by then, nothing is to be said."""
    make = {**NOT_COMPUTED, "by a factor of one's own": lambda o, _n: MultiplicativeLR(o, lambda _step: 0.9)}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first, second = _optimizer(), _optimizer()
        for group in second.param_groups:
            group["lr"] *= 2
        scheduler, later = make(first, 8), make(second, 8)
        _rates(first, scheduler, 4)
        for group, moved in zip(second.param_groups, first.param_groups, strict=True):
            group["lr"] = 2 * moved["lr"]  # as `put_into_groups` does
        assert load_scheduler(later, scheduler.state_dict(), own_rates=True) == []
        assert [g["lr"] for g in second.param_groups] == [2 * g["lr"] for g in first.param_groups]
