"""Real etcd with its members on several nodes: they die, stand still and are cut off with them, or alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

from tests.nodes.node import Node
from tests.nodes.process import NodeProcess
from tests.process import etcd_cluster

T = TypeVar("T")


class EtcdOnNodes(etcd_cluster.Cluster):
    """Member i is on the i-th of these nodes.

    Args:
        nodes: a node for each member.
        folder: for the members' data and logs.
    """

    def __init__(self, nodes: Sequence[Node], folder: Path) -> None:
        self._nodes = list(nodes)
        super().__init__(folder, len(nodes), hosts=[node.address for node in nodes])

    def pause_leader(self) -> int:
        """SIGSTOP to the member that leads; returns its number, for `resume`."""
        member = self.leader()
        self.signal(member, signal.SIGSTOP)
        return member

    def resume(self, member: int) -> None:
        self.signal(member, signal.SIGCONT)

    def _spawn(self, member: int, command: list[str], log: IO[bytes]) -> NodeProcess:
        return self._nodes[member].popen(command, stdout=log, stderr=log)

    def _ask(self, member: int, question: Callable[[], T]) -> T:
        return self._nodes[member].call(question)
