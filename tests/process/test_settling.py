"""What a worker group leaves in memory is made durable where none follows: the job is halted, or stopped just then."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from elastictrain.cli.state_dir import StateDir
from elastictrain.config import load_job
from elastictrain.core.lifecycle import State
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.supervisor import Ending, Supervisor
from elastictrain.supervisor.team import Assignment
from tests.process.resume_helpers import memory_of, steps_in, store_of
from tests.process.test_supervisor import Kept, run_faulty, until, write_faulty

NEVER = {"every_steps": 10**6}


def test_a_job_that_is_halted_leaves_its_last_step_in_the_store(tmp_path: Path) -> None:
    ran = run_faulty(tmp_path, [("loss", "raise", 1, 5)], checkpoint=NEVER, supervisor={"same_step_failures": 1})
    assert ran.finished.code == 79, ran.finished.stderr
    assert steps_in(store_of(tmp_path)) == [5]
    assert [event["at_step"] for event in ran.kept("snapshot_durable")] == [5]
    assert '"event": "snapshot_durable"' in ran.finished.stdout
    assert not memory_of(tmp_path).snapshots()


class Between:
    """A job whose worker group makes room for another one; something is asked of its supervisor while that is laid out.

    Args:
        folder: of the job.
        ask: is called then.
        spoil_the_store: no snapshot gets durable any more.
        preempt_deadline_s: of the job.
    """

    def __init__(
        self,
        folder: Path,
        ask: Callable[[Supervisor], Coroutine[Any, Any, None]],
        *,
        spoil_the_store: bool = False,
        preempt_deadline_s: float = 60.0,
    ) -> None:
        path = write_faulty(
            folder,
            params={"pause_s": 0.02},
            train={"max_steps": 10**6},
            checkpoint={**NEVER, "preempt_deadline_s": preempt_deadline_s},
        )
        self.state = StateDir(folder / "state")
        self.job = load_job(str(path))
        self.left_in_memory: list[int] = []
        self.sink = Kept()
        self.ending = asyncio.run(self._run(ask, spoil_the_store))
        (ended,) = [fields for kind, fields in self.sink.events if kind == "incarnation_ended"]
        self.step = ended["global_step"]

    async def _run(self, ask: Callable[[Supervisor], Coroutine[Any, Any, None]], spoil_the_store: bool) -> Ending:
        loop = asyncio.get_running_loop()
        prepared: list[int] = []
        asking: list[asyncio.Task[None]] = []

        async def begin_to_ask() -> None:
            asking.append(asyncio.create_task(ask(supervisor)))
            await asyncio.sleep(0)

        def prepare(assignment: Assignment) -> Incarnation:
            incarnation = self.state.prepare(self.job, assignment=assignment)
            prepared.append(incarnation.number)
            if len(prepared) == 2:
                asyncio.run_coroutine_threadsafe(begin_to_ask(), loop).result()
            return incarnation

        supervisor = Supervisor(self.job.config, prepare, state_dir=self.state.path, sink=self.sink)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: supervisor.state is State.TRAINING)
        store = self.state.path / "snapshots"
        if spoil_the_store:
            if store.exists():
                store.rename(self.state.path / "elsewhere")
            store.write_text("no folder")
        supervisor.regroup("node c joins")
        ending = await running
        await asyncio.gather(*asking)
        if spoil_the_store:
            self.left_in_memory = [snapshot.global_step for snapshot in memory_of(self.state.path.parent).snapshots()]
            store.unlink()
            await until(self._has_no_persister)
        return ending

    def _has_no_persister(self) -> bool:
        """Those that were left to themselves have done what they were asked for."""
        with (self.state.path / "persister.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return not any(thread.name == "persister" for thread in threading.enumerate())


async def stop(supervisor: Supervisor) -> None:
    await supervisor.stop("enough")


def test_a_job_that_is_stopped_between_two_worker_groups_leaves_its_last_step_in_the_store(tmp_path: Path) -> None:
    between = Between(tmp_path, stop)
    assert between.ending.state is State.STOPPED
    assert between.ending.reason == f"enough, snapshot of step {between.step} durable"
    assert steps_in(store_of(tmp_path)) == [between.step]
    assert not memory_of(tmp_path).snapshots()


def test_a_store_that_fails_then_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    between = Between(tmp_path, stop, spoil_the_store=True, preempt_deadline_s=3.0)
    assert between.ending.state is State.STOPPED
    assert between.ending.reason == f"enough, snapshot of step {between.step} in the memory tier only"
    (said,) = [fields for kind, fields in between.sink.events if kind == "snapshot_not_durable"]
    assert said["at_step"] == between.step
    assert said["last_error"]
    assert between.left_in_memory == [between.step]


@pytest.mark.parametrize("end", ["complete", "stop"])
def test_what_is_heard_while_the_store_is_waited_for_is_not_lost(tmp_path: Path, end: str) -> None:
    async def ask(supervisor: Supervisor) -> None:
        draining = asyncio.create_task(supervisor.drain())
        await asyncio.sleep(1.0)  # by then the store is waited for; if not, what is said is heard all the same
        assert supervisor.state is State.DRAINING
        if end == "complete":
            supervisor.complete_with_all()
        else:
            supervisor.stop_with_all("enough")
            for _ in range(2):  # the first time it is asked for here, and then once more: nobody wants to wait
                await supervisor.stop("enough")
        await draining

    between = Between(tmp_path, ask, spoil_the_store=True, preempt_deadline_s=600.0)
    assert between.ending.state is (State.COMPLETED if end == "complete" else State.STOPPED)
