"""The journal on real files: read while it is written, and disks that are full, read-only, or damaged."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.core.events import Event, Kind, Moment
from elastictrain.errors import StorageError
from elastictrain.supervisor import journal as journal_module
from elastictrain.supervisor import journal_file
from elastictrain.supervisor.journal import Journal
from elastictrain.supervisor.journal_reader import JournalReader, as_json
from elastictrain.supervisor.record import Record, read_status
from tests.process.helpers import ROOT, wait_until


@contextlib.contextmanager
def opened(path: Path, **limits: int) -> Iterator[Journal]:
    journal = Journal(path, **limits)
    try:
        yield journal
    finally:
        journal.close()


def fill(folder: Path) -> Path:
    """Leaves no byte free."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return filler


def numbers(path: Path) -> list[int]:
    return [event.fields["n"] for event in JournalReader(path).read() if "n" in event.fields]


def test_what_was_appended_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with opened(path) as journal:
        journal.append("one", {"n": 1, "loss": float("nan"), "path": tmp_path, "nested": {"a": [1, 2]}})
        journal.append(Kind.PROGRESS, {"n": 2})
        assert journal.flush(5)
        one, two = JournalReader(path).read()
    assert (one.kind, two.kind) == ("one", "progress")
    assert one.fields == {"n": 1, "loss": "NaN", "path": str(tmp_path), "nested": {"a": [1, 2]}}
    assert one.id < two.id
    assert JournalReader(path).read(since=one.id) == [two]
    assert JournalReader(path).read(kinds=["one"]) == [one]
    assert JournalReader(path).read(last=1) == [two]
    assert as_json(one)["event"] == "one"


def test_there_is_no_journal(tmp_path: Path) -> None:
    assert JournalReader(tmp_path / "journal.db").read() == []
    status = read_status(tmp_path, "job")
    assert (status.state, status.journal.state) == ("not_running", "missing")


def test_ids_go_on_after_a_restart_also_if_the_clock_was_set_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for time_s in (2_000_000_000.0, 1_000_000_000.0):
        journal = Journal(path, clock=lambda time_s=time_s: Moment(time_s))
        for n in range(3):
            journal.append("x", {"n": n})
        journal.close()
    events = JournalReader(path).read()
    assert [event.fields["n"] for event in events] == [0, 1, 2, 0, 1, 2]
    assert len({event.id for event in events}) == 6


def test_others_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    script = (
        "import sys; from pathlib import Path; from elastictrain.supervisor.journal_reader import JournalReader\n"
        "seen = []\n"
        "for batch in JournalReader(Path(sys.argv[1])).follow(poll_s=0.01):\n"
        "    seen += [event.fields['n'] for event in batch]\n"
        "    if len(seen) >= 2000: break\n"
        "assert seen == list(range(2000)), seen[:20]\n"
    )
    with opened(path, max_per_thinned_kind=10_000, max_others=10_000) as journal:
        reader = subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=ROOT)
        for n in range(2000):
            journal.append("x", {"n": n})
            if n % 100 == 0:
                journal.flush(5)
        assert reader.wait(60) == 0
        assert journal.health.state == "ok"


def test_a_writer_that_is_killed_leaves_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    script = (
        "import os, sys; from pathlib import Path; from elastictrain.supervisor.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for n in range(100): journal.append('x', {'n': n})\n"
        "journal.flush(10); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, check=False).returncode == -9
    assert numbers(path) == list(range(100))
    with opened(path) as journal:
        journal.append("x", {"n": 100})
    assert numbers(path) == list(range(101))


def test_a_full_disk_costs_nothing_once_there_is_room(small_disk: Path) -> None:
    path = small_disk / "journal.db"
    with opened(path) as journal:
        journal.append("x", {"n": 0})
        assert journal.flush(5)
        filler = fill(small_disk)
        for n in range(1, 200):
            journal.append("x", {"n": n, "text": "." * 1000})
        wait_until(lambda: journal.health.state == "degraded")
        assert "full" in journal.health.reason or "disk I/O" in journal.health.reason, journal.health.reason
        assert journal.recent()[-1].fields["n"] == 199, "memory has it"
        filler.unlink()
        assert journal.flush(30)
        assert journal.health.state == "ok"
    assert numbers(path) == list(range(200))


def test_a_disk_that_was_full_from_the_beginning(small_disk: Path) -> None:
    filler = fill(small_disk)
    record = Record(small_disk, "job")
    try:
        record.append(Kind.SUPERVISOR_STARTED, {"pid": 1})
        wait_until(lambda: record.journal.health.state == "degraded")
        status = record.status(None)
        assert (status.state, status.journal.state) == ("starting", "degraded")
        assert str(small_disk) in status.journal.reason
        filler.unlink()
        assert record.journal.flush(30)
    finally:
        record.close()
    assert read_status(small_disk, "job").state == "not_running"


def test_a_read_only_disk(small_disk: Path) -> None:
    path = small_disk / "journal.db"
    with opened(path) as journal:
        journal.append("x", {"n": 0})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with opened(path) as journal:
        journal.append("x", {"n": 1})
        wait_until(lambda: journal.health.state == "degraded")
        assert numbers(path) == [0], "what is there can be read, without a writer and without the right to write"
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        assert journal.flush(30)
    assert numbers(path) == [0, 1]


@pytest.mark.parametrize(
    "garbage", [b"not a database, not at all. " * 200, b"\0" * 8192, b"SQLite format 3\0" + b"\xff" * 9000]
)
def test_a_damaged_journal_is_set_aside(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(garbage)
    with pytest.raises(StorageError, match="cannot be read"):
        JournalReader(path).read()
    assert read_status(tmp_path, "job").journal.state == "unreadable"
    with opened(path) as journal:
        journal.append("x", {"n": 0})
        assert journal.flush(10)
        assert journal.health.state == "ok"
        assert "set aside" in journal.health.reason
    aside = [p for p in tmp_path.iterdir() if "damaged" in p.name]
    assert [p.read_bytes() for p in aside] == [garbage]
    assert numbers(path) == [0]
    assert "journal_set_aside" in [event.kind for event in JournalReader(path).read()]


def test_a_journal_that_is_damaged_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with opened(path) as journal:
        for n in range(1000):
            journal.append("x", {"n": n})
        assert journal.flush(5)
        for victim in (path, Path(f"{path}-wal")):
            with victim.open("r+b") as file:
                file.write(os.urandom(victim.stat().st_size))
        for n in range(1000, 3000):
            journal.append("x", {"n": n})
            if n % 500 == 0:
                journal.flush(0.5)
        wait_until(lambda: journal.flush(0.1) and journal.health.state == "ok")
        journal.append("x", {"n": 3000})
        assert journal.flush(5)
        assert journal.recent()[-1].fields["n"] == 3000
    found = numbers(path)
    assert found[-1] == 3000
    assert found[-2000:] == list(range(1001, 3001)), "what was in memory was written again"
    assert [p for p in tmp_path.iterdir() if "damaged" in p.name]


def test_damage_is_found_soon_where_little_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "CHECK_INTERVAL_S", 0.05)
    path = tmp_path / "journal.db"
    with opened(path) as journal:
        for n in range(100):
            journal.append("x", {"n": n})
        assert journal.flush(5)
        for victim in (path, Path(f"{path}-wal")):
            with victim.open("r+b") as file:
                file.write(os.urandom(victim.stat().st_size))

        def is_found() -> bool:
            journal.append("x", {"n": 100})
            return "set aside" in journal.health.reason

        # Some hundred events at most: too few to be looked at for their number.
        wait_until(is_found, 5.0)
        assert journal.flush(5)
    assert set(numbers(path)) == set(range(101)), "what was in memory was written again"


def test_a_journal_that_is_deleted_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with opened(path) as journal:
        journal.append("x", {"n": 0})
        assert journal.flush(5)
        path.unlink()
        journal.append("x", {"n": 1})
        wait_until(lambda: path.exists() and numbers(path) == [1])


def test_what_cannot_be_kept_is_dropped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_PENDING", 10)
    path = tmp_path / "missing" / "journal.db"
    with opened(path) as journal:
        for n in range(25):
            journal.append("x", {"n": n})
            wait_until(lambda: journal.health.state == "degraded")
        assert journal.health.dropped == 15
        path.parent.mkdir()
        assert journal.flush(30)
    first, *rest = JournalReader(path).read()
    assert (first.kind, first.fields) == ("journal_gap", {"dropped": 15})
    assert [event.fields["n"] for event in rest] == list(range(15, 25))


def test_its_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with opened(path, max_per_thinned_kind=100, max_others=50) as journal:
        for n in range(3000):
            journal.append(Kind.PROGRESS, {"n": n})
            journal.append("other", {})
            if n % 20 == 0:
                journal.flush(5)
        journal.flush(5)
    events = JournalReader(path).read()
    progress = [event.fields["n"] for event in events if event.kind == Kind.PROGRESS]
    assert len(progress) <= 300
    assert progress[0] == 0, "thinned, not cut off"
    assert progress[-50:] == list(range(2950, 3000)), "the newest are all there"
    assert len(events) - len(progress) <= 250


def test_many_threads_append(tmp_path: Path) -> None:
    with opened(tmp_path / "journal.db") as journal:
        threads = [
            threading.Thread(target=lambda: [journal.append("x", {"n": n}) for n in range(200)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert journal.flush(10)
    ids = [event.id for event in JournalReader(tmp_path / "journal.db").read()]
    assert len(ids) == 800
    assert ids == sorted(set(ids))


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("odd")


odd_values = st.recursive(
    st.none() | st.floats() | st.text() | st.binary(max_size=4) | st.builds(Odd) | st.builds(object),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=2), x, max_size=2),
    max_leaves=5,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), odd_values, max_size=3))
def test_no_field_is_too_odd(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]) -> None:
    folder = tmp_path_factory.mktemp("odd")
    with opened(folder / "journal.db") as journal:
        event = journal.append("x", fields)
        assert journal.flush(10)
    (found,) = JournalReader(folder / "journal.db").read()
    assert isinstance(found, Event)
    assert found == event


def test_a_record_takes_up_where_the_last_supervisor_ended(tmp_path: Path) -> None:
    record = Record(tmp_path, "job")
    record.append(Kind.SUPERVISOR_STARTED, {"pid": 1, "version": "1"})
    record.append(Kind.INCARNATION_STARTED, {"incarnation": 4, "world_size": 2})
    record.append(Kind.RANKS_TRAINING, {"incarnation": 4, "global_step": 7})
    record.close()
    record = Record(tmp_path, "job")
    record.append(Kind.SUPERVISOR_STARTED, {"pid": 2, "version": "1"})
    status = record.status(None)
    record.close()
    assert (status.incarnation, status.global_step, status.state, status.num_restarts) == (4, 7, "recovering", 1)
    assert [event.kind for event in record.events()][-1] == Kind.SUPERVISOR_STARTED
    assert len(record.events()) == 4
