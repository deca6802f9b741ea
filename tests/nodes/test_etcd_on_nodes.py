"""Real etcd over a network that can be cut, alone and with a job that meets through it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.etcd import EtcdOnNodes
from elastictrain.drill.nodes.node import Node
from elastictrain.kv.client import EtcdClient, EtcdError
from elastictrain.kv.settings import EtcdSettings
from tests.nodes.job import LIMITS, Job
from tests.process.etcd_cluster import NEEDS_ETCD
from tests.process.helpers import wait_until

pytestmark = NEEDS_ETCD
OUTAGE_S = 20.0


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


def job_over_etcd(cluster: Cluster, folder: Path) -> tuple[EtcdOnNodes, Job]:
    (folder / "etcd").mkdir()
    etcd = cluster.etcd(3, folder / "etcd")
    members = ",".join(f"{node.address}:2379" for node in cluster)
    return etcd, Job(cluster, folder, rendezvous=f"etcd://{members}", supervisor=LIMITS, pause_s=0.15)


@pytest.mark.longest
@pytest.mark.parametrize(
    "is_killed",
    [
        pytest.param(True, marks=pytest.mark.long, id="killed"),
        pytest.param(False, marks=pytest.mark.soak, id="stopped"),
    ],
)
def test_whatever_happens_to_etcd_whoever_trains_trains(cluster: Cluster, tmp_path: Path, is_killed: bool) -> None:
    """All of it is gone while a node joins, and once more while a node dies; its leader stands still; a member dies
    with its node, which has rank zero."""
    first, second, third = cluster
    etcd, job = job_over_etcd(cluster, tmp_path)

    def take_away() -> None:
        if is_killed:
            etcd.kill()
        else:
            for member in range(3):
                etcd.signal(member, signal.SIGSTOP)

    def give_back(*members: int) -> None:
        if is_killed:
            etcd.start(*members)
        else:
            for member in members:
                etcd.signal(member, signal.SIGCONT)

    job.train_on(first, second)
    before = job.status(first)
    assert before["world_size"] == 2
    take_away()
    gone_s = time.monotonic()
    job.start(third)
    job.wait_without_store(third)
    while time.monotonic() - gone_s < OUTAGE_S:
        job.wait_steps(5)
        for node in (first, second):
            status = job.status(node)
            assert (status["state"], status["world_size"]) == ("training", 2)
            assert (status["attempt"], status["incarnation"]) == (before["attempt"], before["incarnation"])
    assert job.misses_the_store(third)
    give_back(0, 1, 2)
    for node in cluster:
        job.wait_world_size(node, 3)
    job.wait_steps(3)
    lines = job.lines()
    assert len({line["step"] for line in lines}) == len(lines), "who joins costs no step"

    attempt = job.status(second)["attempt"]
    paused = etcd.pause_leader()
    job.wait_steps(10)  # while nobody leads, and after
    etcd.resume(paused)
    assert job.status(second)["attempt"] == attempt

    take_away()
    third.kill()
    for node in (first, second):
        job.wait_without_store(node)
    give_back(0, 1)
    for node in (first, second):
        job.wait_world_size(node, 2)
    job.wait_steps(3)

    third.boot()  # the machine, and not the job on it
    etcd.start(2)
    etcd.wait_ready(EtcdSettings(endpoints=(etcd.urls[2],)))  # else the first one is half of what is left
    first.kill()
    job.wait_world_size(second, 1)
    job.finish(second)
    job.assert_exact(tmp_path, num_again=2)
