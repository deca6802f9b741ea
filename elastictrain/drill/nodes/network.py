"""The network of a cluster: a bridge in a network namespace of its own, with a cable to every node.

Nothing of it is in the machine's own namespace, so that clusters cannot get into each other's way, or into anyone's.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING

from elastictrain.drill.nodes.node import Namespaces
from elastictrain.errors import NodesError

if TYPE_CHECKING:
    from elastictrain.drill.nodes.node import Node

BRIDGE = "bridge0"
NIC = "eth0"
_NOBODY = "02:00:00:00:ff:ff"
"""A hardware address that no node has."""


class Network:
    """Bridge and cables."""

    def __init__(self, name: str) -> None:
        self._namespaces = Namespaces(
            ["--net", "--mount", "--uts"], {"hostname": name, "hosts": "", "own": ["/tmp", "/run"], "kept": []}
        )
        self._cuts: set[frozenset[int]] = set()
        self._nodes: dict[int, Node] = {}
        # Without the spanning tree protocol a port forwards as soon as it is plugged in.
        self._on_bridge(f"link add {BRIDGE} type bridge stp_state 0 mcast_snooping 0", f"link set {BRIDGE} up")

    def destroy(self) -> None:
        self._namespaces.kill()
        self._namespaces.wait()

    def plug_in(self, node: Node) -> None:
        """A new cable for a node that has just booted. Its hardware address is the old one: peers know it still."""
        port, hardware = self._port(node), f"02:00:00:00:00:{node.index + 1:02x}"
        if node.index in self._nodes:
            self._on_bridge(f"link del {port}", may_fail=True)  # is gone when the kernel has taken the node apart
        init = node.namespaces.init
        self._on_bridge(
            f"link add {port} type veth peer name {NIC} address {hardware} netns {init}", f"link set {port} up"
        )
        _ip(
            node.namespaces,
            "link set lo up",
            f"address add {node.address}/24 broadcast 10.77.0.255 dev {NIC}",
            f"link set {NIC} up",
        )
        self._nodes[node.index] = node
        for pair in self._cuts:
            if node.index in pair:
                self._deafen(node, self._nodes[next(iter(pair - {node.index}))])
        self.plug(node)

    def plug(self, node: Node) -> None:
        self._on_bridge(f"link set {self._port(node)} master {BRIDGE}")

    def unplug(self, node: Node) -> None:
        self._on_bridge(f"link set {self._port(node)} nomaster")

    def cut_between(self, some: Iterable[Node], others: Iterable[Node]) -> None:
        """Each of some sends what is for one of the others to nobody, and the other way round. (A route into a black
        hole would tell the sender.)"""
        for one, other in product(some, others):
            self._cuts.add(frozenset((one.index, other.index)))
            for sender, receiver in ((one, other), (other, one)):
                if sender.is_up:
                    self._deafen(sender, receiver)

    def heal_between(self, some: Iterable[Node], others: Iterable[Node]) -> None:
        for one, other in product(some, others):
            self._cuts.discard(frozenset((one.index, other.index)))
            for sender, receiver in ((one, other), (other, one)):
                if sender.is_up:
                    _ip(sender.namespaces, f"neighbour del {receiver.address} dev {NIC}")

    def _deafen(self, sender: Node, receiver: Node) -> None:
        _ip(sender.namespaces, f"neighbour replace {receiver.address} lladdr {_NOBODY} dev {NIC} nud permanent")

    def _on_bridge(self, *commands: str, may_fail: bool = False) -> None:
        _ip(self._namespaces, *commands, may_fail=may_fail)

    @staticmethod
    def _port(node: Node) -> str:
        return f"port{node.index}"


def _ip(namespaces: Namespaces, *commands: str, may_fail: bool = False) -> None:
    done = subprocess.run(
        namespaces.enter("--net", "--", "ip", "-batch", "-"),
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 and not may_fail:
        raise NodesError(
            f"the network of the nodes cannot be set up: {done.stderr.strip()}", f"ip: {'; '.join(commands)}"
        )
