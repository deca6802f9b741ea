"""Edited hyper-parameters are told from those that training has moved, group by group."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from elastictrain.training.hyperparameters import built_with, differences, put_into_groups, put_into_scaler


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


def groups(first_lr: float, second_lr: float, **options: float) -> SGD:
    one, two = parameters()
    return SGD([{"params": [one], "lr": first_lr}, {"params": [two], "lr": second_lr}], lr=1.0, **options)


def shown(kept: SGD, now: SGD) -> list[tuple[str, str, str]]:
    return [(d.name, d.kept, d.now) for d in differences(built_with(kept, None), built_with(now, None))]


def test_nothing_differs_from_itself_however_it_is_computed() -> None:
    one, two = (AdamW(parameters(), fused=fused) for fused in (True, False))
    assert differences(built_with(one, None), built_with(two, None)) == []


def test_a_schedule_is_no_edit() -> None:
    plain, scheduled = groups(0.1, 0.2), groups(0.1, 0.2)
    LambdaLR(scheduled, lambda step: 0.5)
    assert scheduled.param_groups[0]["lr"] == 0.05
    assert shown(plain, scheduled) == []


def test_what_differs_alike_in_all_groups_is_named_once() -> None:
    assert shown(groups(0.1, 0.1, momentum=0.9), groups(0.1, 0.1, momentum=0.8)) == [
        ("optimizer.momentum", "0.9", "0.8")
    ]
    assert shown(groups(0.1, 0.2), groups(0.1, 0.4)) == [("optimizer.param_groups[1].lr", "0.2", "0.4")]
    assert shown(groups(0.1, 0.2), groups(0.3, 0.4)) == [
        ("optimizer.param_groups[0].lr", "0.1", "0.3"),
        ("optimizer.param_groups[1].lr", "0.2", "0.4"),
    ]


def test_a_key_of_another_version_is_no_difference() -> None:
    kept, now = built_with(groups(0.1, 0.1), None), built_with(groups(0.1, 0.1), None)
    del kept["optimizer"][0]["nesterov"], kept["optimizer"][1]["nesterov"]
    now["optimizer"][1]["new"] = 1
    assert differences(kept, now) == []


def test_only_what_was_edited_is_put_into_a_snapshots_groups() -> None:
    kept, now = groups(0.1, 0.2, momentum=0.9), groups(0.1, 0.4, momentum=0.9)
    LambdaLR(now, lambda step: 1.0)
    saved = [{"lr": 0.01, "initial_lr": 0.1, "momentum": 0.7}, {"lr": 0.05, "initial_lr": 0.2, "momentum": 0.7}]
    put_into_groups(saved, now.param_groups, built_with(kept, None), built_with(now, None))
    assert saved == [
        {"lr": 0.01, "initial_lr": 0.1, "momentum": 0.7},
        {"lr": 0.1, "initial_lr": 0.4, "momentum": 0.7},  # a quarter of its rate, as before
    ]


def test_a_rate_that_nothing_moved_is_taken_to_the_bit() -> None:
    kept, now = groups(0.1, 0.3), groups(0.1, 0.7)
    saved = [{"lr": 0.1}, {"lr": 0.3}]
    put_into_groups(saved, now.param_groups, built_with(kept, None), built_with(now, None))
    assert saved == [{"lr": 0.1}, {"lr": 0.7}]


def test_a_shorter_growth_interval_lets_the_scale_grow() -> None:
    kept, now = (
        built_with(groups(0.1, 0.1), torch.amp.GradScaler("cpu", growth_interval=n, init_scale=8.0)) for n in (100, 3)
    )
    saved = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100, "_growth_tracker": 50}
    assert put_into_scaler(saved, kept, now) == {**saved, "growth_interval": 3, "_growth_tracker": 2}
