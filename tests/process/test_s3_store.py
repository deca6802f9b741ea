"""A real S3 server on loopback: what is put comes back, and an outage costs nothing but time."""

from __future__ import annotations

import socket
import time
import uuid
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint import object_store
from elastictrain.checkpoint.format import snapshot_name
from elastictrain.checkpoint.memory_tier import Declined
from elastictrain.checkpoint.pending_uploads import pending_uploads
from elastictrain.checkpoint.persist_loop import PersisterSettings, PersistLoop, Report
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.checkpoint.store import open_store
from elastictrain.cli.lineage import find_source
from elastictrain.cli.state_dir import StartOptions
from elastictrain.errors import StorageError
from tests.process.helpers import read_metrics, wait_until
from tests.process.resume_helpers import assert_same_trace, go, kept, nothing_left
from tests.process.snapshot_payload import RUN_ID, layouts, put, stored_steps, write

pytest.importorskip("s3fs")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    moto_server = pytest.importorskip("moto.server")

DEADLINE_S = 60.0
SECRET = "hunter22-secret"

pytestmark = pytest.mark.filterwarnings("default")  # the server's and the client's own


class S3:
    """A server that can be taken away and come back on the same port; what it holds survives in this process."""

    def __init__(self) -> None:
        self.port = 0
        self.start()
        self.options = {
            "key": "some-key-id",
            "secret": SECRET,
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "client_kwargs": {"region_name": "eu-west-1"},
            "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 5},
        }

    def start(self) -> None:
        self._server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def s3():
    server = S3()
    yield server
    server.stop()


@pytest.fixture
def url(s3):
    import s3fs

    bucket = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(**s3.options, skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/some/prefix"


def test_snapshots_in_s3(s3, url, tier, tmp_path):
    reports: list[Report] = []
    settings = PersisterSettings(url=url, storage_options=s3.options, keep_last=2)
    persister = Persister(settings, reports.append)
    for step in (1, 2, 3):
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S), persister.status
    persister.close(finish=True)
    assert stored_steps(url, s3.options, tmp_path) == [3, 2]
    store = open_store(url, s3.options)
    store.pin("0badcafe", 2, "x")
    assert list(store.pins()) == [("0badcafe", 2)]
    store.unpin("0badcafe", 2, "x")
    assert store.pins() == {}
    name = store.snapshots()[0].name
    assert store.verify(name) == []
    store._fs.pipe_file(store._path(name, "model.safetensors"), b"short")
    assert [d.file for d in store.verify(name)] == ["model.safetensors"]
    assert SECRET not in str(reports)


def begin_upload(store, path: str) -> str:
    """As a writer leaves it that is killed in the middle of a large file."""
    stream = store._fs.open(f"{store._root}/{path}", "wb", block_size=5 << 20)
    stream.write(bytes(6 << 20))
    stream.flush()
    assert stream.mpu["UploadId"]
    stream.closed = True
    return path


def pending(store) -> list[str]:
    return sorted(upload.path for upload in pending_uploads(store._fs, store._root))


def test_what_was_uploaded_in_part_goes_once_its_run_has_gone_on(s3, url, tier, tmp_path, monkeypatch):
    """And nothing else: not what was begun after the last commit, nor what is of another run, nor beside our prefix."""
    store = open_store(url, s3.options)
    names = [snapshot_name(step, RUN_ID) for step in (1, 2, 9)]
    dead = [begin_upload(store, f"{name}/model.safetensors") for name in names]
    others = [
        begin_upload(store, f"{snapshot_name(1, '0000ffff')}/model.safetensors"),
        begin_upload(store, "somebody/else"),
    ]
    beside = open_store(f"{url}-of-another", s3.options)
    elsewhere = begin_upload(beside, dead[0])
    assert store.dead_uploads() == []
    settings = PersisterSettings(url=url, storage_options=s3.options)
    reports: list[Report] = []
    persister = Persister(settings, reports.append)
    assert pending(store) == sorted(dead + others)
    persister.submit(write(tier, 3))
    assert persister.wait(3, DEADLINE_S), persister.status
    persister.close(finish=True)
    assert [r.fields["aborted"] for r in reports if r.kind == "uploads_aborted"] == [sorted(dead)]
    living = begin_upload(store, f"{snapshot_name(1, RUN_ID)}/optimizer.safetensors")

    def as_begun_now(fs, root):
        """This server says of each upload that it began in 2010."""
        return (replace(upload, began_at=datetime.now(UTC)) for upload in pending_uploads(fs, root))

    monkeypatch.setattr(object_store, "pending_uploads", as_begun_now)
    assert list(store.abort_dead_uploads()) == []
    monkeypatch.undo()
    assert pending(store) == sorted([living, *others])
    assert pending(beside) == [elsewhere]
    assert stored_steps(url, s3.options, tmp_path) == [3]


def test_what_happens_while_uploads_are_looked_for_costs_nothing_of_what_is_known(s3, url, tier, monkeypatch):
    """A commit that is pruned meanwhile says nothing, and the server fails midway: what is gone by then is told."""
    store = open_store(url, s3.options)
    dead = [begin_upload(store, f"{snapshot_name(step, RUN_ID)}/model.safetensors") for step in (1, 2, 3)]
    put(store, tier, 4)
    pruned, modified, call_s3 = put(store, tier, 5), type(store._fs).modified, type(store._fs).call_s3
    aborted = []

    def prune_first(fs, path):
        if pruned in path:
            open_store(url, s3.options).delete(pruned)
        return modified(fs, path)

    def fail_third(fs, method, *args, **kwargs):
        if method == "abort_multipart_upload":
            aborted.append(method)
            if len(aborted) == 3:
                raise OSError("SlowDown")
        return call_s3(fs, method, *args, **kwargs)

    monkeypatch.setattr(type(store._fs), "modified", prune_first)
    monkeypatch.setattr(type(store._fs), "call_s3", fail_third)
    reports: list[Report] = []
    loop = PersistLoop(PersisterSettings(url=url, storage_options=s3.options), reports.append)
    loop._tidy(snapshot_name(4, RUN_ID))
    assert [r.kind for r in reports] == ["tidying_failed", "uploads_aborted"]
    assert "SlowDown" in reports[0].fields["error"]
    assert reports[1].fields["aborted"] == dead[:2]
    monkeypatch.undo()
    assert pending(store) == dead[2:]


def test_a_store_that_does_not_let_us_ask_for_uploads_costs_a_warning(s3, url, tier, tmp_path, monkeypatch):
    store = open_store(url, s3.options)
    call_s3 = type(store._fs).call_s3

    def refused(self, method, *args, **kwargs):
        if method == "list_multipart_uploads":
            raise PermissionError("Access Denied")
        return call_s3(self, method, *args, **kwargs)

    monkeypatch.setattr(type(store._fs), "call_s3", refused)
    reports: list[Report] = []
    settings = PersisterSettings(url=url, storage_options=s3.options, keep_last=1)
    persister = Persister(settings, reports.append, in_process=True)
    for step in (1, 2, 3):
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S), persister.status
    persister.close(finish=True)
    [failed] = [r for r in reports if r.kind == "tidying_failed"]
    assert "cut off: PermissionError: Access Denied" in failed.fields["error"]
    assert stored_steps(url, s3.options, tmp_path) == [3]


def outage(s3: S3, url: str, tier, tmp_path, seconds: float) -> None:
    reports: list[Report] = []
    settings = PersisterSettings(url=url, storage_options=s3.options, first_pause_s=0.1, longest_pause_s=1.0)
    persister = Persister(settings, reports.append)
    persister.submit(write(tier, 1))
    assert persister.wait(1, DEADLINE_S), persister.status
    s3.stop()
    begun_s = time.monotonic()
    try:
        step = 2
        while time.monotonic() - begun_s < seconds or not any(r.kind == "retrying" for r in reports):
            # Training goes on and takes snapshots, as far as there are slots.
            writer = tier.begin(layouts())
            if not isinstance(writer, Declined):
                writer.abort()
                persister.submit(write(tier, step))
                step += 1
            with pytest.raises(StorageError) as failed:
                open_store(url, s3.options).snapshots()
            assert SECRET not in str(failed.value)
        assert persister.status.durable_step == 1
    finally:
        s3.start()
    assert persister.wait(step - 1, DEADLINE_S), persister.status
    persister.close(finish=True)
    assert stored_steps(url, s3.options, tmp_path)[0] == step - 1
    assert SECRET not in str(reports)


def test_an_outage_costs_nothing_but_time(s3, url, tier, tmp_path):
    outage(s3, url, tier, tmp_path, 2.0)


@pytest.mark.soak
def test_an_outage_of_twenty_seconds(s3, url, tier, tmp_path):
    outage(s3, url, tier, tmp_path, 20.0)


def train_through(s3: S3, url: str, folder: Path, seconds: float) -> None:
    """Two starts of a job with nothing but S3 between them, and an outage in the second."""
    whole = go(folder / "whole")
    checkpoint = {"url": url, "storage_options": s3.options}
    go(folder / "cut", checkpoint=checkpoint, overrides=["train.max_steps=4"])
    assert nothing_left(folder / "cut")

    def outage(ranks: list[Any]) -> None:
        wait_until(lambda: len(read_metrics(folder / "cut" / "state")) > 4)
        s3.stop()
        try:
            with socket.create_server(("127.0.0.1", s3.port)) as nobody:
                nobody.settimeout(DEADLINE_S)
                nobody.accept()[0].close()  # it is away until it has been wanted, however slow the machine
            time.sleep(seconds)  # not to wait for anything: that is how long it is away at least
            assert ranks[0].exitcode is None, "it ended without its store"
        finally:
            s3.start()

    run = go(folder / "cut", checkpoint=checkpoint, while_running=outage)
    (restored,) = run.events("restored")
    assert (restored["from_tier"], restored["global_step"]) == ("durable", 4)
    assert run.events("persister_retrying"), "it was away while it was wanted"
    assert run.outcome is not None
    assert run.outcome["summary"]["snapshot"]["durable"] is True
    assert_same_trace(run, whole)
    assert kept(folder / "cut", open_store(url, s3.options)) == kept(folder / "whole")
    assert nothing_left(folder / "cut")
    assert SECRET not in "".join(run.output)


def test_a_run_that_goes_on_from_s3_and_bears_an_outage_is_the_uninterrupted_one(s3, url, tmp_path):
    train_through(s3, url, tmp_path, 2.0)


def test_a_run_begins_with_that_of_another_state_directory_whose_store_is_s3(s3, url, tmp_path):
    """It has a store of its own, in the state directory, and no credentials."""
    whole, parent, child = (tmp_path / name for name in ("whole", "parent", "child"))
    losses = go(whole).losses
    go(parent, checkpoint={"url": url, "storage_options": s3.options}, overrides=["train.max_steps=3"])
    source = find_source(str(parent / "state"), {})
    killed = go(
        child,
        overrides=["params.kill_after=1", "checkpoint.every_steps=100"],
        options=StartOptions(source=source),
        expect_success=False,
    )
    assert killed.codes == [-9], killed.output
    assert open_store(url, s3.options).pins().keys() == {(source.run_id, 3)}
    run = go(child)
    assert run.events("restored")[0]["global_step"] == 3
    assert run.losses == losses[3:]
    assert open_store(url, s3.options).pins() == {}
    assert SECRET not in "".join([*killed.output, *run.output])


@pytest.mark.soak
def test_a_run_bears_an_outage_of_twenty_seconds(s3, url, tmp_path):
    train_through(s3, url, tmp_path, 20.0)
