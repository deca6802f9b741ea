"""What a benchmark is held to: each goal that is missed is said, and makes its exit code 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure and its limit.

    Args:
        what: the figure, in words.
        value: what was measured; None if nothing was, which is a miss.
        limit: of it.
        unit: of both; "" for a ratio or a number.
        at_least: the figure must not be below the limit; else it must not be above.
    """

    what: str
    value: float | None
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        found = "nothing was measured" if self.value is None else f"{self.value:.4g}{unit}"
        return f"{self.what}: {found}, {'at least' if self.at_least else 'at most'} {self.limit:g}{unit}"


def judge(goals: Sequence[Goal]) -> int:
    """Prints what has become of the goals.

    Returns:
        the exit code: 1 if one was missed.
    """
    missed = [goal for goal in goals if not goal.is_met]
    for goal in goals:
        print(f"goal {'missed' if goal in missed else 'met'}: {goal}", flush=True)
    return 1 if missed else 0


def not_judged(why: str) -> int:
    """For a run that is too short, or another than the goals are for; returns the exit code."""
    print(f"goals not judged: {why}", flush=True)
    return 0
