"""The faults of `elastictrain drill`, as a table, and the names by which they are asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from elastictrain.core.faults import Action, Expect, Fault, Outside, Who
from elastictrain.core.node_faults import NODE_FAULTS
from elastictrain.core.phases import Phase
from elastictrain.errors import UsageError

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
        "datetime.now(), go on seeing the old time. (The name clock-jump stands for both directions.)",
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

ALL = "all"
GROUPS: dict[str, tuple[str, ...]] = {ALL: tuple(BY_NAME), "clock-jump": ("clock-back", "clock-forward")}
"""Names that stand for several faults."""


def select(names: Iterable[str]) -> list[Fault]:
    """The faults of these names, or names of groups, in the order given, each once.

    Raises:
        UsageError: a name is neither in the table nor a group's.
    """
    chosen: dict[str, Fault] = {}
    for name in names:
        if name not in BY_NAME and name not in GROUPS:
            near = difflib.get_close_matches(name, [*BY_NAME, *GROUPS, *NODE_FAULTS], n=1)
            raise UsageError(
                f"there is no fault {name}" + (f"; did you mean {near[0]}?" if near else ""),
                "`elastictrain drill list` explains them all.",
            )
        chosen |= {member: BY_NAME[member] for member in GROUPS.get(name, (name,))}
    return list(chosen.values())
