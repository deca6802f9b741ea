"""The faults of several nodes: their table, what each must lead to, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastictrain.core.fault_table import BY_NAME, GROUPS
from elastictrain.core.node_faults import NODE_FAULTS, NODE_TABLE, NodesSeen, node_objections, node_remark
from elastictrain.drill.nodes.exercise import nodes_refusal, ranks_on_each
from elastictrain.drill.settings import DrillJob, load_drill_job
from tests.process.helpers import write_job

GOOD = NodesSeen(
    fired=True,
    undone="",
    exit_codes=(("node0", 0), ("node1", 0)),
    error="",
    complete=True,
    is_comparable=True,
    difference="",
    steps_lost=0,
    samples_repeated=0,
    samples_skipped=0,
    world_sizes=(2, 1, 2),
    due_world_sizes=(2, 1, 2),
    num_incidents=0,
    leftovers="",
)
CUT, STORE = NODE_FAULTS["cut-link"], NODE_FAULTS["kill-store"]


def test_the_table_has_every_fault_once_and_none_of_the_others() -> None:
    assert [fault.name for fault in NODE_TABLE] == list(NODE_FAULTS)
    assert not set(NODE_FAULTS) & {*BY_NAME, *GROUPS}
    assert all(fault.explanation.endswith(".") for fault in NODE_TABLE)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("kill-node", (6, 4)),
        ("cut-link", (6, 4, 6)),
        ("join-node", (4, 6)),
        ("kill-store", (6,)),
        ("pause-etcd-leader", (6,)),
    ],
)
def test_the_world_sizes_that_are_due(name: str, sizes: tuple[int, ...]) -> None:
    assert NODE_FAULTS[name].due_world_sizes(3, 2) == sizes


def test_what_is_promised_holds() -> None:
    assert node_objections(CUT, GOOD) == []
    assert node_remark(GOOD) == "world size 2 → 1 → 2"
    assert node_objections(CUT, replace(GOOD, world_sizes=(2, 1, 1, 2))) == []  # a second try at the same size
    uncompared = replace(GOOD, is_comparable=False, difference=None)
    assert node_objections(CUT, uncompared) == []
    assert "bits may differ" in node_remark(uncompared)
    assert node_objections(STORE, replace(GOOD, world_sizes=(2,), due_world_sizes=(2,))) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fired": False, "error": "no"}, "the fault did not happen: the run never came to its point: no"),
        ({"undone": "the node was not taken in"}, "the node was not taken in"),
        ({"exit_codes": (("node0", 0), ("node1", None))}, "the run had not ended in time on node1"),
        ({"exit_codes": (("node0", 79), ("node1", 0)), "error": "no"}, "the run on node0 ended with exit code 79: no"),
        ({"complete": False}, "not all steps are done"),
        ({"world_sizes": (2, 1)}, "the world had the sizes 2 → 1, 2 → 1 → 2 expected"),
        ({"world_sizes": (2, 2, 2)}, "the world had the sizes 2, 2 → 1 → 2 expected"),
        ({"world_sizes": ()}, "the world had the sizes none, 2 → 1 → 2 expected"),
        ({"difference": "step 7 (loss)"}, "differs first at step 7 (loss)"),
        ({"difference": None}, "nothing could be compared"),
        ({"samples_repeated": 3}, "3 samples consumed twice"),
        ({"samples_skipped": 2}, "2 samples left out"),
        ({"steps_lost": 1}, "1 step(s) done again, none allowed"),
        ({"leftovers": "on node1: process sleep"}, "left behind: on node1: process sleep"),
    ],
)
def test_whatever_is_wrong_is_said(changes: dict[str, Any], said: str) -> None:
    assert node_objections(CUT, replace(GOOD, **changes)) == [said]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world_sizes": (2, 2)}, "1 restart(s) and 0 incident(s), none expected"),
        ({"num_incidents": 1}, "0 restart(s) and 1 incident(s), none expected"),
    ],
)
def test_who_must_not_notice_may_not_begin_again(changes: dict[str, Any], said: str) -> None:
    calm = replace(GOOD, world_sizes=(2,), due_world_sizes=(2,))
    assert node_objections(STORE, replace(calm, **changes)) == [said]


def load(folder: Path, nproc_per_node: int = 1, **train: Any) -> DrillJob:
    elastic = {"nproc_per_node": nproc_per_node}
    write_job(folder, "tests.process.faulty:Task", train={"max_steps": 16, **train}, elastic=elastic)
    return load_drill_job(str(folder / "job.toml"), [], steps=None, at_step=None)


def test_a_node_has_the_jobs_ranks_where_a_step_has_microbatches_for_them(tmp_path: Path) -> None:
    job = load(tmp_path, 2, global_batch_size=4)
    assert [ranks_on_each(job, nodes) for nodes in (2, 3, 4, 5)] == [2, 1, 1, 0]
    assert "too few for 5 nodes" in nodes_refusal(CUT, job, 5)
    assert nodes_refusal(CUT, job, 4) == ""
    assert ranks_on_each(load(tmp_path, 2, accumulation_steps=1), 100) == 2


def test_a_fault_needs_its_nodes_and_steps_after_it(tmp_path: Path) -> None:
    job = load(tmp_path, global_batch_size=4)
    assert "it needs 3 nodes at least" in nodes_refusal(NODE_FAULTS["pause-etcd-leader"], job, 2)
    late = replace(job, fault_step=14)
    assert nodes_refusal(NODE_FAULTS["kill-node"], late, 2) == ""
    assert "there must be 3 steps after the fault" in nodes_refusal(CUT, late, 2)


def test_an_override_of_the_drills_nodes_comes_last(tmp_path: Path) -> None:
    job = load(tmp_path, global_batch_size=4)
    arguments = job.arguments(tmp_path, tmp_path / "store", None, ['elastic.nodes="1:2"'])
    assert arguments[-2:] == ["--set", 'elastic.nodes="1:2"']
