"""Real etcd over a network that can be cut."""

from __future__ import annotations

from pathlib import Path

from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.etcd import EtcdOnNodes
from elastictrain.drill.nodes.node import Node
from elastictrain.kv.client import EtcdClient, EtcdError
from tests.process.etcd_cluster import NEEDS_ETCD
from tests.process.helpers import wait_until

pytestmark = NEEDS_ETCD


def write(etcd: EtcdOnNodes, node: Node, value: bytes) -> bool:
    """Writes a key from this node, by whichever member answers; true if it was taken."""
    client = EtcdClient(etcd.settings(request_timeout_s=1.0))

    def put() -> bool:
        try:
            client.put("/key", value, client.grant_lease(3600))
        except EtcdError:
            return False
        return True

    return node.call(put)


def read(etcd: EtcdOnNodes, node: Node) -> bytes | None:
    stored = node.call(lambda: EtcdClient(etcd.settings()).get("/key"))
    return stored.value if stored else None


def test_another_member_leads_while_the_leader_stands_still(cluster: Cluster, tmp_path: Path) -> None:
    etcd = cluster.etcd(3, tmp_path)
    assert write(etcd, cluster[0], b"before")
    paused = etcd.pause_leader()
    other = cluster[(paused + 1) % 3]
    wait_until(lambda: write(etcd, other, b"meanwhile"))
    etcd.resume(paused)
    assert etcd.leader() != paused
    wait_until(lambda: read(etcd, cluster[paused]) == b"meanwhile")


def test_the_majority_goes_on_when_a_node_dies_and_takes_it_back(cluster: Cluster, tmp_path: Path) -> None:
    etcd = cluster.etcd(3, tmp_path)
    dead = etcd.leader()
    cluster[dead].kill()
    other = cluster[(dead + 1) % 3]
    wait_until(lambda: write(etcd, other, b"meanwhile"))
    cluster[dead].boot()
    etcd.start(dead)
    wait_until(lambda: read(etcd, cluster[dead]) == b"meanwhile")


def test_who_is_cut_off_cannot_write(cluster: Cluster, tmp_path: Path) -> None:
    etcd = cluster.etcd(3, tmp_path)
    alone = etcd.leader()
    assert write(etcd, cluster[alone], b"before")
    cluster[alone].cut()
    wait_until(lambda: write(etcd, cluster[(alone + 1) % 3], b"majority"))
    assert not write(etcd, cluster[alone], b"alone")
    cluster[alone].heal()
    wait_until(lambda: read(etcd, cluster[alone]) == b"majority")
