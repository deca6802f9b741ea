"""When to take the next snapshot.

Too seldom, and a failure costs much work; too often, and the snapshots do. With C the time that training loses to one
snapshot and M the mean time between failures, the cheapest interval is about √(2·C·M): J. W. Young, *A first order
approximation to the optimum checkpoint interval*, CACM 17(9), 1974. We use the higher-order estimate of J. T. Daly,
*A higher order estimate of the optimum checkpoint interval for restart dumps*, FGCS 22(3), 2006, equation 37.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PRIOR_MTBF_S = 3600.0
"""The time between failures that is assumed before any is seen, with the weight of one failure. Large jobs fail every
few hours (A. Dubey et al., *The Llama 3 Herd of Models*, 2024, section 3.3.4: 419 unexpected times in 54 days)."""
FIRST_INTERVAL_S = 10.0
"""Before a snapshot's cost is known, the first is taken after this time, to learn it."""


def mean_time_between_failures_s(uptime_s: float, num_failures: int) -> float:
    """Estimates the mean time between failures: the mean of what was seen and one failure per `PRIOR_MTBF_S`."""
    return (PRIOR_MTBF_S + uptime_s) / (1 + num_failures)


def interval_s(cost_s: float, mtbf_s: float, max_overhead: float) -> float:
    """Seconds of training between the end of one snapshot and the start of the next.

    Args:
        cost_s: what training loses to one snapshot.
        mtbf_s: mean time between failures.
        max_overhead: the largest share of the time that snapshots may take, in (0, 1).
    """
    if cost_s <= 0:
        return 0.0
    if cost_s < 2 * mtbf_s:
        ratio = cost_s / (2 * mtbf_s)
        best = math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
    else:
        best = mtbf_s
    # cost / (cost + interval) ≤ max_overhead
    return max(best, cost_s * (1 - max_overhead) / max_overhead)


@dataclass(frozen=True, slots=True)
class SnapshotSchedule:
    """What job.toml says about when.

    Args:
        every_steps: after every so many steps.
        every_s: when so many seconds have passed since the last.
        auto: by cost and time between failures.
        max_overhead: limit of `auto`.
    """

    every_steps: int | None = None
    every_s: float | None = None
    auto: bool = False
    max_overhead: float = 0.01


@dataclass(frozen=True, slots=True)
class LastSnapshot:
    """The last snapshot, or the start of the run.

    Args:
        global_step: the step it is of.
        ended_s: when it was complete, on the clock that also gives `now_s`.
        cost_s: what training lost to a snapshot, measured; None before the first.
    """

    global_step: int
    ended_s: float
    cost_s: float | None = None


def is_due(
    schedule: SnapshotSchedule, last: LastSnapshot, *, global_step: int, now_s: float, mtbf_s: float = PRIOR_MTBF_S
) -> bool:
    """Whether to take a snapshot of `global_step` now. Never two of one step."""
    if global_step <= last.global_step:
        return False
    if schedule.every_steps is not None and global_step // schedule.every_steps > (
        last.global_step // schedule.every_steps
    ):
        return True
    passed_s = now_s - last.ended_s
    if schedule.every_s is not None and passed_s >= schedule.every_s:
        return True
    if not schedule.auto:
        return False
    if last.cost_s is None:
        return passed_s >= FIRST_INTERVAL_S
    return passed_s >= interval_s(last.cost_s, mtbf_s, schedule.max_overhead)
