"""Fifty random partitions of three nodes, one after the other: there is one trajectory, whoever is cut off from whom.

`make test-soak` runs it; twenty minutes for each kind of rendezvous.
"""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.node import Node
from tests.nodes.job import DEADLINE_S, PORT, Job, numbers
from tests.process.etcd_cluster import NEEDS_ETCD
from tests.process.helpers import wait_until
from tests.process.test_supervisor import events

NUM_CUTS = int(os.environ.get("ELASTICTRAIN_TEST_CUTS", "50"))
MAX_CUT_S = 15.0
"""Longer than it takes to give a node up, and so to form another worker group while it is away."""
LONG_CUT_S = (38.0, 55.0)
"""Of one in five: longer than it takes for ranks to stop that have only lost the store, and for nodes that took no part
to go on in the place of a group that they have not heard of."""
LIMITS = {"step_timeout_s": 3.0}
STORE_TIMEOUT_S = 5.0
MAX_HEALED_S = 8.0
"""Sometimes long enough for all to be together again, sometimes not."""
STEPS = 100_000
"""More than are done meanwhile."""


def partition(rng: random.Random, cluster: Cluster) -> tuple[list[Node], list[Node]]:
    """Two groups between which nothing is heard: one against two, or two that do not hear each other while the third
    hears both."""
    nodes = list(cluster)
    rng.shuffle(nodes)
    return nodes[:1], nodes[1 : rng.choice((2, 3))]


@NEEDS_ETCD
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rendezvous", ["c10d", "etcd"])
def test_no_two_groups_go_on_at_once(cluster: Cluster, tmp_path: Path, rendezvous: str) -> None:
    urls = {
        "c10d": f"c10d://{cluster[0].address}:{PORT}",
        "etcd": "etcd://" + ",".join(f"{node.address}:2379" for node in cluster),
    }
    if rendezvous == "etcd":
        (tmp_path / "etcd").mkdir()
        cluster.etcd(3, tmp_path / "etcd")
    job = Job(
        cluster,
        tmp_path,
        rendezvous=urls[rendezvous],
        elastic={"store_timeout_s": STORE_TIMEOUT_S},
        supervisor=LIMITS,
        max_steps=STEPS,
    )
    job.start(*cluster)
    job.wait_world_size(cluster[0], 3)
    rng = random.Random(f"{rendezvous} {NUM_CUTS}")
    for number in range(NUM_CUTS):
        some, others = partition(rng, cluster)
        cut_s = rng.uniform(*LONG_CUT_S) if rng.random() < 0.2 else rng.uniform(0.2, MAX_CUT_S)
        healed_s = rng.uniform(0.0, MAX_HEALED_S)
        print(
            f"{number}: {[n.name for n in some]} | {[n.name for n in others]} for {cut_s:.1f} s, then {healed_s:.1f} s"
        )
        cluster.cut_between(some, others)
        time.sleep(cut_s)
        cluster.heal_between(some, others)
        time.sleep(healed_s)
    for node in cluster:
        wait_until(lambda node=node: job.world_size(node) == 3, DEADLINE_S)
    job.wait_steps(3)
    job.tell(cluster[0], "stop")
    assert [job.processes[node.index].wait(DEADLINE_S) for node in cluster] == [0, 0, 0]

    started = [e for node in cluster for e in events(job.state_dir(node), "incarnation_started")]
    attempts = {(event["incarnation"], event["attempt"]) for event in started}
    assert len(attempts) == len({incarnation for incarnation, _ in attempts}), "two groups under one number"
    assert len(attempts) > NUM_CUTS / 4, "most of the cuts were too short to matter"

    lines = job.lines()
    steps_of: dict[int, list[int]] = {}
    values: dict[int, set[tuple[str, ...]]] = {}
    for line in lines:
        steps_of.setdefault(line["incarnation"], []).append(line["step"])
        if not line.get("partial"):
            values.setdefault(line["step"], set()).add(numbers(line))
    assert {step: found for step, found in values.items() if len(found) > 1} == {}
    # Whoever was left behind made no step any more, but for the one in flight.
    for earlier, later in pairwise(sorted(steps_of)):
        assert max(steps_of[earlier]) <= min(steps_of[later]), (earlier, later)
    assert set(range(1, job.step + 1)) == {line["step"] for line in lines}
