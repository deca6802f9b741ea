"""Whether a drill holds: what was seen, against what the table of faults promises. In words, every reason."""

from __future__ import annotations

from dataclasses import dataclass

from elastictrain.core.faults import Expect, Fault
from elastictrain.errors import HaltError


@dataclass(frozen=True, slots=True)
class Seen:
    """What a drilled run did.

    Args:
        fired: the fault happened.
        exit_code: of the supervisor, the last time it ran; None if it had not ended in time.
        error: what it said last, where it failed.
        complete: all steps are done.
        difference: first differing step and tensor; "" for bitwise equal; None where nothing could be compared.
        steps_lost: committed steps that were done again.
        allowed_steps_lost: how many may have been.
        samples_repeated: consumed more than once in what survived.
        samples_skipped: not consumed at all in what survived.
        num_restarts: worker groups after the first.
        num_incidents: hangs found.
        num_skipped: updates left out, beyond those of the reference without the fault.
        passed_over: the damaged snapshot was named.
        halt_reason: the diagnosis, where the job was halted.
        halted_where: what the diagnosis must say.
        kept_step: of the newest snapshot of a halted job; None if it has none that is sound.
        due_steps: the first and the last step that it may be of.
        leftovers: processes and files that were still there at the end, in words.
    """

    fired: bool
    exit_code: int | None
    error: str = ""
    complete: bool = False
    difference: str | None = None
    steps_lost: int = 0
    allowed_steps_lost: int = 0
    samples_repeated: int = 0
    samples_skipped: int = 0
    num_restarts: int = 0
    num_incidents: int = 0
    num_skipped: int = 0
    passed_over: bool = False
    halt_reason: str = ""
    halted_where: tuple[str, ...] = ()
    kept_step: int | None = None
    due_steps: tuple[int, int] = (0, 0)
    leftovers: str = ""


def objections(fault: Fault, seen: Seen) -> list[str]:
    """Everything that is wrong; nothing if the drill holds."""
    if not seen.fired:
        words = f": {seen.error}" if seen.error else ""
        return [f"the fault did not happen: the run never came to its point{words}"]
    found = _halt_objections(seen) if fault.expect is Expect.HALT else _end_objections(fault, seen)
    if seen.difference:
        found.append(f"differs first at {seen.difference}")
    elif seen.difference is None:
        found.append("nothing could be compared")
    if seen.samples_repeated:
        found.append(f"{seen.samples_repeated} samples consumed twice")
    if seen.samples_skipped:
        found.append(f"{seen.samples_skipped} samples left out")
    if seen.steps_lost > seen.allowed_steps_lost:
        found.append(f"{_steps(seen.steps_lost)} done again, {seen.allowed_steps_lost or 'none'} allowed")
    if seen.leftovers:
        found.append(f"left behind: {seen.leftovers}")
    return found


@dataclass(frozen=True, slots=True)
class SeenLive:
    """What a running job did after a fault from outside.

    Args:
        reached_step: committed when its worker group ended; None if it has not ended.
        restored_step: what the next group went on from, 0 for the beginning; None if there is none that trains.
        snapshot_step: of the newest snapshot that was complete before the fault; 0 where there was none.
        world_size: ranks of the job.
    """

    reached_step: int | None
    restored_step: int | None
    snapshot_step: int
    world_size: int

    @property
    def steps_lost(self) -> int | None:
        """Committed steps that were done again; None where that is not known."""
        if self.reached_step is None or self.restored_step is None:
            return None
        return max(0, self.reached_step - self.restored_step)


def live_objections(fault: Fault, seen: SeenLive) -> list[str]:
    """What is wrong with the steps that a running job lost; nothing if that is as it should be.

    None may be lost while anybody is left who holds the state. A lone rank that dies leaves what its newest regular
    snapshot holds: the steps since then are lost, and no others.
    """
    if (lost := seen.steps_lost) is None:
        return []
    if not (fault.is_gone and seen.world_size == 1):
        return [f"{_steps(lost)} done again, none allowed"] if lost else []
    assert seen.reached_step is not None
    allowed = max(0, seen.reached_step - seen.snapshot_step)
    if lost <= allowed:
        return []
    return [
        f"{_steps(lost)} done again, {allowed or 'none'} allowed: the newest snapshot was of step "
        f"{seen.snapshot_step}, and step {seen.restored_step} was restored"
    ]


def _end_objections(fault: Fault, seen: Seen) -> list[str]:
    found = []
    if seen.exit_code is None:
        found.append("the run had not ended in time")
    elif seen.exit_code != 0:
        found.append(f"the run ended with exit code {seen.exit_code}" + (f": {seen.error}" if seen.error else ""))
    elif not seen.complete:
        found.append("the run ended before all steps were done")
    match fault.expect:
        case Expect.UNDISTURBED | Expect.SKIP:
            if seen.num_restarts or seen.num_incidents:
                found.append(f"{seen.num_restarts} restart(s) and {seen.num_incidents} incident(s), none expected")
        case Expect.RESUME | Expect.FALL_BACK:
            if not seen.num_restarts:
                found.append("no new worker group was started")
    if fault.expect is Expect.SKIP and seen.num_skipped != 1:
        found.append(f"{seen.num_skipped} updates were skipped, one expected")
    if fault.expect is Expect.FALL_BACK and not seen.passed_over:
        found.append("the damaged snapshot was not named as passed over")
    return found


def _halt_objections(seen: Seen) -> list[str]:
    found = []
    if seen.exit_code is None:
        found.append("the job was still being restarted")
    elif seen.exit_code != HaltError.exit_code:
        found.append(f"exit code {seen.exit_code}, {HaltError.exit_code} expected")
    missing = [words for words in seen.halted_where if words not in seen.halt_reason]
    if missing:
        wanted = " and ".join(f'"{words.strip()}"' for words in missing)
        found.append(f"the diagnosis does not say {wanted}: {seen.halt_reason or 'there is none'}")
    first, last = seen.due_steps
    if seen.kept_step is None:
        found.append("no sound snapshot was kept")
    elif not first <= seen.kept_step <= last:
        due = f"step {last}" if first == last else f"a step from {first} to {last}"
        found.append(f"the newest snapshot is of step {seen.kept_step}, not of {due}, before the step that fails")
    return found


def _steps(count: int) -> str:
    return f"{count} step{'s' if count != 1 else ''}"
