"""The store on the first node dies, and what the nodes had agreed on in it is known to no node that is left there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.procs import command_of
from tests.nodes.job import DEADLINE_S, Job
from tests.process.helpers import wait_until


@pytest.mark.soak
def test_who_has_not_heard_of_the_newest_plan_does_not_go_on_beside_it(cluster: Cluster, tmp_path: Path) -> None:
    """The supervisor beside the store stands still, the others go on without it, the store is killed, and nobody else
    is there to be asked when that supervisor wakes up."""
    first, second, third = cluster
    job = Job(cluster, tmp_path)
    job.train_on(*cluster)
    supervisor = job.processes[first.index]
    supervisor.send_signal(signal.SIGSTOP)
    pids = [str(rank["pid"]) for rank in job.status(second)["ranks"] if rank["host"] == first.name]
    first.run(["kill", "-KILL", *pids])
    job.wait_world_size(second, 2)
    (store,) = [each for each in first.processes() if "elastictrain.kv.server" in command_of(each.pid)]
    store.kill()
    cluster.cut_between([first], [second, third])
    supervisor.send_signal(signal.SIGCONT)
    wait_until(lambda: "may train still" in job.status(first).get("reason", ""), DEADLINE_S)
    job.wait_steps(3)
    assert job.world_size(second) == 2
    assert job.world_size(first) == 0
    cluster.heal_between([first], [second, third])
    job.wait_world_size(first, 3)
    job.finish(*cluster)
    job.assert_exact(tmp_path, num_again=2)
