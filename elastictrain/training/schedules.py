"""What torch's schedulers keep inside: the lengths they were laid out for, and the rates they start from.

torch offers none of this by a public name; all private names are here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_HORIZONS = ("T_max", "total_steps", "total_iters")
_LAYOUT = (*_HORIZONS, "_schedule_phases", "_milestones")
"""What belongs to a scheduler's construction although it keeps it in its state: how long its phases are."""
_RATES = ("base_lrs", "max_lrs")
"""Likewise: the learning rates that it was built from."""


def schedule_horizons(scheduler: Any) -> dict[str, int]:
    """The lengths a scheduler was laid out for, by `Class.attribute`; chained schedulers are looked into."""
    return {
        f"{type(one).__name__}.{attribute}": value
        for one in _innermost_first(scheduler)
        for attribute in _HORIZONS
        if isinstance(value := getattr(one, attribute, None), int)
    }


def load_scheduler(scheduler: Any, state: Mapping[str, Any], *, own_rates: bool = False) -> None:
    """Loads a scheduler's state; where it was laid out for another length, the length of this start holds.

    Args:
        scheduler: as it was built at this start; its optimizer's state has been loaded.
        state: its state dict in the snapshot.
        own_rates: the rates it was built from at this start hold, too.
    """
    kept = [
        (one, name, getattr(one, name))
        for one in _innermost_first(scheduler)
        for name in (*_LAYOUT, *(_RATES if own_rates else ()))
        if hasattr(one, name)
    ]
    scheduler.load_state_dict(state)
    relaid = False
    for owner, name, value in kept:
        relaid = relaid or getattr(owner, name, value) != value
        setattr(owner, name, value)
    if relaid and hasattr(scheduler, "_get_closed_form_lr"):
        # Computed from the last rate, the next would follow the old layout: a cosine that had reached zero stays there.
        rates = scheduler._get_closed_form_lr()
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = list(rates)


def _innermost_first(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those it is made of."""
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _innermost_first(inner)
    if scheduler is not None:
        yield scheduler
