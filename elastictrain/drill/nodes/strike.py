"""Carries out the faults of `core.node_faults`, and waits for what must follow.

A rank of the first node holds twice: after the step of the fault, until that has happened, and after the next one,
until what must follow has: a node that is to be taken in is, or will be when this rank goes on; a store is served
again. So all of it happens at steps, however short a step is and however long a node takes to come up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.armed import boot_clock_s
from elastictrain.core.node_faults import NodeFault
from elastictrain.drill.nodes.trial import NodesTrial
from elastictrain.errors import DrillError

STORE_STARTED = "store_started"


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has happened.

    Args:
        where: to which node, in words.
        at_s: when, of `boot_clock_s`.
        recovered_s: from then until what has failed was there again; None where that is told from the ranks.
        undone: what must follow and did not, in words; "" for nothing.
    """

    where: str
    at_s: float
    recovered_s: float | None = None
    undone: str = ""


def strike(fault: NodeFault, trial: NodesTrial, at: str, after: str, deadline_s: float) -> Struck:
    """Carries out a fault, while a rank of the first node holds.

    Args:
        fault: which.
        trial: the run.
        at: the hold in which it happens.
        after: the hold after the next step.
        deadline_s: until when to wait, of `time.monotonic`.
    """
    struck = _STRIKES[fault.name](trial, at, after, deadline_s)
    for hold in (at, after):
        trial.drill.release(hold)
    return struck


def _kill_node(trial: NodesTrial, _at: str, _after: str, _deadline_s: float) -> Struck:
    at_s = boot_clock_s()
    trial.last.kill()
    return Struck(trial.last.name, at_s)


def _cut_link(trial: NodesTrial, at: str, after: str, deadline_s: float) -> Struck:
    node = trial.last
    at_s = boot_clock_s()
    node.cut()
    trial.drill.release(at)
    went_on = trial.wait_held(after, deadline_s)
    node.heal()
    if not went_on:
        return Struck(node.name, at_s, undone="the others did not go on")
    is_back = trial.wait_for(trial.is_regrouping, deadline_s)
    return Struck(node.name, at_s, undone="" if is_back else "the node was not taken in again once its link was healed")


def _join_node(trial: NodesTrial, _at: str, _after: str, deadline_s: float) -> Struck:
    node = trial.last
    at_s = boot_clock_s()
    trial.start_on(node)
    is_in = trial.wait_for(trial.is_regrouping, deadline_s)
    return Struck(node.name, at_s, undone="" if is_in else "the node was not taken in")


def _kill_store(trial: NodesTrial, at: str, after: str, deadline_s: float) -> Struck:
    node = trial.first

    def started() -> list[int]:
        return [int(event.fields["pid"]) for event in trial.events([STORE_STARTED])]

    before = started()
    if not before:
        raise DrillError("the journal of the first node does not say which process serves the store")
    at_s = boot_clock_s()
    node.run(["sh", "-c", f"kill -KILL {before[-1]}"])
    trial.drill.release(at)
    went_on = trial.wait_held(after, deadline_s)
    is_back = trial.wait_for(lambda: len(started()) > len(before), deadline_s)
    recovered_s = trial.events([STORE_STARTED])[-1].moment.boot_s - at_s if is_back else None
    return Struck(
        f"store on {node.name}",
        at_s,
        recovered_s=round(recovered_s, 3) if recovered_s is not None else None,
        undone="the store was not served again" if not is_back else "" if went_on else "no step was done without it",
    )


def _pause_etcd_leader(trial: NodesTrial, at: str, after: str, deadline_s: float) -> Struck:
    etcd = trial.etcd
    assert etcd is not None
    at_s = boot_clock_s()
    paused = etcd.pause_leader()
    trial.drill.release(at)
    went_on = trial.wait_held(after, deadline_s)
    others = [member for member in range(len(trial.cluster.nodes)) if member != paused]
    leads = trial.wait_for(lambda: etcd.leader_of(others) is not None, deadline_s)
    recovered_s = boot_clock_s() - at_s if leads else None
    etcd.resume(paused)
    return Struck(
        f"etcd on {trial.cluster[paused].name}",
        at_s,
        recovered_s=round(recovered_s, 3) if recovered_s is not None else None,
        undone="no other member came to lead" if not leads else "" if went_on else "no step was done meanwhile",
    )


_STRIKES: dict[str, Callable[[NodesTrial, str, str, float], Struck]] = {
    "kill-node": _kill_node,
    "cut-link": _cut_link,
    "join-node": _join_node,
    "kill-store": _kill_store,
    "pause-etcd-leader": _pause_etcd_leader,
}
