"""Which snapshots to delete. What is not certainly superfluous stays.

Two rules hold whatever the settings: a snapshot goes only if a newer one of its run has been read back and found
sound, so the last sound one of a run never goes; and none goes that another run has pinned because it resumes
from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum


class Condition(Enum):
    """What is known about a snapshot."""

    VERIFIED = "verified"
    """read back, or compared while written, and found sound"""
    COMMITTED = "committed"
    """complete when it was written; not looked at since"""
    DAMAGED = "damaged"
    """read back and found wanting"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot in a store.

    Args:
        run_id: the run it belongs to.
        global_step: windows consumed.
        condition: what is known about it.
    """

    run_id: str
    global_step: int
    condition: Condition


def superfluous(
    snapshots: Iterable[Kept], *, keep_last: int, keep_every: int | None = None, pins: Collection[tuple[str, int]] = ()
) -> list[Kept]:
    """What may be deleted, oldest first.

    Args:
        snapshots: all there are, of any number of runs; each run is judged by itself.
        keep_last: how many of the newest of a run to keep; damaged ones do not count.
        keep_every: also keep those whose step is a multiple of this.
        pins: (run id, global step) of those that other runs resume from.
    """
    runs: dict[str, list[Kept]] = {}
    for snapshot in snapshots:
        runs.setdefault(snapshot.run_id, []).append(snapshot)
    doomed = []
    for members in runs.values():
        verified = [s.global_step for s in members if s.condition is Condition.VERIFIED]
        if not verified:
            continue
        sound = sorted((s.global_step for s in members if s.condition is not Condition.DAMAGED), reverse=True)
        last = set(sound[: max(1, keep_last)])
        for snapshot in members:
            step = snapshot.global_step
            damaged = snapshot.condition is Condition.DAMAGED
            milestone = keep_every is not None and step % keep_every == 0
            wanted = not damaged and (step in last or milestone)
            if step < max(verified) and not wanted and (snapshot.run_id, step) not in pins:
                doomed.append(snapshot)
    return sorted(doomed, key=lambda s: (s.global_step, s.run_id))
