"""Who takes part: the nodes of a job, and the plan of the next worker group that they agree on.

Every supervisor publishes what its node is about (`Node`), and sees what the others have published. There is one plan,
written by compare-and-swap: of several nodes that write the next one, one succeeds, and a plan's number is never used
again. So a node that has been cut off and comes back cannot act under an old number: nobody takes part in that one any
more, and a step of a worker group needs all of its ranks.

For the same reason any single member may go on without the others: since its own ranks have ended, theirs make no more
steps. Nodes that were no part of the last worker group cannot know that. They go on in its place when a member says
that it has ended, or after a time (`Bounds.takeover_s`) after which a worker group that nobody hears of has stopped
itself.

Nodes that all reach the store need not reach each other. So they try, before a plan is made and while their ranks wait,
and say what they found: a worker group has only nodes that reach each other (`_connected`).

A node is told from a dead one by its record, which changes every moment while its supervisor lives, and by nothing that
a clock says: it is dead when its record has stood still under our own eyes (`Sightings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Standing(StrEnum):
    """What a node is about."""

    READY = "ready"
    """Its supervisor waits to take part in the next worker group, and can at once."""
    WARMING = "warming"
    """It will be ready soon: its processes are being started, or it pauses after a failure."""
    RUNNING = "running"
    """Its ranks are part of worker group `number`, or are ending."""
    LEAVING = "leaving"
    """The same, but it takes no part in the next one."""
    AWAY = "away"
    """Drained, or halted: it takes no part."""
    DONE = "done"
    """Its ranks have done the job's last step."""


RUNS = (Standing.RUNNING, Standing.LEAVING)
"""Its ranks are at work, or ending."""
LONGEST_WARMING_S = 60.0
"""So long the others wait for one that will be ready soon. Then they go on, and it joins when it is."""
_NUMBERS_OF_LOST_PLANS = 1000
"""So many plans may have been made and lost between one that somebody remembers and the loss of the store's data."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which run a node goes on with.

    Args:
        run_id: of its snapshots.
        global_batch_size: what an earlier start fixed; None where none did, or the job file fixes it.
        source_url: store of the snapshot of another run that it began with; "" for none.
        source_run_id: that other run.
        source_step: and the step of it.
        is_asked_for: somebody asked for this run at this node's start (`--fresh`, `--from`).
        has_begun: an earlier worker group of this run was on this node.
    """

    run_id: str
    global_batch_size: int | None
    source_url: str = ""
    source_run_id: str = ""
    source_step: int = 0
    is_asked_for: bool = False
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """What a node's supervisor has published.

    Args:
        node: its name, unique within the job, the same after a restart of its supervisor.
        host: as its users know it.
        address: under which its ranks are reached.
        num_ranks: that it has.
        standing: what it is about.
        number: the highest number of a worker group that it has taken part in.
        store_port: where its next worker group's store listens already, if it comes to serve it.
        lineage: the run that it goes on with.
        must_agree: what has to be the same on all nodes, by name.
        reason: of its standing, in words.
        has_taken_part: in a worker group, since its supervisor started.
        links_port: where it answers the others' attempts to connect; 0 if it does not.
        links: other nodes, and whether its last attempts to connect to them succeeded; those it has not tried are left
            out.
    """

    node: str
    host: str
    address: str
    num_ranks: int
    standing: Standing
    number: int
    store_port: int
    lineage: Lineage
    must_agree: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    has_taken_part: bool = False
    links_port: int = 0
    links: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Member:
    """A node's part in a plan.

    Args:
        node: its name.
        host: as its users know it.
        address: under which its ranks are reached.
        num_ranks: that it has.
        store_port: where the worker group's store listens, if this is the first member.
    """

    node: str
    host: str
    address: str
    num_ranks: int
    store_port: int


@dataclass(frozen=True, slots=True)
class End:
    """The end of the whole job; another end is another value.

    Args:
        number: of the plan under which it came.
        num_stops: how often it has been asked for under this plan.
        is_complete: the last step is done.
        reason: in words.
    """

    number: int
    num_stops: int
    is_complete: bool
    reason: str = field(compare=False)


def asks_to_stop(job: str, lineage: Lineage, token: str) -> Plan:
    """What a stop is said with where there is no plan yet. Its number is that of no worker group, and there is nobody
    to wait for after it.

    Args:
        job: name of the job.
        lineage: the run that would begin.
        token: makes its name unique.
    """
    return Plan(0, f"{job}-0-{token}", (), lineage, is_over=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """One worker group over all nodes.

    Args:
        number: of the incarnation, on every node; never used again.
        attempt: its name in all logs.
        members: in the order of their ranks; the first one serves the worker group's store. None where no worker group
            has begun yet, and this only says that the job is to stop.
        lineage: the run that all go on with.
        stop_reason: somebody has asked for the end of the whole job, and why.
        num_stops: how often, since this was made. A job that is started again goes on from the same plan, and may be
            told to stop before it has another.
        is_complete: the job's last step is done.
        is_over: a member has ended its part, and said so before it left.
        may_be_outdated: the store had lost its data, and this was written again; there may have been a later one.
    """

    number: int
    attempt: str
    members: tuple[Member, ...]
    lineage: Lineage
    stop_reason: str = ""
    is_complete: bool = False
    is_over: bool = False
    may_be_outdated: bool = False
    num_stops: int = 0

    def joined(self, known: Plan) -> Plan:
        """With what another copy of the same plan says has happened: none of it is ever undone."""
        return replace(
            self,
            stop_reason=known.stop_reason if known.num_stops > self.num_stops else self.stop_reason,
            num_stops=max(self.num_stops, known.num_stops),
            is_complete=self.is_complete or known.is_complete,
            is_over=self.is_over or known.is_over,
        )

    @property
    def end(self) -> End | None:
        """The end of the whole job, if it has been asked for, or come."""
        reason = "the job is complete" if self.is_complete else self.stop_reason
        return End(self.number, self.num_stops, self.is_complete, reason) if reason else None

    @property
    def world_size(self) -> int:
        return sum(member.num_ranks for member in self.members)

    def place_of(self, node: str) -> int | None:
        """The node's place among the members; None if it is none."""
        return next((place for place, member in enumerate(self.members) if member.node == node), None)

    def first_rank_of(self, place: int) -> int:
        """The global rank of a member's first rank."""
        return sum(member.num_ranks for member in self.members[:place])


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many may take part.

    Args:
        min_nodes: with fewer the job waits.
        max_nodes: more stay in reserve.
        last_call_s: at the first start, how long to wait for more nodes.
        micro_batch_size: samples per forward pass.
        global_batch_size: samples per step, where the job file fixes it.
        samples_per_rank: of a step, where it is this that the job file fixes: the first plan makes the global batch.
        takeover_s: nodes that took no part in the last worker group go on in its place once it has not been heard of
            for so long; by then it has stopped itself.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float
    micro_batch_size: int
    global_batch_size: int | None
    samples_per_rank: int
    takeover_s: float

    def max_ranks(self, lineage: Lineage) -> int | None:
        """More would have nothing to do: a step has so many microbatches. None where that is open still."""
        size = self.global_batch_size or lineage.global_batch_size
        return size // self.micro_batch_size if size is not None else None


@dataclass(frozen=True, slots=True)
class Line:
    """The nodes that would take part in the next worker group.

    Args:
        nodes: in the order of their ranks.
        reserve: those that are ready and left out, and why.
        lineage: the run that they go on with; None where there is none of them.
    """

    nodes: tuple[Node, ...]
    reserve: Mapping[str, str]
    lineage: Lineage | None


def reference(plan: Plan | None, nodes: Sequence[Node]) -> Node | None:
    """The node that the others have to agree with: the first member that is there, else the first by name. One that
    comes back changed does not turn away those that have gone on."""
    present = {node.node: node for node in nodes if node.standing is not Standing.AWAY}
    there = [present[member.node] for member in (plan.members if plan is not None else ()) if member.node in present]
    for node in (*[each for each in there if each.has_taken_part], *there):
        return node
    return present[min(present)] if present else None


def differences(node: Node, other: Node) -> list[str]:
    """In words, what should be the same on both and is not."""
    names = sorted({*node.must_agree, *other.must_agree})
    return [
        f"{name} is {node.must_agree.get(name, 'unknown')} here and {other.must_agree.get(name, 'unknown')} there"
        for name in names
        if node.must_agree.get(name) != other.must_agree.get(name)
    ]


def line_up(plan: Plan | None, nodes: Sequence[Node], bounds: Bounds) -> Line:
    """Who of the nodes that are ready takes part: former members first, in their order, then the others by name."""
    former = {member.node: place for place, member in enumerate(plan.members)} if plan is not None else {}
    ready = [node for node in nodes if node.standing is Standing.READY]
    ready.sort(key=lambda node: (former.get(node.node, len(former)), node.node))
    ruler = reference(plan, nodes)
    found = {node.node: differences(node, ruler) for node in ready} if ruler is not None else {}
    reserve = {node: "; ".join(words) for node, words in found.items() if words}
    fitting = [node for node in ready if node.node not in reserve]
    fitting, apart = _connected(fitting)
    reserve |= apart
    # Of all that fit, also of those that are left out below: which run it is does not depend on who takes part.
    lineage = agreed_lineage(fitting) if fitting else None
    max_ranks = bounds.max_ranks(lineage) if lineage is not None else None
    chosen: list[Node] = []
    num_ranks = 0
    for node in fitting:
        if len(chosen) == bounds.max_nodes:
            reserve[node.node] = f"there are {bounds.max_nodes} nodes already"
        elif max_ranks is not None and num_ranks + node.num_ranks > max_ranks:
            reserve[node.node] = f"a step has {max_ranks} microbatches, too few for its ranks as well"
        else:
            chosen.append(node)
            num_ranks += node.num_ranks
    return Line(tuple(chosen), reserve, lineage)


def are_apart(one: Node, other: Node) -> bool:
    """Whether one of the two has found that it does not reach the other: their ranks could not train together."""
    return one.links.get(other.node) is False or other.links.get(one.node) is False


def _connected(nodes: Sequence[Node]) -> tuple[list[Node], dict[str, str]]:
    """The nodes that all reach each other, with as many ranks as can be found by beginning with each node in turn; of
    equally many, those of whom the first comes first. And for each of the others, why it is left out."""
    best: list[Node] = []
    for first in nodes:
        group = [first]
        for node in nodes:
            if node is not first and not any(are_apart(node, each) for each in group):
                group.append(node)
        if sum(node.num_ranks for node in group) > sum(node.num_ranks for node in best):
            best = group
        if len(group) == len(nodes):
            break
    names = {node.node for node in best}
    left_out = {
        node.node: f"it does not reach {_names([each for each in best if are_apart(node, each)])}, or is not reached"
        for node in nodes
        if node.node not in names
    }
    return [node for node in nodes if node.node in names], left_out


def parted_members(plan: Plan, nodes: Sequence[Node]) -> list[Node]:
    """The members between whom there is no connection, though all of them live."""
    members = [node for node in nodes if plan.place_of(node.node) is not None]
    return [node for node in members if any(are_apart(node, each) for each in members)]


def _untried(nodes: Sequence[Node]) -> list[Node]:
    """The nodes of which nobody knows yet whether they reach each other."""
    asked = [node for node in nodes if node.links_port]
    return [
        node
        for node in asked
        if any(each is not node and each.node not in node.links and node.node not in each.links for each in asked)
    ]


@dataclass(frozen=True, slots=True)
class Wait:
    """No plan can be made yet.

    Args:
        reason: in words.
    """

    reason: str


def next_plan(
    plan: Plan | None,
    nodes: Sequence[Node],
    me: str,
    bounds: Bounds,
    *,
    quiet_s: float,
    unheard_s: float,
    stood_s: Mapping[str, float],
    token: str,
    job: str,
) -> Plan | Wait:
    """The plan of the next worker group, if it can be made now and this node is the one to write it.

    Args:
        plan: the last one.
        nodes: all that live, this one included.
        me: this node.
        bounds: how many may take part.
        quiet_s: for how long the same nodes have been ready.
        unheard_s: for how long, under our eyes, neither the plan has changed nor a member that is not among the nodes
            has been heard of.
        stood_s: for how long each node has been standing as it does.
        token: makes the attempt's name unique.
        job: name of the job.
    """
    busy = [node for node in nodes if node.standing in RUNS]
    if busy:
        return Wait(f"the ranks on {_names(busy)} have not ended yet")
    if plan is not None and (done := [n for n in nodes if n.standing is Standing.DONE and n.number >= plan.number]):
        return Wait(f"the ranks on {_names(done)} have done the last step, and the job is about to be complete")
    line = line_up(plan, nodes, bounds)
    if me in line.reserve:
        return Wait(f"this node is in reserve: {line.reserve[me]}")
    if len(line.nodes) < bounds.min_nodes:
        missing = bounds.min_nodes - len(line.nodes)
        ready = (
            f"{_names(line.nodes)} {'is' if len(line.nodes) == 1 else 'are'} ready" if line.nodes else "none is ready"
        )
        return Wait(
            f"waits for {missing} more node{'s' if missing > 1 else ''}: {ready}, elastic.nodes asks for "
            f"{bounds.min_nodes}"
        )
    former = {member.node for member in plan.members} if plan is not None else set()
    warming = [
        node
        for node in nodes
        if node.standing is Standing.WARMING
        and (node.node in former or not former)
        and stood_s.get(node.node, 0.0) < LONGEST_WARMING_S
    ]
    if warming:
        return Wait(f"waits for {_names(warming)}, which will be ready soon")
    goes_on = any(node.node in former for node in line.nodes)
    here = {node.node for node in nodes}
    absent = [member.host for member in plan.members if member.node not in here] if plan is not None else []
    if plan is not None and unheard_s < bounds.takeover_s:
        if plan.may_be_outdated and absent:
            return Wait(_takes_over(", ".join(sorted(absent)), "the store has lost its data", unheard_s, bounds))
        if not goes_on and not is_over(plan, nodes):
            hosts = ", ".join(sorted(member.host for member in plan.members))
            return Wait(_takes_over(hosts, "no node here took part", unheard_s, bounds))
    if not goes_on and len(line.nodes) < bounds.max_nodes and quiet_s < bounds.last_call_s:
        return Wait(f"{_names(line.nodes)} {'is' if len(line.nodes) == 1 else 'are'} ready; more may come")
    if untried := _untried(line.nodes):
        return Wait(f"{_names(untried)} try to reach each other")
    if line.nodes[0].node != me:
        return Wait(f"{line.nodes[0].host} makes the plan")
    number = 1 + max([node.number for node in nodes] + ([plan.number] if plan is not None else []))
    if plan is not None and plan.may_be_outdated:
        number += _NUMBERS_OF_LOST_PLANS
    members = tuple(Member(n.node, n.host, n.address, n.num_ranks, n.store_port) for n in line.nodes)
    lineage = line.lineage
    assert lineage is not None
    if bounds.global_batch_size is None and lineage.global_batch_size is None:
        world_size = sum(member.num_ranks for member in members)
        lineage = replace(lineage, global_batch_size=bounds.samples_per_rank * world_size)
    return Plan(number, f"{job}-{number}-{token}", members, lineage)


def _takes_over(hosts: str, why: str, unheard_s: float, bounds: Bounds) -> str:
    left_s = bounds.takeover_s - unheard_s
    return f"{hosts} may train still, cut off from here, and {why}: goes on without them in {left_s:.0f} s"


def is_over(plan: Plan, nodes: Sequence[Node]) -> bool:
    """Whether the plan's worker group makes no more steps: the ranks of one of its members have ended.

    Args:
        plan: the last one.
        nodes: what the nodes said last, whether they live or not.
    """
    return (
        plan.is_over
        or plan.is_complete
        or any(
            node.standing not in RUNS and node.number >= plan.number and plan.place_of(node.node) is not None
            for node in nodes
        )
    )


def agreed_lineage(nodes: Sequence[Node]) -> Lineage:
    """The run that all go on with: the one that some of them are in the middle of, else one that was asked for, else
    the one that got furthest, else the first node's. A node that comes later never takes the others' run away."""
    places = range(len(nodes))
    best = nodes[
        max(
            places,
            key=lambda place: (
                nodes[place].has_taken_part,
                nodes[place].lineage.is_asked_for,
                nodes[place].lineage.has_begun,
                nodes[place].number,
                -place,
            ),
        )
    ]
    begun = any(n.lineage.has_begun and n.lineage.run_id == best.lineage.run_id for n in nodes)
    return replace(best.lineage, is_asked_for=False, has_begun=begun)


def regroup_reason(plan: Plan, nodes: Sequence[Node], me: str, bounds: Bounds) -> str:
    """Why the members should stop at the next step boundary and begin a new worker group; "" if they should not.

    Only the first member calls for others to join. It makes the next plan, by its own bounds: by those of another
    member, worker groups might end again and again for a node that is never taken.

    Args:
        plan: the one that runs.
        nodes: all that live.
        me: this node.
        bounds: how many may take part, as this node sees it.
    """
    by_name = {node.node: node for node in nodes}
    if any(n.standing is Standing.DONE and plan.place_of(n.node) is not None for n in nodes):
        return ""  # the last step is done: it is too late to help
    leaving = [n for n in nodes if n.standing is Standing.LEAVING and plan.place_of(n.node) is not None]
    if leaving:
        return f"{_names(leaving)} leaves"
    if plan.members[0].node != me:
        return ""
    if len(plan.members) != sum(member.node in by_name for member in plan.members):
        return ""  # one is being lost: first things first
    # As if the members were ready too.
    members = [replace(by_name[member.node], standing=Standing.READY) for member in plan.members]
    others = [n for n in nodes if plan.place_of(n.node) is None]
    line = line_up(plan, [*members, *others], bounds)
    joining = [node for node in line.nodes if plan.place_of(node.node) is None]
    return f"{_names(joining)} {'joins' if len(joining) == 1 else 'join'}" if joining else ""


def lost_members(plan: Plan, nodes: Sequence[Node], me: str) -> list[Member]:
    """The other members whose ranks are no part of this worker group any more, or will never be: they have no living
    record, have ended their part and wait for the next plan, or left before they heard of this one."""
    by_name = {node.node: node for node in nodes}
    ended = (Standing.READY, Standing.WARMING)
    lost = []
    for member in plan.members:
        node = by_name.get(member.node)
        if member.node == me:
            continue
        if node is None or node.standing is Standing.AWAY or (node.standing in ended and node.number >= plan.number):
            lost.append(member)
    return lost


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(sorted(node.host for node in nodes))


class Sightings:
    """For how long each node's record has stood still under our eyes. Time in which we could not look proves nothing.

    Args:
        gap_s: between two looks, above which the time between them does not count.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._seen: dict[str, tuple[str, float]] = {}
        self._looked_s: float | None = None

    def look(self, records: Mapping[str, str], now_s: float) -> None:
        """Takes note of what the records say now.

        Args:
            records: by node, something that changes while the node lives.
            now_s: on a clock that only goes forward.
        """
        gap_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        # Beyond what a look usually takes, it was we who did not look.
        blind_s = gap_s if gap_s > self._gap_s else 0.0
        self._looked_s = now_s
        self._seen = {
            node: (record, self._seen[node][1] + blind_s)
            if node in self._seen and self._seen[node][0] == record
            else (record, now_s)
            for node, record in records.items()
        }

    def silent_s(self, node: str, now_s: float) -> float:
        """For how long it has stood still; infinite for one that has no record."""
        return now_s - self._seen[node][1] if node in self._seen else float("inf")
