"""A job on several nodes, whatever happens to them: it goes on, at the exact step, with the exact numbers.

Every test compares with the run of the same job on one rank, to the last bit. Most of what can happen happens in the
first, one after the other, and in `test_etcd_on_nodes`; each alone, for whoever looks for a cause, is marked `soak`.
"""

from __future__ import annotations

import re
import shutil
import signal
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from elastictrain import __version__
from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.node import Node
from tests.nodes.clock import shifted_clock
from tests.nodes.job import DEADLINE_S, LIMITS, PORT, Job
from tests.nodes.tasks import HELD_FILE, HOLD_FILE
from tests.process.etcd_cluster import NEEDS_ETCD
from tests.process.helpers import ROOT, read_json_lines, wait_until

OTHER_VERSION = "0.0.7"
OTHER_TORCH = "1.13.7"


def start_another_build(job: Job, node: Node, folder: Path) -> None:
    """The job on a node where everything that has to be the same is not: the package, torch, the job file, the code
    beside it."""
    package = folder / "elastictrain"
    shutil.copytree(ROOT / "elastictrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    init = package / "__init__.py"
    init.write_text(init.read_text().replace(__version__, OTHER_VERSION))
    metadata = folder / f"torch-{OTHER_TORCH}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {OTHER_TORCH}\n")
    (folder / "job").mkdir()
    (folder / "job" / "helper.py").write_text("SCALE = 2\n")
    job.start(
        node,
        file=Path(shutil.copy(job.file, folder / "job")),
        options=("--set", "train.clip_norm=0.25"),
        cwd=folder,
    )


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.longest
def test_whatever_happens_to_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Refused, cut off and healed, killed and booted, stopped and woken, drained and resumed, with wrong clocks, and
    one with more ranks than the others: one job goes through all of it, on 4, 3, 1, 2 ranks and more. At last the host
    of the store dies."""
    first, second, third = cluster
    job = Job(cluster, tmp_path, supervisor=LIMITS, pause_s=0.1)
    job.start(first)
    job.start(second, environment=shifted_clock(tmp_path, 3600))
    job.wait_world_size(first, 2)

    start_another_build(job, third, tmp_path / "other")
    assert job.processes[third.index].wait(DEADLINE_S) == 78
    said = job.output(third).read_text()
    assert "this node cannot take part with node0" in said
    assert f"elastictrain is {OTHER_VERSION} here and {__version__} there" in said
    assert f"torch is {OTHER_TORCH} here and {version('torch')} there" in said
    assert re.search("job file is [0-9a-f]+ here and [0-9a-f]+ there", said)
    assert re.search("helper.py is [0-9a-f]+ here and unknown there", said)
    assert "Traceback" not in said

    job.start(third, options=("--set", "elastic.nproc_per_node=2"), environment=shifted_clock(tmp_path, -3600))
    job.wait_world_size(first, 4)
    for view in [job.status(node) for node in cluster]:
        assert {each["host"] for each in view["nodes"]} == {"node0", "node1", "node2"}
        assert [rank["rank"] for rank in view["ranks"]] == [0, 1, 2, 3]
        assert view["attempt"] == job.status(first)["attempt"] is not None

    second.cut()
    job.wait_world_size(first, 3)
    wait_until(lambda: job.world_size(second) == 0 and not job.own_ranks(second), DEADLINE_S)
    job.wait_steps(3)
    assert job.world_size(second) == 0, "who does not reach the store does not train by itself"

    third.kill()
    job.wait_world_size(first, 1)
    job.wait_steps(3)
    second.heal()
    job.wait_world_size(first, 2)
    job.wait_steps(3)
    third.boot()
    job.start(third)
    job.wait_world_size(first, 3)

    second.pause()
    job.wait_world_size(first, 2)
    second.resume()
    job.wait_world_size(first, 3)

    job.tell(third, "drain")
    assert job.status(third)["state"] == "drained"
    job.wait_world_size(first, 2)
    job.tell(third, "resume")
    job.wait_world_size(first, 3)

    first.kill()
    for node in (second, third):
        job.wait_without_store(node)
    first.boot()
    job.start(first)
    job.wait_world_size(second, 3)

    job.processes[third.index].send_signal(signal.SIGTERM)
    job.wait_world_size(first, 2)
    job.finish(first, second)
    job.assert_exact(tmp_path, num_again=4)


@pytest.mark.soak
def test_two_nodes_train_together_and_each_knows_all(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.start(first, second)
    for node in (first, second):
        job.wait_world_size(node, 2)
    views = [job.status(node) for node in (first, second)]
    for view in views:
        assert {each["host"] for each in view["nodes"]} == {"node0", "node1"}
        assert [rank["rank"] for rank in view["ranks"]] == [0, 1]
    assert views[0]["attempt"] == views[1]["attempt"] is not None
    job.finish(first, second)
    job.assert_exact(tmp_path)


@pytest.mark.soak
def test_nodes_may_have_different_numbers_of_ranks(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.start(first)
    job.start(second, options=("--set", "elastic.nproc_per_node=2"))
    job.wait_world_size(first, 3)
    job.finish(first, second)
    job.assert_exact(tmp_path)


@pytest.mark.soak
def test_a_killed_node_is_done_without(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first, second)
    second.kill()
    job.wait_world_size(first, 1)
    job.wait_steps(3)
    job.finish(first)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_what_nodes_keep_of_a_failure_is_gone_at_the_end(cluster: Cluster, tmp_path: Path) -> None:
    """Not only on rank zero's: the memory of a node is not for a job that is over."""
    first, second, third = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first, second, third)
    third.kill()
    job.wait_world_size(first, 2)
    assert all(node.run(["find", "/dev/shm", "-name", "manifest.json"]) for node in (first, second))
    job.wait_steps(3)
    job.finish(first, second)
    assert [node.run(["ls", "/dev/shm"]) for node in (first, second)] == ["", ""]
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_a_killed_node_that_boots_is_taken_in_again(cluster: Cluster, tmp_path: Path) -> None:
    first, second, third = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first, second, third)
    third.kill()
    job.wait_world_size(first, 2)
    third.boot()
    job.start(third)
    job.wait_world_size(first, 3)
    job.wait_steps(3)
    job.finish(first, second, third)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_a_node_that_joins_costs_no_step(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first)
    job.start(second)
    job.wait_world_size(first, 2)
    job.finish(first, second)
    job.assert_exact(tmp_path)


@pytest.mark.soak
@NEEDS_ETCD
@pytest.mark.parametrize("place", ["loss", "eval_data"])
def test_a_node_that_has_joined_keeps_what_it_was_given(cluster: Cluster, tmp_path: Path, place: str) -> None:
    """The node that it was given by had it in memory alone, since its persister stands still. That node loses its power
    in the first step that the two do together, or before that."""
    first, second, _ = cluster
    (tmp_path / "etcd").mkdir()
    cluster.etcd(3, tmp_path / "etcd")
    job = Job(
        cluster,
        tmp_path,
        rendezvous="etcd://" + ",".join(f"{node.address}:2379" for node in cluster),
        checkpoint={"every_steps": 5},
    )
    job.train_on(first)
    wait_until(job.durable_steps, DEADLINE_S)
    for process in first.processes():
        if "elastictrain.checkpoint.persister" in process.cmdline():
            process.suspend()
    durable = job.durable_steps()[0]
    wait_until(lambda: job.step > durable + 10, DEADLINE_S)
    (job.folder / HOLD_FILE.format(place=place)).touch()
    job.start(second)
    held = [0] if place == "loss" else [0, 1]
    wait_until(lambda: all((job.folder / HELD_FILE.format(rank=rank)).exists() for rank in held), DEADLINE_S)
    step = job.step
    assert job.durable_steps()[0] <= durable + 5 < step, "what is to be lost must not be durable"
    first.kill()
    job.wait_world_size(second, 1)
    (kept,) = [line for line in read_json_lines(job.output(second)) if line.get("event") == "snapshot_at_failure"]
    assert (kept["at_step"], kept["is_ours"]) == (step, True)
    job.wait_steps(3)
    job.finish(second)
    job.assert_exact(tmp_path)


@pytest.mark.soak
def test_who_has_the_store_goes_on_when_the_link_is_cut(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first, second)
    second.cut()
    job.wait_world_size(first, 1)
    # The one that is cut off has let its rank go, and does not train by itself.
    wait_until(lambda: job.world_size(second) == 0 and not job.own_ranks(second), DEADLINE_S)
    job.wait_steps(3)
    assert job.world_size(second) == 0
    second.heal()
    job.wait_world_size(first, 2)
    job.wait_world_size(second, 2)
    job.finish(first, second)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_a_link_that_is_healed_at_once_is_as_if_nothing_was(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path, elastic={"node_timeout_s": 60.0})
    job.train_on(first, second)
    attempt = job.status(first)["attempt"]
    before = first.tcp_counter("RetransSegs")
    second.cut()
    wait_until(lambda: first.tcp_counter("RetransSegs") > before)
    second.heal()
    job.wait_steps(3)
    assert job.status(first)["attempt"] == attempt
    job.finish(first, second)
    job.assert_exact(tmp_path)


@pytest.mark.soak
def test_the_job_waits_for_the_host_of_the_store_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.start(first, second)
    job.wait_world_size(second, 2)
    job.wait_steps(3)
    first.kill()
    wait_until(lambda: job.world_size(second) == 0 and "store" in job.status(second)["reason"], DEADLINE_S)
    first.boot()
    job.start(first)
    job.wait_world_size(second, 2)
    job.finish(first, second)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_a_paused_node_is_done_without_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    """A node that stands still as a whole cannot know that it did: it must find out before it does any harm."""
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first, second)
    second.pause()
    job.wait_world_size(first, 1)
    job.wait_steps(3)
    second.resume()
    job.wait_world_size(first, 2)
    job.finish(first, second)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_a_drained_node_leaves_at_a_step_boundary_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first, second)
    job.tell(second, "drain")
    assert job.status(second)["state"] == "drained"
    job.wait_world_size(first, 1)
    job.wait_steps(3)
    job.tell(second, "resume")
    job.wait_world_size(first, 2)
    job.finish(first, second)
    job.assert_exact(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_supervisor_that_ends_closes_nothing_for_the_others(
    cluster: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    first, second, third = cluster
    job = Job(cluster, tmp_path)
    job.train_on(first, second, third)
    job.processes[third.index].send_signal(number)
    job.wait_world_size(first, 2)
    job.start(third)
    job.wait_world_size(first, 3)
    job.finish(first, second, third)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_wrong_clocks_change_nothing(cluster: Cluster, tmp_path: Path) -> None:
    first, second, third = cluster
    job = Job(cluster, tmp_path)
    for node, shift_s in ((first, 0), (second, 3600), (third, -3600)):
        job.start(node, environment=shifted_clock(tmp_path, shift_s))
    job.wait_world_size(first, 3)
    job.wait_steps(3)
    third.kill()
    job.wait_world_size(first, 2)
    third.boot()
    job.start(third, environment=shifted_clock(tmp_path, -3600))
    job.wait_world_size(first, 3)
    job.finish(first, second, third)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_a_node_with_another_job_file_is_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = Job(cluster, tmp_path)
    job.start(first)
    job.wait_world_size(first, 1)
    job.start(second, options=("--set", "train.clip_norm=0.25"))
    assert job.processes[second.index].wait(DEADLINE_S) == 78
    said = job.output(second).read_text()
    assert "job file" in said
    assert "node0" in said
    assert "Traceback" not in said
    job.finish(first)
    job.assert_exact(tmp_path)


@pytest.mark.soak
@NEEDS_ETCD
@pytest.mark.parametrize("fault", ["kill a node with a member", "pause the leader", "kill all members"])
def test_with_etcd_no_host_is_special(cluster: Cluster, tmp_path: Path, fault: str) -> None:
    first, second, third = cluster
    (tmp_path / "etcd").mkdir()
    etcd = cluster.etcd(3, tmp_path / "etcd")
    members = ",".join(f"{node.address}:2379" for node in cluster)
    job = Job(cluster, tmp_path, rendezvous=f"etcd://{members}")
    job.start(first, second, third)
    job.wait_world_size(second, 3)
    job.wait_steps(3)
    match fault:
        case "kill a node with a member":
            first.kill()
            job.wait_world_size(second, 2)
            first.boot()
            etcd.start(0)
            job.start(first)
        case "pause the leader":
            paused = etcd.pause_leader()
            job.wait_steps(3)  # while nobody leads, and after
            etcd.resume(paused)
        case "kill all members":
            attempt = job.status(second)["attempt"]
            etcd.kill()
            job.wait_steps(5)  # whoever trains, trains
            etcd.start()
            job.wait_steps(3)
            assert job.status(second)["attempt"] == attempt
    job.wait_world_size(second, 3)
    job.finish(first, second, third)
    job.assert_exact(tmp_path, num_again=1)


@pytest.mark.soak
def test_a_partition_between_two_that_both_see_the_store(cluster: Cluster, tmp_path: Path) -> None:
    """Each of the two is alive for everybody, and still they cannot train together: the job must not stand for ever."""
    first, second, third = cluster
    job = Job(cluster, tmp_path, rendezvous=f"c10d://{third.address}:{PORT}")
    job.start(first, second, third)
    job.wait_world_size(third, 3)
    job.wait_steps(3)
    cluster.cut_between([first], [second])
    job.wait_world_size(third, 2)
    job.wait_steps(3)
    cluster.heal_between([first], [second])
    job.wait_world_size(third, 3)
    job.finish(first, second, third)
    job.assert_exact(tmp_path, num_again=1)


STOPS_ONCE = """
import os, pathlib, signal, sys
marker = pathlib.Path(__file__).with_name("stop-once")
if "elastictrain.training.agent" in sys.orig_argv and marker.exists():
    marker.unlink()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def start_with_an_agent_that_stops(cluster: Cluster, folder: Path) -> Job:
    """A job on two nodes. The first node's agent stands still before it serves the worker group's store. The kernel
    accepts connections to it all the same, so the second node's agent waits for an answer, with no time-out of torch's
    to end that."""
    job = Job(cluster, folder, elastic={"fast_restart": False}, supervisor={"startup_timeout_s": 20.0})
    stops = folder / "stops"
    stops.mkdir()
    (stops / "sitecustomize.py").write_text(STOPS_ONCE)
    (stops / "stop-once").touch()
    job.start(cluster[0], environment={"PYTHONPATH": f"{stops}:{ROOT}"})
    job.start(cluster[1])
    return job


@pytest.mark.soak
def test_an_agent_that_hangs_in_a_call_of_the_store_is_ended_after_its_limit(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = start_with_an_agent_that_stops(cluster, tmp_path)
    job.wait_world_size(first, 2)
    assert not (tmp_path / "stops" / "stop-once").exists()
    assert job.status(first)["incarnation"] > 1
    job.finish(first, second)
    job.assert_exact(tmp_path)


@pytest.mark.soak
def test_an_agent_that_loses_the_one_it_starts_with_is_no_failure_of_its_node(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster
    job = start_with_an_agent_that_stops(cluster, tmp_path)
    stopped = wait_until(lambda: [p for p in first.processes() if p.status() == psutil.STATUS_STOPPED], DEADLINE_S)
    for process in stopped:
        process.kill()
    job.wait_world_size(first, 2)
    job.finish(first, second)
    job.assert_exact(tmp_path)
    ends = [line for line in read_json_lines(job.output(second)) if line.get("event") == "incarnation_ended"]
    assert [end["cause"] for end in ends] == []  # shown where this node is to blame
