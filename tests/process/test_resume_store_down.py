"""A store that cannot be reached at a start: what it is known to hold is waited for, never passed over in silence."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint.durable_note import DurableNote, GivenUp
from elastictrain.checkpoint.faults import ENV_FAULT
from elastictrain.checkpoint.format import snapshot_name
from elastictrain.cli.state_dir import StartOptions, StateDir
from elastictrain.config import load_job
from elastictrain.errors import StateDirError, StorageError
from elastictrain.protocol import DURABLE_FILE, JobIdentity
from tests.process.helpers import Trained, run_cli, train, wait_until, write_job
from tests.process.resume_helpers import KILLED, TASK, assert_same_future, go, memory_of, steps_in, store_of

IMPATIENT = {"storage_timeout_s": 0.3}
ALLOWED = StartOptions(allowed_differences=("rewind",))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return go(folder), folder


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, to be copied: step 7 is durable, and its memory tier is that of an earlier life, which got to step 4."""
    folder = tmp_path_factory.mktemp("stale")
    run = go(folder, environment={ENV_FAULT: "memory.begin:5:kill"}, expect_success=False)
    assert run.codes == [KILLED]
    subprocess.run(["cp", "-a", folder / "shm", folder / "old"], check=True)
    go(folder, overrides=["train.max_steps=7"])
    assert steps_in(store_of(folder))[0] == 7
    (folder / "shm").rmdir()
    (folder / "old").rename(folder / "shm")
    assert noted(folder) == 7
    return folder


def noted(folder: Path) -> int | None:
    identity = JobIdentity.read(folder / "state")
    assert identity is not None
    return DurableNote(folder / "state").read(identity.run_id)


@pytest.fixture
def job(tmp_path: Path, stale: Path) -> Path:
    """The stale job, under another path: the memory tier's folder is named after the state directory."""
    subprocess.run(["cp", "-a", f"{stale}/.", tmp_path], check=True)
    there = memory_of(stale).root
    (tmp_path / there.relative_to(stale)).rename(memory_of(tmp_path).root)
    assert memory_of(tmp_path).snapshots()[0].global_step == 4
    return tmp_path


def take_away(folder: Path) -> Callable[[], None]:
    """The store fails from now on; returns what brings it back."""
    store = folder / "state" / "snapshots"
    store.rename(folder / "away")
    store.write_text("no folder")

    def back() -> None:
        store.unlink()
        (folder / "away").rename(store)

    return back


def unmount(folder: Path) -> Callable[[], None]:
    """The store is an empty folder, as where a file system is not mounted."""
    store = folder / "state" / "snapshots"
    store.rename(folder / "away")
    store.mkdir()

    def back() -> None:
        store.rmdir()
        (folder / "away").rename(store)

    return back


@pytest.mark.parametrize("lose", [take_away, unmount])
def test_an_older_snapshot_is_no_substitute(
    job: Path, undisturbed: tuple[Trained, Path], lose: Callable[[Path], Callable[[], None]]
) -> None:
    back = lose(job)
    run = go(job, checkpoint=IMPATIENT, expect_success=False)
    assert run.codes == [StorageError.exit_code], run.output
    assert "step 7" in run.errors[0].what
    assert "step 4" in run.errors[0].what
    assert "--allow rewind" in run.errors[0].hint
    assert "--fresh" in run.errors[0].hint
    assert "(tried for 0.3 s)" in run.errors[0].what
    assert run.events("store_retrying")[0]["level"] == "warning"
    assert run.events("restored") == []
    back()
    assert go(job).events("restored")[0]["global_step"] == 7
    assert_same_trace_at_the_end(job, undisturbed)


def assert_same_trace_at_the_end(folder: Path, undisturbed: tuple[Trained, Path]) -> None:
    whole, whole_folder = undisturbed
    again = go(folder)  # nothing is left to do; its metrics are those of all starts
    assert_same_future(again, folder, whole, whole_folder)


def test_it_is_waited_for(job: Path, undisturbed: tuple[Trained, Path]) -> None:
    """A store that comes back within storage_timeout_s costs nothing but time."""
    back = take_away(job)

    def mend(ranks: list[Any]) -> None:
        output = job / "state" / "runs" / "0003" / "output-0.txt"
        wait_until(lambda: output.exists() and '"store_retrying"' in output.read_text())
        back()

    run = go(job, while_running=mend)
    assert run.events("restored")[0]["global_step"] == 7
    assert_same_future(run, job, *undisturbed)


def test_an_older_one_can_be_accepted_once(job: Path, undisturbed: tuple[Trained, Path]) -> None:
    """It is named; the note then says what was accepted; the steps done again are the same as the first time."""
    back = take_away(job)

    def mend(ranks: list[Any]) -> None:
        output = job / "state" / "runs" / "0003" / "output-0.txt"
        wait_until(lambda: output.exists() and '"restored"' in output.read_text())
        assert noted(job) == 4
        back()

    run = go(job, checkpoint=IMPATIENT, options=ALLOWED, while_running=mend)
    assert run.events("restored")[0]["global_step"] == 4
    assert run.events("snapshot_passed_over")[0]["level"] == "warning"
    assert noted(job) == 9
    assert_same_future(run, job, *undisturbed)
    assert ALLOWED.of_restart().allowed_differences == ()


def test_a_rewind_to_nothing_is_not_accepted(job: Path) -> None:
    shutil.rmtree(memory_of(job).root)
    unmount(job)
    run = go(job, checkpoint=IMPATIENT, options=ALLOWED, expect_success=False)
    assert run.codes == [StorageError.exit_code]
    assert "step 7" in run.errors[0].what
    assert "--allow" not in run.errors[0].hint


def test_what_is_not_known_to_be_newer_is_gone_on_from(job: Path, undisturbed: tuple[Trained, Path]) -> None:
    """The memory tier holds what was made durable last: a store that is down then costs a warning."""
    (job / "state" / DURABLE_FILE).unlink()
    identity = JobIdentity.read(job / "state")
    assert identity is not None
    DurableNote(job / "state").learn(identity.run_id, 4)
    back = take_away(job)

    def mend(ranks: list[Any]) -> None:
        output = job / "state" / "runs" / "0003" / "output-0.txt"
        wait_until(lambda: output.exists() and '"restored"' in output.read_text())
        back()

    run = go(job, checkpoint=IMPATIENT, while_running=mend)
    assert run.events("restored")[0]["global_step"] == 4
    assert_same_future(run, job, *undisturbed)


def test_a_store_that_has_lost_its_newest_is_believed(job: Path) -> None:
    """It answers, and has others of the run: passed over with a warning, and the note says what there is."""
    newest = store_of(job).snapshots()[0].name
    store_of(job).delete(newest)
    left = steps_in(store_of(job))[0]
    run = go(job, overrides=["train.max_steps=0"] if left == 0 else [f"train.max_steps={left}"])
    assert run.events("restored")[0]["global_step"] == left
    assert "was durable, and is not there any more" in run.events("snapshot_passed_over")[0]["reason"]
    assert noted(job) == left


def test_the_note_is_checked(job: Path) -> None:
    (job / "state" / DURABLE_FILE).write_text("{")
    run = go(job, expect_success=False)
    assert run.codes == [StateDirError.exit_code]
    assert DURABLE_FILE in run.errors[0].what


def test_the_note_only_grows_unless_told(tmp_path: Path) -> None:
    note = DurableNote(tmp_path)
    assert note.read("0badcafe") is None
    for step in (3, 5, 4):
        note.learn("0badcafe", step)
    assert note.read("0badcafe") == 5
    assert note.read("another0") is None
    note.unlearn("0badcafe", 4, 1)  # there is news by now
    assert note.read("0badcafe") == 5
    note.unlearn("0badcafe", 5, 2)
    assert note.read("0badcafe") == 2
    note.learn("another0", 1)
    assert note.read("0badcafe") is None
    assert json.loads(note.path.read_text()) == {"global_step": 1, "run_id": "another0"}


def test_the_note_keeps_what_was_given_up_until_its_step_is_done_anew(tmp_path: Path) -> None:
    note, run_id = DurableNote(tmp_path), "0badcafe"
    given_up = {GivenUp(snapshot_name(step, run_id), "digest") for step in (8, 9)}
    note.give_up(run_id, given_up)
    assert note.read(run_id) is None
    for step in (3, 5):
        note.learn(run_id, step)
    note.unlearn(run_id, 5, 4)
    assert (note.read(run_id), note.given_up(run_id)) == (4, given_up)
    note.learn(run_id, 9)
    note.learn(run_id, 8)  # by a slow persister; no less is durable than before
    assert (note.read(run_id), note.given_up(run_id)) == (9, frozenset())
    note.give_up(run_id, given_up)
    note.learn("another0", 1)
    assert note.given_up(run_id) == note.given_up("another0") == frozenset()


# ---- the first start of a state directory


def test_the_first_start_waits_for_its_store(tmp_path: Path) -> None:
    """A new state directory adopts the run of its store, which must answer first."""
    go(tmp_path / "one", overrides=["train.max_steps=2"], checkpoint={"url": str(tmp_path / "store")})
    back = take_away_url(tmp_path / "store")
    said: list[str] = []

    def warn(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            back()

    write_job(tmp_path / "two", TASK, train={"global_batch_size": 4}, checkpoint={"url": str(tmp_path / "store")})
    incarnation = StateDir(tmp_path / "two" / "state", warn).prepare(load_job(str(tmp_path / "two")))
    incarnation.board.close()
    first, second = JobIdentity.read(tmp_path / "one" / "state"), JobIdentity.read(tmp_path / "two" / "state")
    assert first is not None
    assert second is not None
    assert second.run_id == first.run_id
    assert len(said) == 2
    assert "tried again" in said[0]
    assert str(tmp_path / "store") in said[0]


def take_away_url(store: Path) -> Callable[[], None]:
    away = store.with_name("away")
    store.rename(away)
    store.write_text("no folder")

    def back() -> None:
        store.unlink()
        away.rename(store)

    return back


def test_a_first_start_whose_store_stays_down(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    with pytest.raises(StorageError, match=r"tried for 0\.3 s") as caught:
        train(tmp_path, TASK, train={"global_batch_size": 4}, checkpoint={"url": str(tmp_path / "store"), **IMPATIENT})
    assert "--fresh" in caught.value.hint
    done = run_cli("run", tmp_path, "--state-dir", tmp_path / "state")
    assert done.code == StorageError.exit_code
    assert "tried again in" in done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "store") in done.stderr
