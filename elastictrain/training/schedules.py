"""What torch's schedulers keep inside: the lengths they were laid out for, and the rates they start from.

torch offers none of this by a public name; all private names are here, and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    OneCycleLR,
    SequentialLR,
)

_HORIZONS = ("T_max", "total_steps", "total_iters")
_LAYOUT = (*_HORIZONS, "_schedule_phases", "_milestones", "milestones")
"""What belongs to a scheduler's construction although it keeps it in its state: how long its phases are."""
_RATES = ("base_lrs", "max_lrs")
"""Likewise: the learning rates that it was built from."""
_FROM_STEP_ALONE = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)
"""Their `get_lr` goes by the step, not by the rate of the step before."""

Rates = list[Any]
"""One a group: a float, or a tensor where the group's is one."""


def schedule_horizons(scheduler: Any) -> dict[str, int]:
    """The lengths a scheduler was laid out for, by `Class.attribute`; chained schedulers are looked into."""
    return {
        f"{type(one).__name__}.{attribute}": value
        for one in _innermost_first(scheduler)
        for attribute in _HORIZONS
        if isinstance(value := getattr(one, attribute, None), int)
    }


def load_scheduler(scheduler: Any, state: Mapping[str, Any], *, own_rates: bool = False) -> list[str]:
    """Loads a scheduler's state; where it was laid out for another length, the length of this start holds.

    Args:
        scheduler: as it was built at this start; its optimizer's state has been loaded.
        state: its state dict in the snapshot.
        own_rates: the rates it was built from at this start hold, too.

    Returns:
        the classes of schedulers that were laid out for another length, and whose present rate by the new one cannot be
        told: they go on from the last rate.
    """
    kept = [
        (one, name, getattr(one, name))
        for one in _innermost_first(scheduler)
        for name in (*_LAYOUT, *(_RATES if own_rates else ()))
        if hasattr(one, name)
    ]
    scheduler.load_state_dict(state)
    relaid: set[int] = set()
    resized: set[int] = set()
    for owner, name, value in kept:
        if getattr(owner, name, value) != value:
            relaid.add(id(owner))
            if name in _LAYOUT:
                resized.add(id(owner))
        setattr(owner, name, value)
    present = _present(scheduler, resized)
    if not any(id(one) in relaid for one in (*present, *_innermost_first(present[-1]))):
        return []  # to the last bit as it was: what was laid out anew has ended, or has not begun
    # Computed from the last rate, the next would follow the old layout: a cosine that had reached zero stays there.
    rates = _product_now(scheduler) if isinstance(scheduler, ChainedScheduler) else _rates_now(present[-1])
    if rates is None:
        # Where only the rates are others, the last one is in proportion already (see `put_into_groups`).
        return [type(one).__name__ for one in _innermost_first(present[-1]) if id(one) in resized]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    for one in present:
        one._last_lr = list(rates)
    return []


def _present(scheduler: Any, resized: set[int]) -> list[Any]:
    """A scheduler, the one in it that has the rate at this step, and so on; each at its own step."""
    found = [scheduler]
    has_moved = False
    while isinstance(outer := found[-1], SequentialLR):
        place = bisect_right(outer._milestones, outer.last_epoch)
        inner: Any = outer._schedulers[place]
        depth = len(found) - 1
        found.append(inner)
        has_moved = has_moved or id(outer) in resized
        if not has_moved:
            continue
        # With other milestones, here or further out, it began at another step.
        if place:
            inner_step = outer.last_epoch - outer._milestones[place - 1]
        else:  # a sequence in another is stepped once more than it counts, before the first step (torch 2.13)
            inner_step = outer.last_epoch - depth + (depth + 1 if isinstance(inner, SequentialLR) else 0)
        if getattr(inner, "last_epoch", inner_step) != inner_step:
            inner.last_epoch = inner_step
    return found


def _rates_now(scheduler: Any) -> Rates | None:
    """What a scheduler's rates are at its step, whatever they were at the step before; None where it cannot tell. Nor
    can a chain within a sequence: torch lets its links multiply once more than they count, before the first step."""
    if hasattr(scheduler, "_get_closed_form_lr"):
        return list(scheduler._get_closed_form_lr())
    if not isinstance(scheduler, _FROM_STEP_ALONE):
        return None
    if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch > scheduler.total_steps:
        return None  # beyond its end it raises
    scheduler._get_lr_called_within_step = True  # or it warns of a caller who may want the last rate instead
    try:
        return list(scheduler.get_lr())
    finally:
        scheduler._get_lr_called_within_step = False


def _product_now(chained: Any) -> Rates | None:
    """Of a chain whose links each multiply the rate by a factor of their own; one that has a floor does not."""
    rates: Rates | None = None
    for link in chained._schedulers:
        floor = getattr(link, "eta_min", 0)
        if not hasattr(link, "_get_closed_form_lr") or floor:
            return None
        of_link: Rates = link._get_closed_form_lr()
        if rates is None:
            rates = list(of_link)
        else:
            rates = [
                rate * now / base if base else now
                for rate, now, base in zip(rates, of_link, link.base_lrs, strict=True)
            ]
    return rates


def _innermost_first(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those it is made of."""
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _innermost_first(inner)
    if scheduler is not None:
        yield scheduler
