"""What a drill changes in a job, and why: as few keys as will do, for it is the user's own job that is proven."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastictrain.config import JobConfig, load_job
from elastictrain.core.faults import Action, Expect, Fault, Outside
from elastictrain.errors import UsageError

DEFAULT_STEPS = 40
MIN_STEPS = 8
"""Before the fault there must be a snapshot, after it steps to compare."""
SNAPSHOTS_PER_DRILL = 8
KEEP_LAST = 3
"""Snapshots that a drill keeps at least: there is one to fall back to."""
NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class DrillJob:
    """A job to be drilled.

    Args:
        target: as given: a job.toml, its folder, an example.
        overrides: of the user, as `--set`.
        config: with them; as in job.toml otherwise.
        steps: length of a drill.
        fault_step: after how many steps the fault happens.
        snapshot_every_steps: interval of regular snapshots.
        keep_last: how many of the newest are kept, at least.
    """

    target: str
    overrides: tuple[str, ...]
    config: JobConfig
    steps: int
    fault_step: int
    snapshot_every_steps: int
    keep_last: int = KEEP_LAST

    @property
    def world_size(self) -> int:
        return self.config.elastic.nproc_per_node

    @property
    def name(self) -> str:
        """Of the job in its scratch state directory."""
        return self.config.name

    def with_steps(self, steps: int, snapshot_every_steps: int) -> DrillJob:
        """The same, of another length: for a soak."""
        return replace(self, steps=steps, fault_step=steps // 2, snapshot_every_steps=snapshot_every_steps)

    def with_snapshot_of(self, step: int) -> DrillJob:
        """The same, with a snapshot of this step that is still there at the end."""
        return replace(self, snapshot_every_steps=step, keep_last=max(KEEP_LAST, self.steps // step + 1))

    def arguments(
        self, state_dir: Path, store: Path, fault: Fault | None, more_overrides: Sequence[str] = ()
    ) -> list[str]:
        """The command line of `elastictrain` that runs it."""
        sets = [*self.overrides, *self._drill_overrides(store, fault), *more_overrides]
        options = [part for item in sets for part in ("--set", item)]
        return ["run", self.target, "--state-dir", str(state_dir), "--output", "json", *options]

    def _drill_overrides(self, store: Path, fault: Fault | None) -> list[str]:
        config = self.config
        found = [
            f"train.max_steps={self.steps}",
            f"name={json.dumps(config.name)}",
            # The user's data, store and ports stay untouched; only the task and its data are theirs.
            f"checkpoint.url={json.dumps(str(store))}",
            "checkpoint.storage_options={}",
            f"checkpoint.every_steps={self.snapshot_every_steps}",
            "checkpoint.auto=false",
            f"checkpoint.keep_last={max(self.keep_last, config.checkpoint.keep_last)}",
            # Every step's loss is compared.
            "metrics.every_steps=1",
            "metrics.tensorboard=false",
        ]
        if config.checkpoint.every_s is not None:
            found.append(f"checkpoint.every_s={NEVER_S}")  # the interval is that of steps
        if config.train.max_epochs is not None:
            found.append(f"train.max_epochs={10**9}")  # the length is that of steps
        if config.elastic.has_peers:
            # The job itself may run, on this node too: a drill must not turn up among its nodes.
            found += ['elastic.rendezvous="local"', 'elastic.nodes="1"']
        if config.supervisor.metrics_port is not None:
            found.append("supervisor.metrics_port=0")  # the job itself may run, and have it
        if fault is not None and fault.action is Action.KILL_LOADER and config.data.num_workers == 0:
            found.append("data.num_workers=1")
        return found


def load_drill_job(target: str, overrides: list[str], *, steps: int | None, at_step: int | None) -> DrillJob:
    """Loads a job and decides on the length of its drills.

    Args:
        target: a job.toml, its folder, or an example by name.
        overrides: as `--set`.
        steps: length; None takes the job's own `max_steps`, at most `DEFAULT_STEPS`.
        at_step: after how many steps the fault happens; None takes the middle.

    Raises:
        MissingInputError, ConfigError: as `load_job`.
        UsageError: the drill would be too short for its fault.
    """
    config = load_job(target, overrides).config
    if steps is None:
        steps = min(config.train.max_steps or DEFAULT_STEPS, DEFAULT_STEPS)
        if steps < MIN_STEPS:
            steps = MIN_STEPS
    if steps < MIN_STEPS:
        raise UsageError(
            f"--steps {steps}: a drill takes at least {MIN_STEPS} steps",
            "There must be a snapshot before the fault, and steps after it that can be compared.",
        )
    every = max(1, steps // SNAPSHOTS_PER_DRILL)
    fault_step = at_step if at_step is not None else steps // 2 + (1 if every > 1 and (steps // 2) % every == 0 else 0)
    if not every < fault_step <= steps - 2:
        raise UsageError(
            f"--at-step {fault_step}: with {steps} steps the fault must be after step {every + 1} to {steps - 2}",
            f"Snapshots are taken every {every} step(s).",
        )
    return DrillJob(target, tuple(overrides), config, steps, fault_step, every)


def refusal(fault: Fault, job: DrillJob) -> str:
    """Why this job cannot have this fault; "" if it can. What the machine lacks shows when it is tried."""
    if fault.expect is Expect.SKIP and not job.config.train.check_gradients and job.config.train.precision != "fp16":
        return "train.check_gradients = false: the NaN would go into the weights, which no restart can undo"
    if fault.outside in (Outside.STORE_AWAY, Outside.STORE_FULL) and job.steps < 4 * job.snapshot_every_steps:
        return f"{job.steps} steps are too few for an outage over two snapshots; use --steps"
    return ""
