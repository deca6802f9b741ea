"""One drill after the other: the reference, the run with the fault in it, the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastictrain.armed import CLOCK_JUMPS_S, ArmedFault
from elastictrain.core.drill_verdict import Seen, objections
from elastictrain.core.events import Kind
from elastictrain.core.faults import Action, Expect, Fault, Outside, Point, allowed_steps_lost
from elastictrain.core.phases import Phase
from elastictrain.drill import outside
from elastictrain.drill.compare import newest_state, state_of_step
from elastictrain.drill.judge import Evidence, Reference, Row, survived
from elastictrain.drill.settings import KEEP_LAST, DrillJob, refusal
from elastictrain.drill.trial import Trial
from elastictrain.errors import DrillError, ElasticTrainError, HaltError, MissingInputError, UsageError

MIN_DEADLINE_S = 180.0
REFERENCE_DEADLINE_S = 6 * 3600.0


def refused(fault: Fault, why: str) -> Row:
    return Row(fault=fault.name, verdict="refused", why=why)


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
            self._reference = self._undisturbed("reference", self.job)
        return self._reference

    def _undisturbed(
        self, name: str, job: DrillJob, armed: list[ArmedFault] | None = None, *, step: int | None = None
    ) -> Reference:
        """A run to the end, without a fault.

        Args:
            name: of its folder.
            job: to run.
            armed: what belongs to its data all the same.
            step: of the state that is wanted; None for the last.
        """
        # A newer snapshot takes the place of one that still waits for the store: the run holds until this one is there.
        hold: ArmedFault | None = None
        if step is not None and step < job.steps:
            hold = ArmedFault(f"{name}-hold", Action.HOLD, 0, step, Phase.FORWARD)
        trial = Trial(job, self._scratch / name, None, [*(armed or []), *([hold] if hold is not None else [])])
        deadline_s = time.monotonic() + REFERENCE_DEADLINE_S
        try:
            trial.start()
            if hold is not None and trial.wait_fired(hold.id, deadline_s):
                trial.wait_for(lambda: any(each.global_step == step for each in trial.durable()), deadline_s)
                trial.drill.release(hold.id)
            code = trial.wait_end(deadline_s)
            if code != 0 or not trial.said_named("training_started"):
                raise DrillError(
                    f"the job does not even run undisturbed (exit code {code}): there is nothing to drill",
                    f"{trial.last_words()}\nIts output is in {trial.folder}.",
                )
            trajectory = survived(trial)
            reference = Reference(
                lines=trial.step_lines(),
                final=state_of_step(trial.store(), step if step is not None else job.steps),
                wall_s=trial.wall_s,
                step_s=trajectory.useful_s / max(1, trajectory.last_step),
                started=trial.said_named("training_started")[0].fields,
            )
        except MissingInputError as error:
            raise DrillError(f"the undisturbed run: {error.what}", f"Its output is in {trial.folder}.") from error
        finally:
            trial.close()
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
            reference = self._undisturbed(f"reference-{fault.name}", self.job, armed)
        self._tell(f"{fault.name}: {point}")
        cgroup: outside.MemoryCgroup | None = None
        mounted: Path | None = None
        trial: Trial | None = None
        row: Row | None = None
        try:
            if fault.action is Action.OOM:
                cgroup = outside.MemoryCgroup(f"elastictrain-drill-{self._scratch.name}")
                armed = [ArmedFault(a.id, a.action, a.rank, a.step, a.phase, str(cgroup.path)) for a in armed]
            trial = Trial(self.job, self._scratch / fault.name, fault, armed)
            if fault.outside is Outside.STORE_FULL:
                room = reference.final.size_bytes * (max(KEEP_LAST, self.job.config.checkpoint.keep_last) + 3) + (
                    4 << 20
                )
                outside.mount_small(trial.store_path, room)
                mounted = trial.store_path
            row = self._drilled(fault, point, armed[0].id, trial, reference)
        except UsageError as error:
            row = refused(fault, error.what)
        except ElasticTrainError as error:
            folder = str(trial.folder) if trial is not None else ""
            row = Row(fault=fault.name, injected_at=str(point), verdict="fails", why=error.what, folder=folder)
        finally:
            if trial is not None:
                trial.close()
            if mounted is not None:
                outside.unmount(mounted, keep=self._keep or (row is not None and row.verdict == "fails"))
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
        trial.wait_gone()  # a persister may finish its snapshot after its rank: that is what was kept
        kept = newest_state(trial.kept if fault.expect is Expect.HALT else trial.durable)
        allowed = allowed_steps_lost(
            fault, world_size=self.job.world_size, snapshot_every_steps=self.job.snapshot_every_steps
        )
        due: dict[str, Any] = {}
        if fault.expect is Expect.HALT:
            halted = trial.events([Kind.HALTED])
            due = {
                "halt_reason": str(halted[-1].fields.get("reason", "")) if halted else "",
                "halted_where": (f"step {point.step + 1} fails", "samples "),
                "kept_step": kept.step if kept is not None else None,
                "due_steps": (point.step - allowed, point.step),
            }
            if kept is not None:
                reference = self._reference_of_step(fault, reference, kept.step)
        evidence = Evidence(trial, code, reference, kept)
        match fault.expect:
            case Expect.SKIP:
                # The reference of a NaN has that NaN in it: what is skipped anyway, the plain one says.
                due["num_skipped"] = (
                    kept.counters.get("skipped", 0) - self.reference.final.counters.get("skipped", 0) if kept else 0
                )
            case Expect.FALL_BACK:
                due["passed_over"] = any(
                    str(said.fields.get("where", "")).startswith(place)
                    for said in trial.said_named("snapshot_passed_over")
                    for place in damaged
                )
            case Expect.HALT:  # every life of the group ends at the same sample, and so may lose the same steps
                allowed *= max(1, evidence.num_restarts)
        seen = evidence.seen(fired=at_s is not None, allowed_steps_lost=allowed, **due)
        wrong = objections(fault, seen)
        on_cuda = "cuda" in str(reference.started.get("device"))
        if evidence.difference and not self.job.config.train.deterministic and on_cuda:
            wrong.append("train.deterministic = false: CUDA kernels may differ from run to run by themselves")
        is_of_store = fault.outside in (Outside.STORE_AWAY, Outside.STORE_FULL)
        return evidence.row(
            fault.name,
            str(point),
            wrong,
            detected_s=_store_detected_s(trial, at_s) if is_of_store else evidence.detected_s(at_s),
            recovered_s=_store_recovered_s(trial, point, at_s) if is_of_store else evidence.recovered_s(at_s),
            remark=_in_short(fault, seen),
        )

    def _reference_of_step(self, fault: Fault, reference: Reference, step: int) -> Reference:
        """The state of an undisturbed run at this step; that of its end, if it does not come by there."""
        if not 0 < step <= self.job.steps:
            return reference
        self._tell(f"{fault.name}: a reference with a snapshot of step {step}")
        return self._undisturbed(f"reference-{fault.name}", self.job.with_snapshot_of(step), step=step)


def _store_detected_s(trial: Trial, at_s: float | None) -> float | None:
    """From an outage of the store until the run says that it cannot write there."""
    said = [said.at_s for said in list(trial.said) if said.name.startswith("persister_")]
    return next((round(moment_s - at_s, 3) for moment_s in said if at_s and moment_s >= at_s), None)


def _store_recovered_s(trial: Trial, point: Point, at_s: float | None) -> float | None:
    """From an outage of the store until a snapshot that was taken in it was durable."""
    durable = [e for e in trial.events([Kind.SNAPSHOT_DURABLE]) if e.fields.get("at_step", 0) > point.step]
    return round(durable[0].moment.boot_s - at_s, 3) if durable and at_s else None


def _in_short(fault: Fault, seen: Seen) -> str:
    if fault.expect is Expect.HALT:
        return (
            f"halted with exit code {HaltError.exit_code}: {seen.halt_reason.rstrip('.')}; "
            f"kept: step {seen.kept_step}, as an undisturbed run has it"
        )
    if fault.expect is Expect.FALL_BACK:
        return "the damaged snapshot was named and passed over"
    if fault.expect is Expect.SKIP:
        return "all ranks left the update out, and counted it"
    if seen.steps_lost:
        return f"{seen.steps_lost} step(s) done again; nobody was left to keep them"
    return ""
