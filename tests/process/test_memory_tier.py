"""The memory tier: whose it is, what it keeps, and what it does where there is no room."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from elastictrain.checkpoint import faults, memory_tier, safefs
from elastictrain.checkpoint.catalog import newest_first, open_candidate
from elastictrain.checkpoint.memory_snapshot import Mappings, OpenSnapshot, verify_memory
from elastictrain.checkpoint.memory_tier import Declined, MemoryTier
from elastictrain.errors import BusyError, MemoryTierError, SnapshotDamagedError, StateDirError, UnsafePathError
from tests.process.snapshot_payload import assert_holds, fill, layouts, tier_of, trainer, write

COMMIT_POINTS = ("memory.filled", "memory.hashed", "memory.trainer", "memory.manifest")


def test_nothing_is_made_by_looking(tier, tmp_path):
    assert tier.snapshots() == []
    assert tier.damaged() == []
    assert tier.clean()
    assert list((tmp_path / "shm").iterdir()) == []


def test_snapshots_alternate_and_hold_what_was_written(tier, tmp_path):
    for step in range(1, 6):
        write(tier, step)
        found = tier.snapshots()
        assert [s.global_step for s in found] == ([step, step - 1] if step > 1 else [1])
        for candidate in newest_first(tier, None):
            with open_candidate(candidate, tmp_path) as reader:
                assert_holds(reader)
    assert sorted(p.name for p in tier.root.iterdir()) == ["slot-0", "slot-1"]


def test_folders_are_0700_and_files_0600_whatever_the_umask(tier):
    before = os.umask(0)
    try:
        write(tier, 1)
    finally:
        os.umask(before)
    for path in [tier.root.parent, tier.root, *tier.root.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_buffers_are_the_same_objects_again(tier):
    seen = []
    for step in range(1, 5):
        writer = tier.begin(layouts())
        seen.append((writer.index, writer.buffers["model.safetensors"]))
        writer.commit(job="j", run_id="0" * 8, global_step=step, versions={}, trainer={})
    assert [index for index, _ in seen] == [0, 1, 0, 1]
    assert seen[0][1] is seen[2][1]
    assert seen[1][1] is seen[3][1]


def test_another_layout_replaces_the_files(tier, tmp_path):
    write(tier, 1)
    write(tier, 2)
    write(tier, 3, size=5000)
    write(tier, 4, size=10)
    sizes = {4: 10, 3: 5000}
    for candidate in newest_first(tier, None):
        with open_candidate(candidate, tmp_path) as reader:
            assert_holds(reader, sizes[candidate.global_step])


def test_the_newest_is_never_written_to(tier):
    write(tier, 1)
    write(tier, 2)
    for _ in range(4):  # a new process each time, that dies in its copy
        other = MemoryTier(tier.root, base=tier._base)
        writer = other.begin(layouts())
        writer.buffers["model.safetensors"][:] = bytes(len(writer.buffers["model.safetensors"]))
        other.close()
        assert [s.global_step for s in tier.snapshots()] == [2]
        assert verify_memory(tier.snapshots()[0]) == []


def test_a_run_that_begins_anew_protects_its_own_newest(tier):
    write(tier, 1000, run_id="0000000a")
    write(tier, 10, run_id="0000000b")
    again = MemoryTier(tier.root, base=tier._base)
    write(again, 20, run_id="0000000b")
    again.close()
    assert {(s.run_id, s.global_step) for s in tier.snapshots()} == {("0000000b", 10), ("0000000b", 20)}


def test_what_is_found_damaged_can_be_given_up(tier):
    write(tier, 1)
    snapshot = write(tier, 2)
    path = snapshot.path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [str(d).partition(":")[0] for d in verify_memory(snapshot)] == ["model.safetensors"]
    tier.discard(snapshot)
    assert [s.global_step for s in tier.snapshots()] == [1]
    write(tier, 2)
    assert [s.global_step for s in tier.snapshots()] == [2, 1]


def test_what_a_writer_has_put_in_the_place_of_a_damaged_one_stays(tier, monkeypatch):
    """It commits after the damaged one was found, at the last moment before its slot is locked to be emptied."""
    damaged = write(tier, 1)
    write(tier, 2)
    other = MemoryTier(tier.root, base=tier._base)
    lock, written = memory_tier._try_lock, []

    def commit_first(fd: int) -> bool:
        written.append(write(tier, 3))
        return lock(fd)

    monkeypatch.setattr(memory_tier, "_try_lock", commit_first)
    other.discard(damaged)
    assert written[0].path == damaged.path
    assert [s.global_step for s in tier.snapshots()] == [3, 2]
    assert verify_memory(written[0]) == []


def test_the_newest_stays_protected_when_the_one_before_it_in_its_slot_is_given_up(tier):
    damaged = write(tier, 1)
    write(tier, 2)
    newest = write(tier, 3)
    tier.discard(damaged)
    assert tier.newest == newest
    assert newest.path == damaged.path


def test_a_third_slot_only_while_one_is_read(tier):
    write(tier, 1)
    with OpenSnapshot(tier.snapshots()[0].path, tier.snapshots()[0].name) as read:
        write(tier, 2)
        write(tier, 3)
        assert sorted(p.name for p in tier.root.iterdir()) == ["slot-0", "slot-1", "slot-2"]
        with OpenSnapshot(tier.root / "slot-1", tier.snapshots()[1].name):
            declined = tier.begin(layouts())
            assert isinstance(declined, Declined)
            assert "storage does not keep up" in declined.reason
        write(tier, 4)
        assert read.manifest.global_step == 1
        assert [s.global_step for s in tier.snapshots()] == [4, 3, 1]


def test_the_budget_stops_the_third_slot_and_too_small_a_one_everything(tier):
    size = sum(layout.size_bytes for layout in layouts().values())
    small = MemoryTier(tier.root, base=tier._base, budget_bytes=int(2.5 * size))
    write(small, 1)
    with OpenSnapshot(small.snapshots()[0].path, small.snapshots()[0].name):
        write(small, 2)
        declined = small.begin(layouts())
        assert isinstance(declined, Declined)
        assert "memory_budget_mb" in declined.reason
    small.close()
    with pytest.raises(MemoryTierError, match="do not fit"):
        MemoryTier(tier.root, base=tier._base, budget_bytes=size).begin(layouts())
    assert [s.global_step for s in tier.snapshots()] == [2, 1]


def test_readers_and_writers_keep_out_of_each_others_way(tier):
    snapshot = write(tier, 1)
    write(tier, 2)
    writer = tier.begin(layouts())
    assert writer.index == 0
    with pytest.raises(BusyError):
        OpenSnapshot(snapshot.path, snapshot.name)
    writer.abort()
    with pytest.raises(SnapshotDamagedError, match="no complete snapshot"):
        OpenSnapshot(snapshot.path, snapshot.name)
    write(tier, 3)
    with pytest.raises(BusyError, match="by now"):
        OpenSnapshot(snapshot.path, snapshot.name)


@pytest.mark.parametrize("level", ["user", "job", "slot-0", "model.safetensors", "lock", ".manifest.json.tmp"])
def test_a_symbolic_link_is_refused_and_not_followed(tier, tmp_path, level):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / "precious"
    target.write_text("precious")
    slot = tier.root / "slot-0"
    place = {"user": tier.root.parent, "job": tier.root, "slot-0": slot}.get(level, slot / level)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target if place.parent == slot else elsewhere)
    if level == ".manifest.json.tmp":  # our own temporary name: the link goes, its target stays
        write(tier, 1)
    else:
        with pytest.raises(UnsafePathError, match="symbolic link"):
            write(tier, 1)
    assert target.read_text() == "precious"
    assert list(elsewhere.iterdir()) == [target]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that belongs to someone else")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_folder_of_someone_else_is_refused(tier, level):
    place = [tier.root.parent, tier.root, tier.root / "slot-0"][level]
    place.mkdir(parents=True)
    os.chown(place, 12345, 12345)
    with pytest.raises(UnsafePathError, match="belongs to user 12345"):
        write(tier, 1)
    if level < 2:
        with pytest.raises(UnsafePathError):
            tier.snapshots()


def test_a_hard_link_to_someone_elses_file_is_refused(tier, tmp_path):
    target = tmp_path / "precious"
    target.write_text("precious")
    slot = tier.root / "slot-0"
    slot.mkdir(parents=True)
    os.link(target, slot / "model.safetensors")
    with pytest.raises(UnsafePathError, match="ours alone"):
        write(tier, 1)
    assert target.read_text() == "precious"


def test_a_memory_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(StateDirError, match="memory_path"):
        MemoryTier.for_job(tmp_path / "no", job="j", state_dir=tmp_path).begin(layouts())


def test_clean_removes_all_but_waits_for_readers(tier, tmp_path):
    write(tier, 1)
    snapshot = write(tier, 2)
    (tier.root / "slot-0" / "left.by.a.killed.writer").write_text("x")
    with OpenSnapshot(snapshot.path, snapshot.name):
        assert not tier.clean()
        assert [s.global_step for s in tier.snapshots()] == [2]
    assert tier.clean()
    assert list((tmp_path / "shm").iterdir()) == []
    write(tier, 3)
    assert [s.global_step for s in tier.snapshots()] == [3]


def test_a_child_that_was_forked_does_not_keep_the_slot(tier):
    writer = tier.begin(layouts())
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[writer._slot.lock_fd])
    try:
        writer.commit(job="j", run_id="0" * 8, global_step=1, versions={}, trainer={})
        with (tier.root / "slot-0" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.communicate()


@pytest.fixture
def small_tmpfs(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_tmpfs_is_an_error_and_costs_nothing(small_tmpfs, tmp_path):
    tier = MemoryTier.for_job(small_tmpfs, job="job", state_dir=tmp_path)
    size = 50_000  # 400 kB: two fit, a third does not
    write(tier, 1, size)
    write(tier, 2, size)
    with OpenSnapshot(tier.snapshots()[1].path, tier.snapshots()[1].name):
        declined = tier.begin(layouts(size))
        assert isinstance(declined, Declined)
        assert "no room for a third slot" in declined.reason
    assert [s.global_step for s in tier.snapshots()] == [2, 1]
    with pytest.raises(MemoryTierError, match="no room"):
        tier.begin(layouts(10 * size))
    assert [verify_memory(s) for s in tier.snapshots()] == [[], []]
    write(tier, 3, size)
    assert [s.global_step for s in tier.snapshots()] == [3, 2]
    tier.close()


def test_staging_needs_no_tmpfs(tmp_path):
    tier = MemoryTier.staging(tmp_path)
    write(tier, 1)
    assert tier.root == tmp_path / "staging"
    assert [s.global_step for s in tier.snapshots()] == [1]
    assert tier.clean()
    assert list(tmp_path.iterdir()) == []


def test_a_reader_keeps_the_mappings_of_files_that_stay_and_sees_what_is_in_them(tier):
    mappings = Mappings()

    def read(snapshot, file: str) -> tuple[memoryview, bytes]:
        with OpenSnapshot(snapshot.path, snapshot.name, mappings) as opened:
            view = opened.map_file(file)
            return view, bytes(view)

    write(tier, 1)
    second = write(tier, 2)
    model, _ = read(second, "model.safetensors")
    trainer, _ = read(second, "trainer.json")
    write(tier, 3)
    fourth = write(tier, 4)
    assert fourth.path == second.path
    again, content = read(fourth, "model.safetensors")
    assert again is model
    assert content == (fourth.path / "model.safetensors").read_bytes()
    again, content = read(fourth, "trainer.json")  # replaced by another file
    assert again is not trainer
    assert content == (fourth.path / "trainer.json").read_bytes()
    write(tier, 5)
    larger = write(tier, 6, size=2000)
    assert larger.path == second.path
    again, content = read(larger, "model.safetensors")
    assert again is not model
    assert content == (larger.path / "model.safetensors").read_bytes()


def test_what_a_killed_writer_left_is_told_from_what_is_being_written(tier):
    write(tier, 1)
    writer = tier.begin(layouts())
    assert tier.incomplete() == [], "somebody writes to it"
    tier.close()
    assert tier.incomplete() == [tier.root / f"slot-{writer.index}"]
    other = MemoryTier(tier.root, base=tier._base)
    write(other, 2)
    assert other.incomplete() == []
    other.discard(other.snapshots()[0])
    assert other.incomplete() == [], "nothing is left of it"
    other.close()


def test_what_a_writer_gave_up_is_not_taken_for_what_a_killed_one_left(tier):
    """Its files, and their pages, serve the next snapshot."""
    write(tier, 1)
    writer = tier.begin(layouts())
    path, buffer = tier.root / f"slot-{writer.index}", writer.buffers["model.safetensors"]
    writer.abort()
    writer.abort()
    assert (path / "model.safetensors").exists()
    assert tier.incomplete() == []
    assert tier.begin(layouts()).buffers["model.safetensors"] is buffer
    tier.close()
    assert tier.incomplete() == [path], "this one was killed"
    snapshot = write(tier, 2)
    assert snapshot.path == path
    assert sorted(p.name for p in path.iterdir()) == ["lock", "manifest.json", *sorted(snapshot.manifest.files)]


@pytest.mark.parametrize("point", ["memory.unpublished", "memory.allocated", *COMMIT_POINTS])
def test_a_writer_that_fails_leaves_nothing_that_looks_like_a_killed_one(tier, point):
    for step in (1, 2):
        write(tier, step)
    faults.arm(f"{point}:1:raise")
    try:
        with pytest.raises(MemoryTierError, match="fault injected"):
            write(tier, 3)
    finally:
        faults.arm(None)
    tier.close()
    assert tier.incomplete() == []
    assert [s.global_step for s in tier.snapshots()] == [2]
    write(tier, 3)
    assert [s.global_step for s in tier.snapshots()] == [3, 2]


def test_a_writer_that_cannot_even_mark_what_it_gives_up_removes_it(tier, monkeypatch):
    write(tier, 1)
    writer = tier.begin(layouts())
    path = tier.root / f"slot-{writer.index}"
    open_file = safefs.open_file

    def full(folder_fd: int, name: str, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "no inode left")
        return open_file(folder_fd, name, path, flags)

    monkeypatch.setattr(safefs, "open_file", full)
    writer.abort()
    monkeypatch.undo()
    assert tier.incomplete() == []
    assert [p.name for p in path.iterdir()] == ["lock"]
    assert write(tier, 2).path == path


def test_a_writer_that_is_killed_while_it_takes_over_what_was_given_up(tier):
    """Between any two steps: it is told of, or it has begun with nothing. The next snapshot is complete."""
    write(tier, 1)
    outcomes = []
    for number in range(1, 5):
        tier.begin(layouts(2000)).abort()
        path = tier.root / "slot-1"
        before = sorted(p.name for p in path.iterdir())
        tier.close()
        if (pid := os.fork()) == 0:
            unlink, done = os.unlink, []

            def killed(name, *, dir_fd=None, unlink=unlink, done=done, number=number):
                done.append(name)
                if len(done) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                unlink(name, dir_fd=dir_fd)

            os.unlink = killed
            try:
                tier.begin(layouts(1000))
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        told = tier.incomplete()
        assert told == [path] or sorted(p.name for p in path.iterdir()) == before
        outcomes.append(bool(told))
        assert [s.global_step for s in tier.snapshots()] == [1]
        assert tier.newest is None or tier.newest.global_step == 1
    assert set(outcomes) == {False, True}
    assert write(tier, 2).path == path
    assert tier.incomplete() == []


def test_a_snapshot_that_is_committed_while_it_is_looked_for_what_is_left_is_not_named(tier, monkeypatch):
    write(tier, 1)
    writer = tier.begin(layouts())
    read_slots = MemoryTier._read_slots

    def then_commit(self):
        found = read_slots(self)
        fill(writer, 2)
        writer.commit(job="job", run_id="0badcafe", global_step=2, versions={}, trainer=trainer(2))
        return found

    other = MemoryTier(tier.root, base=tier._base)
    monkeypatch.setattr(MemoryTier, "_read_slots", then_commit)
    assert other.incomplete() == []
    monkeypatch.undo()
    assert [s.global_step for s in other.snapshots()] == [2, 1]


# ---- memory that is had beforehand


def always(_num_ready: int) -> bool:
    return True


def make_room(tier, size=1000, go_on=always):
    return [files.index for files in tier.make_room(layouts(size), go_on)]


def test_what_room_was_made_for_is_written_to_without_a_fault(tmp_path):
    """Another thread has had the pages allocated and mapped; to the one that trains nothing is left but the copy."""
    size = 1_000_000
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:  # a page of a disk faults again to become dirty
        tier = MemoryTier.for_job(Path(shm), job="job", state_dir=tmp_path)
        with ThreadPoolExecutor() as executor:
            ready = executor.submit(lambda: list(tier.make_room(layouts(size), always))).result()
        assert [files.index for files in ready] == [0, 1]
        assert tier.snapshots() == tier.incomplete() == tier.damaged() == []
        for step, files in enumerate(ready, 1):
            wanted = layouts(size)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            writer = tier.begin(wanted)
            for view in writer.buffers.values():
                np.frombuffer(view, np.uint8)[4095 :: mmap.PAGESIZE] = 1
            num_faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
            num_pages = sum(len(view) for view in writer.buffers.values()) // mmap.PAGESIZE
            assert num_faults < num_pages / 10
            assert writer.index == files.index
            assert all(view is files.buffers[name] for name, view in writer.buffers.items()), "views onto them hold"
            fill(writer, step, size)
            writer.commit(job="job", run_id="0" * 8, global_step=step, versions={}, trainer=trainer(step))
            with open_candidate(newest_first(tier, None)[0], tmp_path) as reader:
                assert_holds(reader, size)
        tier.close()


def test_room_is_made_around_the_snapshots_that_are_there(tier, tmp_path):
    write(tier, 1)
    write(tier, 2)
    tier.close()
    before = {path: path.read_bytes() for path in tier.root.rglob("*") if path.is_file()}
    assert make_room(tier) == [0, 1], "they are mapped anew"
    with OpenSnapshot(tier.snapshots()[0].path, tier.snapshots()[0].name):
        assert make_room(tier) == [0, 1], "also while one is read"
    assert make_room(tier, 2000) == [], "what they hold is not given up for it"
    assert {path: path.read_bytes() for path in tier.root.rglob("*") if path.is_file()} == before
    tier.discard(tier.snapshots()[1])
    assert make_room(tier, 2000) == [0]
    assert tier.incomplete() == []
    assert write(tier, 3, 2000).path.name == "slot-0"
    for candidate, size in zip(newest_first(tier, None), (2000, 1000), strict=True):
        with open_candidate(candidate, tmp_path) as reader:
            assert_holds(reader, size)


@pytest.mark.parametrize("num_asked", range(14))
def test_a_snapshot_may_come_while_room_is_being_made(tier, tmp_path, num_asked):
    """The thread that makes it stops wherever it is told to, and a killed one leaves nothing that looks torn."""
    asked = []

    def go_on(_num_ready: int) -> bool:
        asked.append(None)
        return len(asked) <= num_asked

    ready = make_room(tier, go_on=go_on)
    assert len(ready) == (0 if num_asked < 4 else 1 if num_asked < 8 else 2), len(asked)
    assert tier.snapshots() == tier.incomplete() == tier.damaged() == []
    for step in (1, 2, 3):
        write(tier, step)
        make_room(tier)
        assert [s.global_step for s in tier.snapshots()] == ([step, step - 1] if step > 1 else [1])
        for candidate in newest_first(tier, None):
            with open_candidate(candidate, tmp_path) as reader:
                assert_holds(reader)


def test_who_is_killed_while_making_room_leaves_nothing_that_looks_like_a_snapshot(tier):
    for number in range(1, 9):
        if (pid := os.fork()) == 0:
            asked = []

            def go_on(_num_ready, asked=asked, number=number):
                asked.append(None)
                if len(asked) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return True

            try:
                make_room(tier, go_on=go_on)
            finally:
                os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), number
        assert tier.snapshots() == tier.incomplete() == tier.damaged() == []
        assert tier.clean()
    write(tier, 1)


def test_room_that_cannot_be_made_is_given_back_and_the_snapshot_says_why(small_tmpfs, tmp_path):
    tier = MemoryTier.for_job(small_tmpfs, job="job", state_dir=tmp_path)
    with pytest.raises(MemoryTierError, match="no room"):
        make_room(tier, 100_000)  # 800 kB: one fits, two do not
    assert not any((tier.root / "slot-1" / name).exists() for name in layouts()), "half a slot only takes room"
    write(tier, 1, 100_000)
    with pytest.raises(MemoryTierError, match="no room"):
        write(tier, 2, 100_000)
    assert verify_memory(tier.snapshots()[0]) == []
    tier.close()


def test_no_room_is_made_beyond_the_budget(tmp_path):
    tier = tier_of(tmp_path)
    small = MemoryTier(tier.root, base=tier._base, budget_bytes=15_000)
    assert make_room(small) == []
    assert not (tmp_path / "shm").exists()
    with pytest.raises(MemoryTierError, match="memory_budget_mb"):
        small.begin(layouts())


def test_a_slot_that_another_writes_to_is_left_to_it(tier):
    other = MemoryTier(tier.root, base=tier._base)
    writer = other.begin(layouts())
    fill(writer, 1)
    assert make_room(tier, 2000) == [1]
    writer.commit(job="job", run_id="0" * 8, global_step=1, versions={}, trainer=trainer(1))
    assert verify_memory(other.snapshots()[0]) == []
    other.close()
