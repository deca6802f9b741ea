"""A soak: many faults on one long run, and how much of its time was useful."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from elastictrain.armed import ArmedFault
from elastictrain.core.drill_verdict import objections
from elastictrain.core.faults import Expect, Fault, Outside, allowed_steps_lost
from elastictrain.core.soak import Strike, schedule
from elastictrain.drill import outside
from elastictrain.drill.compare import newest_state
from elastictrain.drill.exercise import Exercise
from elastictrain.drill.judge import Evidence, Reference, Row
from elastictrain.drill.settings import SNAPSHOTS_PER_DRILL, DrillJob
from elastictrain.drill.trial import Trial
from elastictrain.errors import UsageError

MAX_STEPS = 10_000_000


@dataclass(frozen=True, slots=True)
class Soaked:
    """What a soak gave.

    Args:
        row: the verdict on all of it: detection and recovery are medians, what was lost is a sum.
        goodput: share of the run's time that was spent on steps that survived.
        strikes: what happened, in order: fault, point, detected_s, recovered_s.
        drawn: how many there were of each kind.
        not_drawn: kinds that it could have had as well: a longer soak has them.
    """

    row: Row
    goodput: float
    strikes: list[dict[str, Any]]
    drawn: dict[str, int]
    not_drawn: list[str]

    @property
    def about(self) -> dict[str, Any]:
        return {
            "goodput": round(self.goodput, 4),
            "faults": len(self.strikes),
            "drawn": self.drawn,
            "not_drawn": self.not_drawn,
            "strikes": self.strikes,
        }


class Soak:
    """Random faults on one job.

    Args:
        job: what is drilled; its length follows from `for_s`.
        scratch: folder for everything.
        for_s: how long the run would take undisturbed.
        mtbf_s: mean time of training between two faults.
        seed: of the faults.
        faults: to draw from.
        tell: gets a line about what is being done.
        keep: leave the folders of both runs, also where all holds.
    """

    def __init__(
        self,
        job: DrillJob,
        scratch: Path,
        *,
        for_s: float,
        mtbf_s: float,
        seed: int,
        faults: Sequence[Fault],
        tell: Callable[[str], None],
        keep: bool,
    ) -> None:
        self.job = job
        self._scratch = scratch
        self._keep = keep
        self._for_s = for_s
        self._mtbf_s = mtbf_s
        self._seed = seed
        self._faults = faults
        self._tell = tell
        self._strikes: tuple[Strike, ...] = ()

    def run(self) -> Soaked:
        """The undisturbed run, and the one with all the faults.

        Raises:
            UsageError: there would be no fault in it.
            DrillError: the job does not even run undisturbed.
        """
        self._plan()
        exercise = Exercise(self.job, self._scratch, tell=self._tell, keep=self._keep)
        reference = exercise.reference
        armed = [self._armed(number, strike) for number, strike in enumerate(self._strikes, start=1)]
        self._tell(f"soak: {self.job.steps} steps, {len(armed)} faults")
        trial = Trial(self.job, self._scratch / "soak", None, armed)
        deadline_s = time.monotonic() + exercise.patience_s(reference, num_faults=len(armed))
        try:
            trial.start()
            for strike, fault in zip(self._strikes, armed, strict=True):
                if strike.fault.outside is Outside.NOTHING:
                    continue
                if not trial.wait_fired(fault.id, deadline_s):
                    break
                outside.act(strike.fault.outside, trial, fault.id, deadline_s)
            code = trial.wait_end(deadline_s)
            soaked = self._judge(exercise, trial, armed, code, reference)
        finally:
            trial.close()
        if soaked.row.verdict == "holds" and not self._keep:
            trial.remove()
        return soaked

    def _plan(self) -> None:
        """Turns times into steps, and draws the faults."""
        self._tell(f"how long a step takes: {self.job.steps} steps, undisturbed")
        step_s = Exercise(self.job, self._scratch, tell=lambda _text: None).reference.step_s
        num_steps = min(MAX_STEPS, max(self.job.steps, round(self._for_s / step_s)))
        mean_steps = max(1.0, self._mtbf_s / step_s)
        self._strikes = schedule(self._seed, num_steps=num_steps, mean_steps_between=mean_steps, faults=self._faults)
        if not self._strikes:
            raise UsageError(
                f"a soak of {self._for_s:g} s with a fault every {self._mtbf_s:g} s has no fault (seed {self._seed})",
                "Use a longer --for, a shorter --mtbf or another --seed.",
            )
        every = max(1, min(num_steps, round(mean_steps)) // SNAPSHOTS_PER_DRILL)
        self.job = self.job.with_steps(num_steps, every)

    def _armed(self, number: int, strike: Strike) -> ArmedFault:
        point = strike.fault.point(strike.step, self.job.world_size)
        return ArmedFault(strike.id(number), strike.fault.action, point.rank, point.step, point.phase)

    def _judge(
        self, exercise: Exercise, trial: Trial, armed: list[ArmedFault], code: int | None, reference: Reference
    ) -> Soaked:
        trial.wait_gone()
        evidence = Evidence(trial, code, reference, newest_state(trial.durable))
        strikes = []
        for strike, fault in zip(self._strikes, armed, strict=True):
            at_s = trial.drill.fired_at_s(fault.id)
            strikes.append(
                {
                    "fault": strike.fault.name,
                    "injected_at": str(fault.point) if at_s is not None else None,
                    "detected_s": evidence.detected_s(at_s),
                    "recovered_s": evidence.recovered_s(at_s),
                }
            )
        num_missing = sum(strike["injected_at"] is None for strike in strikes)
        allowed = [
            allowed_steps_lost(
                strike.fault, world_size=self.job.world_size, snapshot_every_steps=self.job.snapshot_every_steps
            )
            for strike in self._strikes
        ]
        any_resume = Fault("soak", "", armed[0].action, armed[0].phase, expect=Expect.RESUME)
        wrong = objections(any_resume, evidence.seen(fired=num_missing < len(strikes), allowed_steps_lost=sum(allowed)))
        if num_missing:
            wrong.append(f"{num_missing} of {len(strikes)} faults did not happen")
        goodput = evidence.survived.goodput
        drawn = dict(Counter(strike.fault.name for strike in self._strikes))
        not_drawn = [fault.name for fault in self._faults if fault.name not in drawn]
        remarks = [f"{len(drawn)} of {len(self._faults)} kinds drawn", f"goodput {goodput:.1%}"]
        row = evidence.row(
            "soak",
            f"{len(strikes)} faults over {self.job.steps} steps",
            [*wrong, *remarks] if wrong else [],
            detected_s=_median(strikes, "detected_s"),
            recovered_s=_median(strikes, "recovered_s"),
            remark="; ".join(remarks),
        )
        return Soaked(row, goodput, strikes, drawn, not_drawn)


def _median(strikes: list[dict[str, Any]], key: str) -> float | None:
    values = [strike[key] for strike in strikes if strike[key] is not None]
    return round(median(values), 3) if values else None
