"""The optimizer's and the scaler's hyper-parameters: what a run was built with, and what it goes by.

A snapshot holds them as part of the state, so a changed learning rate in job.toml would be overridden without a word. A
snapshot therefore says what its run was built with too, which a schedule does not change: compared to what this start
was built with, that tells an edited value from one that training has moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from elastictrain.core.identity import Difference

Hyperparameters = dict[str, Any]
"""Plain JSON: `optimizer`, a list of groups; `scaler`, or None."""

COMPUTATION_KEYS = ("fused", "foreach", "capturable", "differentiable")
"""How an update is computed is each start's choice, not a hyper-parameter."""
_NOT_COMPARED = ("params", "param_names", "initial_lr", *COMPUTATION_KEYS)


def built_with(optimizer: Optimizer, scaler: GradScaler | None) -> Hyperparameters:
    """What an optimizer and a scaler were built with. Call it before training moves any of it."""
    groups = []
    for group in optimizer.param_groups:
        values = {key: _plain(value) for key, value in group.items() if key not in _NOT_COMPARED}
        # A scheduler sets the rate of its first step when it is built, and keeps here what it starts from.
        values["lr"] = _plain(group.get("initial_lr", group["lr"]))
        groups.append(values)
    state = scaler.state_dict() if scaler is not None else {}
    scaling = {"init_scale" if key == "scale" else key: v for key, v in state.items() if not key.startswith("_")}
    return {"optimizer": groups, "scaler": scaling or None}


def differences(kept: Hyperparameters, now: Hyperparameters) -> list[Difference]:
    """What a snapshot's run was built with differently from this one, by the keys of job.toml where there are such.

    Both must have as many groups of parameters. A key that only one of them has is another version's, not a change.
    """
    found = []
    groups = list(zip(kept["optimizer"], now["optimizer"], strict=True))
    for key in now["optimizer"][0] if groups else ():
        changed = {i: (a[key], b[key]) for i, (a, b) in enumerate(groups) if key in a and key in b and a[key] != b[key]}
        if len(changed) == len(groups) and all(pair == changed[0] for pair in changed.values()):
            found.append(Difference(f"optimizer.{key}", str(changed[0][0]), str(changed[0][1])))
        else:
            found += [Difference(f"optimizer.param_groups[{i}].{key}", str(a), str(b)) for i, (a, b) in changed.items()]
    if kept["scaler"] is not None and now["scaler"] is not None:
        found += [
            Difference(f"scaler.{key}", str(kept["scaler"][key]), str(value))
            for key, value in now["scaler"].items()
            if key in kept["scaler"] and kept["scaler"][key] != value
        ]
    return found


def put_into_groups(
    saved: Sequence[dict[str, Any]], own: Sequence[Mapping[str, Any]], kept: Hyperparameters, now: Hyperparameters
) -> None:
    """Changes a snapshot's parameter groups to what this start was built with, where that differs.

    A learning rate that a schedule has moved keeps its share of the rate it started from.

    Args:
        saved: the snapshot's groups.
        own: this start's groups, as they were built.
        kept: what the snapshot's run was built with.
        now: what this start was built with.
    """
    for group, mine, before, after in zip(saved, own, kept["optimizer"], now["optimizer"], strict=True):
        for key, value in after.items():
            if key not in before or before[key] == value:
                continue
            if key != "lr":
                group[key] = mine[key]
                continue
            moved = float(group["lr"])
            group["lr"] = value if moved == before["lr"] or not before["lr"] else moved / before["lr"] * value
            if "initial_lr" in mine:
                group["initial_lr"] = mine["initial_lr"]


def put_into_scaler(saved: Mapping[str, Any], kept: Hyperparameters, now: Hyperparameters) -> dict[str, Any]:
    """A snapshot's scaler state with what this start was built with, where that differs."""
    if kept["scaler"] is None or now["scaler"] is None:
        return dict(saved)
    changed = {key: value for key, value in now["scaler"].items() if kept["scaler"].get(key, value) != value}
    state = {**saved, **{"scale" if key == "init_scale" else key: value for key, value in changed.items()}}
    # The scale grows when the count equals the interval: a count that is beyond it already would never do so.
    state["_growth_tracker"] = min(state["_growth_tracker"], state["growth_interval"] - 1)
    return state


def _plain(value: Any) -> Any:
    """As JSON has it; what it has no word for is compared by its text."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return repr(value)
