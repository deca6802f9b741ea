"""One drill on several nodes after the other: the reference, the run with the fault in it, the verdict."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from elastictrain.armed import ArmedFault
from elastictrain.core.events import Kind
from elastictrain.core.faults import Action
from elastictrain.core.node_faults import NodeFault, NodesSeen, node_objections, node_remark
from elastictrain.core.phases import Phase
from elastictrain.drill.compare import newest_state, state_of_step
from elastictrain.drill.exercise import MIN_DEADLINE_S, REFERENCE_DEADLINE_S
from elastictrain.drill.judge import Evidence, Reference, Row, survived
from elastictrain.drill.nodes.cluster import why_impossible
from elastictrain.drill.nodes.strike import Struck, strike
from elastictrain.drill.nodes.trial import NodesTrial
from elastictrain.drill.settings import DrillJob
from elastictrain.errors import DrillError, ElasticTrainError, MissingInputError, NodesError

AT = "at"
"""The hold in which the fault happens."""
AFTER = "after"
"""The hold in which what must follow is waited for: a short job would be over before."""
DETECTED = frozenset(
    {Kind.INCIDENT_OPENED, Kind.RANK_FAILED, Kind.RESTART_PLANNED, "worker_group_abandoned", "store_ended"}
)
"""Events by which the first node's supervisor says that it has noticed."""


class NodesExercise:
    """Drills of one job on several nodes.

    Args:
        job: what is drilled.
        scratch: folder for everything.
        num_nodes: how many nodes there are; None for as many as the fault needs.
        tell: gets a line about what is being done.
        keep: leave the folders of runs that held, too.
    """

    def __init__(
        self, job: DrillJob, scratch: Path, *, num_nodes: int | None, tell: Callable[[str], None], keep: bool = False
    ) -> None:
        self.job = job
        self._scratch = scratch
        self._num_nodes = num_nodes
        self._tell = tell
        self._keep = keep
        self._references: dict[tuple[int, int], Reference] = {}

    # ---- one fault

    def run(self, fault: NodeFault) -> Row:
        """One drill; never raises for what the job, or the machine, does."""
        num_nodes = self._num_nodes or fault.num_nodes
        if why := nodes_refusal(fault, self.job, num_nodes) or _machine_refusal(fault):
            return Row(fault=fault.name, verdict="refused", why=why)
        ranks_per_node = ranks_on_each(self.job, num_nodes)
        trial: NodesTrial | None = None
        try:
            reference = self._reference(self._num_at_reference(fault, num_nodes), ranks_per_node)
        except NodesError as error:
            return Row(fault=fault.name, verdict="refused", why=error.what)
        self._tell(f"{fault.name}: {num_nodes} nodes, after step {self.job.fault_step}")
        try:
            trial = NodesTrial(
                self.job,
                self._scratch / fault.name,
                num_nodes=num_nodes,
                num_late=fault.num_late,
                ranks_per_node=ranks_per_node,
                armed=self._holds(num_nodes * ranks_per_node),
                with_etcd=fault.needs_etcd,
            )
            row = self._drilled(fault, trial, reference, fault.due_world_sizes(num_nodes, ranks_per_node))
        except NodesError as error:
            row = Row(fault=fault.name, verdict="refused", why=error.what)
        except (ElasticTrainError, TimeoutError) as error:
            what = error.what if isinstance(error, ElasticTrainError) else str(error)
            folder = str(trial.folder) if trial is not None else ""
            row = Row(fault=fault.name, injected_at=self._point, verdict="fails", why=what, folder=folder)
        finally:
            if trial is not None:
                trial.close()
        if trial is not None and not self._keep and row.verdict != "fails":
            trial.remove()
        return row

    @property
    def _point(self) -> str:
        return f"after step {self.job.fault_step}"

    def _holds(self, max_ranks: int) -> list[ArmedFault]:
        """The first rank of the first node that gets there holds, whatever its number is by then."""
        after_step = self.job.fault_step + 1
        return [
            ArmedFault(hold, Action.HOLD, rank, step, Phase.READY)
            for hold, step in ((AT, self.job.fault_step), (AFTER, after_step))
            for rank in range(max_ranks)
        ]

    # ---- the reference

    def _num_at_reference(self, fault: NodeFault, num_nodes: int) -> int:
        """Where the job file fixes what a rank does in a step, the nodes that begin make the global batch."""
        return num_nodes if self.job.config.train.global_batch_size is not None else num_nodes - fault.num_late

    def _reference(self, num_nodes: int, ranks_per_node: int) -> Reference:
        """The undisturbed run; done when first asked for."""
        key = (num_nodes, ranks_per_node)
        if key not in self._references:
            self._tell(f"reference: {self.job.steps} steps on {num_nodes} node(s), undisturbed")
            self._references[key] = self._undisturbed(num_nodes, ranks_per_node)
        return self._references[key]

    def _undisturbed(self, num_nodes: int, ranks_per_node: int) -> Reference:
        folder = self._scratch / f"reference-{num_nodes}-nodes"
        trial = NodesTrial(self.job, folder, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
        try:
            trial.start()
            trial.wait_end(time.monotonic() + REFERENCE_DEADLINE_S)
            if bad := [f"{node}: {code}" for node, code in trial.exit_codes() if code != 0]:
                raise DrillError(
                    f"the job does not even run undisturbed on {num_nodes} node(s) (exit code on {', '.join(bad)}): "
                    "there is nothing to drill",
                    f"{trial.last_words()}\nIts output is in {trial.folder}.",
                )
            due = (num_nodes * ranks_per_node,)
            if set(sizes := trial.world_sizes()) != set(due):
                raise DrillError(
                    f"the undisturbed run on {num_nodes} node(s) had worker groups of {', '.join(map(str, sizes))} "
                    f"rank(s), {due[0]} expected: a node was lost without a fault, or came late",
                    f"Its output is in {trial.folder}. A larger elastic.node_timeout_s bears a busy machine.",
                )
            trajectory = survived(trial)
            started = trial.said_named("training_started")
            reference = Reference(
                lines=trial.step_lines(),
                final=state_of_step(trial.store(), self.job.steps),
                wall_s=trial.wall_s,
                step_s=trajectory.useful_s / max(1, trajectory.last_step),
                started=started[0].fields if started else {},
            )
        except MissingInputError as error:
            raise DrillError(f"the undisturbed run: {error.what}", f"Its output is in {trial.folder}.") from error
        except NodesError:  # this machine cannot have the nodes
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            trial.close()
        if not self._keep:
            trial.remove()
        return reference

    # ---- what was seen

    def _drilled(self, fault: NodeFault, trial: NodesTrial, reference: Reference, due: tuple[int, ...]) -> Row:
        deadline_s = time.monotonic() + self._patience_s(reference)
        trial.start()
        struck: Struck | None = None
        if trial.wait_held(AT, deadline_s):
            struck = strike(fault, trial, AT, AFTER, deadline_s)
        trial.wait_end(deadline_s)
        codes = trial.exit_codes()
        is_comparable = not fault.changes or self.job.config.elastic.reduction == "tree"
        kept = newest_state(trial.durable) if is_comparable else None
        code = next((code for _, code in codes if code != 0), 0)
        evidence = Evidence(trial, code, reference, kept)
        seen = NodesSeen(
            fired=struck is not None,
            undone=struck.undone if struck is not None else "",
            exit_codes=codes,
            error=trial.last_words().partition("\n")[0] if code else "",
            complete=evidence.survived.last_step == self.job.steps,
            is_comparable=is_comparable,
            difference=evidence.difference,
            steps_lost=evidence.survived.steps_lost,
            samples_repeated=evidence.survived.samples_repeated,
            samples_skipped=evidence.survived.samples_skipped,
            world_sizes=trial.world_sizes(),
            due_world_sizes=due,
            num_incidents=len(trial.events([Kind.INCIDENT_OPENED])),
            leftovers=trial.leftovers(),
        )
        at_s = struck.at_s if struck is not None else None
        recovered_s = struck.recovered_s if struck is not None and not fault.changes else evidence.recovered_s(at_s)
        return evidence.row(
            fault.name,
            f"{struck.where}, {self._point}" if struck is not None else self._point,
            node_objections(fault, seen),
            detected_s=_detected_s(trial, at_s),
            recovered_s=recovered_s,
            remark=node_remark(seen),
        )

    def _patience_s(self, reference: Reference) -> float:
        """After so long a run is given up."""
        return 5 * reference.wall_s + MIN_DEADLINE_S + 3 * self.job.config.elastic.process_group_timeout_s


def nodes_refusal(fault: NodeFault, job: DrillJob, num_nodes: int) -> str:
    """Why this job cannot have this fault; "" if it can.

    Args:
        fault: which.
        job: what is drilled.
        num_nodes: how many nodes there are to be.
    """
    if num_nodes < fault.num_nodes:
        return f"it needs {fault.num_nodes} nodes at least; use --nodes {fault.num_nodes}"
    if ranks_on_each(job, num_nodes) == 0:
        return f"a step has {_num_microbatches(job):.0f} microbatch(es), too few for {num_nodes} nodes"
    if job.fault_step + fault.room_steps > job.steps:
        return f"there must be {fault.room_steps} steps after the fault; use --steps or --at-step"
    return ""


def _machine_refusal(fault: NodeFault) -> str:
    """Why this machine cannot have this fault; "" if it seems to. What else is missing shows when it is tried."""
    if why := why_impossible():
        return why
    if fault.needs_etcd and shutil.which("etcd") is None:
        return "the program etcd is not here: apt-get install etcd-server"
    return ""


def ranks_on_each(job: DrillJob, num_nodes: int) -> int:
    """How many ranks each node has: as many as in job.toml, if a step has microbatches for so many; else one; 0 if it
    has not even for that."""
    config = job.config
    for ranks in (config.elastic.nproc_per_node, 1):
        if num_nodes * ranks <= _num_microbatches(job):
            return ranks
    return 0


def _num_microbatches(job: DrillJob) -> float:
    """Of a step; there are enough where the job file says how many there are for each rank."""
    train = job.config.train
    return math.inf if train.global_batch_size is None else train.global_batch_size // train.micro_batch_size


def _detected_s(trial: NodesTrial, at_s: float | None) -> float | None:
    """From the fault until the first node's journal says that something is, or has changed."""
    if at_s is None:
        return None
    noticed = [event for event in trial.events(DETECTED) if event.moment.boot_s >= at_s]
    return round(noticed[0].moment.boot_s - at_s, 3) if noticed else None
