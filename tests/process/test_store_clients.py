"""Stores behind the lesser clients of fsspec: no folders by themselves, one connection, and an `exists` that errs."""

from __future__ import annotations

import uuid

import pytest

from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.persist_loop import PersisterSettings, Report
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.checkpoint.store import open_store
from elastictrain.cli.lineage import run_in_store
from elastictrain.errors import ConfigError, StorageError
from elastictrain.testing import faulty_fs
from tests.process.helpers import wait_until
from tests.process.resume_helpers import go, kept, nothing_left
from tests.process.sftp_server import NEEDS_SSHD, Sftp
from tests.process.snapshot_payload import RUN_ID, put, stored_steps, write

DEADLINE_S = 60.0


@pytest.fixture
def sftp(tmp_path):
    pytest.importorskip("paramiko")
    server = Sftp(tmp_path / "sshd")
    yield server
    server.stop()


# ---- what cannot be known is not "no"


@pytest.mark.parametrize("target", ["memory", "file"])
def test_a_manifest_that_cannot_be_asked_for_is_not_missing(tier, tmp_path, target):
    """Else a sound snapshot, pinned or not, counts as a leftover and is deleted."""
    unique = uuid.uuid4().hex
    url = f"faulty:/{tmp_path}/store"
    sound = open_store(url, {"target": target})
    names = [put(sound, tier, step) for step in (1, 2, 3)]
    sound.pin(RUN_ID, 1, "another run")
    for number in (1, 2, 3):
        options = {"target": target, "faults": {f"info:{number}": "fail"}, "counter": f"{unique}-{number}"}
        for act in ("leftovers", "clean_leftovers", "snapshots", "incomplete"):
            faulty_fs.reset(options["counter"])
            with pytest.raises(StorageError, match=f"info number {number} failed"):
                getattr(open_store(url, options), act)()
    assert [s.name for s in sound.snapshots()] == names[::-1]
    assert [sound.verify(name) for name in names] == [[], [], []]


def test_a_store_that_goes_right_after_it_was_listed_is_not_an_empty_one(tier, tmp_path):
    """Else a machine that has never seen the job would begin a new run."""
    unique = uuid.uuid4().hex
    url = f"faulty://{unique}"
    put(open_store(url), tier, 1)
    with pytest.raises(StorageError, match="info number 1 failed"):
        run_in_store(open_store(url, {"faults": {"info:1": "fail+"}, "counter": unique}))
    assert run_in_store(open_store(url)).run_id == RUN_ID


def test_what_could_not_be_deleted_is_an_error_and_what_is_not_there_is_none(tier):
    unique = uuid.uuid4().hex
    url = f"faulty://{unique}"
    name = put(open_store(url), tier, 1)
    store = open_store(url, {"faults": {"delete:1": "fail"}, "counter": unique})
    with pytest.raises(StorageError, match="delete number 1 failed"):
        store.delete(name)
    store.delete(name)
    store.delete(name)
    store.unpin(RUN_ID, 1, "nobody")
    assert open_store(url).folders() == []


# ---- folders


def test_folders_are_made_where_the_client_makes_none(tier, tmp_path):
    url, options = f"faulty:/{tmp_path}/not/there/yet", {"target": "file"}
    store = open_store(url, options)
    assert store.snapshots() == []
    store.claim(Fence(RUN_ID, 1, "run-1-a"))
    put(store, tier, 1)
    store.pin(RUN_ID, 1, "another run")
    assert stored_steps(url, options, tmp_path) == [1]
    store.unpin(RUN_ID, 1, "another run")
    assert store.delete_unless_pinned(store.snapshots()[0].name)
    assert store.folders() == []


# ---- a real server: OpenSSH


@NEEDS_SSHD
@pytest.mark.filterwarnings("default")  # the client's own
def test_snapshots_over_sftp(sftp, tier, tmp_path):
    url = f"sftp://127.0.0.1{tmp_path}/some/folder"
    reports: list[Report] = []
    fence = {"run_id": RUN_ID, "incarnation": 1, "attempt": "run-1-a"}
    settings = PersisterSettings(url=url, storage_options=sftp.options, keep_last=2, fence=fence)
    persister = Persister(settings, reports.append)
    for step in (1, 2, 3):
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S), persister.status
    persister.close(finish=True)
    assert stored_steps(url, sftp.options, tmp_path) == [3, 2]
    assert [r.kind for r in reports if r.kind not in ("started", "persisted", "tidied")] == []
    assert not (tmp_path / "some/folder" / f"step-{1:012d}-{RUN_ID}").exists(), "with its folder"
    store = open_store(url, sftp.options)
    store.pin(RUN_ID, 2, "x")
    assert not store.delete_unless_pinned(store.snapshots()[1].name)
    store.unpin(RUN_ID, 2, "x")
    store.unpin(RUN_ID, 2, "x")
    assert store.pins() == {}
    name = store.snapshots()[0].name
    assert store.verify(name) == []
    (tmp_path / "some/folder" / name / "model.safetensors").write_bytes(b"short")
    assert [d.file for d in store.verify(name)] == ["model.safetensors"]
    (tmp_path / "some/folder" / store.snapshots()[1].name / "manifest.json").unlink()
    assert [store.clean_leftovers(), [s.global_step for s in store.snapshots()]] == [
        [f"step-{2:012d}-{RUN_ID}"],
        [3],
    ]


@NEEDS_SSHD
@pytest.mark.filterwarnings("default")
def test_a_connection_that_breaks_is_made_again(sftp, tier, tmp_path):
    """By who writes, who lists, and who is started in the middle of it."""
    url = f"sftp://127.0.0.1{tmp_path}/some/folder"
    store = open_store(url, sftp.options)
    reports: list[Report] = []
    settings = PersisterSettings(url=url, storage_options=sftp.options, first_pause_s=0.05, longest_pause_s=0.2)
    persister = Persister(settings, reports.append)
    persister.submit(write(tier, 1))
    assert persister.wait(1, DEADLINE_S), persister.status
    assert [s.global_step for s in store.snapshots()] == [1]
    sftp.stop()
    try:
        persister.submit(write(tier, 2))
        late = Persister(PersisterSettings(url=url, storage_options=sftp.options, first_pause_s=0.05), reports.append)
        late.submit(write(tier, 3))
        wait_until(lambda: {r.global_step for r in reports if r.kind == "retrying"} >= {2, 3})
        for stale in (store, open_store(url, sftp.options)):
            with pytest.raises(StorageError):
                stale.snapshots()
    finally:
        sftp.start()
    assert persister.wait(2, DEADLINE_S), persister.status
    assert late.wait(3, DEADLINE_S), late.status
    for ended in (persister, late):
        ended.close(finish=True)
    assert [s.global_step for s in store.snapshots()] == [3, 2, 1]
    assert stored_steps(url, sftp.options, tmp_path) == [3, 2, 1]
    assert not [r for r in reports if r.kind in ("failed", "restarting")]


@NEEDS_SSHD
@pytest.mark.filterwarnings("default")
def test_a_job_goes_on_from_sftp_on_a_machine_that_has_never_seen_it(sftp, tmp_path):
    checkpoint = {"url": f"sftp://127.0.0.1{tmp_path}/some/folder", "storage_options": sftp.options}
    whole = go(tmp_path / "whole")
    go(tmp_path / "first", checkpoint=checkpoint, overrides=["train.max_steps=4"])
    assert nothing_left(tmp_path / "first")
    run = go(tmp_path / "second", checkpoint=checkpoint)
    (restored,) = run.events("restored")
    assert (restored["from_tier"], restored["global_step"]) == ("durable", 4)
    assert run.losses == whole.losses[4:]
    store = open_store(checkpoint["url"], sftp.options)
    assert kept(tmp_path / "second", store) == kept(tmp_path / "whole")


@NEEDS_SSHD
@pytest.mark.filterwarnings("default")
def test_an_option_that_the_client_does_not_know_is_a_mistake_and_no_outage(sftp, tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.url = sftp:.*keyfile"):
        open_store(f"sftp://127.0.0.1{tmp_path}", {**sftp.options, "keyfile": "x"})
