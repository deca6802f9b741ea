"""Kills in the write path, damage in either tier, storage that fails, and signals: what is left can be gone on with."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastictrain.checkpoint.faults import ENV_FAULT, POINTS
from elastictrain.checkpoint.memory_snapshot import LOCK_FILE, MemorySnapshot, verify_memory
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.store import open_store
from elastictrain.cli.snapshot_places import find_place
from elastictrain.cli.state_dir import StartOptions
from elastictrain.protocol import DURABLE_FILE
from elastictrain.training.device import Place
from elastictrain.training.restore import Lookup, Restorer
from tests.process.helpers import Trained, wait_until
from tests.process.resume_helpers import (
    KILLED,
    as_of_version,
    assert_same_future,
    assert_same_trace,
    go,
    kept,
    memory_of,
    nothing_left,
    steps_in,
    store_of,
)
from tests.process.snapshot_payload import tier_of, write

MEMORY_POINTS = [point for point in POINTS if point.startswith("memory.")]
EVERYTHING: dict[str, Any] = {
    "params": {"model": "mixed", "scheduler": "step", "own_state": "good", "implementation": "fused"},
    "model": {"ema_decay": 0.7},
}


# ---- kills


def assert_sound(folder: Path) -> None:
    """Whatever looks complete, is."""
    tier, store = memory_of(folder), store_of(folder)
    assert tier.damaged() == []
    for snapshot in tier.snapshots():
        assert verify_memory(snapshot) == []
    for stored in store.snapshots():
        # The dead rank's persister is still at work, and may delete an old one while we read it.
        assert store.verify(stored.name) == [] or stored not in store.snapshots()


def sweep(folder: Path, whole: Trained, kills: list[dict[str, str]], num_steps: int) -> None:
    """Kills a rank in one start after another, each at another place; then lets it end."""
    newest = 0
    for fault in kills:
        run = go(folder / "cut", **EVERYTHING, train_section={"max_steps": num_steps}, environment=fault, **BARE)
        if run.codes == [0]:
            pytest.fail(f"the run was over before {fault}")
        assert run.codes == [KILLED], (fault, run.output)
        assert run.events("snapshot_passed_over") == []
        assert_sound(folder / "cut")
        restored = [event["global_step"] for event in run.events("restored")] or [0]
        assert restored[0] >= newest, f"{fault}: a snapshot was lost"
        newest = restored[0]
    run = go(folder / "cut", **EVERYTHING, train_section={"max_steps": num_steps})
    assert_same_trace(run, whole)
    assert kept(folder / "cut") == kept(folder / "whole")
    assert nothing_left(folder / "cut")


BARE: dict[str, Any] = {"expect_success": False}


@pytest.mark.long
def test_killed_at_every_point_of_the_write_path(tmp_path: Path) -> None:
    """Each start is killed in its first or third snapshot: 16 kills."""
    kills = [{ENV_FAULT: f"{point}:{number}:kill"} for point in MEMORY_POINTS for number in (1, 3)]
    random.Random(5).shuffle(kills)
    whole = go(tmp_path / "whole", **EVERYTHING, train_section={"max_steps": 60})
    sweep(tmp_path, whole, kills, 60)


@pytest.mark.soak
def test_killed_at_every_point_many_times(tmp_path: Path) -> None:
    kills = [{ENV_FAULT: f"{point}:{number}:kill"} for point in MEMORY_POINTS for number in range(1, 8)]
    random.Random(6).shuffle(kills)
    whole = go(tmp_path / "whole", **EVERYTHING, train_section={"max_steps": 300})
    sweep(tmp_path, whole, kills, 300)


def kill_at_random_times(folder: Path, num_kills: int, world_size: int, num_steps: int, seed: int) -> None:
    """Kills all ranks, or one of them, when a number of steps drawn by chance have been done, and a moment later."""
    draw = random.Random(seed)
    options = {**EVERYTHING, "train_section": {"max_steps": num_steps}}
    if world_size > 1:  # the task's own state is that of rank zero: it must not hang on the rank
        options["params"] = {**EVERYTHING["params"], "own_state": ""}
    whole = go(folder / "whole", world_size, **options)

    def kill(ranks: list[Any]) -> None:
        metrics, wanted = folder / "cut" / "state" / "metrics.jsonl", draw.randrange(1, 6)
        start = metrics.stat().st_size if metrics.exists() else 0

        def far_enough() -> bool:
            if not metrics.exists() or metrics.stat().st_size <= start:
                return any(rank.exitcode is not None for rank in ranks)
            with metrics.open() as file:
                file.seek(start)
                return file.read().count('"kind": "step"') >= wanted

        wait_until(far_enough)
        for _ in range(draw.randrange(20_000)):  # a random moment, without sleeping
            pass
        for rank in ranks if draw.random() < 0.5 else [draw.choice(ranks)]:
            rank.kill()

    done = 0
    while done < num_kills:
        run = go(folder / "cut", world_size, **options, expect_success=False, while_running=kill)
        assert_sound(folder / "cut")
        assert run.events("snapshot_passed_over") == []
        if run.codes == [0] * world_size:
            break
        done += 1
    assert done >= num_kills, f"the run was over after {done} kills: make it longer"
    run = go(folder / "cut", world_size, **options)
    assert_same_trace(run, whole)
    assert kept(folder / "cut") == kept(folder / "whole")
    assert nothing_left(folder / "cut")


@pytest.mark.parametrize(("world_size", "num_kills"), [(1, 4), (2, 2)])
def test_killed_at_random_times(tmp_path: Path, world_size: int, num_kills: int) -> None:
    kill_at_random_times(tmp_path, num_kills, world_size, 120, seed=world_size)


@pytest.mark.soak
@pytest.mark.parametrize(("world_size", "num_kills"), [(1, 15), (2, 15)])
def test_killed_at_random_times_often(tmp_path: Path, world_size: int, num_kills: int) -> None:
    kill_at_random_times(tmp_path, num_kills, world_size, 1500, seed=10 + world_size)


# ---- damage

FIFTH = {ENV_FAULT: "memory.begin:5:kill"}
"""Kills the rank when the snapshots of steps 3 and 4 are complete in the memory tier."""


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return go(folder), folder


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with durable snapshots of steps 3 and 4, to be copied."""
    folder = tmp_path_factory.mktemp("four")
    for stop in (3, 4):
        go(folder, overrides=[f"train.max_steps={stop}"])
    return folder


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (flip, "model.safetensors"),
        (cut_off, "optimizer.safetensors"),
        (Path.unlink, "trainer.json"),
        (flip, "manifest.json"),
        (cut_off, "manifest.json"),
        (Path.unlink, "manifest.json"),
        *(
            pytest.param(damage, file, marks=pytest.mark.long)
            for damage, file in [
                (cut_off, "model.safetensors"),
                (Path.unlink, "model.safetensors"),
                (flip, "optimizer.safetensors"),
                (Path.unlink, "optimizer.safetensors"),
                (flip, "trainer.json"),
                (cut_off, "trainer.json"),
            ]
        ),
    ],
)
def test_damage_in_the_durable_tier(
    tmp_path: Path, four_steps: Path, undisturbed: tuple[Trained, Path], damage: Any, file: str
) -> None:
    """The newest is damaged: the one before is used, and the warning names file and reason."""
    shutil.copytree(four_steps, tmp_path, dirs_exist_ok=True)
    newest = next((tmp_path / "state" / "snapshots").glob("step-000000000004-*"))
    damage(newest / file)
    run = go(tmp_path)
    assert run.events("restored")[0]["global_step"] == 3
    passed_over = run.events("snapshot_passed_over")
    if (damage, file) == (Path.unlink, "manifest.json"):
        # Without a manifest there is no snapshot; but that there was one is known.
        assert [event["reason"] for event in passed_over] == ["was durable, and is not there any more"]
    else:
        assert [event["where"] for event in passed_over] == [str(newest)]
        assert file in passed_over[0]["reason"]
        assert passed_over[0]["level"] == "warning"
    assert_same_future(run, tmp_path, *undisturbed)


@pytest.mark.parametrize(
    ("damage", "file", "both"),
    [
        (flip, "model.safetensors", False),
        (cut_off, "trainer.json", True),
        (flip, "manifest.json", True),
        (cut_off, "manifest.json", False),
        *(
            pytest.param(damage, file, both, marks=pytest.mark.long)
            for damage, file, both in [
                (flip, "model.safetensors", True),
                (cut_off, "model.safetensors", False),
                (flip, "trainer.json", False),
                (flip, "manifest.json", False),
                (cut_off, "manifest.json", True),
            ]
        ),
    ],
)
def test_damage_in_the_memory_tier(
    tmp_path: Path, undisturbed: tuple[Trained, Path], damage: Any, file: str, both: bool
) -> None:
    """The newest in memory is damaged: the one before it is used; if all are, the older durable one."""
    run = go(tmp_path, environment=FIFTH, expect_success=False)
    assert run.codes == [KILLED]
    tier = memory_of(tmp_path)
    found = tier.snapshots()
    assert len(found) in (2, 3), "a third slot is made where the persister still reads one of two"
    (tmp_path / "state" / "snapshots").mkdir(exist_ok=True)
    wait_for_persister(tmp_path)
    for stored in store_of(tmp_path).snapshots()[:-1]:
        store_of(tmp_path).delete(stored.name)
    durable = steps_in(store_of(tmp_path))[0]
    for snapshot in found if both else found[:1]:
        damage(snapshot.path / file)
    run = go(tmp_path)
    expected = durable if both else max(durable, found[1].global_step)
    assert run.events("restored")[0]["global_step"] == expected
    reasons = [e["reason"] for e in run.events("snapshot_passed_over") if e["where"] == str(found[0].path)]
    assert reasons, run.output
    assert all(file in reason for reason in reasons), run.output
    assert_same_future(run, tmp_path, *undisturbed)


def test_a_last_snapshot_that_is_damaged_before_it_is_durable_is_taken_again(
    tmp_path: Path, undisturbed: tuple[Trained, Path]
) -> None:
    """The state itself is still there, and the store works."""
    (tmp_path / "state").mkdir(parents=True)
    with (tmp_path / "state" / "persister.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another persister's turn, until the damage is done

        def damage_the_last(_ranks: list[Any]) -> None:
            last = whole.counters["global_step"]
            wait_until(lambda: [s.global_step for s in memory_of(tmp_path).snapshots()][:1] == [last])
            flip(memory_of(tmp_path).snapshots()[0].path / "model.safetensors")
            fcntl.flock(lock, fcntl.LOCK_UN)

        whole = undisturbed[0]
        run = go(tmp_path, while_running=damage_the_last)
    assert len(run.events("persister_failed")) == 1
    assert run.events("snapshot_not_durable") == []
    assert_same_future(run, tmp_path, *undisturbed)
    assert nothing_left(tmp_path)


def wait_for_persister(folder: Path) -> None:
    """Until the persister of a rank that was killed is done: it goes on alone."""

    def is_idle() -> bool:
        path = folder / "state" / "persister.lock"
        if not path.exists() or not steps_in(store_of(folder)):
            return False
        with path.open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    wait_until(is_idle)


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_if_all_are_damaged_it_is_an_error_and_never_a_fresh_start(tmp_path: Path, file: str) -> None:
    go(tmp_path, environment=FIFTH, expect_success=False)
    wait_for_persister(tmp_path)
    paths = [s.path for s in memory_of(tmp_path).snapshots()]
    paths += [tmp_path / "state" / "snapshots" / s.name for s in store_of(tmp_path).snapshots()]
    assert len(paths) >= 3
    for path in paths:
        cut_off(path / file)
    run = go(tmp_path, expect_success=False)
    assert run.codes == [65], run.output
    assert f"there are {len(paths)} snapshot(s) of this run, but none of them can be read" in run.errors[0].what
    assert "--fresh" in run.errors[0].hint
    assert {event["where"] for event in run.events("snapshot_passed_over")} == set(map(str, paths))
    fresh = go(tmp_path, overrides=["train.max_steps=1"], options=StartOptions(fresh=True))
    assert fresh.events("restored") == []
    assert fresh.counters["global_step"] == 1


def lock_slot(snapshot: MemorySnapshot) -> int:
    """As a writer does; closing the descriptor unlocks it."""
    lock = os.open(snapshot.path / LOCK_FILE, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def test_what_another_process_writes_to_is_no_damage_and_no_fresh_start_either(tmp_path: Path) -> None:
    """It is worth another try, as nothing needs to be repaired; the snapshots are there once that process has ended."""
    go(tmp_path, environment=FIFTH, expect_success=False)
    wait_for_persister(tmp_path)
    found = memory_of(tmp_path).snapshots()
    for stored in store_of(tmp_path).snapshots():
        store_of(tmp_path).delete(stored.name)
    (tmp_path / "state" / DURABLE_FILE).unlink(missing_ok=True)
    locks = [lock_slot(snapshot) for snapshot in found]
    run = go(tmp_path, expect_success=False)
    for lock in locks:
        os.close(lock)
    assert run.codes == [75], run.output
    assert f"{len(found)} snapshot(s) of this run are being written by another process" in run.errors[0].what
    assert memory_of(tmp_path).snapshots() == found
    assert go(tmp_path).events("restored")[0]["global_step"] == found[0].global_step


def test_a_snapshot_whose_slot_is_let_go_right_after_it_was_busy_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    with closing(tier_of(tmp_path)) as tier:
        snapshots = [write(tier, step) for step in (1, 2)]
        lock = lock_slot(snapshots[1])
        told = []

        def let_go(where: str, reason: str) -> None:
            told.append((where, reason))
            os.close(lock)

        restorer = Restorer(
            Place(),
            allowed=frozenset(),
            on_passed_over=let_go,
            on_wait=lambda *_: None,
            on_incomplete=lambda *_: None,
            progress=lambda _bytes: None,
        )
        reader = restorer._newest_in_memory(Lookup((tier,), None, snapshots[0].run_id, tmp_path, 1.0))
        assert reader is not None
        with reader:
            assert reader.manifest.global_step == 1
        assert told == [(str(snapshots[1].path), f"{snapshots[1].path} is being written")]
        assert tier.snapshots() == snapshots[::-1]


def test_what_has_no_manifest_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    """Robbed of it here; one that an object store's writer did not get to complete looks the same."""
    for num_steps in (3, 5):
        go(tmp_path, overrides=[f"train.max_steps={num_steps}"])
    store = store_of(tmp_path)
    newest, before = (snapshot.global_step for snapshot in store.snapshots())
    folder = tmp_path / "state" / "snapshots" / store.snapshots()[0].name
    (folder / "manifest.json").unlink()
    run = go(tmp_path)
    (said,) = run.events("snapshot_incomplete")
    assert (said["where"], said["reason"]) == (str(folder), "manifest.json: is missing")
    assert [event["global_step"] for event in run.events("restored")] == [before]
    assert newest > before
    assert go(tmp_path).events("snapshot_incomplete") == [], "its writer's successor has cleaned it up"


@pytest.mark.parametrize("tier", ["memory", "durable"])
def test_a_newer_format_is_refused_by_name_and_nothing_is_done_again(
    tmp_path: Path, undisturbed: tuple[Trained, Path], tier: str
) -> None:
    """It is not damaged: an older program must not go back behind what a newer one has done."""
    if tier == "memory":
        go(tmp_path, environment=FIFTH, expect_success=False)
        wait_for_persister(tmp_path)
        newest = memory_of(tmp_path).snapshots()[0].path
    else:
        for num_steps in (3, 5):
            go(tmp_path, overrides=[f"train.max_steps={num_steps}"])
        newest = tmp_path / "state" / "snapshots" / store_of(tmp_path).snapshots()[0].name
    as_of_version(newest / "manifest.json", 7)
    run = go(tmp_path, expect_success=False)
    assert run.codes == [65], run.output
    assert f"{newest}/manifest.json: snapshot format version 7" in run.errors[0].what
    assert "--allow rewind" in run.errors[0].hint
    assert run.events("restored") == []
    assert (newest / "manifest.json").exists()
    run = go(tmp_path, options=StartOptions(allowed_differences=("rewind",)))
    assert [event["where"] for event in run.events("snapshot_passed_over")][:1] == [str(newest)]
    assert run.events("restored") != []
    assert_same_trace(run, undisturbed[0])


def test_only_the_memory_tier_was_there_and_its_manifests_are_damaged(tmp_path: Path) -> None:
    """Nothing is durable, and no list of snapshots has an entry: still no fresh start."""
    go(tmp_path, environment=FIFTH, overrides=['checkpoint.url="memory://nowhere"'], expect_success=False)
    tier = memory_of(tmp_path)
    for snapshot in tier.snapshots():
        cut_off(snapshot.path / "manifest.json")
    assert tier.snapshots() == []
    run = go(tmp_path, overrides=['checkpoint.url="memory://nowhere"'], expect_success=False)
    assert run.codes == [65]
    assert "none of them can be read" in run.errors[0].what


def test_the_newer_tier_wins(tmp_path: Path, undisturbed: tuple[Trained, Path]) -> None:
    """First the memory tier is newer than the durable one; then its slots are set back behind it."""
    run = go(tmp_path, environment=FIFTH, expect_success=False)
    wait_for_persister(tmp_path)
    in_memory = memory_of(tmp_path).snapshots()[0].global_step
    for stored in store_of(tmp_path).snapshots():
        if stored.global_step >= in_memory:
            store_of(tmp_path).delete(stored.name)
    old = tmp_path / "old"
    run = go(tmp_path, overrides=["params.kill_after=1"], expect_success=False)
    assert (run.events("restored")[0]["from_tier"], run.events("restored")[0]["global_step"]) == ("memory", in_memory)
    wait_for_persister(tmp_path)
    subprocess.run(["cp", "-a", tmp_path / "shm", old], check=True)
    go(tmp_path, overrides=["train.max_steps=7"])
    assert nothing_left(tmp_path)
    subprocess.run(["rm", "-r", tmp_path / "shm"], check=True)
    old.rename(tmp_path / "shm")
    run = go(tmp_path)
    assert (run.events("restored")[0]["from_tier"], run.events("restored")[0]["global_step"]) == ("durable", 7)
    assert_same_future(run, tmp_path, *undisturbed)
    assert nothing_left(tmp_path)


# ---- signals


def test_sigterm_to_one_of_two_ranks(tmp_path: Path) -> None:
    """Both finish the same step; the snapshot is durable; the loader processes have gone on until then."""
    run = go(tmp_path, 2, overrides=["params.stop_after=2", "params.on_ranks=[1]"], data={"num_workers": 2})
    assert run.outcome is not None
    step = run.counters["global_step"]
    assert 2 <= step <= 4
    assert not run.outcome["complete"]
    assert run.outcome["reason"] == f"preempted (asked to stop), snapshot of step {step} durable"
    assert run.metrics("summary")[-1]["snapshot"] == {"step": step, "durable": True}
    assert run.metrics("summary")[-1]["reason"] == run.outcome["reason"]
    assert steps_in(store_of(tmp_path))[0] == step
    assert nothing_left(tmp_path)


def test_sigterm_to_everybody_with_loader_processes(tmp_path: Path, undisturbed: tuple[Trained, Path]) -> None:
    """As an init system does it: to the whole group, loaders included, which leave it to their rank."""
    loaders: list[psutil.Process] = []

    def stop(ranks: list[Any]) -> None:
        family = psutil.Process(ranks[0].pid)
        wait_until((tmp_path / "state" / "metrics.jsonl").exists)
        loaders.extend(child for child in family.children() if "persister" not in " ".join(child.cmdline()))
        for process in [*loaders, family]:
            process.send_signal(signal.SIGTERM)

    run = go(
        tmp_path,
        data={"num_workers": 2},
        params={"length": 1000},
        train_section={"max_steps": 100_000},
        while_running=stop,
    )
    assert len(loaders) == 2
    assert run.outcome is not None
    assert run.outcome["reason"].startswith("preempted (SIGTERM), snapshot of step")
    assert not any(loader.is_running() for loader in loaders)


STALLED = {
    "url": "faulty://store",
    "storage_options": {"target": "file", "faults": {"write:1": "stall"}},
    "storage_timeout_s": 2.0,
}


def stalled(folder: Path, **settings: Any) -> dict[str, Any]:
    """A store that hangs at the first write."""
    return {**STALLED, "url": f"faulty:/{folder}/store", **settings}


@pytest.mark.parametrize("how", ["second signal", "deadline"])
def test_a_store_that_stalls_at_the_end(tmp_path: Path, undisturbed: tuple[Trained, Path], how: str) -> None:
    """What is not durable by then is in the memory tier, and the event says where."""
    settings = stalled(tmp_path, preempt_deadline_s=0.5 if how == "deadline" else 600.0)
    stops = 1 if how == "deadline" else 2
    run = go(tmp_path, overrides=["params.stop_after=3", f"params.stops={stops}"], checkpoint=settings)
    assert run.outcome is not None
    assert run.outcome["reason"] == "preempted (SIGTERM), snapshot of step 3 in the memory tier only"
    event = run.events("snapshot_not_durable")[0]
    assert event["at_step"] == 3
    assert event["kept_in"].startswith(str(tmp_path / "shm"))
    assert memory_of(tmp_path).snapshots()[0].global_step == 3
    run = go(tmp_path)  # to a store that works
    assert (run.events("restored")[0]["from_tier"], run.events("restored")[0]["global_step"]) == ("memory", 3)
    assert_same_future(run, tmp_path, *undisturbed)


def test_a_signal_while_a_finished_run_waits_for_its_store(tmp_path: Path) -> None:
    """A run that is complete waits for ever; once it is asked to stop, until the deadline."""

    def stop(ranks: list[Any]) -> None:
        wait_until(lambda: memory_of(tmp_path).snapshots() and memory_of(tmp_path).snapshots()[0].global_step == 9)
        os.kill(ranks[0].pid, signal.SIGTERM)

    run = go(tmp_path, checkpoint=stalled(tmp_path, preempt_deadline_s=0.3), while_running=stop)
    assert run.outcome is not None
    assert "snapshot of step 9 in the memory tier only" in run.outcome["reason"]


def test_nothing_runs_on_after_a_completed_job(tmp_path: Path) -> None:
    run = go(tmp_path, data={"num_workers": 2})
    assert run.codes == [0]

    def left() -> list[int]:
        found = []
        for process in psutil.process_iter(["environ"]):
            environment = process.info["environ"] or {}
            if str(tmp_path) in environment.get("ELASTICTRAIN_RUN_DIR", ""):
                found.append(process.pid)
        return found

    wait_until(lambda: not left())
    assert nothing_left(tmp_path)
    assert list((tmp_path / "state" / "scratch").iterdir()) == []
    assert not (tmp_path / "state" / "staging").exists()


# ---- no room


def test_a_store_without_room_costs_nothing_but_time(tmp_path: Path, small_disk: Path) -> None:
    """Training goes on, with warnings; once there is room, the snapshot becomes durable."""
    whole = go(tmp_path / "whole")
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * ((2 << 20) - 8192))

    def make_room(ranks: list[Any]) -> None:
        output = tmp_path / "job" / "state" / "runs" / "0001" / "output-0.txt"
        wait_until(lambda: output.exists() and '"persister_retrying"' in output.read_text())
        wait_until(lambda: (m := memory_of(tmp_path / "job").snapshots()) and m[0].global_step == 9)
        filler.unlink()

    job = tmp_path / "job"
    run = go(job, checkpoint={"url": str(small_disk / "store")}, while_running=make_room)
    assert run.events("persister_retrying")[0]["level"] == "warning"
    assert "No space left" in run.events("persister_retrying")[0]["error"]
    assert_same_trace(run, whole)
    assert kept(job, open_store(small_disk / "store")) == kept(tmp_path / "whole")
    assert nothing_left(job)


@pytest.mark.parametrize("why", ["tmpfs", "budget"])
def test_a_memory_tier_without_room_is_replaced_by_the_state_directory(
    tmp_path: Path, small_disk: Path, why: str
) -> None:
    """A model of 800 kB with its moments does not fit twice."""
    options: dict[str, Any] = {"params": {"model": "wide", "hidden": 70_000}, "train_section": {"max_steps": 3}}
    place = {"memory_path": str(small_disk)} if why == "tmpfs" else {"memory_budget_mb": 1}
    run = go(tmp_path, **options, checkpoint=place)
    event = run.events("memory_tier_given_up")
    assert len(event) == 1, "said once"
    assert event[0]["instead"] == str(tmp_path / "state" / "staging")
    assert steps_in(store_of(tmp_path))[0] == 3
    assert not (tmp_path / "state" / "staging").exists(), "given back at the end"
    killed = go(tmp_path, **options, checkpoint=place, overrides=["train.max_steps=9", "params.kill_after=3"], **BARE)
    assert killed.codes == [KILLED]
    staged = MemoryTier.staging(tmp_path / "state").snapshots()
    assert staged[0].global_step >= 4
    run = go(tmp_path, **options, checkpoint=place, overrides=["train.max_steps=9"])
    assert run.events("restored")[0]["global_step"] >= staged[0].global_step


def test_a_complete_training_whose_last_step_cannot_be_kept_is_an_error(tmp_path: Path, small_disk: Path) -> None:
    """Exit code 74; with room, it goes on from what was kept before, and ends where it would have ended."""
    job = small_disk / "job"
    options: dict[str, Any] = {
        "params": {"model": "wide", "hidden": 8_000},  # half a megabyte with its moments
        "checkpoint": {"memory_tier": False, "url": str(tmp_path / "store")},
    }
    whole = go(tmp_path / "whole", params=options["params"], train_section={"max_steps": 4})
    go(job, overrides=["train.max_steps=2"], **options)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 400_000))
    failed = go(job, overrides=["train.max_steps=4"], expect_success=False, **options)
    assert failed.codes == [74]
    assert "the state of its last step, 4, could not be kept" in failed.errors[0].what
    assert "Make room" in failed.errors[0].hint
    assert "has no room for a snapshot" in failed.events("snapshot_failed")[0]["error"]
    store = open_store(tmp_path / "store")
    assert steps_in(store)[0] == 2
    filler.unlink()
    run = go(job, overrides=["train.max_steps=4"], **options)
    assert run.events("restored")[0]["global_step"] == 2
    assert_same_trace(run, whole)
    assert kept(job, store) == kept(tmp_path / "whole")


def test_without_a_memory_tier(tmp_path: Path, undisturbed: tuple[Trained, Path]) -> None:
    off = {"memory_tier": False}
    go(tmp_path, checkpoint=off, overrides=["params.kill_after=4"], expect_success=False)
    assert nothing_left(tmp_path)
    run = go(tmp_path, checkpoint=off)
    assert_same_future(run, tmp_path, *undisturbed)
    assert not (tmp_path / "state" / "staging").exists()


def newest_in_memory_alone(folder: Path) -> int:
    """A run is killed, and its newest step is in memory only, as if the store had been slower."""
    assert go(folder, environment=FIFTH, expect_success=False).codes == [KILLED]
    newest = memory_of(folder).snapshots()[0].global_step
    wait_for_persister(folder)
    for stored in store_of(folder).snapshots():
        if stored.global_step >= newest:
            store_of(folder).delete(stored.name)
    (folder / "state" / "durable.json").unlink()
    return newest


def test_what_is_newest_in_memory_is_gone_on_with_though_the_memory_tier_is_off_by_now(
    tmp_path: Path, undisturbed: tuple[Trained, Path]
) -> None:
    """The error that names the switch tells people to do just that; and the memory is given back at the end."""
    newest = newest_in_memory_alone(tmp_path)
    run = go(tmp_path, checkpoint={"memory_tier": False})
    restored = [(event["from_tier"], event["global_step"]) for event in run.events("restored")]
    assert restored == [("memory", newest)]
    assert_same_future(run, tmp_path, *undisturbed)
    assert nothing_left(tmp_path)


def test_what_is_newest_in_memory_is_gone_on_with_though_its_path_is_another_by_now(
    tmp_path: Path, undisturbed: tuple[Trained, Path]
) -> None:
    newest = newest_in_memory_alone(tmp_path)
    place = find_place(None, tmp_path / "state", None)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = {"memory_path": str(elsewhere)}
    second = {ENV_FAULT: "memory.begin:2:kill"}
    assert go(tmp_path, checkpoint=other, environment=second, expect_success=False).codes == [KILLED]
    again = find_place(None, tmp_path / "state", None)
    assert [tier.root for tier in place.tiers[:-1]] == [memory_of(tmp_path).root]
    assert [tier.root.is_relative_to(elsewhere) for tier in again.tiers[:-1]] == [True, False]
    run = go(tmp_path, checkpoint=other)
    restored = [(event["from_tier"], event["global_step"] >= newest) for event in run.events("restored")]
    assert restored == [("memory", True)]
    assert_same_future(run, tmp_path, *undisturbed)
    assert nothing_left(tmp_path)
    assert list(elsewhere.iterdir()) == []


def test_a_place_where_the_memory_tier_has_been_need_not_be_fit_any_more(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    go(tmp_path, checkpoint={"memory_path": str(before)}, train_section={"max_steps": 1})
    before.rmdir()
    before.touch()
    (tmp_path / "elsewhere").mkdir()
    other = {"memory_path": str(tmp_path / "elsewhere")}
    run = go(tmp_path, checkpoint=other, train_section={"max_steps": 2})
    assert [event["where"].startswith(str(before)) for event in run.events("snapshot_passed_over")] == [True]
    assert steps_in(store_of(tmp_path))[0] == 2
    note = tmp_path / "state" / "memory.json"
    note.write_text("{")
    failed = go(tmp_path, checkpoint=other, train_section={"max_steps": 3}, expect_success=False)
    assert f"{note} cannot be read" in failed.errors[0].what
    assert "Remove it" in failed.errors[0].hint


@pytest.mark.parametrize("unfit", ["missing", "a file", "a link in it"])
def test_a_memory_tier_that_is_off_need_not_be_fit(tmp_path: Path, unfit: str) -> None:
    place = tmp_path / "unfit"
    if unfit == "a file":
        place.touch()
    elif unfit == "a link in it":
        place.mkdir()
        (place / f"elastictrain-{os.geteuid()}").symlink_to(tmp_path)
    off = {"memory_tier": False, "memory_path": str(place)}
    run = go(tmp_path, checkpoint=off, train_section={"max_steps": 2})
    assert steps_in(store_of(tmp_path))[0] == 2
    said = [event["where"] for event in run.events("snapshot_passed_over")]
    assert [where.startswith(str(place)) for where in said] == ([] if unfit == "missing" else [True])
    assert run.events("memory_not_given_back") == []


def test_a_fresh_run_keeps_what_is_durable_and_writes_over_what_is_in_memory_alone(tmp_path: Path) -> None:
    """As the help of `--fresh` says."""
    assert go(tmp_path, environment=FIFTH, expect_success=False).codes == [KILLED]
    wait_for_persister(tmp_path)
    store = store_of(tmp_path)
    in_memory = memory_of(tmp_path).snapshots()[0]
    for stored in store.snapshots():
        if stored.global_step >= in_memory.global_step:
            store.delete(stored.name)
    old = {stored.name for stored in store.snapshots()}
    go(tmp_path, overrides=["train.max_steps=4"], options=StartOptions(fresh=True))
    names = {stored.name for stored in store.snapshots()}
    assert old < names
    assert in_memory.name not in names
    assert nothing_left(tmp_path)


# ---- secrets


def test_credentials_are_nowhere_but_in_the_spec(tmp_path: Path) -> None:
    """Neither in a file of the state directory, a snapshot, the memory tier, nor in what is printed: also not when
    the store's client says them in an error."""
    secret = "hunter2-very-secret"
    options = {"target": "file", "secret": secret, "faults": {"put:1": "fail"}}
    run = go(tmp_path, checkpoint={"url": f"faulty:/{tmp_path}/store", "storage_options": options})
    assert secret not in "\n".join(run.output)
    found = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and not path.is_symlink() and secret in path.read_bytes().decode(errors="replace")
    ]
    spec = tmp_path / "state" / "runs" / "0001" / "spec.json"
    assert set(found) == {spec, tmp_path / "job.toml"}
    assert spec.stat().st_mode & 0o777 == 0o600
