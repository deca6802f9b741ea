"""What a rank reads, from where the session stands to the end of the run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from elastictrain.core.window import WindowPlan
from elastictrain.training.data import FetchFailed, Span
from elastictrain.training.session import Session, Step


class Limits:
    """When a run is complete.

    Args:
        plan: how the samples are cut into windows.
        max_steps: optimizer steps; None for no such limit.
        max_epochs: epochs; None for no such limit.
    """

    def __init__(self, plan: WindowPlan, max_steps: int | None, max_epochs: int | None) -> None:
        self._plan = plan
        self._max_steps = max_steps
        self._max_epochs = max_epochs

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = [self._max_steps] if self._max_steps is not None else []
        if self._max_epochs is not None:
            steps.append(self._plan.steps_in(self._max_epochs))
        return min(steps)

    def reached(self, global_step: int, sample_position: int) -> bool:
        if self._max_steps is not None and global_step >= self._max_steps:
            return True
        return self._max_epochs is not None and self._plan.epochs_done(sample_position) >= self._max_epochs


def my_spans(session: Session, plan: WindowPlan, limits: Limits) -> Iterator[Span]:
    """What this rank will read from the session's position on, until the run is complete."""
    step, position = session.global_step, session.sample_position
    while not limits.reached(step, position):
        window = plan.window_at(position)
        for microbatch in window.share(session.place.rank, session.place.world_size):
            yield microbatch.start, microbatch.stop
        step, position = step + 1, window.stop


@dataclass(frozen=True, slots=True)
class Feed:
    """A rank's batches, and how they are cut out of the stream of samples.

    Args:
        plan: how samples are cut into windows.
        limits: when the run is complete.
        stream: this rank's batches, in order; closed with the run.
    """

    plan: WindowPlan
    limits: Limits
    stream: Generator[Any, None, None]

    def fetch(self, step: Step) -> Any:
        """The next batch of this rank; raises DataError, naming the sample, where the dataset failed."""
        batch = next(self.stream)
        if isinstance(batch, FetchFailed):
            raise batch.as_error(step.index)
        return batch
