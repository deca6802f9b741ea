"""What an experienced colleague would say about a run: decisions over measurements, no measuring.

Each function returns an `Advice`, or None where there is nothing to say. The thresholds are judgements, named so
that they can be argued with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALL_BATCHNORM_BATCH = 16
"""Below this many samples per rank and pass, batch statistics are visibly noisy: Wu and He, *Group Normalization*
(ECCV 2018), figure 1."""
BOUND_SHARE = 0.25
"""A quarter of the time lost to one cause is worth a line."""
MIN_STEPS_FOR_SHARES = 20


@dataclass(frozen=True, slots=True)
class Advice:
    """One remark. `key` names it in logs and makes it appear once; `what` is the finding, `hint` what to do."""

    key: str
    what: str
    hint: str


@dataclass(frozen=True, slots=True)
class TimeShares:
    """How the wall time of an interval was spent, as fractions of it; they add up to 1."""

    data: float
    compute: float
    reduce: float
    other: float


def batchnorm_advice(
    layers: Sequence[str], *, micro_batch_size: int, world_size: int, synchronised: bool, can_synchronise: bool = True
) -> Advice | None:
    """BatchNorm sees the microbatch of one rank, not the global batch: accumulation does not help it."""
    if not layers or synchronised or micro_batch_size >= SMALL_BATCHNORM_BATCH:
        return None
    names = ", ".join(layers[:3]) + (", …" if len(layers) > 3 else "")
    ways = ["raise train.micro_batch_size", "normalise by group or layer instead"]
    if world_size > 1 and can_synchronise:
        ways.insert(0, "set model.sync_batchnorm = true (statistics over all ranks)")
    return Advice(
        "batchnorm_small_microbatch",
        f"BatchNorm ({names}) takes its statistics from {micro_batch_size} samples, not from the global batch",
        f"Its noise grows as the microbatch shrinks: {', or '.join(ways)}.",
    )


def schedule_advice(
    horizons: Mapping[str, int], *, max_steps: int, microbatches_per_step: int, world_size: int
) -> Advice | None:
    """A schedule laid out over microbatches ends too late: it advances once per applied update.

    Args:
        horizons: the scheduler's lengths by their own names, such as `{"CosineAnnealingLR.T_max": 800}`.
        max_steps: optimizer steps of the whole run.
        microbatches_per_step: M.
        world_size: number of ranks.
    """
    factors = {microbatches_per_step, -(-microbatches_per_step // world_size)} - {1}
    for name, horizon in horizons.items():
        for factor in sorted(factors):
            if horizon == max_steps * factor:
                return Advice(
                    "schedule_counts_microbatches",
                    f"{name} = {horizon} is {factor} times train.max_steps = {max_steps}, and a step has "
                    f"{factor} microbatches: the schedule looks counted in microbatches",
                    f"It advances once per applied update, so it would only get 1/{factor} of the way. "
                    f"Use num_steps, which Task.scheduler is given.",
                )
    return None


def mean_of_means_advice(weights: Sequence[int], *, found_by: str) -> Advice | None:
    """A mean loss over tokens, averaged over microbatches with unequal numbers of tokens, is a mean of means.

    Args:
        weights: counted (not ignored) elements in the first microbatches seen.
        found_by: how they were recognised, for the message.
    """
    if len(set(weights)) < 2:
        return None
    low, high = min(weights), max(weights)
    return Advice(
        "mean_of_means",
        f"microbatches hold between {low} and {high} counted elements ({found_by}), but Task has no weight(): each "
        "microbatch's mean counts by its number of samples",
        "If the loss is a mean over those elements, define Task.weight(batch) to return their number; the step's "
        "gradient is then the exact mean over all of them.",
    )


def bound_advice(shares: TimeShares, *, num_steps: int, num_workers: int, world_size: int) -> Advice | None:
    """Says what a run mostly waits for, from measured shares."""
    if num_steps < MIN_STEPS_FOR_SHARES:
        return None
    if shares.data >= BOUND_SHARE and shares.data >= shares.reduce:
        more = f"raise data.num_workers (now {num_workers})" if num_workers else "set data.num_workers to 1 or more"
        return Advice(
            "loader_bound",
            f"{shares.data:.0%} of the time is spent waiting for data",
            f"The run is loader-bound: {more}, make dataset[i] cheaper, or store the data decoded.",
        )
    if world_size > 1 and shares.reduce >= BOUND_SHARE:
        return Advice(
            "communication_bound",
            f"{shares.reduce:.0%} of the time is spent in gradient reduction",
            "The run is communication-bound: more microbatches per step (one reduction each), larger microbatches, "
            "or fewer ranks; where ranks are uneven, the time is spent waiting for the slowest.",
        )
    return None
