"""One drill after the other: the reference, the run with the fault in it, what was seen, the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastictrain.armed import CLOCK_JUMPS_S, ArmedFault
from elastictrain.core.drill_verdict import Seen, objections
from elastictrain.core.events import Event, Kind
from elastictrain.core.faults import Action, Expect, Fault, Outside, Point, allowed_steps_lost
from elastictrain.core.trajectory import RankTrace, survey
from elastictrain.core.window import EpochTail
from elastictrain.drill import outside
from elastictrain.drill.compare import FinalState, first_difference, read_final_state
from elastictrain.drill.settings import DrillJob, refusal
from elastictrain.drill.trial import Trial
from elastictrain.errors import DrillError, ElasticTrainError, HaltError, UsageError

MIN_DEADLINE_S = 180.0
REFERENCE_DEADLINE_S = 6 * 3600.0
DETECTED = (
    Kind.INCIDENT_OPENED,
    Kind.RANK_FAILED,
    Kind.INCARNATION_ENDED,
    Kind.SUPERVISOR_STARTED,
    Kind.STOPPED,
    Kind.HALTED,
)
"""Events by which the supervisor says that it has noticed."""


@dataclass(frozen=True, slots=True)
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
    injected_at: str
    detected_s: float | None
    recovered_s: float | None
    steps_lost: int | None
    samples_repeated: int | None
    samples_skipped: int | None
    bitwise_equal: bool | None
    difference: str
    verdict: str
    why: str
    folder: str = ""

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)


def refused(fault: Fault, why: str) -> Row:
    return Row(fault.name, "", None, None, None, None, None, None, "", "refused", why)


@dataclass(frozen=True, slots=True)
class Reference:
    """A run that nothing happened to.

    Args:
        lines: its steps.
        final: its state at the end.
        wall_s: how long it took.
        step_s: typical duration of a step.
        started: what rank zero said at its start: samples, batch sizes.
    """

    lines: list[dict[str, Any]]
    final: FinalState
    wall_s: float
    step_s: float
    started: dict[str, Any]


class Exercise:
    """Drills of one job.

    Args:
        job: what is drilled.
        scratch: folder for everything.
        tell: gets a line about what is being done.
        keep: leave the folders of runs that held, too.
    """

    def __init__(self, job: DrillJob, scratch: Path, *, tell: Callable[[str], None], keep: bool = False) -> None:
        self.job = job
        self._scratch = scratch
        self._tell = tell
        self._keep = keep
        self._reference: Reference | None = None

    # ---- the reference

    @property
    def reference(self) -> Reference:
        """The undisturbed run; done when first asked for."""
        if self._reference is None:
            self._tell(f"reference: {self.job.steps} steps, undisturbed")
            self._reference = self._undisturbed("reference", [])
        return self._reference

    def _undisturbed(self, name: str, armed: list[ArmedFault]) -> Reference:
        trial = Trial(self.job, self._scratch / name, None, armed)
        try:
            trial.start()
            code = trial.wait_end(time.monotonic() + REFERENCE_DEADLINE_S)
            if code != 0 or not trial.said_named("training_started"):
                raise DrillError(
                    f"the job does not even run undisturbed (exit code {code}): there is nothing to drill",
                    f"{trial.last_words()}\nIts output is in {trial.folder}.",
                )
            survived = survey(trial.traces(), drops_tail_of=self.dropped_tail(trial))
            reference = Reference(
                lines=trial.step_lines(),
                final=read_final_state(trial.store()),
                wall_s=trial.wall_s,
                step_s=survived.useful_s / max(1, survived.last_step),
                started=trial.said_named("training_started")[0].fields,
            )
        finally:
            trial.close()
        if reference.final.step != self.job.steps:
            raise DrillError(
                f"the undisturbed run ended at step {reference.final.step} instead of {self.job.steps}",
                f"Its output is in {trial.folder}.",
            )
        if not self._keep:
            trial.remove()
        return reference

    # ---- one fault

    def run(self, fault: Fault) -> Row:
        """One drill; never raises for what the job, or the machine, does."""
        if why := refusal(fault, self.job):
            return refused(fault, why)
        reference = self.reference
        point = fault.point(self.job.fault_step, self.job.world_size)
        armed = self._armed(fault, point)
        if fault.expect is Expect.SKIP:
            self._tell(f"{fault.name}: a reference with the same NaN in it")
            reference = self._undisturbed(f"reference-{fault.name}", armed)
        self._tell(f"{fault.name}: {point}")
        cgroup: outside.MemoryCgroup | None = None
        mounted: Path | None = None
        trial: Trial | None = None
        try:
            if fault.action is Action.OOM:
                cgroup = outside.MemoryCgroup(f"elastictrain-drill-{self._scratch.name}")
                armed = [ArmedFault(a.id, a.action, a.rank, a.step, a.phase, str(cgroup.path)) for a in armed]
            trial = Trial(self.job, self._scratch / fault.name, fault, armed)
            if fault.outside is Outside.STORE_FULL:
                room = reference.final.size_bytes * (max(3, self.job.config.checkpoint.keep_last) + 3) + (4 << 20)
                outside.mount_small(trial.store_path, room)
                mounted = trial.store_path
            row = self._drilled(fault, point, armed[0].id, trial, reference)
        except UsageError as error:
            row = refused(fault, error.what)
        except ElasticTrainError as error:
            row = Row(fault.name, str(point), None, None, None, None, None, None, "", "fails", error.what)
        finally:
            if trial is not None:
                trial.close()
            if mounted is not None:
                outside.unmount(mounted)
            if cgroup is not None:
                cgroup.remove()
        if trial is not None and not self._keep and row.verdict != "fails":
            trial.remove()
        return row

    def _armed(self, fault: Fault, point: Point) -> list[ArmedFault]:
        ranks = range(self.job.world_size) if fault.action in CLOCK_JUMPS_S else [point.rank]
        return [ArmedFault(f"{fault.name}-{rank}", fault.action, rank, point.step, point.phase) for rank in ranks]

    def _drilled(self, fault: Fault, point: Point, fault_id: str, trial: Trial, reference: Reference) -> Row:
        deadline_s = time.monotonic() + self.patience_s(reference)
        trial.start()
        has_fired = trial.wait_fired(fault_id, deadline_s)
        at_s = trial.drill.fired_at_s(fault_id)
        damaged: list[str] = []
        if has_fired and fault.outside is not Outside.NOTHING:
            at_s, damaged = outside.act(fault.outside, trial, fault_id, deadline_s)
        code = trial.wait_end(deadline_s)
        return self._judge(fault, point, trial, reference, at_s, damaged, code)

    def patience_s(self, reference: Reference, *, num_faults: int = 1) -> float:
        """After so long a run is given up. Every limit of the job's own watchdog lies below the timeout of its
        process group, and a fault needs no more than three of them."""
        group_s = self.job.config.elastic.process_group_timeout_s
        return 5 * reference.wall_s + num_faults * (MIN_DEADLINE_S + 3 * group_s)

    # ---- what was seen

    def _judge(
        self,
        fault: Fault,
        point: Point,
        trial: Trial,
        reference: Reference,
        at_s: float | None,
        damaged: list[str],
        code: int | None,
    ) -> Row:
        traces = trial.traces()
        survived = survey(traces, drops_tail_of=self.dropped_tail(trial))
        final = self.final_state(trial) if fault.expect is not Expect.HALT else None
        difference: str | None = None
        if final is not None or fault.expect is Expect.HALT:
            difference = first_difference(
                reference.lines, trial.step_lines(), reference.final if final is not None else None, final
            )
        incarnations = {trace.incarnation for trace in traces if trace.began_step is not None}
        halted = trial.events([Kind.HALTED])
        seen = Seen(
            fired=at_s is not None,
            exit_code=code,
            error=trial.last_words().partition("\n")[0],
            complete=survived.last_step == self.job.steps,
            difference=difference,
            steps_lost=survived.steps_lost,
            allowed_steps_lost=allowed_steps_lost(
                fault, world_size=self.job.world_size, snapshot_every_steps=self.job.snapshot_every_steps
            ),
            samples_repeated=survived.samples_repeated,
            samples_skipped=survived.samples_skipped,
            num_restarts=max(0, len(incarnations) - 1),
            num_incidents=len(trial.events([Kind.INCIDENT_OPENED])),
            num_skipped=final.counters.get("skipped", 0) - self._skipped_without(reference, fault) if final else 0,
            passed_over=any(
                str(said.fields.get("where", "")).startswith(place)
                for said in trial.said_named("snapshot_passed_over")
                for place in damaged
            ),
            halt_reason=str(halted[-1].fields.get("reason", "")) if halted else "",
            leftovers=trial.leftovers(),
            halted_where=(f"step {point.step + 1} fails", "samples ") if fault.expect is Expect.HALT else (),
        )
        wrong = objections(fault, seen)
        if difference and not self.job.config.train.deterministic and "cuda" in str(reference.started.get("device")):
            wrong.append("train.deterministic = false: CUDA kernels may differ from run to run by themselves")
        is_of_store = fault.outside in (Outside.STORE_AWAY, Outside.STORE_FULL)
        return Row(
            fault=fault.name,
            injected_at=str(point),
            detected_s=self._store_detected_s(trial, at_s) if is_of_store else self.detected_s(trial, at_s),
            recovered_s=(
                self._store_recovered_s(trial, point, at_s) if is_of_store else self.recovered_s(traces, at_s)
            ),
            steps_lost=survived.steps_lost,
            samples_repeated=survived.samples_repeated,
            samples_skipped=survived.samples_skipped,
            bitwise_equal=None if difference is None else not difference,
            difference=difference or "",
            verdict="fails" if wrong else "holds",
            why="; ".join(wrong) if wrong else _in_short(fault, seen),
            folder=str(trial.folder) if wrong else "",
        )

    def _skipped_without(self, reference: Reference, fault: Fault) -> int:
        """Updates that the run skips anyway. The reference of a NaN has that NaN in it, so it is the plain one that
        says."""
        plain = self.reference if fault.expect is Expect.SKIP else reference
        return plain.final.counters.get("skipped", 0)

    def final_state(self, trial: Trial) -> FinalState | None:
        """What the run kept at its end; None if there is nothing that can be read."""
        try:
            return read_final_state(trial.store())
        except ElasticTrainError:
            return None

    def dropped_tail(self, trial: Trial) -> int | None:
        """Samples per epoch, where windows leave out an epoch's tail."""
        started = trial.said_named("training_started")
        drops = self.job.config.data.epoch_tail is EpochTail.DROP
        return int(started[0].fields["samples"]) if drops and started else None

    def detected_s(self, trial: Trial, at_s: float | None) -> float | None:
        """From the fault until the journal says that something is wrong; None if it never does."""
        if at_s is None:
            return None
        noticed = [event for event in trial.events(DETECTED) if event.moment.boot_s >= at_s and not _is_good(event)]
        return round(noticed[0].moment.boot_s - at_s, 3) if noticed else None

    def _store_detected_s(self, trial: Trial, at_s: float | None) -> float | None:
        """From an outage of the store until the run says that it cannot write there."""
        said = [said.at_s for said in list(trial.said) if said.name.startswith("persister_")]
        return next((round(moment_s - at_s, 3) for moment_s in said if at_s and moment_s >= at_s), None)

    def _store_recovered_s(self, trial: Trial, point: Point, at_s: float | None) -> float | None:
        """From an outage of the store until a snapshot that was taken in it was durable."""
        durable = [e for e in trial.events([Kind.SNAPSHOT_DURABLE]) if e.fields.get("at_step", 0) > point.step]
        return round(durable[0].moment.boot_s - at_s, 3) if durable and at_s else None

    def recovered_s(self, traces: list[RankTrace], at_s: float | None) -> float | None:
        """From the fault until every rank of a group that began after it had committed a step."""
        if at_s is None:
            return None
        groups: dict[int, list[float]] = {}
        for trace in traces:
            if trace.began_step is not None and trace.began_s > at_s:
                groups.setdefault(trace.incarnation, []).append(min(trace.committed.values(), default=float("inf")))
        recovered = [max(first) for first in groups.values() if max(first) < float("inf")]
        return round(min(recovered) - at_s, 3) if recovered else None


def _is_good(event: Event) -> bool:
    """A worker group that ended as it should, or was told to."""
    return event.kind == Kind.INCARNATION_ENDED and not event.fields.get("kind")


def _in_short(fault: Fault, seen: Seen) -> str:
    if fault.expect is Expect.HALT:
        return f"halted with exit code {HaltError.exit_code}: {seen.halt_reason}"
    if fault.expect is Expect.FALL_BACK:
        return "the damaged snapshot was named and passed over"
    if fault.expect is Expect.SKIP:
        return "all ranks left the update out, and counted it"
    if seen.steps_lost:
        return f"{seen.steps_lost} step(s) done again; nobody was left to keep them"
    return ""
