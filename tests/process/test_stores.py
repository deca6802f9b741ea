"""The durable tier: one contract over all stores, and what each must withstand."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import pytest

from elastictrain.checkpoint import faults, local_store, object_store
from elastictrain.checkpoint.catalog import first_sound, newest_first, open_candidate
from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.format import snapshot_name
from elastictrain.checkpoint.local_store import LocalStore
from elastictrain.checkpoint.memory_snapshot import OpenSnapshot
from elastictrain.checkpoint.patience import patiently
from elastictrain.checkpoint.store import CHUNK_BYTES, open_store
from elastictrain.checkpoint.stored_file import BLOCK_BYTES
from elastictrain.cli.state_dir import StartOptions, StateDir
from elastictrain.config.schema import JobConfig
from elastictrain.errors import ConfigError, FencedError, MissingInputError, SnapshotDamagedError, StorageError
from elastictrain.procs import Identity
from elastictrain.protocol import JobIdentity
from elastictrain.testing import faulty_fs
from tests.process.snapshot_payload import RUN_ID, assert_holds, layouts, put, store_of, write

DEADLINE_S = 60.0
FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]


@pytest.fixture(params=["path", "file", "memory", "faulty"])
def store(request, tmp_path):
    unique = uuid.uuid4().hex
    url = {
        "path": str(tmp_path / "snapshots"),
        "file": f"file://{tmp_path}/snapshots",
        "memory": f"memory://{unique}/deep",
        "faulty": f"faulty://{unique}/deep",
    }[request.param]
    return open_store(url)


def check(store, tmp_path: Path) -> list[int]:
    """Steps of all snapshots in the store, each of which is read and compared."""
    steps = []
    for candidate in newest_first(None, store):
        scratch = tmp_path / uuid.uuid4().hex
        scratch.mkdir()
        with open_candidate(candidate, scratch) as reader:
            assert_holds(reader)
        steps.append(candidate.global_step)
    return steps


def test_what_is_put_comes_back(store, tier, tmp_path):
    assert store.snapshots() == []
    moved = []
    snapshot = write(tier, 5)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        store.put(source, moved.append)
    assert sum(moved) >= snapshot.manifest.size_bytes
    put(store, tier, 7)
    assert check(store, tmp_path) == [7, 5]
    assert store.verify(snapshot.name) == []
    assert store.read_manifest(snapshot.name) == snapshot.manifest
    put(store, tier, 7)  # another try of the same step
    assert check(store, tmp_path) == [7, 5]


def test_delete_and_pins(store, tier):
    name = put(store, tier, 1)
    store.pin(RUN_ID, 1, "run in /elsewhere")
    store.pin(RUN_ID, 1, "another")
    assert sorted(store.pins()[(RUN_ID, 1)]) == ["another", "run in /elsewhere"]
    store.unpin(RUN_ID, 1, "another")
    store.unpin(RUN_ID, 1, "never pinned")
    assert store.pins() == {(RUN_ID, 1): ["run in /elsewhere"]}
    store.delete(name)
    store.delete(name)
    assert store.snapshots() == []
    with pytest.raises(SnapshotDamagedError, match=r"manifest\.json"):
        store.read_manifest(name)


def test_a_pin_that_is_taken_back_while_the_pins_are_read_takes_no_other_with_it(store, tier, monkeypatch):
    """Else whoever deletes at that moment would see no pins at all."""
    put(store, tier, 1)
    for owner in ("a", "b", "c"):
        store.pin(RUN_ID, 1, owner)
    reader, method = (Path, "read_bytes") if isinstance(store, LocalStore) else (store._fs, "cat_file")
    original, unpinned = getattr(reader, method), []

    def unpin_first(*args, **kwargs):
        if not unpinned:
            owner = json.loads(original(*args, **kwargs))["owner"]
            unpinned.append(owner)
            store.unpin(RUN_ID, 1, owner)
        return original(*args, **kwargs)

    monkeypatch.setattr(reader, method, unpin_first)
    assert sorted(store.pins()[(RUN_ID, 1)]) == sorted({"a", "b", "c"} - set(unpinned))
    assert len(unpinned) == 1


def pinned(store, step: int) -> bool:
    """Pins; False if it came too late."""
    try:
        store.pin(RUN_ID, step, "another")
    except MissingInputError:
        return False
    return True


def assert_agreed(store, name: str, step: int, has_pin: bool, deleted: bool) -> None:
    """Whoever pins and whoever deletes believe the same, and it is so."""
    assert has_pin is not deleted
    assert (name in [s.name for s in store.snapshots()]) is has_pin
    assert ((RUN_ID, step) in store.pins()) is has_pin
    if has_pin:
        assert store.verify(name) == []
        assert store._marks(name) == []


@pytest.mark.parametrize("when", ["first pins", "mark", "second pins", "manifest"])
def test_a_pin_at_any_moment_of_a_deletion(store, tier, monkeypatch, when):
    """The pin begins right before each thing that the deletion does, and waits or not: they agree."""
    name, answers = put(store, tier, 1), []
    written = threading.Event()
    pinner = threading.Thread(target=lambda: answers.append(pinned(store, 1)))
    write_pin, pins, mark, delete = store._write_pin, store.pins, store._mark, store.delete
    looks = iter(["first pins", "second pins"])

    def noting(*args) -> None:
        write_pin(*args)
        written.set()

    def begin_at(place: str) -> None:
        if place == when:
            pinner.start()
            assert written.wait(DEADLINE_S)

    monkeypatch.setattr(store, "_write_pin", noting)
    monkeypatch.setattr(store, "pins", lambda: begin_at(next(looks, "")) or pins())
    monkeypatch.setattr(store, "_mark", lambda *args: begin_at("mark") or mark(*args))
    monkeypatch.setattr(store, "delete", lambda *args: begin_at("manifest") or delete(*args))
    deleted = store.delete_unless_pinned(name)
    pinner.join()
    assert_agreed(store, name, 1, answers[0], deleted)
    assert deleted is (when == "manifest"), "only a pin that comes after the last look is too late"


@pytest.mark.parametrize("when", ["_write_pin", "_marks", "snapshots"])
def test_a_deletion_at_any_moment_of_a_pin(store, tier, monkeypatch, when):
    """All of the deletion happens right before each thing that whoever pins does."""
    name, deleted = put(store, tier, 1), []
    original = getattr(store, when)

    def interrupted(*args):
        monkeypatch.undo()
        deleted.append(store.delete_unless_pinned(name))
        return original(*args)

    monkeypatch.setattr(store, when, interrupted)
    has_pin = pinned(store, 1)
    assert_agreed(store, name, 1, has_pin, deleted[0])
    assert deleted[0] is (when == "_write_pin")


def test_who_was_killed_while_deleting_leaves_no_pin_that_does_not_hold(store, tier, tmp_path, monkeypatch):
    """Its mark stays: a pin is refused after a while, and the next deletion goes through."""
    name = put(store, tier, 1)

    def killed(_point: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("elastictrain.checkpoint.faults.point", killed)
    with pytest.raises(KeyboardInterrupt):
        store.delete_unless_pinned(name)
    monkeypatch.undo()
    assert check(store, tmp_path) == [1], "it is still whole"
    with pytest.raises(MissingInputError, match=r"step 1 in .* just being deleted"):
        store.pin(RUN_ID, 1, "another", patience_s=0.1)
    assert store.pins() == {}
    assert store.delete_unless_pinned(name)
    assert store.snapshots() == []


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("tier_name", ["memory", "durable"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_anywhere_is_named_and_the_previous_one_is_used(tier, tmp_path, file, tier_name, damage):
    store = store_of(tmp_path)
    put(store, tier, 1)
    name = put(store, tier, 2)
    folder = store.path / name if tier_name == "durable" else tier.snapshots()[0].path
    path = folder / file
    size = path.stat().st_size
    data = path.read_bytes()
    # Every place of a small file, and places all over a large one; JSON files end in a newline that means nothing.
    for place in range(0, size - 1, max(1, size // 40)):
        if damage == "flip":
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        elif damage == "cut":
            path.write_bytes(data[:place])
        else:
            path.unlink()
        passed_over: list[str] = []
        candidates = newest_first(tier, None) if tier_name == "memory" else newest_first(None, store)
        opened = partial(open_candidate, scratch=tmp_path)
        with first_sound(candidates, opened, lambda c, error: passed_over.append(error.what)) as reader:  # noqa: B023
            assert reader.manifest.global_step == 1
            assert_holds(reader)
        problems = [*passed_over, *(str(d) for _, d in tier.damaged())]
        if (file, damage) != ("manifest.json", "remove"):  # without a manifest there is no snapshot
            assert problems, place
            assert all(file in problem for problem in problems)
        path.write_bytes(data)
        if damage == "remove":
            break


def test_a_commit_is_on_the_disk_before_it_shows_and_stays_there(tier, tmp_path, monkeypatch):
    """What is there when the power goes: every file and its folder before the rename, the folder above after it."""
    store, done = open_store(tmp_path / "new" / "snapshots"), []
    fsync, rename = os.fsync, Path.rename

    def place(path: Path) -> str:
        relative = path.relative_to(tmp_path)
        return str(relative.with_name("tmp") if path.name.startswith(".tmp-") else relative)

    def note_fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        done.append(("fsync", path.name if path.is_file() else place(path)))
        fsync(fd)

    def note_rename(path: Path, target: Path) -> Path:
        done.append(("rename", place(target)))
        return rename(path, target)

    snapshot = write(tier, 1)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        store.put(source)
    assert done[:2] == [("fsync", "."), ("fsync", "new")], "the folders that were made"
    assert sorted(done[2:5]) == [("fsync", name) for name in sorted(FILES) if name != "manifest.json"]
    assert done[5:] == [
        ("fsync", "manifest.json"),
        ("fsync", "new/snapshots/tmp"),
        ("rename", f"new/snapshots/{snapshot.name}"),
        ("fsync", "new/snapshots"),
    ]
    done.clear()
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        store.put(source)
    assert done == [("fsync", "new/snapshots")], "it is there; who renamed it may have been killed before that"


def test_a_damaged_one_is_replaced_and_a_sound_one_left(tier, tmp_path):
    store = store_of(tmp_path)
    snapshot = write(tier, 3)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        store.put(source)
        path = store.path / snapshot.name / "model.safetensors"
        inode = path.stat().st_ino
        store.put(source)
        assert path.stat().st_ino == inode
        path.write_bytes(path.read_bytes()[:-1])
        store.put(source)
        assert path.stat().st_ino != inode
    assert check(store, tmp_path) == [3]
    assert [p.name for p in store.path.iterdir()] == [snapshot.name]


@pytest.mark.parametrize("protocol", ["path", "memory"])
def test_a_source_that_was_damaged_is_not_stored(tier, tmp_path, protocol):
    store = open_store(tmp_path / "s" if protocol == "path" else f"memory://{uuid.uuid4().hex}")
    snapshot = write(tier, 1)
    path = snapshot.path / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with (
        OpenSnapshot(snapshot.path, snapshot.name) as source,
        pytest.raises(SnapshotDamagedError, match=r"optimizer\.safetensors"),
    ):
        store.put(source)
    assert store.snapshots() == []


@pytest.mark.parametrize("jump_s", [-3600.0, 0.0, 3600.0])
def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tier, tmp_path, jump_s):
    """Whatever the clock said when they were written."""
    store = store_of(tmp_path)
    name = put(store, tier, 1)
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = os.uname().nodename
    me = Identity.mine()
    writer = f"{me.pid}.{me.started_ticks}.{me.boot}"
    living = f".tmp-{snapshot_name(2, RUN_ID)}-{host}-{writer}-00000000"
    elsewhere = f".tmp-{snapshot_name(2, RUN_ID)}-other_host-{dead.pid}.1.{me.boot}-00000000"
    gone = [
        f".tmp-{snapshot_name(2, RUN_ID)}-{host}-{dead.pid}.{me.started_ticks}.{me.boot}-00000000",
        f".tmp-{snapshot_name(2, RUN_ID)}-{host}-{me.pid}.{me.started_ticks - 1}.{me.boot}-00000000",  # the same number
        f".tmp-{snapshot_name(2, RUN_ID)}-{host}-{me.pid}.{me.started_ticks}.00000000-00000000",  # before a reboot
        f".damaged-{name}-00000000",
        snapshot_name(2, RUN_ID),
    ]
    for folder in [living, elsewhere, *gone]:
        (store.path / folder).mkdir()
        (store.path / folder / "model.safetensors").write_text("x")
        os.utime(store.path / folder, (time.time() + jump_s,) * 2)
    assert store.leftovers() == sorted(gone)
    assert {path.name for path in store.path.iterdir()} == {name, living, elsewhere, *gone}, "only asked"
    assert store.clean_leftovers() == sorted(gone)
    assert sorted(p.name for p in store.path.iterdir()) == sorted([living, elsewhere, name])


def test_in_a_shared_folder_what_writers_of_older_worker_groups_left_goes_too(tier, tmp_path):
    """Of a writer on another host nobody can tell whether it lives; if it does, it may complete nothing any more."""
    store = store_of(tmp_path)
    store.claim(fence(5))

    def left(run_id: str, host: str, group: str) -> str:
        name = f".tmp-{snapshot_name(2, run_id)}-{host}-1.1.0{group}-00000000"
        (store.path / name).mkdir()
        (store.path / name / "model.safetensors").write_text("x")
        return name

    gone = [left(RUN_ID, "other_host", ".3"), left(RUN_ID, "third.host", ".4")]
    stay = [
        left(RUN_ID, "other_host", ".5"),
        left(RUN_ID, "other_host", ".6"),
        left(RUN_ID, "other_host", ""),
        left("0000ffff", "other_host", ".1"),
    ]
    assert store_of(tmp_path).leftovers() == sorted(gone), "whoever asks"
    assert store.clean_leftovers() == sorted(gone)
    assert sorted(p.name for p in store.path.glob(".tmp-*")) == sorted(stay)
    names = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", lambda _name: names.extend(p.name for p in store.path.glob(".tmp-*.5-*")))
        put(store, tier, 1)
    assert set(names) - set(stay), "its own name says which group it is of"


def test_an_older_writer_whose_files_are_taken_away_hears_that_it_is_over(tier, tmp_path):
    old, new = store_of(tmp_path), store_of(tmp_path)
    old.claim(fence(4))
    taken = []

    def point(name: str) -> None:
        if name == "store.copied" and not taken:
            with pytest.MonkeyPatch.context() as elsewhere:
                elsewhere.setattr(local_store, "_host", lambda: "other_host")
                new.claim(fence(5))
                taken.extend(new.clean_leftovers())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", point)
        with pytest.raises(StorageError):
            put(old, tier, 1)
    assert len(taken) == 1
    with pytest.raises(FencedError):
        put(old, tier, 2)
    put(new, tier, 3)
    assert check(new, tmp_path) == [3]
    assert not list(new.path.glob(".tmp-*"))


def test_leftovers_in_an_object_store_go_once_the_run_has_gone_on(tier):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    old = put(store, tier, 1)
    new = put(store, tier, 3)
    for name in (old, new):
        store._fs.rm_file(store._path(name))
    assert store.clean_leftovers() == []
    put(store, tier, 2)
    assert store.clean_leftovers() == [old]
    assert store._fs.exists(store._path(new, "model.safetensors"))


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_who_cleans_up_while_an_older_step_is_written_again_tears_nothing(tier, tmp_path, monkeypatch, num_files):
    """A run that goes on from before a damaged snapshot writes what looks like a leftover, until its manifest is there.
    Somebody cleans up after each file in turn: all of it is stored by one try, or nothing."""
    url = f"memory://{uuid.uuid4().hex}"
    put(open_store(url), tier, 100)
    snapshot, other, copied = write(tier, 90), open_store(url), []

    def clean_up(point: str) -> None:
        if point == "store.copied":
            copied.append(point)
            if len(copied) == num_files:
                assert other.clean_leftovers() == [snapshot.name]

    monkeypatch.setattr(faults, "point", clean_up)
    store = open_store(url)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        with pytest.raises(StorageError, match="was removed or replaced while the rest was written"):
            store.put(source)
        assert check(other, tmp_path) == [100]
        store.put(source)
    assert check(other, tmp_path) == [100, 90]


@pytest.mark.parametrize("begins", ["before it is published", "after"])
def test_who_cleans_up_while_it_is_published_tears_nothing(tier, tmp_path, monkeypatch, begins):
    """Closer together than any look beforehand: the one has found no manifest, and has not deleted yet, while the other
    puts one. Or the other way round."""
    url = f"memory://{uuid.uuid4().hex}"
    put(open_store(url), tier, 100)
    snapshot, other = write(tier, 90), open_store(url)
    has_looked, is_published = threading.Event(), threading.Event()
    cleaning = threading.Thread(target=other.clean_leftovers, daemon=True)

    def point(name: str) -> None:
        if threading.current_thread() is cleaning:
            if name == ("store.delete" if begins == "before it is published" else "store.marked"):
                has_looked.set()
                assert is_published.wait(DEADLINE_S)
        elif name == "store.files" and not cleaning.is_alive() and not has_looked.is_set():
            cleaning.start()
            # Its look comes before ours at the files: they are all there still.
            assert has_looked.wait(DEADLINE_S)
        elif name == "store.manifest":
            is_published.set()

    monkeypatch.setattr(faults, "point", point)
    store = open_store(url)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        if begins == "after":
            store.put(source)
        else:
            with pytest.raises(StorageError, match="was removed or replaced while the rest was written"):
                store.put(source)
            cleaning.join(DEADLINE_S)
            assert check(other, tmp_path) == [100]
            assert all(snapshot.name not in path for path in store._fs.find(store._root))
            store.put(source)
    cleaning.join(DEADLINE_S)
    assert check(other, tmp_path) == [100, 90]
    assert all("deleting-" not in path for path in store._fs.find(store._root))


def test_a_mark_that_stays_is_named(tier, tmp_path, monkeypatch):
    """Of one who cleans up and was killed, or who is slow: nobody can tell."""
    monkeypatch.setattr(object_store, "PIN_PATIENCE_S", 0.1)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    snapshot = write(tier, 90)
    store._mark(snapshot.name, "deleting-1")
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        with pytest.raises(StorageError, match="deleting-1"):
            store.put(source)
        assert check(store, tmp_path) == []
        put(store, tier, 100)
        assert store.clean_leftovers() == [snapshot.name]
        snapshot = write(tier, 90)
    put_again = put(store, tier, 90)
    assert put_again == snapshot.name
    assert check(store, tmp_path) == [100, 90]


def test_what_was_complete_by_the_time_it_is_cleaned_up_stays(tier, tmp_path, monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    put(store, tier, 100)
    name = put(store, tier, 90)
    monkeypatch.setattr(store, "leftovers", lambda: [name])  # as it was a moment ago
    store.clean_leftovers()
    assert check(store, tmp_path) == [100, 90]


CALLS = [
    f"{kind}:{number}"
    for kind, most in {"write": 2, "close": 2, "put": 1, "ls": 1, "get": 1, "read": 4, "info": 15}.items()
    for number in range(1, most + 1)
]
AFTER_THE_MANIFEST = [f"info:{n}" for n in (12, 13, 14, 15)]
"""Each file is there still, and the manifest."""
FAULTS = [
    *((call, "fail") for call in CALLS),
    *((call, "truncate") for call in CALLS if call.partition(":")[0] in faulty_fs.WITH_DATA),
]


@pytest.mark.parametrize(("fault", "action"), FAULTS)
def test_a_store_that_fails_once_leaves_nothing_torn_and_the_next_try_works(tier, tmp_path, fault, action):
    unique = uuid.uuid4().hex
    sound = open_store(f"faulty://{unique}")
    put(sound, tier, 1)
    store = open_store(f"faulty://{unique}", {"faults": {fault: action}, "counter": unique})
    snapshot = write(tier, 2)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        try:
            store.put(source)
        except StorageError:
            # Complete all the same where only a look at what was published failed; torn in no case.
            has_published = action == "fail" and fault in ("ls:1", "get:1", *AFTER_THE_MANIFEST)
            assert check(sound, tmp_path) == ([2, 1] if has_published else [1])
        store.put(source)
    assert faulty_fs.counts(unique)[fault.partition(":")[0]] >= int(fault.partition(":")[2])
    assert check(sound, tmp_path) == [2, 1]


@pytest.mark.parametrize(
    ("fault", "action", "why"),
    [
        *((f"{kind}:1", "truncate", f"{kind} carries no data") for kind in ("close", "info", "ls", "delete")),
        ("rename:1", "fail", "no call 'rename'"),
        ("write", "fail", "needs the number"),
        ("write:0", "fail", "needs the number"),
        ("write:1", "cut", "no 'cut'"),
    ],
)
def test_a_fault_that_would_never_happen_is_refused(fault, action, why):
    with pytest.raises(ValueError, match=f"fault '{fault}': .*{why}"):
        faulty_fs.FaultyFileSystem(faults={fault: action})
    with pytest.raises(ConfigError, match=why):
        open_store("faulty://x", {"faults": {fault: action}})


# ---- what is opened


def test_progress_is_told_piece_by_piece(store, tier, tmp_path):
    """While a file is downloaded, not after it, and while it is hashed; in the thread that waits."""
    size = 3_000_000  # floats: a file and a half of a piece
    snapshot = write(tier, 1, size)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        store.put(source)
    told: list[tuple[int, threading.Thread]] = []

    def progress(num_bytes: int) -> None:
        told.append((num_bytes, threading.current_thread()))

    size_bytes = sum(entry.size_bytes for entry in snapshot.manifest.files.values())
    for candidate in newest_first(tier, store):
        told.clear()
        with open_candidate(candidate, tmp_path, progress) as reader:
            assert_holds(reader, size)
        is_stored, is_downloaded = candidate.store is not None, store.is_downloaded and candidate.store is not None
        num_times = 2 if is_downloaded else 1
        assert sum(num_bytes for num_bytes, _ in told) == num_times * size_bytes
        piece_bytes = BLOCK_BYTES if is_stored and not is_downloaded else CHUNK_BYTES
        assert max(num_bytes for num_bytes, _ in told) == piece_bytes
        assert {thread for _, thread in told} == {threading.current_thread()}


def test_a_file_that_has_arrived_does_not_come_again(tier, tmp_path):
    """The store fails in the middle of the second file, which alone is fetched once more."""
    unique = uuid.uuid4().hex
    put(open_store(f"faulty://{unique}"), tier, 1)
    store = open_store(f"faulty://{unique}", {"faults": {"read:4": "fail"}, "counter": unique})
    waits: list[str] = []

    def attempt(act):
        return patiently(act, patience_s=DEADLINE_S, on_wait=lambda error, _pause_s: waits.append(error))

    with open_candidate(newest_first(None, store)[0], tmp_path, attempt=attempt) as reader:
        assert_holds(reader)
    assert len(waits) == 1
    assert "optimizer.safetensors" in waits[0]
    # The data and the end of each of three files, and those of the second once more.
    assert (faulty_fs.counts(unique)["get"], faulty_fs.counts(unique)["read"]) == (1, 8)


def test_without_reading_back_a_cut_is_still_found_by_size(tier):
    unique = uuid.uuid4().hex
    options = {"faults": {"write:1": "truncate"}, "counter": unique}
    store = open_store(f"faulty://{unique}", options, verify_uploads=False)
    with pytest.raises(StorageError, match=r"model\.safetensors.*stored wrongly|stored wrongly.*model\.safetensors"):
        put(store, tier, 1)
    assert store.snapshots() == []


def test_a_full_disk_is_an_error_that_leaves_nothing_and_passes(tier, tmp_path, small_disk):
    store = open_store(small_disk / "snapshots")
    put(store, tier, 1)
    filler = small_disk / "filler"
    free_bytes = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(free_bytes - 8192))
    snapshot = write(tier, 2)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        with pytest.raises(StorageError, match="No space left"):
            store.put(source)
        assert [p.name for p in store.path.iterdir()] == [snapshot_name(1, RUN_ID)]
        assert check(store, tmp_path) == [1]
        filler.unlink()
        store.put(source)
    assert check(store, tmp_path) == [2, 1]


def test_an_unknown_protocol_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"checkpoint\.url = nosuch://\*\*\*@x"):
        open_store("nosuch://me:secret@x")


def test_a_store_that_cannot_be_listed_says_so_without_its_credentials():
    unique = uuid.uuid4().hex
    store = open_store(f"faulty://{unique}", {"faults": {"ls:1": "fail"}, "counter": unique})
    with pytest.raises(StorageError, match="listing"):
        store.snapshots()


def test_a_folder_that_cannot_be_made_says_so(tmp_path, tier):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        put(open_store(tmp_path / "file" / "x"), tier, 1)


def test_the_whole_store_can_be_moved(tier, tmp_path):
    store = store_of(tmp_path)
    put(store, tier, 1)
    shutil.move(store.path, tmp_path / "moved")
    assert check(open_store(tmp_path / "moved"), tmp_path) == [1]
    assert sum(layout.size_bytes for layout in layouts().values()) > 0


# ---- worker groups that follow one another on several nodes


def fence(number: int, run_id: str = RUN_ID) -> Fence:
    return Fence(run_id, number, f"job-{number}-abc")


def twin(store):
    """The same place, as another node has it."""
    if isinstance(store, LocalStore):
        return LocalStore(store.path)
    other = copy.copy(store)
    other.fence = None
    return other


def test_a_newer_worker_group_takes_over_and_the_older_one_writes_nothing_more(store, tier, tmp_path):
    old, new = store, twin(store)
    old.claim(fence(4))
    put(old, tier, 1)
    new.claim(fence(7))
    assert old.read_fence(RUN_ID) == fence(7)
    with pytest.raises(FencedError, match="job-4-abc may write nothing more: job-7-abc has begun since"):
        put(old, tier, 2)
    name = put(new, tier, 3)
    for forbidden in (lambda: old.delete(name), lambda: old.delete_unless_pinned(name), lambda: put(old, tier, 3)):
        with pytest.raises(FencedError):
            forbidden()
    with pytest.raises(FencedError):
        old.claim(fence(4))
    assert check(new, tmp_path) == [3, 1]
    assert not new.pins()
    new.pin(RUN_ID, 3, "somebody")  # no mark of a deletion is left


def test_a_fence_is_for_one_run_and_for_those_that_claim(store, tier, tmp_path):
    store.claim(fence(9, "0000ffff"))
    other = twin(store)
    other.claim(fence(1))
    put(other, tier, 1)
    put(twin(store), tier, 2)  # a job on one node asks nobody
    assert check(store, tmp_path) == [2, 1]


def test_a_fence_that_is_no_fence_or_an_older_one_is_written_again(store, tier):
    store.claim(fence(5))
    for left in (b"", b"{}", b"[1]", fence(3).encode()):
        twin(store)._write_fence(Mangled(left))
        put(store, tier, 1)
        assert store.read_fence(RUN_ID) == fence(5)


class Mangled:
    """Somebody's idea of a fence."""

    file = fence(0).file

    def __init__(self, content: bytes) -> None:
        self._content = content

    def encode(self) -> bytes:
        return self._content


@pytest.mark.parametrize("point", ["store.files", "store.copied"])
def test_a_worker_group_that_begins_while_an_older_one_writes_keeps_it_from_committing(
    store, tier, tmp_path, monkeypatch, point
):
    """Right before the commit it is looked once more."""
    old, new = store, twin(store)
    old.claim(fence(4))
    monkeypatch.setattr(faults, "point", lambda name: new.claim(fence(5)) if name == point else None)
    with pytest.raises(FencedError):
        put(old, tier, 1)
    monkeypatch.undo()
    assert check(new, tmp_path) == []
    put(new, tier, 1)
    assert check(new, tmp_path) == [1]


def test_in_a_folder_nobody_begins_between_the_last_look_and_the_commit(tier, tmp_path):
    old = LocalStore(tmp_path / "snapshots")
    old.claim(fence(4))
    began = threading.Event()
    claiming = threading.Thread(target=lambda: (LocalStore(old.path).claim(fence(5)), began.set()))
    with old._allowed():
        claiming.start()
        assert not began.wait(0.2)
        assert old.read_fence(RUN_ID) == fence(4)
    claiming.join()
    assert old.read_fence(RUN_ID) == fence(5)


def test_a_node_with_a_new_state_directory_numbers_on_from_what_has_begun_elsewhere(tmp_path):
    store = LocalStore(tmp_path / "snapshots")
    store.claim(fence(7))
    config = JobConfig.model_validate(
        {
            "name": "job",
            "task": "elastictrain.examples.lm:Task",
            "train": {"max_steps": 1, "micro_batch_size": 1},
            "checkpoint": {"url": str(store.path)},
        }
    )
    state = StateDir(tmp_path / "state")
    assert state.last_number == 0
    JobIdentity(run_id=RUN_ID, global_batch_size=None, source=None).write(state.path)
    assert state.lineage(config, StartOptions()).run_id == RUN_ID
    assert state.last_number == 7
    store.path.rename(tmp_path / "away")
    store.path.write_text("what cannot be a store")
    again = StateDir(tmp_path / "state")
    assert again.lineage(config, StartOptions()).run_id == RUN_ID
    assert again.last_number == 0, "a store that cannot be read keeps nobody from starting"
