"""Several hosts on one machine, each of which can be killed, cut off, stopped and booted again.

    with Cluster(3, shared=[tmp_path]) as cluster:
        first, second, third = cluster
        first.popen(["elastictrain", "run", ...], env=..., cwd=tmp_path)
        second.kill()

Hosts are namespaces (`node.py`, `network.py`) and need root, util-linux and iproute2. All of it is held by processes
that end with this one, however that ends; nothing of it is on this machine's network, among its mounts or in
its folders.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from elastictrain.drill.nodes.etcd import EtcdOnNodes
from elastictrain.drill.nodes.network import Network
from elastictrain.drill.nodes.node import Node

_CODE = Path(__file__).parents[3]
"""The nodes must find what runs here."""


def why_impossible() -> str:
    """Namespaces need root and the programs that make them; what of it is missing, "" if nothing is."""
    if os.getuid() != 0:
        return "several hosts on one machine need root"
    for tool in ("unshare", "nsenter", "setpriv", "mount", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not here: apt-get install util-linux mount iproute2"
    return ""


class Cluster:
    """Hosts node0, node1, … on one network, all of them up.

    Args:
        num_nodes: how many.
        shared: folders that all of them see under the same path, as on a network file system. (All but /tmp, /run and
            /dev/shm is seen anyway.)
        own: folders that are empty at first on every node, and its own, but for what is shared.
    """

    def __init__(self, num_nodes: int, shared: Sequence[Path] = (), own: Sequence[str] = ("/tmp", "/run")) -> None:
        self.own = tuple(own)
        self.kept = [path.resolve() for path in (*shared, _CODE, Path(sys.prefix), Path(sys.base_prefix))]
        self.nodes = [Node(self, index) for index in range(num_nodes)]
        names = [f"{node.address} {node.name}\n" for node in self.nodes]
        self.hosts = "".join(["127.0.0.1 localhost\n", *names])
        """Text of every node's /etc/hosts."""
        self._network: Network | None = None

    @property
    def network(self) -> Network:
        assert self._network is not None, "the cluster is down"
        return self._network

    def __enter__(self) -> Cluster:
        self._network = Network(f"network-{os.getpid()}")
        try:
            for node in self.nodes:
                node.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            if node.is_up:
                node.kill()
        if self._network is not None:
            self._network.destroy()
            self._network = None

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def etcd(self, num_members: int, folder: Path) -> EtcdOnNodes:
        """A real etcd with a member on each of the first nodes, ready.

        Args:
            num_members: on how many nodes.
            folder: for the members' data and logs, which a killed node finds again when it boots.
        """
        members = EtcdOnNodes(self.nodes[:num_members], folder)
        members.start()
        members.wait_ready()
        return members

    def cut_between(self, some: Iterable[Node], others: Iterable[Node]) -> None:
        """A partition: silence between each of some and each of the others. Holds over a `boot`."""
        self.network.cut_between(list(some), list(others))

    def heal_between(self, some: Iterable[Node], others: Iterable[Node]) -> None:
        self.network.heal_between(list(some), list(others))
