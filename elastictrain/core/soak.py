"""Which faults a soak has, and when: drawn from a seed, so that the same seed is the same soak.

The gaps between faults are exponentially distributed, as those of independent failures are, and counted in steps: a
fault happens at a point of the training, not at a time of day, and a machine that is slower has the same soak. Kinds
come in rounds, each a shuffle of all of them: none comes a second time before every other has come once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.core.fault_table import TABLE
from elastictrain.core.faults import Fault

FIRST_STEP = 2
"""No fault before this step: there would be nothing to lose."""
QUIET_STEPS = 2
"""None in the last steps: what follows on a fault is to be seen."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault of a soak.

    Args:
        fault: which.
        step: after how many steps.
    """

    fault: Fault
    step: int

    def id(self, number: int) -> str:
        return f"{number:04d}-{self.fault.name}"


def soakable() -> list[Fault]:
    return [fault for fault in TABLE if fault.in_soak]


def schedule(seed: int, *, num_steps: int, mean_steps_between: float, faults: Sequence[Fault]) -> tuple[Strike, ...]:
    """Draws the faults of a soak, in the order of their steps, at most one a step.

    Args:
        seed: of the draw.
        num_steps: length of the run.
        mean_steps_between: mean gap between two faults.
        faults: to draw from, each once a round.
    """
    generator = random.Random(seed)
    strikes: list[Strike] = []
    step = FIRST_STEP
    still_to_come: list[Fault] = []
    while True:
        step += max(1, round(generator.expovariate(1 / mean_steps_between)))
        if step > num_steps - QUIET_STEPS:
            return tuple(strikes)
        if not still_to_come:
            still_to_come = generator.sample(list(faults), len(faults))
        strikes.append(Strike(still_to_come.pop(), step))


def parse_duration_s(text: str) -> float | None:
    """Seconds of a duration such as `90`, `30s`, `10m`, `2h`; None if it is none."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    unit = units.get(text[-1:], 0.0)
    number = text[:-1] if unit else text
    try:
        value_s = float(number) * (unit or 1.0)
    except ValueError:
        return None
    return value_s if 0 < value_s < float("inf") else None
