"""What a start downloads from an object store: a cut on the way costs no step, and nobody takes the wait for a hang.

The job here has trained three steps and lost its memory tier: it goes on from the durable tier alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint.durable_note import DurableNote
from elastictrain.checkpoint.format import MANIFEST_FILE
from elastictrain.checkpoint.object_store import ObjectStore
from elastictrain.checkpoint.store import Progress, open_store
from elastictrain.cli.lineage import run_in_store
from elastictrain.cli.state_dir import StartOptions
from elastictrain.errors import StorageError
from elastictrain.protocol import JobIdentity
from elastictrain.testing.faulty_fs import FaultyFileSystem
from elastictrain.training.session import Session
from tests.process.helpers import Trained
from tests.process.resume_helpers import as_of_version, go, steps_in
from tests.process.resume_tasks import Resumable
from tests.process.tasks import record

SOUND = {"target": "file"}
NEWEST = 3
ALLOWED = StartOptions(allowed_differences=("rewind",))
FILES = ["model.safetensors", "optimizer.safetensors", "trainer.json"]


class Watched(Resumable):
    """Records when its rank beats, and when a file begins to be fetched and has been."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        beat, fetch = Session.beat, ObjectStore.fetch

        def recorded_beat(session: Session, number: int = 0) -> None:
            record("start", what="beat")
            beat(session, number)

        def recorded_fetch(store: ObjectStore, name: str, file: str, scratch: Path, progress: Progress) -> Path:
            record("start", what=f"begins {file}", held=sorted(path.name for path in scratch.iterdir()))
            path = fetch(store, name, file, scratch, progress)
            record("start", what=f"has {file}")
            return path

        Session.beat, ObjectStore.fetch = recorded_beat, recorded_fetch  # type: ignore[method-assign,assignment]


def start(folder: Path, max_steps: int, options: Mapping[str, Any] = SOUND, **more: Any) -> Trained:
    settings = {"url": f"faulty:/{folder}/store", "storage_options": dict(options)}
    return go(folder, train_section={"max_steps": max_steps}, checkpoint=settings, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, to be copied. It stops a step before its last: both steps are durable then."""
    folder = tmp_path_factory.mktemp("trained")
    for step in (NEWEST - 1, NEWEST):
        start(folder, step)
        shutil.rmtree(folder / "shm")
    assert steps_in(open_store(f"faulty:/{folder}/store", SOUND)) == [NEWEST, NEWEST - 1]
    return folder


@pytest.fixture
def job(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def noted(folder: Path) -> int | None:
    identity = JobIdentity.read(folder / "state")
    assert identity is not None
    return DurableNote(folder / "state").read(identity.run_id)


@pytest.mark.parametrize(
    ("call", "file"), [("get:1", MANIFEST_FILE), *((f"read:{1 + 2 * n}", file) for n, file in enumerate(FILES))]
)
def test_a_download_that_is_cut_is_no_damage(job: Path, call: str, file: str) -> None:
    """Once, without an error: the snapshot is fetched again, and none is passed over. The note stays what it was."""
    struck = job / "struck"
    run = start(job, NEWEST, {**SOUND, "faults": {call: "truncate"}, "once": str(struck)})
    assert struck.exists()
    assert [(e["from_tier"], e["global_step"]) for e in run.events("restored")] == [("durable", NEWEST)]
    assert run.events("snapshot_passed_over") == []
    (said,) = run.events("store_retrying")
    assert file in said["error"]
    assert noted(job) == NEWEST


@pytest.mark.parametrize("file", [MANIFEST_FILE, *FILES])
@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_what_is_damaged_in_the_store_is_passed_over(job: Path, file: str, damage: str) -> None:
    """After it was fetched twice. A manifest that is missing leaves no snapshot to fetch."""
    store = open_store(f"faulty:/{job}/store", SOUND)
    path = job / "store" / store.snapshots()[0].name / file
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    else:
        path.unlink()
    run = start(job, NEWEST - 1)
    assert [e["global_step"] for e in run.events("restored")] == [NEWEST - 1]
    assert len(run.events("snapshot_passed_over")) == 1
    if (file, damage) != (MANIFEST_FILE, "remove"):
        assert file in run.events("snapshot_passed_over")[0]["reason"]
        assert len(run.events("store_retrying")) == 1
    assert noted(job) == NEWEST - 1


def take_out_of_reach(path: Path) -> None:
    """The store lists this file, and does not give it, as where it is archived, or permission lacks (which no test can
    do without): the kernel refuses to follow a link to itself."""
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("protocol", ["faulty", "folder"])
def test_what_the_store_lists_and_does_not_give_is_passed_over_if_that_is_allowed(
    job: Path, file: str, protocol: str
) -> None:
    """It may be sound: it is not done again unasked."""
    take_out_of_reach(job / "store" / open_store(job / "store").snapshots()[0].name / file)
    settings: dict[str, Any] = {"url": str(job / "store")}
    if protocol == "faulty":
        settings = {"url": f"faulty:/{job}/store", "storage_options": SOUND}
    settings["storage_timeout_s"] = 0.3
    refused = go(job, train_section={"max_steps": NEWEST}, checkpoint=settings, expect_success=False)
    assert refused.codes == [StorageError.exit_code], refused.output
    assert file in refused.errors[0].what
    assert "--allow rewind" in refused.errors[0].hint
    assert noted(job) == NEWEST
    run = go(job, train_section={"max_steps": NEWEST - 1}, checkpoint=settings, options=ALLOWED)
    assert [e["global_step"] for e in run.events("restored")] == [NEWEST - 1]
    (said,) = run.events("snapshot_passed_over")
    assert f"step-{NEWEST:012d}" in said["where"]
    assert file in said["reason"]
    assert noted(job) == NEWEST - 1


def test_a_store_that_gives_none_of_its_snapshots_is_no_reason_to_begin_anew(job: Path) -> None:
    for snapshot in open_store(job / "store").snapshots():
        take_out_of_reach(job / "store" / snapshot.name / FILES[0])
    settings = {"url": str(job / "store"), "storage_timeout_s": 0.3}
    run = go(job, train_section={"max_steps": 1}, checkpoint=settings, options=ALLOWED, expect_success=False)
    assert run.codes == [StorageError.exit_code], run.output
    assert len(run.events("snapshot_passed_over")) == 2


@pytest.mark.parametrize("file", [MANIFEST_FILE, "trainer.json"])
def test_a_new_machine_is_told_the_run_by_an_older_snapshot_if_that_is_allowed(
    job: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = JobIdentity.read(job / "state")
    assert known is not None
    store = open_store(f"faulty:/{job}/store", SOUND)
    cat_file = FaultyFileSystem.cat_file

    def refuse(fs: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        if path.endswith(file) and f"step-{NEWEST:012d}" in path:
            raise PermissionError("InvalidObjectState")
        return cat_file(fs, path, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", refuse)
    with pytest.raises(StorageError, match=f"{file}.*InvalidObjectState"):
        run_in_store(store)
    said: list[str] = []
    assert run_in_store(store, rewinds=True, warn=said.append) == JobIdentity(known.run_id, 4)
    (told,) = said
    assert f"step-{NEWEST:012d}" in told
    assert "InvalidObjectState" in told
    shutil.rmtree(job / "store" / store.snapshots()[1].name)
    if file == MANIFEST_FILE:
        with pytest.raises(StorageError, match="InvalidObjectState"):
            run_in_store(store, rewinds=True)
    else:
        assert run_in_store(store, rewinds=True) == JobIdentity(known.run_id, None)


def test_a_new_machine_goes_on_with_no_older_run_because_the_newest_is_out_of_reach(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allowed is an older snapshot, not another run: which one wrote last nobody can tell."""
    settings = {"url": f"faulty:/{job}/store", "storage_options": SOUND}
    go(job, train_section={"max_steps": 1}, checkpoint=settings, options=StartOptions(fresh=True))
    second = JobIdentity.read(job / "state")
    store = open_store(f"faulty:/{job}/store", SOUND)
    found = run_in_store(store)
    assert second is not None
    assert found is not None
    assert found.run_id == second.run_id
    assert len({snapshot.run_id for snapshot in store.snapshots()}) == 2
    cat_file = FaultyFileSystem.cat_file

    def refuse(fs: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        if path.endswith(MANIFEST_FILE) and second.run_id in path:
            raise PermissionError("InvalidObjectState")
        return cat_file(fs, path, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", refuse)
    with pytest.raises(StorageError, match=second.run_id) as raised:
        run_in_store(store, rewinds=True)
    assert "--fresh" in raised.value.hint


def test_a_new_machine_goes_on_from_an_older_snapshot_if_that_is_allowed(job: Path) -> None:
    for file in ("trainer.json", "model.safetensors"):
        take_out_of_reach(job / "store" / open_store(job / "store").snapshots()[0].name / file)
    shutil.rmtree(job / "state")
    settings = {"url": str(job / "store"), "storage_timeout_s": 0.3}
    with pytest.raises(StorageError, match=r"trainer\.json") as raised:
        go(job, train_section={"max_steps": NEWEST}, checkpoint=settings, expect_success=False)
    assert "--allow rewind" in raised.value.hint
    run = go(job, train_section={"max_steps": NEWEST - 1}, checkpoint=settings, options=ALLOWED)
    assert [e["global_step"] for e in run.events("restored")] == [NEWEST - 1]


def test_what_was_downloaded_of_a_damaged_one_makes_room_for_the_next(job: Path) -> None:
    store = open_store(f"faulty:/{job}/store", SOUND)
    (job / "store" / store.snapshots()[0].name / FILES[-1]).write_bytes(b"short")
    run = start(job, NEWEST - 1, task="tests.process.test_resume_downloads:Watched")
    assert [e["global_step"] for e in run.events("restored")] == [NEWEST - 1]
    held = [line["held"] for line in run.recorded("start") if line["what"] == f"begins {FILES[0]}"]
    assert [len(names) for names in held] == [0, 3, 0], "the damaged one twice, then the one before"


def test_what_is_damaged_in_a_folder_is_not_read_twice(job: Path) -> None:
    store = open_store(job / "store")
    (job / "store" / store.snapshots()[0].name / FILES[0]).write_bytes(b"short")
    run = go(job, train_section={"max_steps": NEWEST - 1}, checkpoint={"url": str(job / "store")})
    assert [e["global_step"] for e in run.events("restored")] == [NEWEST - 1]
    assert len(run.events("snapshot_passed_over")) == 1
    assert run.events("store_retrying") == []


def test_a_rank_beats_while_it_fetches_and_hashes(job: Path) -> None:
    """Each piece that arrives, and each that is hashed, shows in the heartbeat, which the startup timeout goes by."""
    run = start(job, NEWEST, task="tests.process.test_resume_downloads:Watched")
    assert [e["global_step"] for e in run.events("restored")] == [NEWEST]
    seen = [line["what"] for line in run.recorded("start")]
    marks = [what for what in seen if what != "beat"]
    assert sorted(marks) == sorted(f"{when} {file}" for file in FILES for when in ("begins", "has"))
    for file in FILES:
        begins, ends = seen.index(f"begins {file}"), seen.index(f"has {file}")
        assert "beat" in seen[begins:ends], file
    after = seen[max(seen.index(f"has {file}") for file in FILES) :]
    assert after.count("beat") >= len(FILES), "while hashing"


@pytest.mark.parametrize("loss", ["out of reach", "newer format"])
def test_what_was_given_up_stays_so_until_its_step_is_done_anew(tmp_path: Path, loss: str) -> None:
    """To go back is allowed once, to the first worker group. The one after it does not ask again; nor does it go over
    to what the store gives by then, another future than the run's own."""

    def start(max_steps: int, *, allow: bool = False, kill_after: int = 0, every_steps: int = 1) -> Trained:
        return go(
            tmp_path,
            train_section={"max_steps": max_steps},
            params={"kill_after": kill_after, "job_folder": str(tmp_path)},
            checkpoint={"every_steps": every_steps, "storage_timeout_s": 0.3},
            options=ALLOWED if allow else None,
            expect_success=not kill_after,
        )

    def restored(run: Trained) -> int:
        (event,) = run.events("restored")
        step: int = event["global_step"]
        return step

    for step in (2, 6):
        start(step, every_steps=100)
    store = open_store(tmp_path / "state" / "snapshots")
    assert steps_in(store) == [6, 2]
    folder = tmp_path / "state" / "snapshots" / store.snapshots()[0].name
    shutil.copytree(folder, tmp_path / "sound")
    if loss == "newer format":
        as_of_version(folder / MANIFEST_FILE, 7)
    else:
        take_out_of_reach(folder / "model.safetensors")
    assert restored(start(6, allow=True, kill_after=2)) == 2
    second = start(6, kill_after=2)
    assert restored(second) == 3
    (said,) = second.events("snapshot_passed_over")
    assert said["where"] == str(folder)
    assert "--allow rewind" in said["reason"]
    if loss == "out of reach":
        (folder / "model.safetensors").unlink()
        shutil.copy(tmp_path / "sound" / "model.safetensors", folder)
        assert store.verify(folder.name) == []
    third = start(6)
    assert restored(third) == 4
    assert third.events("snapshot_passed_over") != []
    fourth = start(7)
    assert restored(fourth) == 6
    assert fourth.events("snapshot_passed_over") == []
