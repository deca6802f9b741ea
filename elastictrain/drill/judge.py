"""The one judge of drilled runs: what a run left behind, compared with its reference; and the row that says so.

Nothing in here knows what was done to the run. A drill of one fault (`drill.exercise`) and a soak of many
(`drill.soak`) add what is due of theirs, and ask `core.drill_verdict` what is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from elastictrain.core.drill_verdict import Seen
from elastictrain.core.events import Event, Kind
from elastictrain.core.trajectory import RankTrace, Trajectory, survey
from elastictrain.core.window import EpochTail
from elastictrain.drill.compare import FinalState, first_difference
from elastictrain.drill.settings import DrillJob
from elastictrain.drill.trial import Said

DETECTED = (
    Kind.INCIDENT_OPENED,
    Kind.RANK_FAILED,
    Kind.INCARNATION_ENDED,
    Kind.SUPERVISOR_STARTED,
    Kind.STOPPED,
    Kind.HALTED,
)
"""Events by which the supervisor says that it has noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        fault: its name.
        injected_at: rank, step and phase, in words.
        detected_s: from the fault until the supervisor's journal says that something is wrong; None where nothing is.
        recovered_s: from the fault until every rank of a new worker group has committed a step; after an outage of the
            store, until a snapshot was durable again. None where there was nothing to recover from.
        steps_lost: committed steps that were done again.
        samples_repeated: consumed more than once in what survived.
        samples_skipped: not consumed in what survived.
        bitwise_equal: to the reference; None where it was not run.
        difference: the first differing step and tensor, if not.
        verdict: "holds", "fails" or "refused".
        why: in words; "" where there is nothing to say.
        folder: what is left of a run that failed.
    """

    fault: str
    injected_at: str = ""
    detected_s: float | None = None
    recovered_s: float | None = None
    steps_lost: int | None = None
    samples_repeated: int | None = None
    samples_skipped: int | None = None
    bitwise_equal: bool | None = None
    difference: str = ""
    verdict: str
    why: str
    folder: str = ""

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reference:
    """A run that nothing happened to.

    Args:
        lines: its steps.
        final: its state at the end; or at the step that the run in question was halted at.
        wall_s: how long it took.
        step_s: typical duration of a step.
        started: what rank zero said at its start: samples, batch sizes.
    """

    lines: list[dict[str, Any]]
    final: FinalState
    wall_s: float
    step_s: float
    started: dict[str, Any]


class Remains(Protocol):
    """What can be read of a run, on one node or on several."""

    job: DrillJob
    folder: Path

    def traces(self) -> list[RankTrace]: ...

    def step_lines(self) -> list[dict[str, Any]]: ...

    def events(self, kinds: Collection[str] = ()) -> list[Event]: ...

    def said_named(self, name: str) -> list[Said]: ...

    def last_words(self) -> str: ...

    def leftovers(self) -> str: ...


class Evidence:
    """What one run left behind, read once.

    Args:
        trial: the run; what supervises it has ended, or is given up.
        exit_code: of its supervisor; None if it had not ended in time.
        reference: what its steps, and what it kept, are compared with.
        kept: the state that it kept; None if there is nothing that can be read: then nothing can be compared.
    """

    def __init__(self, trial: Remains, exit_code: int | None, reference: Reference, kept: FinalState | None) -> None:
        self.trial = trial
        self.kept = kept
        self.traces = trial.traces()
        self.survived = survived(trial)
        self.num_restarts = max(0, len({t.incarnation for t in self.traces if t.began_step is not None}) - 1)
        self._exit_code = exit_code
        self.difference = (
            None if kept is None else first_difference(reference.lines, trial.step_lines(), reference.final, kept)
        )

    def seen(self, *, fired: bool, allowed_steps_lost: int, **of_the_fault: Any) -> Seen:
        """What there is to judge.

        Args:
            fired: the fault happened.
            allowed_steps_lost: how many committed steps may have been done again.
            of_the_fault: further fields of `Seen`, for what is due after this fault alone.
        """
        return Seen(
            fired=fired,
            exit_code=self._exit_code,
            error=self.trial.last_words().partition("\n")[0],
            complete=self.survived.last_step == self.trial.job.steps,
            difference=self.difference,
            steps_lost=self.survived.steps_lost,
            allowed_steps_lost=allowed_steps_lost,
            samples_repeated=self.survived.samples_repeated,
            samples_skipped=self.survived.samples_skipped,
            num_restarts=self.num_restarts,
            num_incidents=len(self.trial.events([Kind.INCIDENT_OPENED])),
            leftovers=self.trial.leftovers(),
            **of_the_fault,
        )

    def row(
        self,
        name: str,
        injected_at: str,
        wrong: Sequence[str],
        *,
        detected_s: float | None,
        recovered_s: float | None,
        remark: str,
    ) -> Row:
        """The verdict as a line of the table.

        Args:
            name: of the fault.
            injected_at: where, in words.
            wrong: all objections.
            detected_s: see `Row`.
            recovered_s: see `Row`.
            remark: what there is to say where nothing is wrong.
        """
        return Row(
            fault=name,
            injected_at=injected_at,
            detected_s=detected_s,
            recovered_s=recovered_s,
            steps_lost=self.survived.steps_lost,
            samples_repeated=self.survived.samples_repeated,
            samples_skipped=self.survived.samples_skipped,
            bitwise_equal=None if self.difference is None else not self.difference,
            difference=self.difference or "",
            verdict="fails" if wrong else "holds",
            why="; ".join(wrong) if wrong else remark,
            folder=str(self.trial.folder) if wrong else "",
        )

    def detected_s(self, at_s: float | None) -> float | None:
        """From the fault until the journal says that something is wrong; None if it never does."""
        if at_s is None:
            return None
        noticed = [e for e in self.trial.events(DETECTED) if e.moment.boot_s >= at_s and not _is_good(e)]
        return round(noticed[0].moment.boot_s - at_s, 3) if noticed else None

    def recovered_s(self, at_s: float | None) -> float | None:
        """From the fault until every rank of a group that began after it had committed a step."""
        if at_s is None:
            return None
        groups: dict[int, list[float]] = {}
        for trace in self.traces:
            if trace.began_step is not None and trace.began_s > at_s:
                groups.setdefault(trace.incarnation, []).append(min(trace.committed.values(), default=float("inf")))
        recovered = [max(first) for first in groups.values() if max(first) < float("inf")]
        return round(min(recovered) - at_s, 3) if recovered else None


def survived(trial: Remains) -> Trajectory:
    """What survived of a run."""
    started = trial.said_named("training_started")
    drops = trial.job.config.data.epoch_tail is EpochTail.DROP
    return survey(trial.traces(), drops_tail_of=int(started[0].fields["samples"]) if drops and started else None)


def _is_good(event: Event) -> bool:
    """A worker group that ended as it should, or was told to."""
    return event.kind == Kind.INCARNATION_ENDED and not event.fields.get("kind")
