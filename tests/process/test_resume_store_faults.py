"""A store that fails, cuts off, or stalls at each of its calls, while a job is trained in one start after another:
what is durable is sound each time, and the run is bit for bit the undisturbed one.

After every start the memory tier is removed: the next has the durable tier alone.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from elastictrain.checkpoint.store import open_store
from elastictrain.testing.faulty_fs import KINDS, WITH_DATA
from tests.process.helpers import Trained
from tests.process.resume_helpers import assert_same_trace, go, kept, nothing_left
from tests.process.test_resume_store_kills import EVERYTHING

STEPS_PER_START = 3
KEEP_LAST = 2
OF_THE_PERSISTER = ("write", "close", "put", "delete")
"""Calls that the ranks do not make. One of theirs that never returns is a hang, and the supervisor's to end."""


@pytest.mark.parametrize(
    ("action", "kinds"),
    [
        pytest.param("fail", KINDS, id="fail"),
        pytest.param("truncate", WITH_DATA, id="truncate", marks=pytest.mark.long),
        pytest.param("stall", OF_THE_PERSISTER, id="stall", marks=pytest.mark.soak),
    ],
)
def test_a_fault_at_each_call(tmp_path: Path, action: str, kinds: tuple[str, ...]) -> None:
    num_steps = STEPS_PER_START * (len(kinds) + 1)
    whole = go(tmp_path / "whole", **EVERYTHING, train_section={"max_steps": num_steps})
    url = f"faulty:/{tmp_path}/store"
    sound = {"target": "file"}
    store = open_store(url, sound)
    for number, kind in enumerate(kinds, 1):
        struck = tmp_path / f"struck-{kind}"
        run = go(
            tmp_path / "struck",
            **EVERYTHING,
            train_section={"max_steps": STEPS_PER_START * number},
            checkpoint={
                "url": url,
                "storage_options": {**sound, "faults": {f"{kind}:1": action}, "once": str(struck)},
                "storage_timeout_s": 3.0,
                "keep_last": KEEP_LAST,
            },
        )
        assert struck.exists(), f"nothing called {kind}"
        assert_went_on(run, STEPS_PER_START * (number - 1))
        snapshots = store.snapshots()
        assert [s.global_step for s in snapshots[:1]] == [STEPS_PER_START * number]
        assert [store.verify(snapshot.name) for snapshot in snapshots] == [[] for _ in snapshots]
        assert nothing_left(tmp_path / "struck")
        shutil.rmtree(tmp_path / "struck" / "shm")
    run = go(
        tmp_path / "struck",
        **EVERYTHING,
        train_section={"max_steps": num_steps},
        checkpoint={"url": url, "storage_options": sound, "keep_last": KEEP_LAST},
    )
    assert_went_on(run, STEPS_PER_START * len(kinds))
    assert_same_trace(run, whole)
    assert kept(tmp_path / "struck", store) == kept(tmp_path / "whole")


def assert_went_on(run: Trained, step: int) -> None:
    """It began with this very step, which was durable before; none, where that is 0."""
    assert run.events("snapshot_passed_over") == []
    assert [e["global_step"] for e in run.events("restored")] == ([step] if step else [])


def test_a_store_that_stalls_is_warned_of_once_and_costs_no_snapshot_after_it(tmp_path: Path) -> None:
    """The memory tier has room for two snapshots: one is being read, one is the newest. There is no attempt at each
    step, and what is left out is told of once, until one has been taken again."""
    url, struck = f"faulty:/{tmp_path}/store", tmp_path / "struck"
    run = go(
        tmp_path / "job",
        params={"model": "wide", "hidden": 70_000},
        train_section={"max_steps": 100},
        checkpoint={
            "url": url,
            "storage_options": {"target": "file", "faults": {"write:4": "stall"}, "once": str(struck)},
            "storage_timeout_s": 3.0,
            "memory_budget_mb": 11,
        },
    )
    assert struck.exists()
    left_out = {event["at_step"] for event in run.events("snapshot_left_out")}
    taken = {event["at_step"] for event in run.events("snapshot_taken")}
    assert left_out
    told = [step in left_out - taken for step in sorted(left_out | taken)]
    assert not any(before and after for before, after in pairwise(told)), "twice, with nothing taken in between"
    assert "memory_budget_mb" in run.events("snapshot_left_out")[0]["reason"]
    assert open_store(url, {"target": "file"}).snapshots()[0].global_step == 100
    assert nothing_left(tmp_path / "job")
