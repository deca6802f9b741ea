"""A durable folder that cannot be read: real refusals of the kernel, each told with file and reason."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from elastictrain.checkpoint.catalog import first_sound, newest_first, open_candidate
from elastictrain.checkpoint.format import digest, snapshot_name
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.patience import patiently
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.checkpoint.stored_file import BLOCK_BYTES, StoredFile
from elastictrain.cli import main as command_line
from elastictrain.errors import SnapshotDamagedError, StateDirError, StorageError, UnreadableFileError
from tests.process.conftest import DeadDisk
from tests.process.snapshot_payload import RUN_ID, assert_holds, put, store_of, tier_of

NOBODY = 65534
DEADLINE_S = 60.0
LOST_SIZE = 3 << 20
"""Of the arrays of a snapshot that is lost in part: its files have more than one piece."""
BROKEN_FILE = Path("/proc/self/mem")
"""Nothing is mapped at address zero, where a read begins: the kernel says EIO."""


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user whom permissions hold."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[MemoryTier]:
    (tmp_path / "shm").mkdir()
    made = tier_of(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("unfit", ["a file", "shut"])
def test_a_memory_path_that_cannot_be_opened_is_named(tmp_path, unfit):
    path = tmp_path / unfit
    if unfit == "shut":
        path.mkdir(mode=0)
    else:
        path.touch()
    with without_privileges(), pytest.raises(StateDirError, match=f"{unfit} cannot be opened") as raised:
        MemoryTier.for_job(path, job="job", state_dir=Path("/")).snapshots()
    assert "memory_path" in raised.value.hint


@pytest.fixture
def locked(tier) -> Iterator[Path]:
    """A store that everybody may read, but for the folder of its newest snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        store = open_store(Path(folder) / "snapshots")
        put(store, tier, 1)
        name = put(store, tier, 2)
        (store.path / name).chmod(0)
        yield store.path
        (store.path / name).chmod(0o700)


@pytest.fixture(params=["this", "3.14"])
def python(request, monkeypatch) -> None:
    """From Python 3.14 on pathlib takes any error for "there is none"."""
    if request.param == "3.14":
        for question in ("exists", "is_file", "is_dir"):
            answer = getattr(os.path, question.replace("_", ""))
            monkeypatch.setattr(Path, question, lambda path, answer=answer, **_kwargs: answer(path))


@pytest.mark.usefixtures("python")
def test_a_folder_that_may_not_be_entered_is_named(locked):
    store, path = open_store(locked), locked / snapshot_name(2, RUN_ID)
    calls = {
        "snapshots": store.snapshots,
        "leftovers": store.leftovers,
        "clean_leftovers": store.clean_leftovers,
        "verify": lambda: store.verify(path.name),
        "fetch": lambda: store.fetch(path.name, "model.safetensors", locked),
        "open": lambda: store.open(path.name, "model.safetensors"),
        "marks": lambda: store._marks(path.name),
        "StoredFile": lambda: StoredFile(path / "model.safetensors"),
    }
    for name, call in calls.items():
        with without_privileges(), pytest.raises(StorageError, match="Permission denied") as raised:
            call()
        assert str(path if not name.endswith("leftovers") else locked) in raised.value.what, name
    path.chmod(0o700)
    assert store.verify(path.name) == []


@pytest.mark.parametrize("command", ["list", "verify", "show"])
def test_the_commands_name_it_without_a_traceback(locked, command, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["elastictrain", "checkpoints", command, "--url", str(locked)])
    with without_privileges(), pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == StorageError.exit_code
    said = capsys.readouterr().err.replace("\n", "")
    assert f"{locked}/{snapshot_name(2, RUN_ID)}/manifest.json: Permission denied" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_damage(tier, tmp_path, file):
    store = store_of(tmp_path)
    name = put(store, tier, 1)
    path = store.path / name / file
    path.unlink()
    path.symlink_to(BROKEN_FILE)
    assert list(map(str, store.verify(name))) == [f"{file}: cannot be read: Input/output error"]
    path.unlink()
    path.mkdir()
    assert list(map(str, store.verify(name))) == [f"{file}: is a folder"]


def test_a_broken_file_is_tried_again_and_then_passed_over(tier, tmp_path):
    store = store_of(tmp_path)
    put(store, tier, 1)
    name = put(store, tier, 2)
    path = store.path / name / "manifest.json"
    path.unlink()
    path.symlink_to(BROKEN_FILE)
    waits, passed_over = [], []
    attempt = partial(patiently, patience_s=0.1, on_wait=lambda what, _pause_s: waits.append(what))
    opened = partial(open_candidate, scratch=tmp_path, attempt=attempt)
    with first_sound(newest_first(None, store), opened, lambda c, e: passed_over.append((c.name, e.what))) as reader:
        assert reader.manifest.global_step == 1
        assert_holds(reader)
    assert waits[0] == f"{path}: Input/output error"
    assert passed_over == [(name, f"{path}: Input/output error (tried for 0.1 s)")]


@pytest.fixture
def lossy_disk(tier, tmp_path, mortal_disk: DeadDisk) -> LossyDisk:
    """A disk that has lost the large files of its newest snapshot, of two."""
    store = open_store(mortal_disk.path)
    put(store, tier, 1)
    name = put(store, tier, 2, LOST_SIZE)
    files = [store.path / name / file for file in ("model.safetensors", "optimizer.safetensors")]
    # Nothing is written any more: that would make the image long again, with zeros where the files were.
    subprocess.run(["mount", "-o", "remount,ro", mortal_disk.path], check=True)
    image = tmp_path / "disk.img"
    begin = (min(map(first_block, files)) + 1) * os.statvfs(store.path).f_bsize
    with image.open("rb") as file:
        file.seek(begin)
        lost = file.read()
    os.truncate(image, begin)
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return LossyDisk(store, files, image, lost)


@dataclass
class LossyDisk:
    """The image below a file system, cut short: what lay there is EIO, for real."""

    store: Store
    files: list[Path]
    image: Path
    lost: bytes

    def give_back(self) -> None:
        """What was lost."""
        with self.image.open("ab") as file:
            file.write(self.lost)


def test_what_a_disk_has_lost_is_an_error_that_names_the_file(lossy_disk, tmp_path):
    newest, before = newest_first(None, lossy_disk.store)
    assert {str(damage) for damage in newest.verify()} == {
        f"{path.name}: cannot be read: Input/output error" for path in lossy_disk.files
    }
    passed_over = []
    attempt = partial(patiently, patience_s=0.1, on_wait=lambda _what, _pause_s: None)
    opened = partial(open_candidate, scratch=tmp_path, attempt=attempt)
    with first_sound([newest, before], opened, lambda c, e: passed_over.append((c, e))) as reader:
        assert reader.candidate == before
        assert_holds(reader)
    ((candidate, error),) = passed_over
    assert candidate == newest
    assert isinstance(error, UnreadableFileError)
    assert error.what in {f"{path}: Input/output error (tried for 0.1 s)" for path in lossy_disk.files}
    assert before.verify() == []


def test_what_a_disk_gives_back_while_it_is_tried_is_read(lossy_disk, tmp_path):
    """As a server on NFS does that comes back."""
    failures = []

    def wait(what: str, _pause_s: float) -> None:
        if not failures:
            lossy_disk.give_back()
        failures.append(what)

    attempt = partial(patiently, patience_s=DEADLINE_S, on_wait=wait)
    newest = newest_first(None, lossy_disk.store)[0]
    with open_candidate(newest, tmp_path, attempt=attempt) as reader:
        assert_holds(reader, LOST_SIZE)
    assert len(failures) == 1
    assert failures[0] in {f"{path}: Input/output error" for path in lossy_disk.files}


def test_a_file_whose_handle_the_server_has_forgotten_is_opened_anew_and_no_other_is_read_again(
    tier, tmp_path, monkeypatch
):
    """ESTALE, which holds for what was open before: it needs an NFS server to come of itself."""
    store = store_of(tmp_path)
    path = store.path / put(store, tier, 1) / "model.safetensors"
    forgotten = path.stat().st_ino
    original = os.preadv
    waits, hashed = [], []

    def forget(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino == forgotten:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(fd, buffers, offset)

    def wait(what: str, _pause_s: float) -> None:
        waits.append(what)
        if len(waits) == 1:
            (tmp_path / "again").write_bytes(path.read_bytes())
            (tmp_path / "again").rename(path)

    monkeypatch.setattr(os, "preadv", forget)
    attempt = partial(patiently, patience_s=DEADLINE_S, on_wait=wait)
    with open_candidate(newest_first(None, store)[0], tmp_path, hashed.append, attempt) as reader:
        assert_holds(reader)
        assert sum(hashed) == sum(entry.size_bytes for entry in reader.manifest.files.values())
    assert waits == [f"{path}: {os.strerror(errno.ESTALE)}"]


@pytest.mark.parametrize("by_then", ["the same", "another", "gone"])
def test_what_cannot_be_read_a_second_time_is_tried_again(tier, tmp_path, monkeypatch, by_then):
    """It was hashed, and fails while it is taken over. What is opened anew need not be what it was."""
    store = store_of(tmp_path)
    name = put(store, tier, 1)
    path = store.path / name / "optimizer.safetensors"
    broken = path.stat().st_ino
    original = os.preadv
    waits = []

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(fd).st_ino == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset)

    def wait(what: str, _pause_s: float) -> None:
        waits.append(what)
        content = bytearray(path.read_bytes())
        content[-1] ^= by_then == "another"
        path.rename(tmp_path / "before")  # its number stays taken
        if by_then != "gone":
            path.write_bytes(content)

    was_open = sorted(Path("/proc/self/fd").iterdir())
    attempt = partial(patiently, patience_s=DEADLINE_S, on_wait=wait)
    with open_candidate(newest_first(None, store)[0], tmp_path, attempt=attempt) as reader:
        monkeypatch.setattr(os, "preadv", fail)
        if by_then == "the same":
            assert_holds(reader)
        else:
            with pytest.raises(SnapshotDamagedError, match=r"optimizer\.safetensors"):
                assert_holds(reader)
    assert waits == [f"{path}: Input/output error"]
    monkeypatch.undo()
    assert sorted(Path("/proc/self/fd").iterdir()) == was_open


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_trainer_json_says_is_read_again_as_well(tier, tmp_path, monkeypatch, number):
    """It is read a second time before anybody has the snapshot: once it has been hashed."""
    store = store_of(tmp_path)
    path = store.path / put(store, tier, 1) / "trainer.json"
    content = path.read_bytes()
    original, reads, waits = os.preadv, [], []

    def fail_second(fd: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == path:
            reads.append(offset)
            if len(reads) == 2:
                raise OSError(number, os.strerror(number))
        return original(fd, buffers, offset)

    was_open = sorted(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(os, "preadv", fail_second)
    attempt = partial(patiently, patience_s=DEADLINE_S, on_wait=lambda what, _pause_s: waits.append(what))
    with open_candidate(newest_first(None, store)[0], tmp_path, attempt=attempt) as reader:
        assert reader.trainer == json.loads(content)
    assert waits == [f"{path}: {os.strerror(number)}"]
    assert sorted(Path("/proc/self/fd").iterdir()) == was_open


@pytest.mark.parametrize("tier_name", ["memory", "durable"])
def test_a_snapshot_that_cannot_be_opened_holds_no_file(tier, tmp_path, tier_name):
    """What its trainer.json is, is known last: the checksum is right, and it is no JSON."""
    store = store_of(tmp_path)
    name = put(store, tier, 1)
    candidate = next(c for c in newest_first(tier, store) if c.tier == tier_name)
    folder = candidate.memory.path if candidate.memory is not None else store.path / name
    trainer, manifest = folder / "trainer.json", folder / "manifest.json"
    before = candidate.read_manifest()
    content = b"?" * before.files["trainer.json"].size_bytes
    files = before.files | {"trainer.json": replace(before.files["trainer.json"], xxh3_128=digest(content))}
    trainer.write_bytes(content)
    manifest.write_bytes(replace(before, files=files).encoded)
    was_open = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(SnapshotDamagedError, match=r"trainer\.json: not JSON"):
        open_candidate(candidate, tmp_path)
    assert sorted(Path("/proc/self/fd").iterdir()) == was_open


def first_block(path: Path) -> int:
    """Number of the file system's block in which a file begins."""
    extents = subprocess.run(["filefrag", "-v", path], check=True, capture_output=True, text=True).stdout
    return min(int(number) for number in re.findall(r"\d+:\s+\d+\.\.\s*\d+:\s+(\d+)\.\.", extents))


@pytest.mark.parametrize("when", ["while it is hashed", "while it is taken over"])
def test_a_file_that_is_cut_short_meanwhile_is_an_error_with_its_name(tier, tmp_path, monkeypatch, when):
    """Of a mapping it would be SIGBUS, and the end of the process."""
    store = store_of(tmp_path)
    name = put(store, tier, 1, size=1 << 20)
    path = store.path / name / "model.safetensors"
    original = os.preadv

    def cut_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == path and offset >= BLOCK_BYTES:
            os.truncate(path, BLOCK_BYTES)
        return original(fd, buffers, offset)

    def read() -> None:
        with open_candidate(newest_first(None, store)[0], tmp_path) as reader:
            monkeypatch.setattr(os, "preadv", cut_first)
            reader.read(path.name)

    if when == "while it is hashed":
        monkeypatch.setattr(os, "preadv", cut_first)
    with pytest.raises(SnapshotDamagedError, match=r"model\.safetensors: was cut short while it was read"):
        read()
