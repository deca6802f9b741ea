"""What a job's journal tells a new supervisor about the worker groups before it: the failures that still count, and how
long groups lived.

A supervisor that is killed takes what it knew with it; its journal stays. Without it, a step that brings down the
supervisor, or the whole node, would be tried for ever: each new supervisor would meet it for the first time. So the
failures are read back, and a group that began and has no end counts as one more: its supervisor died with it.

How long ago a failure was is told by the boot clock, for as long as the machine stays up. Across a reboot there is
only the wall clock, and that may have been set. Here a failure that looks older than it is would be forgotten, and the
job go on for ever; one that looks younger only counts for longer. So time across a reboot is taken as the least that it
can have been: what the new boot has run for, or what the wall clock says beyond the latest it has ever shown, less two
hours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastictrain.core.events import Event, Kind, Moment
from elastictrain.core.policy import Cause, CauseKind, Failure, since_progress
from elastictrain.core.readings import finite, first_known, integer, text

CLOCK_ERROR_S = 2 * 3600.0
"""How wrong the difference of two wall clocks may be. An hour, either way, is what mistaken time zones and summer time
make of one."""
UNSYNCED_S = 10.0
"""What a power cut may take of the journal's end: twice `journal.SYNC_INTERVAL_S`."""
RECALLED = frozenset(
    {
        Kind.SUPERVISOR_STARTED,
        Kind.INCARNATION_STARTED,
        Kind.TRAINING_STARTED,
        Kind.RANKS_TRAINING,
        Kind.RESTORED,
        Kind.PROGRESS,
        Kind.SNAPSHOT_TAKEN,
        Kind.SNAPSHOT_DURABLE,
        Kind.INCARNATION_ENDED,
        Kind.HALTED,
        Kind.STOPPED,
        Kind.DRAINED,
        Kind.COMPLETED,
    }
)
"""Kinds that `recall` looks at."""
_SETTLED = frozenset({Kind.HALTED, Kind.STOPPED, Kind.DRAINED, Kind.COMPLETED})
"""Whoever starts the job after one of these means it, and all counts begin anew."""


@dataclass(frozen=True, slots=True)
class OpenLife:
    """A worker group that began and has no end in the journal.

    Args:
        incarnation: which; None if the journal does not say.
        began: when.
        began_s: likewise, on the clock that only runs where it is attested.
        step: the furthest step that is known of it.
        uncertain_steps: so many steps further it may have come.
        began_step: whether it had begun a step.
        steps_per_s: as it reported last.
    """

    incarnation: int | None
    began: Moment
    began_s: float
    step: int = 0
    uncertain_steps: int = 0
    began_step: bool = False
    steps_per_s: float = 0.0

    def as_failure(self, at_s: float, furthest_step: int) -> Failure:
        """The failure that the death of its supervisor was."""
        return Failure(
            at_s=at_s,
            reached_step=self.step,
            uncertain_steps=self.uncertain_steps,
            began_step=self.began_step,
            progressed=self.step > furthest_step,
            cause=Cause(
                CauseKind.SUPERVISOR,
                f"the supervisor ended without a word in incarnation {self.incarnation}: it was killed, or the machine "
                "went down",
                step=self.step,
            ),
        )

    @property
    def as_fields(self) -> dict[str, Any]:
        """For the journal, so that later supervisors need not find it out again."""
        return {
            "left_incarnation": self.incarnation,
            "left_step": self.step,
            "left_uncertain_steps": self.uncertain_steps,
            "left_began_step": self.began_step,
        }


@dataclass(frozen=True, slots=True)
class Past:
    """What the journal says.

    Args:
        failures: those that count, oldest first; without that of `left`.
        left: the worker group that the last supervisor died with.
        uptime_s: how long worker groups lived, all together.
        num_failures: how many of them ended badly; `left` included.
        data: of the ranks' data, as they reported it: `samples`, `global_batch_size`.
    """

    failures: tuple[Failure, ...] = ()
    left: OpenLife | None = None
    uptime_s: float = 0.0
    num_failures: int = 0
    data: Mapping[str, int] = field(default_factory=dict)

    def counted(self, now_s: float) -> tuple[Failure, ...]:
        """All failures that count, that of `left` included.

        Args:
            now_s: when `left` was found, on the clock of `Failure.at_s`.
        """
        if self.left is None:
            return self.failures
        return since_progress((*self.failures, self.left.as_failure(now_s, furthest_step(self.failures))))


def furthest_step(failures: Iterable[Failure]) -> int:
    """The furthest step that a failure is known to have reached; -1 before any."""
    return max((failure.reached_step for failure in failures), default=-1)


@dataclass(slots=True)
class _Reading:
    """Where the reading of a journal stands."""

    report_steps: int
    clock_s: float = 0.0
    last: Moment | None = None
    latest_s: float = float("-inf")
    """The latest that the wall clock has ever shown."""
    failures: tuple[Failure, ...] = ()
    life: OpenLife | None = None
    life_s: float = 0.0
    """`clock_s` when the open life was last heard of."""
    uptime_s: float = 0.0
    num_failures: int = 0
    data: dict[str, int] = field(default_factory=dict)

    def pass_to(self, moment: Moment) -> None:
        """Lets the time go by until a moment."""
        if self.last is not None:
            self.clock_s += _least_s(self.last, moment, self.latest_s)
        self.last = moment
        self.latest_s = max(self.latest_s, moment.time_s)

    def add(self, failure: Failure) -> None:
        self.failures = since_progress((*self.failures, failure))
        self.num_failures += 1

    def unended(self) -> OpenLife | None:
        """The open life, as far as the journal alone knows it."""
        life = self.life
        if life is None:
            return None
        further = self.report_steps + math.ceil(min(life.steps_per_s, 1e6) * UNSYNCED_S)
        return replace(life, uncertain_steps=further)


def recall(events: Iterable[Event], *, now: Moment, now_s: float, report_steps: int) -> Past:
    """Reads a journal. Never raises, whatever the events hold.

    Args:
        events: all of the kinds in `RECALLED`, in the order of their ids.
        now: the present.
        now_s: likewise, on the clock that `Failure.at_s` is to be of.
        report_steps: steps between two reports of progress.
    """
    reading = _Reading(report_steps)
    for event in events:
        reading.pass_to(event.moment)
        _read(reading, event)
    left = reading.unended()
    uptime_s = reading.uptime_s
    num_failures = reading.num_failures
    if left is not None:
        uptime_s += reading.life_s - left.began_s
        num_failures += 1
    reading.pass_to(now)
    # From the clock that only runs where it is attested, to the caller's.
    shift_s = now_s - reading.clock_s
    failures = tuple(replace(failure, at_s=failure.at_s + shift_s) for failure in reading.failures)
    return Past(failures, left, uptime_s, num_failures, reading.data)


def _least_s(last: Moment, this: Moment, latest_s: float) -> float:
    """The least time that can have passed between two events that follow each other."""
    if this.boot_id and this.boot_id == last.boot_id:
        return max(0.0, this.boot_s - last.boot_s)
    up_s = this.boot_s if this.boot_id else 0.0
    return max(0.0, up_s, this.time_s - latest_s - CLOCK_ERROR_S)


def _read(reading: _Reading, event: Event) -> None:
    f = event.fields
    match event.kind:
        case Kind.SUPERVISOR_STARTED:
            left = reading.unended()
            if left is not None:
                reading.uptime_s += reading.life_s - left.began_s
                reading.add(_as_found(left, f).as_failure(reading.clock_s, furthest_step(reading.failures)))
            reading.life = None
        case Kind.INCARNATION_STARTED:
            reading.life = OpenLife(integer(f, "incarnation"), event.moment, reading.clock_s)
            reading.life_s = reading.clock_s
        case Kind.INCARNATION_ENDED:
            reading.life = None
            reading.uptime_s += max(0.0, finite(f, "lived_s") or 0.0)
            if text(f, "kind"):
                reading.add(_ended(reading, f))
        case Kind.TRAINING_STARTED:
            found = {name: integer(f, name) for name in ("samples", "global_batch_size")}
            reading.data = {name: value for name, value in found.items() if value is not None and value > 0}
        case Kind.RANKS_TRAINING | Kind.RESTORED | Kind.PROGRESS | Kind.SNAPSHOT_TAKEN | Kind.SNAPSHOT_DURABLE:
            _hear(reading, event)
        case kind if kind in _SETTLED:
            reading.failures = ()
            reading.life = None


def _hear(reading: _Reading, event: Event) -> None:
    """A sign of life."""
    life, f = reading.life, event.fields
    if life is None or first_known(integer(f, "incarnation"), life.incarnation) != life.incarnation:
        return
    reading.life_s = reading.clock_s
    step = integer(f, "at_step", "global_step", "step")
    reading.life = replace(
        life,
        step=max(life.step, step or 0),
        began_step=life.began_step or event.kind in (Kind.RANKS_TRAINING, Kind.RESTORED, Kind.PROGRESS),
        steps_per_s=max(0.0, finite(f, "steps_per_s") or life.steps_per_s),
    )


def _as_found(left: OpenLife, f: Mapping[str, Any]) -> OpenLife:
    """As the supervisor that came next has found it."""
    step = integer(f, "left_step")
    if step is None or integer(f, "left_incarnation") != left.incarnation:
        return left
    uncertain_steps = max(0, integer(f, "left_uncertain_steps") or 0)
    return replace(left, step=step, uncertain_steps=uncertain_steps, began_step=f.get("left_began_step") is True)


def _ended(reading: _Reading, f: Mapping[str, Any]) -> Failure:
    step = first_known(integer(f, "failed_step", "global_step"), 0) or 0
    try:
        kind = CauseKind(text(f, "kind"))
    except ValueError:
        kind = CauseKind.AGENT
    return Failure(
        at_s=reading.clock_s,
        reached_step=step,
        began_step=f.get("began_step") is not False,
        progressed=step > furthest_step(reading.failures),
        cause=Cause(kind, text(f, "cause") or "no cause is known", step=step),
    )
