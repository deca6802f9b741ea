"""Facts about gloo on a real network that the rest is built on; they may change with the version of torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.process import NodeProcess
from tests.nodes.possible import skip_unless_possible
from tests.process.helpers import wait_until

PAYLOAD = Path(__file__).with_name("gloo_payload.py")
FOREVER_S = 1000.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    skip_unless_possible()
    with Cluster(2, shared=[tmp_path]) as cluster:
        yield cluster


def start(cluster: Cluster, folder: Path, timeout_s: float = FOREVER_S, **environment: str) -> list[NodeProcess]:
    """A rank on each of two nodes; `said` reads what they print."""
    ranks = []
    for node in cluster:
        with (folder / f"rank{node.index}.txt").open("w") as output:
            args = [sys.executable, PAYLOAD, str(node.index), cluster[0].address, str(timeout_s)]
            env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            ranks.append(node.popen(args, env=env, cwd=folder, stdout=output))
    return ranks


def said(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank{rank}.txt").read_text().splitlines()


def say(folder: Path, word: str) -> None:
    new = folder / "new"
    new.write_text(word)
    new.rename(folder / "word")


def test_ranks_meet_at_the_address_of_their_host_name(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, tmp_path)
    for node in cluster:
        wait_until(lambda node=node: "sum 3" in said(tmp_path, node.index))
        assert said(tmp_path, node.index)[0] == f"peers {cluster[1 - node.index].address}"


@pytest.mark.soak
def test_a_host_name_that_means_loopback_needs_the_name_of_the_interface(cluster: Cluster, tmp_path: Path) -> None:
    """As Debian has it: /etc/hosts gives the host's own name the address 127.0.1.1."""
    for node in cluster:
        hosts = node.run(["sed", f"s/.* {node.name}$/127.0.1.1 {node.name}/", "/etc/hosts"])
        node.run(["sh", "-c", 'echo "$0" > /etc/hosts', hosts])
    first, second = start(cluster, tmp_path)
    assert first.wait() == 1
    second.kill()
    assert said(tmp_path, 0) == []

    start(cluster, tmp_path, GLOO_SOCKET_IFNAME="eth0")
    for rank in (0, 1):
        wait_until(lambda rank=rank: "sum 3" in said(tmp_path, rank))


def test_only_the_end_of_its_connection_gets_a_rank_out_of_a_collective_with_a_dead_node(
    cluster: Cluster, tmp_path: Path
) -> None:
    survivor, _ = start(cluster, tmp_path)
    wait_until(lambda: said(tmp_path, 0)[-1:] == ["sum 3"])
    cluster[1].kill()
    say(tmp_path, "abort")
    wait_until(lambda: "abort" in said(tmp_path, 0))
    assert said(tmp_path, 0)[-1] == "abort", "aborting the group is enough: simpler than hanging up"
    say(tmp_path, "hang up")
    assert survivor.wait() == 0
    assert said(tmp_path, 0)[-1].startswith("failed: ")
    assert "Connection closed by peer" in said(tmp_path, 0)[-1]


def test_a_cut_link_holds_a_collective_up_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    ranks = start(cluster, tmp_path)
    wait_until(lambda: said(tmp_path, 0)[-1:] == ["sum 3"])
    before = cluster[0].tcp_counter("RetransSegs")
    cluster[1].cut()
    wait_until(lambda: cluster[0].tcp_counter("RetransSegs") > before)
    cluster[1].heal()
    before = len(said(tmp_path, 0))
    wait_until(lambda: len(said(tmp_path, 0)) > before + 10)
    assert all(line == "sum 3" for line in said(tmp_path, 0)[1:])
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
