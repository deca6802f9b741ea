"""The persister: what it is asked for becomes durable, whatever happens to it, to its store, or to training."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import fsspec
import psutil
import pytest

from elastictrain.checkpoint.catalog import newest_first, open_candidate
from elastictrain.checkpoint.faults import ENV_FAULT
from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.format import snapshot_name
from elastictrain.checkpoint.persist_loop import PersisterSettings, PersistLoop, Report
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.checkpoint.store import open_store
from elastictrain.testing import faulty_fs
from tests.process.snapshot_payload import RUN_ID, assert_holds, store_of, write

DEADLINE_S = 30.0


@pytest.fixture
def make_persister(tmp_path):
    made = []

    def make(*, on_report=lambda report: None, in_process=None, **changes) -> Persister:
        settings = {"url": str(tmp_path / "snapshots"), "first_pause_s": 0.02, "longest_pause_s": 0.1, **changes}
        made.append(Persister(PersisterSettings(**settings), on_report, in_process=in_process))
        return made[-1]

    yield make
    for persister in made:
        persister.close(finish=False, timeout_s=DEADLINE_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def durable_steps(tmp_path: Path, url: str | None = None) -> list[int]:
    store = open_store(url) if url else store_of(tmp_path)
    steps = []
    for candidate in newest_first(None, store):
        with open_candidate(candidate, tmp_path) as reader:
            assert_holds(reader)
        steps.append(candidate.global_step)
    return steps


def test_what_is_submitted_becomes_durable_and_old_ones_go(tier, tmp_path, make_persister):
    reports: list[Report] = []
    persister = make_persister(on_report=reports.append, keep_last=2)
    for step in range(1, 6):
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S)
    persister.close(finish=True)
    assert durable_steps(tmp_path) == [5, 4]
    assert persister.status.durable_step == 5
    assert persister.status.pending_step is None
    assert persister.status.last_seconds > 0
    assert [r.global_step for r in reports if r.kind == "persisted"] == [1, 2, 3, 4, 5]
    deleted = [name for r in reports if r.kind == "tidied" for name in r.fields["deleted"]]
    assert deleted == [snapshot_name(step, RUN_ID) for step in (1, 2, 3)]


def test_pinned_and_milestones_stay(tier, tmp_path, make_persister):
    persister = make_persister(keep_last=1, keep_every=4)
    for step in range(1, 8):
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S)
        if step == 2:
            store_of(tmp_path).pin(RUN_ID, 2, "another run")
    persister.close(finish=True)
    assert durable_steps(tmp_path) == [7, 4, 2]


def test_what_was_not_read_back_is_before_anything_goes_for_it(tier, tmp_path, make_persister, monkeypatch):
    """Once in `keep_last` snapshots: what is newer than all that goes has been read then."""
    unique = uuid.uuid4().hex
    url, options = f"faulty://{unique}", {"counter": unique}
    persister = make_persister(url=url, storage_options=options, verify_uploads=False, keep_last=2, in_process=True)
    reads, tidied, tidy = [], [], PersistLoop._tidy

    def tidy_and_say(loop: PersistLoop, newest: str) -> None:
        tidy(loop, newest)
        tidied.append(newest)

    monkeypatch.setattr(PersistLoop, "_tidy", tidy_and_say)
    for step in range(1, 8):
        before = faulty_fs.counts(unique).get("read", 0)
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S)
        until(lambda step=step: len(tidied) == step)  # it comes after the snapshot is durable, and is what reads
        assert _steps_in(url) == [step, step - 1][: min(step, 2)]
        reads.append(faulty_fs.counts(unique).get("read", 0) > before)
    assert reads == [False, False, True, False, True, False, True]


def test_nothing_goes_for_what_was_stored_wrongly(tier, tmp_path, make_persister):
    """Its size is right, so that only reading it back tells."""
    unique = uuid.uuid4().hex
    url, reports = f"memory://{unique}", []
    persister = make_persister(url=url, verify_uploads=False, keep_last=1, in_process=True, on_report=reports.append)
    fs, _ = fsspec.core.url_to_fs(url)
    pipe_file = type(fs).pipe_file

    def spoiled(self, path, value, **kwargs):
        """As soon as the snapshot is complete a bit of it is lost."""
        pipe_file(self, path, value, **kwargs)
        if path.endswith(f"{snapshot_name(2, RUN_ID)}/manifest.json"):
            model = path.replace("manifest.json", "model.safetensors")
            data = bytearray(self.cat_file(model))
            data[-1] ^= 1
            pipe_file(self, model, bytes(data))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fs), "pipe_file", spoiled)
        for step in (1, 2):
            persister.submit(write(tier, step))
            assert persister.wait(step, DEADLINE_S)
        until(lambda: any(r.kind == "tidying_failed" for r in reports))
        assert _steps_in(url) == [2, 1]
        [failed] = [r for r in reports if r.kind == "tidying_failed"]
        assert "model.safetensors" in failed.fields["error"]
        persister.submit(write(tier, 3))
        assert persister.wait(3, DEADLINE_S)
        persister.close(finish=True)
    assert durable_steps(tmp_path, url) == [3]


def _steps_in(url: str) -> list[int]:
    return [snapshot.global_step for snapshot in open_store(url).snapshots()]


def test_closing_without_finishing_and_without_a_start(make_persister):
    persister = make_persister()
    persister.close(finish=True)
    assert not persister.wait(1, 0)


@pytest.mark.parametrize("point", ["store.begin", "store.copied", "store.rename", "store.renamed"])
def test_a_killed_persister_is_started_again(tier, tmp_path, make_persister, monkeypatch, point):
    monkeypatch.setenv(ENV_FAULT, f"{point}:1:kill")

    def forget_the_fault(report: Report) -> None:
        if report.kind == "restarting":
            monkeypatch.delenv(ENV_FAULT)

    persister = make_persister(on_report=forget_the_fault)
    persister.submit(write(tier, 1))
    assert persister.wait(1, DEADLINE_S)
    assert persister.status.num_restarts == 1
    persister.close(finish=True)
    assert durable_steps(tmp_path) == [1]
    assert len(list(store_of(tmp_path).path.iterdir())) == 1


def test_a_stalled_store_is_given_up_and_tried_afresh(tier, tmp_path, make_persister):
    # In the second process the first write stalls as well: only the third counter, reset by the test, has no fault.
    options = {"target": "file", "faults": {"write:1": "stall"}, "counter": "c"}
    reports: list[Report] = []
    persister = make_persister(
        on_report=reports.append,
        url=f"faulty://{tmp_path}/snapshots",
        storage_options=options,
        storage_timeout_s=0.5,
    )
    persister.submit(write(tier, 1))
    until(lambda: persister.status.num_restarts == 2)
    assert "moved nothing" in persister.status.last_error
    assert [r.kind for r in reports if r.kind in ("stalled", "restarting")][:4] == ["stalled", "restarting"] * 2
    assert durable_steps(tmp_path) == []


@pytest.mark.parametrize(
    "fault", ["ls:1", "info:1", "write:1", "close:1", "info:2", "read:1", "put:1", "get:1", "delete:1"]
)
def test_a_stall_of_each_call_costs_one_process_and_no_snapshot(tier, tmp_path, make_persister, fault):
    """A call that never returns, at each place of storing and tidying; the next process has luck."""
    stalled = tmp_path / "stalled"
    options = {"target": "file", "faults": {fault: "stall"}, "once": str(stalled)}
    reports: list[Report] = []
    persister = make_persister(
        on_report=reports.append,
        url=f"faulty:/{tmp_path}/snapshots",
        storage_options=options,
        keep_last=1,
        storage_timeout_s=2.0,
    )
    for step in (1, 2):
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S), persister.status
    until(lambda: persister.status.num_restarts == 1)
    persister.submit(write(tier, 3))
    assert persister.wait(3, DEADLINE_S), persister.status
    persister.close(finish=True)
    assert stalled.exists()
    assert [r.kind for r in reports if r.kind in ("stalled", "restarting")] == ["stalled", "restarting"]
    assert durable_steps(tmp_path) == [3]
    assert [path.name for path in store_of(tmp_path).path.iterdir()] == [snapshot_name(3, RUN_ID)]


@pytest.mark.parametrize(
    ("fault", "action"),
    [
        *((call, "fail") for call in ["write:1", "close:2", "put:1", "read:1", "get:1", "info:1", "info:4", "ls:1"]),
        *((call, "truncate") for call in ["write:1", "put:1", "read:1", "get:1"]),
    ],
)
def test_each_single_fault_of_a_store_is_survived(tier, tmp_path, make_persister, fault, action):
    unique = uuid.uuid4().hex
    url = f"faulty://{unique}"
    reports: list[Report] = []
    persister = make_persister(
        on_report=reports.append,
        url=url,
        storage_options={"faults": {fault: action}, "counter": unique, "secret": "hunter22"},
    )
    for step in (1, 2):
        persister.submit(write(tier, step))
        assert persister.wait(step, DEADLINE_S)
    persister.close(finish=True)
    assert durable_steps(tmp_path, url) == [2, 1]
    assert "hunter22" not in str(reports) + repr(persister._settings)


def test_a_newer_one_supersedes_one_that_waits_or_is_retried(tier, tmp_path, make_persister):
    unique = uuid.uuid4().hex
    url = f"faulty://{unique}"
    faults = {"write:1": "fail+"}
    reports: list[Report] = []
    persister = make_persister(
        on_report=reports.append, url=url, storage_options={"faults": faults, "counter": unique}, longest_pause_s=30.0
    )
    persister.submit(write(tier, 1))
    until(lambda: sum(r.kind == "retrying" for r in reports) >= 2)
    assert "as it was told" in persister.status.last_error
    persister.submit(write(tier, 2))
    until(lambda: any(r.kind == "superseded" and r.global_step == 1 for r in reports))
    assert not persister.wait(1, 0)
    assert persister.status.pending_step == 2
    faults.clear()  # the outage is over
    assert persister.wait(1, DEADLINE_S)
    assert durable_steps(tmp_path, url) == [2]


def test_closing_without_finishing_ends_the_retries(tier, make_persister):
    unique = uuid.uuid4().hex
    reports: list[Report] = []
    options = {"faults": {"write:1": "fail+"}, "counter": unique}
    persister = make_persister(
        on_report=reports.append, url=f"faulty://{unique}", storage_options=options, first_pause_s=25.0
    )
    persister.submit(write(tier, 1))
    until(lambda: any(r.kind == "retrying" for r in reports))
    persister.close(finish=False, timeout_s=DEADLINE_S)
    assert not persister._thread.is_alive()
    assert reports[-1].kind == "superseded"


def test_a_damaged_source_is_a_failure_that_is_known_at_once(tier, make_persister):
    persister = make_persister()
    snapshot = write(tier, 1)
    path = snapshot.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    persister.submit(snapshot)
    assert not persister.wait(1, DEADLINE_S)
    assert "model.safetensors" in persister.status.last_error
    persister.submit(write(tier, 2))
    assert persister.wait(2, DEADLINE_S)


@pytest.mark.parametrize("in_process", [False, True])
def test_a_sound_snapshot_takes_the_place_of_a_damaged_one_of_its_step(tier, tmp_path, make_persister, in_process):
    persister = make_persister(in_process=in_process)
    damaged = write(tier, 1)
    path = damaged.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    persister.submit(damaged)
    assert not persister.wait(1, DEADLINE_S)
    assert persister.has_failed(1)
    tier.discard(damaged)
    persister.submit(write(tier, 1))
    assert persister.wait(1, DEADLINE_S)
    assert not persister.has_failed(1)
    assert durable_steps(tmp_path) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died(tier, make_persister, monkeypatch):
    monkeypatch.setattr(PersistLoop, "_persist", lambda self, request: 1 / 0)
    persister = make_persister(in_process=True)
    for step in (1, 1, 2):
        persister.submit(write(tier, step))
        assert not persister.wait(step, DEADLINE_S)
        assert persister.has_failed(step)
    assert "ZeroDivisionError" in persister.status.last_error


@contextmanager
def no_descriptors():
    """Nothing more can be opened, so no process can be started: EMFILE, from the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("when", ["at the first start", "at a restart"])
def test_a_process_that_cannot_be_started_is_tried_again(tier, tmp_path, make_persister, when):
    reports: list[Report] = []
    persister = make_persister(on_report=reports.append)
    first, second = write(tier, 1), write(tier, 2)
    if when == "at a restart":
        persister.submit(first)
        assert persister.wait(1, DEADLINE_S)
    with no_descriptors():
        if persister.pid is not None:
            os.kill(persister.pid, signal.SIGKILL)
        persister.submit(second)
        until(lambda: len([r for r in reports if r.kind == "retrying"]) >= 2)
        assert persister.status.last_error == "the persister cannot be started: Too many open files"
        assert persister.status.pending_step == 2
        assert not persister.has_failed(2)
    assert [r.fields["tries"] for r in reports if r.kind == "retrying"][:2] == [1, 2]
    assert persister.wait(2, DEADLINE_S), persister.status
    assert persister.status.last_error is None
    assert durable_steps(tmp_path)[0] == 2


def test_one_that_cannot_be_started_holds_up_nobody(tier, make_persister, monkeypatch):
    """Neither who hands over the next snapshot nor who closes."""
    monkeypatch.setattr("elastictrain.checkpoint.persister_client.LAUNCH_TIMEOUT_S", 10 * DEADLINE_S)
    monkeypatch.setattr("elastictrain.checkpoint.persister_client.FIRST_RESTART_PAUSE_S", 10 * DEADLINE_S)
    persister = make_persister()
    first, second = write(tier, 1), write(tier, 2)
    with no_descriptors():
        persister.begin()
        persister.submit(first)
        persister.submit(second)
        persister.close(finish=True, timeout_s=10 * DEADLINE_S)
    assert persister._thread is not None
    assert not persister._thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_process_that_nobody_starts_any_more(tier, make_persister, monkeypatch):
    monkeypatch.setattr(Persister, "_start", lambda self: 1 / 0)
    persister = make_persister()
    for step in (1, 1, 2):
        persister.submit(write(tier, step))
        assert not persister.wait(step, DEADLINE_S)
        assert persister.has_failed(step)
    assert "ZeroDivisionError" in persister.status.last_error


def test_signals_are_ignored_and_secrets_are_not_on_the_command_line(tier, make_persister):
    persister = make_persister(storage_options={"secret": "hunter22"})
    persister.submit(write(tier, 1))
    assert persister.wait(1, DEADLINE_S)
    process = psutil.Process(persister.pid)
    assert "hunter22" not in " ".join(process.cmdline()) + str(process.environ())
    assert os.getsid(persister.pid) == persister.pid
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(signum)
    persister.submit(write(tier, 2))
    assert persister.wait(2, DEADLINE_S)
    assert persister.status.num_restarts == 0


def _start_by_hand(**settings) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "elastictrain.checkpoint.persister"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps({"configure": settings}) + "\n")
    return process


def test_the_orphan_of_a_dead_worker_finishes_and_its_successor_waits_for_it(tier, tmp_path, make_persister):
    lock_path = str(tier.root / "persister.lock")
    snapshot = write(tier, 1)
    faults = {"target": "file", "faults": {"write:2": "stall"}, "counter": "c"}
    orphan = _start_by_hand(
        url=f"faulty://{tmp_path}/snapshots", storage_options=faults, lock_path=lock_path, grace_s=2.0
    )
    request = {"path": str(snapshot.path), "name": snapshot.name}
    orphan.stdin.write(json.dumps({"persist": request}) + "\n")
    orphan.stdin.flush()
    assert json.loads(orphan.stdout.readline())["kind"] == "started"
    orphan.stdin.close()
    reports: list[Report] = []
    persister = make_persister(on_report=reports.append, lock_path=lock_path)
    persister.submit(write(tier, 2))
    assert persister.wait(2, DEADLINE_S)
    assert reports[0].kind == "waiting_for_other"
    assert [json.loads(line)["kind"] for line in orphan.stdout] == ["abandoned"]
    orphan.stdout.close()
    assert orphan.wait(DEADLINE_S) == 75
    assert durable_steps(tmp_path) == [2]


@pytest.mark.parametrize("told_first", [True, False])
def test_who_was_told_to_end_does_not_go_on_for_long_once_its_worker_is_gone(tier, tmp_path, told_first):
    snapshot = write(tier, 1)
    orphan = _start_by_hand(
        url=f"faulty://{tmp_path}/snapshots",
        storage_options={"target": "file", "faults": {"write:2": "stall"}, "counter": "c"},
        grace_s=100 * DEADLINE_S,
        storage_timeout_s=100 * DEADLINE_S,
    )
    orphan.stdin.write(json.dumps({"persist": {"path": str(snapshot.path), "name": snapshot.name}}) + "\n")
    orphan.stdin.flush()
    assert json.loads(orphan.stdout.readline())["kind"] == "started"
    if told_first:
        orphan.send_signal(signal.SIGTERM)
        orphan.stdin.close()
    else:
        orphan.stdin.close()
        orphan.send_signal(signal.SIGTERM)
    assert [json.loads(line)["kind"] for line in orphan.stdout] == ["abandoned"]
    orphan.stdout.close()
    assert orphan.wait(DEADLINE_S) == 75


def test_what_was_asked_is_finished_after_the_worker_is_gone(tier, tmp_path):
    snapshot = write(tier, 1)
    process = _start_by_hand(url=str(tmp_path / "snapshots"))
    process.stdin.write(json.dumps({"persist": {"path": str(snapshot.path), "name": snapshot.name}}) + "\n")
    process.stdout.close()  # nobody listens any more
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0
    assert durable_steps(tmp_path) == [1]


# ---- worker groups on several nodes


def fence_of(number: int) -> dict[str, object]:
    return {"run_id": RUN_ID, "incarnation": number, "attempt": f"job-{number}-abc"}


@pytest.mark.parametrize("in_process", [False, True])
def test_a_worker_group_says_that_it_has_begun_before_it_has_anything_to_write(tmp_path, make_persister, in_process):
    persister = make_persister(fence=fence_of(3), in_process=in_process)
    persister.begin()
    until(lambda: store_of(tmp_path).read_fence(RUN_ID) == Fence(RUN_ID, 3, "job-3-abc"))


@pytest.mark.parametrize("in_process", [False, True])
def test_the_persister_of_a_node_that_was_cut_off_commits_and_deletes_nothing(
    tier, tmp_path, make_persister, in_process
):
    reports: list[Report] = []
    zombie = make_persister(fence=fence_of(3), in_process=in_process, keep_last=1, on_report=reports.append)
    zombie.submit(write(tier, 1))
    assert zombie.wait(1, DEADLINE_S)
    newer = make_persister(fence=fence_of(4), in_process=in_process, keep_last=5)
    newer.begin()
    until(lambda: store_of(tmp_path).read_fence(RUN_ID).incarnation == 4)
    zombie.submit(write(tier, 2))
    until(lambda: zombie.has_failed(2))
    assert not zombie.wait(2, 0.0)
    [refused] = [report for report in reports if report.kind == "fenced"]
    assert refused.global_step == 2
    assert refused.fields["refused_attempt"] == "job-3-abc"
    assert "job-4-abc has begun since" in refused.fields["error"]
    assert durable_steps(tmp_path) == [1]
    newer.submit(write(tier, 3))
    assert newer.wait(3, DEADLINE_S)
    assert durable_steps(tmp_path) == [3, 1]
