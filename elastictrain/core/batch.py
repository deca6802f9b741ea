"""From what the user wrote about batch sizes to the numbers a run works with, or a reason why not."""

from __future__ import annotations

from dataclasses import dataclass

from elastictrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Samples per optimizer step and per forward pass. `global_batch_size` is a multiple of `micro_batch_size`."""

    global_batch_size: int
    micro_batch_size: int

    @property
    def num_microbatches(self) -> int:
        """Microbatches in a full window, M."""
        return self.global_batch_size // self.micro_batch_size


def resolve_batch(
    *,
    micro_batch_size: int,
    global_batch_size: int | None,
    accumulation_steps: int | None,
    world_size: int,
    kept_global_batch_size: int | None,
) -> BatchPlan:
    """Fixes the batch sizes of a run.

    Args:
        micro_batch_size: samples per forward pass.
        global_batch_size: samples per optimizer step, where the user fixed it.
        accumulation_steps: microbatches per rank and step, where the user gave this instead.
        world_size: number of ranks now.
        kept_global_batch_size: what an earlier start of this job fixed from `accumulation_steps`; it is kept ever
            after, so that a job that goes on with fewer ranks still trains the same model.

    Raises:
        ConfigError: the sizes do not divide, or the window has fewer microbatches than there are ranks.
    """
    if global_batch_size is None:
        if kept_global_batch_size is not None:
            global_batch_size = kept_global_batch_size
        else:
            global_batch_size = micro_batch_size * (accumulation_steps or 1) * world_size
    if global_batch_size % micro_batch_size:
        below = max(1, global_batch_size // micro_batch_size) * micro_batch_size
        above = below + micro_batch_size
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size} is not a multiple of "
            f"train.micro_batch_size = {micro_batch_size}",
            f"Take a global batch of {below} or {above}, or a micro batch that divides {global_batch_size}.",
        )
    plan = BatchPlan(global_batch_size, micro_batch_size)
    if plan.num_microbatches < world_size:
        fitting = [m for m in range(micro_batch_size, 0, -1) if global_batch_size % m == 0]
        smaller = next((m for m in fitting if global_batch_size // m >= world_size), None)
        ways = [f"raise train.global_batch_size to {micro_batch_size * world_size}"]
        if smaller is not None:
            ways.append(f"lower train.micro_batch_size to {smaller}")
        ways.append(f"start at most {plan.num_microbatches} rank(s)")
        raise ConfigError(
            f"a global batch of {global_batch_size} samples in microbatches of {micro_batch_size} makes "
            f"{plan.num_microbatches} microbatch(es), too few for {world_size} ranks: some would have no work",
            f"Either {', or '.join(ways)}.",
        )
    return plan
