"""When to stop skipping updates: a run that skips for ever is not training, however healthy it looks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from elastictrain.core.counters import Counters

HISTORY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class SkippedUpdate:
    """One window whose update was left out.

    Args:
        step: the global step it made.
        scale: the loss scale it was computed with; None where there is no scaler.
        grad_norm: the norm that was not finite, as seen.
    """

    step: int
    scale: float | None
    grad_norm: float | None


@dataclass(slots=True)
class SkipWatch:
    """Remembers the last skipped updates and says when there have been too many in a row.

    Args:
        max_consecutive: how many in a row are borne; one more halts the run.
    """

    max_consecutive: int
    history: deque[SkippedUpdate] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))

    def observe(self, skipped: SkippedUpdate, counters: Counters) -> str | None:
        """Takes note of a skipped update; returns the diagnosis if the run must halt, else None."""
        self.history.append(skipped)
        if counters.consecutive_skips <= self.max_consecutive:
            return None
        lines = [
            f"{counters.consecutive_skips} updates in a row were skipped, up to step {skipped.step}: their gradients "
            f"were not finite (train.max_consecutive_skips = {self.max_consecutive})."
        ]
        recent = list(self.history)[-counters.consecutive_skips :]
        scales = [s.scale for s in recent if s.scale is not None]
        if scales:
            lines.append("Loss scale, oldest first: " + " → ".join(f"{scale:g}" for scale in scales) + ".")
        return "\n".join(lines)

    @staticmethod
    def advice(precision: str) -> str:
        """What to do about it."""
        common = "lower the learning rate, clip (train.clip_norm), look for a division by zero or log(0) in the loss"
        if precision == "fp16":
            return f"Try bf16, or keep the unstable operation in fp32 (torch.autocast(enabled=False)); or {common}."
        return f"Check the data of these steps for NaN; {common}."
