"""The faults of `elastictrain drill`, as a table: what happens, to whom, at which point of a step, what must follow.

What is injected where is data; who carries it out is elsewhere: an `Action` at a point of a rank is for
`training.injection`, an `Outside` for `drill.outside`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elastictrain.core.phases import Phase
from elastictrain.errors import UsageError


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


TABLE: tuple[Fault, ...] = (
    Fault(
        "kill-rank",
        "The last rank is killed (SIGKILL) as its forward pass begins. Stands for a crashed process.",
        Action.KILL,
        Phase.FORWARD,
        is_gone=True,
        is_live=True,
        in_soak=True,
    ),
    Fault(
        "kill-rank-zero",
        "Rank zero, which keeps the snapshots, is killed (SIGKILL) in the middle of its optimizer step.",
        Action.KILL,
        Phase.OPTIMIZER,
        who=Who.ZERO,
        is_gone=True,
        is_live=True,
        in_soak=True,
    ),
    Fault(
        "stop-rank",
        "The last rank is stopped (SIGSTOP) before its backward pass. Stands for a process that the kernel, or a "
        "debugger, does not let run.",
        Action.STOP,
        Phase.BACKWARD,
        is_gone=True,
        is_live=True,
        in_soak=True,
    ),
    Fault(
        "hang-in-loss",
        "The last rank's loss() sleeps for ever. Stands for a deadlock in the task's code.",
        Action.HANG_IN_LOSS,
        Phase.FORWARD,
        is_gone=True,
        in_soak=True,
    ),
    Fault(
        "hang-holding-gil",
        "The last rank's loss() waits for ever inside a C call that keeps the interpreter lock: no Python code of that "
        "process runs any more. Stands for a deadlock in an extension.",
        Action.HANG_HOLDING_GIL,
        Phase.FORWARD,
        is_gone=True,
    ),
    Fault(
        "segfault",
        "The last rank reads address zero as its backward pass begins (SIGSEGV; without a core file).",
        Action.SEGFAULT,
        Phase.BACKWARD,
        is_gone=True,
        is_live=True,
        in_soak=True,
    ),
    Fault(
        "raise-in-loss",
        "The last rank's loss() raises RuntimeError, once.",
        Action.RAISE_IN_LOSS,
        Phase.FORWARD,
        in_soak=True,
    ),
    Fault(
        "raise-in-dataset",
        "dataset[i] raises OSError (EIO) on the last rank, once, as a network file system does. (An exception that is "
        "no I/O error is taken as a defect of the data: the job halts at once and names the sample.)",
        Action.RAISE_IN_DATASET,
        Phase.DATA,
        in_soak=True,
    ),
    Fault(
        "oom-kill",
        "The last rank moves into a memory cgroup of the drill's own that is nearly full, and allocates until the "
        "kernel's OOM killer ends it: a real OOM kill, which no other process can feel. Needs the right to make a "
        "memory cgroup (root); refused where there is none.",
        Action.OOM,
        Phase.FORWARD,
        is_gone=True,
    ),
    Fault(
        "exit-in-the-middle-of-a-snapshot",
        "Rank zero dies while it writes a snapshot into the memory tier, when the bytes are there and the manifest is "
        "not. The torn snapshot must not be taken for one.",
        Action.DIE_IN_SNAPSHOT,
        Phase.SNAPSHOT,
        who=Who.ZERO,
        is_gone=True,
        in_soak=True,
    ),
    Fault(
        "kill-agent",
        "The agent, the parent of the ranks, is killed (SIGKILL) as the last rank's forward pass begins. The ranks are "
        "at work then, and go on with it until they hear of it.",
        Action.KILL_AGENT,
        Phase.FORWARD,
        is_live=True,
        in_soak=True,
    ),
    Fault(
        "kill-supervisor",
        "The supervisor is killed (SIGKILL) as the last rank's forward pass begins, and started again, as systemd "
        "would. The ranks are at work, as they are for kill-agent.",
        Action.KILL_SUPERVISOR,
        Phase.FORWARD,
        outside=Outside.START_AGAIN,
        in_soak=True,
    ),
    Fault(
        "kill-loader-worker",
        "A loader process of the last rank is killed (SIGKILL). A job with data.num_workers = 0 gets one for this "
        "drill: who reads a sample never changes which samples a step holds.",
        Action.KILL_LOADER,
        Phase.DATA,
        is_live=True,
    ),
    Fault(
        "slow-rank",
        "The last rank takes five times the longest step so far, and at least a quarter of a second longer, for each "
        "of five steps. Slow is not hung: nobody may be killed for it.",
        Action.SLOW,
        Phase.FORWARD,
        expect=Expect.UNDISTURBED,
    ),
    Fault(
        "corrupt-latest",
        "The job is stopped; some bytes in the middle of the newest snapshot's model are turned over, in every tier "
        "that has it; the job is started again.",
        Action.HOLD,
        Phase.DATA,
        expect=Expect.FALL_BACK,
        who=Who.ZERO,
        outside=Outside.CORRUPT,
    ),
    Fault(
        "truncate-latest",
        "The job is stopped; the newest snapshot's model loses its second half, in every tier that has it; the job is "
        "started again.",
        Action.HOLD,
        Phase.DATA,
        expect=Expect.FALL_BACK,
        who=Who.ZERO,
        outside=Outside.TRUNCATE,
    ),
    Fault(
        "storage-outage",
        "The folder of the durable store is moved away, and a plain file put in its place, until the run has taken its "
        "next two snapshots: whatever touches the store fails, for root as well. Training must not notice.",
        Action.HOLD,
        Phase.DATA,
        expect=Expect.UNDISTURBED,
        who=Who.ZERO,
        outside=Outside.STORE_AWAY,
    ),
    Fault(
        "disk-full",
        "The durable store is a small file system (tmpfs, in a mount namespace of the drill's own) that is filled to "
        "the last byte until the run has taken its next two snapshots. Needs root; refused elsewhere.",
        Action.HOLD,
        Phase.DATA,
        expect=Expect.UNDISTURBED,
        who=Who.ZERO,
        outside=Outside.STORE_FULL,
    ),
    Fault(
        "preempt",
        "The supervisor gets SIGTERM, as at a preemption or a reboot, and is started again once it has ended.",
        Action.HOLD,
        Phase.FORWARD,
        who=Who.ZERO,
        outside=Outside.PREEMPT,
        in_soak=True,
    ),
    Fault(
        "clock-back",
        "The wall clock jumps back by an hour, for all ranks and the supervisor. The machine's own clock is never "
        "touched: time.time() of these processes is shifted, which is what Python code reads it with; C code, and "
        "datetime.now(), go on seeing the old time.",
        Action.CLOCK_BACK,
        Phase.READY,
        expect=Expect.UNDISTURBED,
    ),
    Fault(
        "clock-forward",
        "The wall clock jumps forward by an hour, likewise.",
        Action.CLOCK_FORWARD,
        Phase.READY,
        expect=Expect.UNDISTURBED,
    ),
    Fault(
        "nan-loss",
        "The last rank's loss is NaN in one step. All ranks must skip that update; compared with an undisturbed run "
        "that has the same NaN.",
        Action.NAN_LOSS,
        Phase.FORWARD,
        expect=Expect.SKIP,
    ),
    Fault(
        "poison-sample",
        "Whichever process reads one certain sample dies (SIGKILL), every time. The job must halt, name the step and "
        "its samples, and keep its state, rather than restart for ever.",
        Action.DIE_IN_DATASET,
        Phase.DATA,
        expect=Expect.HALT,
        is_gone=True,
    ),
)
"""In the order in which `drill all` goes."""

BY_NAME: dict[str, Fault] = {fault.name: fault for fault in TABLE}

REPEATING = frozenset({Action.DIE_IN_DATASET, Action.NAN_LOSS})
"""Actions that belong to the data: they happen whenever the step is done, all others once in a drill."""


def select(names: Iterable[str]) -> list[Fault]:
    """The faults of these names, in the order given; `all` for all.

    Raises:
        UsageError: a name is not in the table.
    """
    chosen: dict[str, Fault] = {}
    for name in names:
        if name == "all":
            chosen |= BY_NAME
        elif name in BY_NAME:
            chosen[name] = BY_NAME[name]
        else:
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            raise UsageError(
                f"there is no fault {name}" + (f"; did you mean {near[0]}?" if near else ""),
                "`elastictrain drill list` explains them all.",
            )
    return list(chosen.values())


def allowed_steps_lost(fault: Fault, *, world_size: int, snapshot_every_steps: int) -> int:
    """How many committed steps may have to be done again.

    None while a replica of the model lives, whose state is the snapshot. Where nobody is left who could keep it (a
    lone rank that dies), or what was kept is damaged on purpose, the newest regular snapshot counts.
    """
    lone_rank_died = fault.is_gone and world_size == 1
    if fault.expect is Expect.FALL_BACK or lone_rank_died:
        return snapshot_every_steps
    return 0
