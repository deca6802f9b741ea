"""What a fault of `elastictrain drill` is: what happens, to whom, at which point of a step, what must follow.

They are all in `core.fault_table`; who carries them out is elsewhere: an `Action` at a point of a rank is for
`training.injection`, an `Outside` for `drill.outside`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastictrain.core.phases import Phase


class Action(StrEnum):
    """What a rank does to itself, in the phase of the fault, before it goes on."""

    KILL = "kill"
    STOP = "stop"
    SEGFAULT = "segfault"
    HANG_IN_LOSS = "hang in loss"
    HANG_HOLDING_GIL = "hang holding the interpreter lock"
    RAISE_IN_LOSS = "raise in loss"
    RAISE_IN_DATASET = "raise in dataset"
    DIE_IN_DATASET = "die in dataset"
    NAN_LOSS = "nan loss"
    OOM = "out of memory"
    DIE_IN_SNAPSHOT = "die in snapshot"
    KILL_LOADER = "kill loader worker"
    SLOW = "slow"
    CLOCK_BACK = "clock back"
    CLOCK_FORWARD = "clock forward"
    KILL_AGENT = "kill agent"
    KILL_SUPERVISOR = "kill supervisor"
    HOLD = "hold"
    """Waits until the drill has done its part outside, and says so."""


class Outside(StrEnum):
    """What the drill does itself: while the rank holds, or, to start the supervisor again, while it goes on."""

    NOTHING = ""
    START_AGAIN = "start again"
    PREEMPT = "preempt"
    CORRUPT = "corrupt"
    TRUNCATE = "truncate"
    STORE_AWAY = "store away"
    STORE_FULL = "store full"


class Expect(StrEnum):
    """What must follow. In all cases but `HALT` the run ends complete and bitwise equal to its reference, with every
    sample of the surviving trajectory consumed exactly once."""

    RESUME = "resumes"
    """A new worker group goes on from the exact step."""
    UNDISTURBED = "goes on undisturbed"
    """No restart, no incident."""
    FALL_BACK = "falls back"
    """The damaged snapshot is named and passed over, the one before it is used."""
    SKIP = "skips the update"
    """All ranks leave the update out, and count it."""
    HALT = "halts"
    """The job is given up with exit code 79, and the diagnosis names the step and its samples."""


class Who(StrEnum):
    """Which rank the fault happens on."""

    ZERO = "rank zero"
    LAST = "the last rank"

    def rank(self, world_size: int) -> int:
        return 0 if self is Who.ZERO else world_size - 1


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table.

    Args:
        name: on the command line.
        explanation: what happens, and what it stands for.
        action: what the rank does.
        phase: in which phase of the step.
        expect: what must follow.
        who: the rank.
        outside: what the drill does itself.
        is_gone: the rank ends without a word: it can keep nothing of what it holds itself.
        is_live: can be done to a running job from outside.
        in_soak: may be drawn by a soak.
    """

    name: str
    explanation: str
    action: Action
    phase: Phase
    expect: Expect = Expect.RESUME
    who: Who = Who.LAST
    outside: Outside = Outside.NOTHING
    is_gone: bool = False
    is_live: bool = False
    in_soak: bool = False

    def point(self, step: int, world_size: int) -> Point:
        return Point(self.who.rank(world_size), step, self.phase)


@dataclass(frozen=True, slots=True)
class Point:
    """Where a fault happens.

    Args:
        rank: on which rank.
        step: after how many committed steps.
        phase: when this phase of the next step begins.
    """

    rank: int
    step: int
    phase: Phase

    def __str__(self) -> str:
        return f"rank {self.rank}, after step {self.step}, {self.phase.name.lower()}"


REPEATING = frozenset({Action.DIE_IN_DATASET, Action.NAN_LOSS})
"""Actions that belong to the data: they happen whenever the step is done, all others once in a drill."""


def allowed_steps_lost(fault: Fault, *, world_size: int, snapshot_every_steps: int) -> int:
    """How many committed steps may have to be done again.

    None while a replica of the model lives, whose state is the snapshot. Where nobody is left who could keep it (a
    lone rank that dies), or what was kept is damaged on purpose, the newest regular snapshot counts.
    """
    lone_rank_died = fault.is_gone and world_size == 1
    if fault.expect is Expect.FALL_BACK or lone_rank_died:
        return snapshot_every_steps
    return 0
