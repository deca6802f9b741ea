"""The machine is gone while the persister stands at a point of its write path: what is durable is sound, and training
goes on from it as if nothing had happened.

The persister is frozen at the point (SIGSTOP from within), so that the place is exact; then it and the rank are killed
with SIGKILL, and the memory tier is removed. The next start has the durable tier alone.

With `test_resume_faults`, kills after which real training goes on and is compared bit for bit, to the end of an
undisturbed run:

    points of the memory tier    16 in the default set     56 in the soak
    random times                  6                        30
    points of a folder           12                        48
    points of an object store     -                        50

Together 218, of which 184 in the soak (`make test-soak`). (`test_kill_sweep` kills 244 writers without training.)
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastictrain.checkpoint.faults import ENV_FAULT, POINTS
from elastictrain.checkpoint.store import Store, open_store
from tests.process.helpers import Trained, wait_until
from tests.process.resume_helpers import KILLED, assert_same_trace, go, kept, nothing_left

EVERYTHING: dict[str, Any] = {
    "params": {"model": "mixed", "scheduler": "step", "own_state": "good", "implementation": "fused"},
    "model": {"ema_decay": 0.7},
}
IN_FOLDERS = [point for point in POINTS if point.startswith("store.")]
IN_OBJECT_STORES = [point for point in IN_FOLDERS if point not in ("store.rename", "store.renamed")]


class Place:
    """Where a job keeps its durable tier.

    Args:
        folder: of the test.
        is_object_store: no rename, the manifest is the last put.
    """

    def __init__(self, folder: Path, *, is_object_store: bool) -> None:
        self.settings: dict[str, Any] = {"url": str(folder / "store")}
        if is_object_store:
            self.settings = {"url": f"faulty:/{folder}/store", "storage_options": {"target": "file"}}

    def store(self) -> Store:
        return open_store(self.settings["url"], self.settings.get("storage_options"))


def frozen_persister(rank: Any) -> psutil.Process | None:
    """The rank's persister, if it stands at its point. Fails the test if the rank ends without getting there."""
    assert rank.exitcode is None, "the run was over before its persister got to the point"
    for child in psutil.Process(rank.pid).children():
        try:
            if "elastictrain.checkpoint.persister" in child.cmdline() and child.status() == psutil.STATUS_STOPPED:
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def cut_off(ranks: list[Any]) -> None:
    """The power goes."""
    persister = wait_until(lambda: frozen_persister(ranks[0]))
    ranks[0].kill()
    persister.kill()


def sweep(folder: Path, kills: list[str], *, is_object_store: bool, num_steps: int) -> None:
    """One start after another is cut off, each at another point; then one may end."""
    place = Place(folder / "cut", is_object_store=is_object_store)
    job = {**EVERYTHING, "train_section": {"max_steps": num_steps}}
    whole = go(folder / "whole", **job)
    promised = 0
    for kill in kills:
        run = go(
            folder / "cut",
            **job,
            checkpoint=place.settings,
            environment={ENV_FAULT: f"{kill}:stop"},
            while_running=cut_off,
            expect_success=False,
        )
        assert run.codes == [KILLED], (kill, run.output)
        check_restored(run, promised, kill)
        promised = max([promised, *(event["at_step"] for event in run.events("snapshot_durable"))])
        shutil.rmtree(folder / "cut" / "shm")
        store = place.store()
        assert [store.verify(snapshot.name) for snapshot in store.snapshots()] == [[] for _ in store.snapshots()], kill
    run = go(folder / "cut", **job, checkpoint=place.settings)
    check_restored(run, promised, "the last start")
    assert_same_trace(run, whole)
    assert kept(folder / "cut", place.store()) == kept(folder / "whole")
    assert nothing_left(folder / "cut")


def check_restored(run: Trained, promised: int, where: str) -> None:
    """It began with what was said to be durable, or later; nothing had to be passed over."""
    restored = [event["global_step"] for event in run.events("restored")] or [0]
    assert restored[0] >= promised, f"{where}: a durable snapshot was lost"
    assert run.events("snapshot_passed_over") == [], where


@pytest.mark.long
def test_cut_off_at_every_point_of_a_folder(tmp_path: Path) -> None:
    """12 kills."""
    sweep(tmp_path, [f"{point}:1" for point in IN_FOLDERS], is_object_store=False, num_steps=60)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_cut_off_at_every_point_of_a_folder_many_times(tmp_path: Path) -> None:
    """48 kills."""
    kills = [f"{point}:{number}" for point in IN_FOLDERS for number in (1, 2, 2, 3)]
    random.Random(7).shuffle(kills)
    sweep(tmp_path, kills, is_object_store=False, num_steps=600)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_cut_off_at_every_point_of_an_object_store(tmp_path: Path) -> None:
    """50 kills."""
    kills = [f"{point}:{number}" for point in IN_OBJECT_STORES for number in (1, 1, 2, 2, 3)]
    random.Random(8).shuffle(kills)
    sweep(tmp_path, kills, is_object_store=True, num_steps=600)
