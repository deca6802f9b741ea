"""The counters of a run. They move in one place only: `Counters.commit`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counters:
    """Where a run stands. `applied + skipped == global_step`, always.

    Args:
        global_step: windows consumed.
        applied: optimizer updates that changed the weights.
        skipped: windows whose update was left out because its gradient was not finite.
        sample_position: place in the job's stream of samples: where the next window begins.
        consecutive_skips: skipped updates since the last applied one.
    """

    global_step: int = 0
    applied: int = 0
    skipped: int = 0
    sample_position: int = 0
    consecutive_skips: int = 0

    def __post_init__(self) -> None:
        if self.applied + self.skipped != self.global_step:
            raise ValueError(f"{self.applied} applied + {self.skipped} skipped != global step {self.global_step}")

    def commit(self, *, applied: bool, sample_position: int) -> Counters:
        """One window consumed, up to `sample_position`; its update was applied, or skipped."""
        if sample_position <= self.sample_position:
            raise ValueError(f"a window cannot end at {sample_position}: it began at {self.sample_position}")
        return Counters(
            global_step=self.global_step + 1,
            applied=self.applied + applied,
            skipped=self.skipped + (not applied),
            sample_position=sample_position,
            consecutive_skips=0 if applied else self.consecutive_skips + 1,
        )
