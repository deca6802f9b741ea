"""What the journal is made of: events, and the moments they happened at.

An event has a kind, in the past tense, and fields. The kinds that the summary understands are listed here; it leaves
others alone, and so may a reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LINE_STAMPS = frozenset({"event", "level", "timestamp", "attempt"})
"""Keys of every line of a log: what it says is in the others."""
STAMPS = LINE_STAMPS | {"rank", "incarnation", "step"}
"""Keys that say of whom and when an event is; in an evaluation, all others are its values."""


class Kind(StrEnum):
    """Kinds that have a meaning for the state of the job. Their fields are in docs/operations.md."""

    SUPERVISOR_STARTED = "supervisor_started"
    INCARNATION_STARTED = "incarnation_started"
    TRAINING_STARTED = "training_started"
    RANKS_TRAINING = "ranks_training"
    RESTORED = "restored"
    PROGRESS = "progress"
    SNAPSHOT_PASSED_OVER = "snapshot_passed_over"
    SNAPSHOT_INCOMPLETE = "snapshot_incomplete"
    SNAPSHOT_TAKEN = "snapshot_taken"
    SNAPSHOT_AT_FAILURE = "snapshot_at_failure"
    SNAPSHOT_DURABLE = "snapshot_durable"
    SNAPSHOT_LEFT_OUT = "snapshot_left_out"
    SNAPSHOT_FAILED = "snapshot_failed"
    PERSISTER_RETRYING = "persister_retrying"
    PERSISTER_STALLED = "persister_stalled"
    PERSISTER_FAILED = "persister_failed"
    PERSISTER_FENCED = "persister_fenced"
    STORE_RETRYING = "store_retrying"
    EVALUATED = "evaluated"
    RANK_FAILED = "rank_failed"
    INCIDENT_OPENED = "incident_opened"
    RANK_KILLED = "rank_killed"
    INCARNATION_ENDED = "incarnation_ended"
    RESTART_PLANNED = "restart_planned"
    HALTED = "halted"
    COMPLETED = "completed"
    STOPPED = "stopped"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time that survives a change of the clock.

    Two moments of one boot are apart by what the boot clock says; only across a reboot is the wall clock believed.

    Args:
        time_s: wall clock, seconds since 1970.
        boot_s: seconds since the machine was booted (CLOCK_BOOTTIME).
        boot_id: which boot; empty if unknown.
    """

    time_s: float
    boot_s: float = 0.0
    boot_id: str = ""

    def since(self, earlier: Moment) -> float:
        """Seconds from `earlier` to here; never negative."""
        if self.boot_id and self.boot_id == earlier.boot_id:
            return max(0.0, self.boot_s - earlier.boot_s)
        return max(0.0, self.time_s - earlier.time_s)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job.

    Args:
        id: orders the events of a job, also over restarts of its supervisor; not without gaps.
        moment: when.
        kind: one of `Kind`, or another.
        fields: plain data.
    """

    id: int
    moment: Moment
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
