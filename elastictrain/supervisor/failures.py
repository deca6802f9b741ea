"""The failures of a job that count, and what each of them leads to. How much is borne is decided in `core.policy`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastictrain.core.past import furthest_step
from elastictrain.core.policy import Budget, Cause, Failure, Halt, Restart, classify, decide, decide_elsewhere

if TYPE_CHECKING:
    from elastictrain.supervisor.life import LifeEnd


class Failures:
    """Failures of this node, and worker groups that ended because another one failed.

    Args:
        earlier: those of supervisors before this one.
        budget: how much is borne.
        samples_in_step: which samples a step holds, in words.
    """

    def __init__(self, earlier: Sequence[Failure], budget: Budget, samples_in_step: Callable[[int], str]) -> None:
        self._own = list(earlier)
        self._budget = budget
        self._samples_in_step = samples_in_step
        self._num_elsewhere = 0
        self._elsewhere_at = -1

    def halt(self) -> Halt | None:
        """What those of earlier supervisors lead to, which these could not say any more; None if it is no halt."""
        decision = self._decide() if self._own else None
        return decision if isinstance(decision, Halt) else None

    def add(self, cause: Cause, reached_step: int, *, began_step: bool) -> Restart | Halt:
        """Takes note of a failure of this node.

        Args:
            cause: of it.
            reached_step: where the rank stood that failed first.
            began_step: whether it, or all, had begun a step.
        """
        progressed = reached_step > furthest_step(self._own)
        self._own.append(
            Failure(
                at_s=time.monotonic(),
                reached_step=reached_step,
                began_step=began_step,
                progressed=progressed,
                cause=cause,
            )
        )
        return self._decide()

    def add_elsewhere(self, end: LifeEnd) -> Halt | None:
        """Takes note of an end that another node is to blame for, and counts; None where it goes on."""
        if not end.ends:
            return None  # nobody has failed: a node comes, or goes
        if end.failed_step > self._elsewhere_at:
            self._num_elsewhere = 0
        self._elsewhere_at = max(end.failed_step, self._elsewhere_at)
        self._num_elsewhere += 1
        return decide_elsewhere(self._num_elsewhere, classify(end.ends), self._budget)

    def forget(self) -> None:
        """Somebody says that the cause is removed."""
        self._own.clear()
        self._num_elsewhere = 0

    def _decide(self) -> Restart | Halt:
        samples = self._samples_in_step(self._own[-1].reached_step)
        return decide(self._own, self._budget, now_s=time.monotonic(), jitter=random.random(), samples=samples)
