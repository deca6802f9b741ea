"""Who else takes part in the job: what the supervisor needs to know of the other nodes, and to tell them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastictrain.core.membership import Plan, Standing
from elastictrain.core.status import NodeView, RankView


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node's part in the next worker group.

    Args:
        plan: what the nodes have agreed on; None where this node is the only one.
        place: of this node among the plan's members.
        listener: where its agent is to serve the worker group's store, where it is to and there are other nodes.
    """

    plan: Plan | None = None
    place: int = 0
    listener: socket.socket | None = None


class Orders(Protocol):
    """What the other nodes may ask of this one; the supervisor carries it out. A node that takes part in a plan may be
    asked before its ranks have been started: it remembers that until they can hear of it. What is asked when they have
    ended already has happened."""

    def regroup(self, reason: str) -> None:
        """The ranks finish their step, keep it in memory and end: another worker group follows at once."""

    def abandon(self, reason: str) -> None:
        """The ranks keep their last committed step and go: nobody will answer them any more."""

    def stop_with_all(self, reason: str) -> None:
        """The whole job is to end."""

    def complete_with_all(self) -> None:
        """The whole job is done, whatever part this node had in it."""

    def waits_since_s(self) -> tuple[float, float]:
        """For how long every rank of this node has stood still where it may wait for another node, in seconds, 0 if one
        moves; and how long they may before they count as hung."""

    def rank_views(self) -> Sequence[RankView]:
        """The ranks of this node, for the status that the other nodes show."""

    def news(self) -> dict[str, dict[str, Any]]:
        """The last that the ranks have said of each kind that all nodes keep: progress, snapshots, evaluations."""


class Team(Protocol):
    """The nodes of the job. All methods belong to the supervisor's event loop."""

    @property
    def is_alone(self) -> bool:
        """There are no other nodes, and will be none: nothing is waited for."""

    @property
    def waits_for(self) -> str:
        """What `assemble` waits for, in words."""

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """All nodes, this one included; empty where it is the only one."""

    @property
    def other_ranks(self) -> tuple[RankView, ...]:
        """The ranks of the other nodes, as their supervisors said last."""

    @property
    def pids(self) -> frozenset[int]:
        """Processes of its own, which whoever collects orphans must spare."""

    async def open(self, orders: Orders) -> None:
        """Begins to look out for the others."""

    async def assemble(self) -> Assignment:
        """Waits until a worker group can begin, and this node is part of it."""

    def stand(self, standing: Standing, reason: str = "") -> None:
        """Tells the others what this node is about."""

    async def others_ended(self) -> bool:
        """This node's part in the worker group has ended: whether another node's has as well, or soon does."""

    async def finish(self) -> bool:
        """All ranks of this node have done the last step: waits until the job is done. False if it must go on, since
        the last snapshot could not be kept."""

    def is_first_left(self) -> bool:
        """Whether none of the nodes that come before this one in the last worker group lives: one of several acts for
        all that were in it."""

    async def stop_all(self, reason: str) -> None:
        """Asks all nodes to stop."""

    async def close(self) -> None:
        """Takes leave of the others."""


class Alone:
    """The team of a job on one node."""

    is_alone = True
    waits_for = ""
    nodes: tuple[NodeView, ...] = ()
    other_ranks: tuple[RankView, ...] = ()
    pids: frozenset[int] = frozenset()

    async def open(self, orders: Orders) -> None: ...

    async def assemble(self) -> Assignment:
        return Assignment()

    def stand(self, standing: Standing, reason: str = "") -> None: ...

    async def others_ended(self) -> bool:
        return False

    async def finish(self) -> bool:
        return True

    def is_first_left(self) -> bool:
        return True

    async def stop_all(self, reason: str) -> None: ...

    async def close(self) -> None: ...
