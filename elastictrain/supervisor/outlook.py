"""What a node sees of the others: their records, and which of them live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastictrain.core.membership import Node, Plan, Sightings, Standing
from elastictrain.core.status import NodeView, RankView
from elastictrain.supervisor.shared_keys import Record

_PLAN_SEEN = "the plan"
"""What our sightings of it go by: no node's name has a space."""


class Outlook:
    """The nodes as their records show them.

    Args:
        timeout_s: after which a node that is not heard of is done without.
        gap_s: between two looks, above which the time between them does not count.

    Attributes:
        living: this node, and those that are heard of.
    """

    def __init__(self, *, timeout_s: float, gap_s: float) -> None:
        self._timeout_s = timeout_s
        self._sightings = Sightings(gap_s)
        self._others: dict[str, Record] = {}
        self._said: dict[str, str] = {}
        self._ready: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._stood: dict[str, tuple[Standing, float]] = {}
        self.living: list[Node] = []

    def take_in(self, me: Node, others: Mapping[str, Record], plan: Plan | None, now_s: float) -> None:
        """Takes note of what was read.

        Args:
            me: this node.
            others: records of the others, by node.
            plan: the newest.
            now_s: on a clock that only goes forward.
        """
        self._others = dict(others)
        seen = {name: f"{record.life}/{record.turn}" for name, record in others.items()}
        if plan is not None:
            # A record that is gone, its lease being over, is no sign of life.
            seen = {member.node: self._said.get(member.node, "") for member in plan.members} | seen
            self._said = {member.node: seen[member.node] for member in plan.members}
            seen[_PLAN_SEEN] = f"{plan.attempt}/{plan.may_be_outdated}"
        self._sightings.look(seen, now_s)
        self.living = [me] + [
            record.about for name, record in others.items() if self._sightings.silent_s(name, now_s) < self._timeout_s
        ]
        ready = frozenset(node.node for node in self.living if node.standing is Standing.READY)
        if ready != self._ready[0]:
            self._ready = (ready, now_s)
        self._stood = {
            node.node: known
            if (known := self._stood.get(node.node)) is not None and known[0] is node.standing
            else (node.standing, now_s)
            for node in self.living
        }

    def quiet_s(self, now_s: float) -> float:
        """For how long the nodes that are ready have been the same."""
        return now_s - self._ready[1]

    def stood_s(self, now_s: float) -> dict[str, float]:
        """For how long each of the nodes that live has been standing as it does."""
        return {node: now_s - since_s for node, (_, since_s) in self._stood.items()}

    def turns(self, standing: Standing) -> dict[str, int]:
        """How often each other living node that stands so has looked."""
        living = [node for node in self.living if node.standing is standing and node.node in self._others]
        return {node.node: self._others[node.node].turn for node in living}

    def unheard_s(self, plan: Plan | None, now_s: float) -> float:
        """For how long nothing at all was heard of a plan, nor of those of its members that do not live."""
        living = {node.node for node in self.living}
        absent = [m.node for m in (plan.members if plan is not None else ()) if m.node not in living]
        return min(self._sightings.silent_s(name, now_s) for name in (_PLAN_SEEN, *absent))

    def are_late(self, plan: Plan, after_s: float, now_s: float) -> bool:
        """Whether one of the plan's other members has not been heard of for so long."""
        records = (member.node for member in plan.members if member.node in self._others)
        return any(self._sightings.silent_s(name, now_s) >= after_s for name in records)

    def news(self, node: str) -> Mapping[str, dict[str, Any]]:
        """The last that rank zero has said of each kind, if it is on this node."""
        record = self._others.get(node)
        return record.news if record is not None else {}

    def ranks(self, plan: Plan) -> tuple[RankView, ...]:
        """The other nodes' ranks in a plan, as their supervisors said last."""
        ranks = [r for name, record in self._others.items() if plan.place_of(name) is not None for r in record.ranks]
        return tuple(sorted(ranks, key=lambda rank: rank.rank))

    def views(self, me: Node, plan: Plan | None, now_s: float) -> tuple[NodeView, ...]:
        """All nodes, in the order of their ranks.

        Args:
            me: this node.
            plan: by which ranks are numbered.
            now_s: on a clock that only goes forward.
        """
        views = [self._view(me, plan, None)]
        for name, record in self._others.items():
            views.append(self._view(record.about, plan, self._sightings.silent_s(name, now_s)))
        return tuple(sorted(views, key=lambda view: (view.first_rank is None, view.first_rank, view.host)))

    def _view(self, node: Node, plan: Plan | None, silent_s: float | None) -> NodeView:
        place = plan.place_of(node.node) if plan is not None else None
        return NodeView(
            node=node.node,
            host=node.host,
            address=node.address,
            standing=node.standing.value if silent_s is None or silent_s < self._timeout_s else "silent",
            reason=node.reason,
            first_rank=plan.first_rank_of(place) if plan is not None and place is not None else None,
            num_ranks=node.num_ranks,
            heard_s=silent_s,
            is_me=silent_s is None,
        )
