"""What job.toml says about supervision, as the values that the decisions in `core` take."""

from __future__ import annotations

from elastictrain.config.schema import JobConfig
from elastictrain.core.liveness import Limits
from elastictrain.core.order import sample_list
from elastictrain.core.policy import Budget
from elastictrain.core.window import EpochTail, WindowPlan

STOP_GRACE_S = 10.0
"""Between being told to hurry and being killed."""
NUM_SAMPLES_NAMED = 16


def limits_of(config: JobConfig) -> Limits:
    """How long a rank may stand still; all below the process group's timeout."""
    s = config.supervisor
    default_s = s.DEFAULT_SHARE * config.elastic.process_group_timeout_s

    def or_default(value_s: float | None) -> float:
        return value_s if value_s is not None else default_s

    min_step_s = s.min_step_timeout_s if s.min_step_timeout_s is not None else min(s.DEFAULT_MIN_STEP_S, default_s)
    return Limits(
        startup_s=or_default(s.startup_timeout_s),
        step_s=s.step_timeout_s,
        min_step_s=min_step_s,
        max_step_s=max(default_s, min_step_s),
        eval_s=or_default(s.eval_timeout_s),
        snapshot_s=or_default(s.snapshot_timeout_s),
        exit_s=s.exit_timeout_s,
        collective_s=config.elastic.process_group_timeout_s,
    )


def budget_of(config: JobConfig) -> Budget:
    """How many failures are borne."""
    s = config.supervisor
    return Budget(
        max_failures=s.max_failures,
        window_s=s.failure_window_s,
        same_step_failures=s.same_step_failures,
        backoff_s=s.backoff_s,
        max_backoff_s=s.max_backoff_s,
    )


def stop_timeout_s(config: JobConfig) -> float:
    """After a request to stop: when ranks that are still there are ended."""
    asked_s = config.supervisor.stop_timeout_s
    return asked_s if asked_s is not None else config.checkpoint.preempt_deadline_s + STOP_GRACE_S


def samples_in_step(config: JobConfig, *, step: int, length: int, global_batch_size: int) -> str:
    """Which samples a step holds, in words.

    Args:
        config: of the job.
        step: windows consumed before it.
        length: samples in the dataset.
        global_batch_size: samples per full window.
    """
    plan = WindowPlan(length, global_batch_size, config.train.micro_batch_size, config.data.epoch_tail)
    if plan.epoch_tail is EpochTail.CONTINUE:
        position = step * global_batch_size
    else:
        epochs, place = divmod(step, plan.steps_in(1))
        position = epochs * length + place * global_batch_size
    window = plan.window_at(position)
    indices = sample_list(config.seed, window.start, window.stop, length, shuffle=config.data.shuffle)
    named = ", ".join(str(index) for _, index, _ in indices[:NUM_SAMPLES_NAMED])
    more = f" and {len(indices) - NUM_SAMPLES_NAMED} more" if len(indices) > NUM_SAMPLES_NAMED else ""
    return f"samples {named}{more} (epoch {indices[0][0]})"
