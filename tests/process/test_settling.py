"""What a worker group leaves in memory is made durable where none follows: the job is halted, or stopped just then."""

from __future__ import annotations

import asyncio
from pathlib import Path

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


def stop_between_two_groups(folder: Path, *, spoil_the_store: bool = False) -> tuple[Ending, Kept, int]:
    """Has a worker group make room for another one, and stops the job while that is laid out.

    Returns:
        the supervisor's end, its events, and the last step.
    """
    path = write_faulty(
        folder,
        params={"pause_s": 0.02},
        train={"max_steps": 10**6},
        checkpoint={**NEVER, "preempt_deadline_s": 5.0 if spoil_the_store else 60.0},
    )
    state = StateDir(folder / "state")
    job = load_job(str(path))
    sink = Kept()
    prepared: list[int] = []

    async def scenario() -> Ending:
        loop = asyncio.get_running_loop()

        def prepare(assignment: Assignment) -> Incarnation:
            incarnation = state.prepare(job, assignment=assignment)
            prepared.append(incarnation.number)
            if len(prepared) == 2:
                asyncio.run_coroutine_threadsafe(supervisor.stop("enough"), loop).result()
            return incarnation

        supervisor = Supervisor(job.config, prepare, state_dir=state.path, sink=sink)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: supervisor.state is State.TRAINING)
        if spoil_the_store:
            if (state.path / "snapshots").exists():
                (state.path / "snapshots").rename(state.path / "elsewhere")
            (state.path / "snapshots").write_text("no folder")
        supervisor.regroup("node c joins")
        return await running

    ending = asyncio.run(scenario())
    (step,) = [fields["global_step"] for kind, fields in sink.events if kind == "incarnation_ended"]
    return ending, sink, step


def test_a_job_that_is_stopped_between_two_worker_groups_leaves_its_last_step_in_the_store(tmp_path: Path) -> None:
    ending, _, step = stop_between_two_groups(tmp_path)
    assert ending.state is State.STOPPED
    assert ending.reason == f"enough, snapshot of step {step} durable"
    assert steps_in(store_of(tmp_path)) == [step]
    assert not memory_of(tmp_path).snapshots()


def test_a_store_that_fails_then_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    ending, sink, step = stop_between_two_groups(tmp_path, spoil_the_store=True)
    assert ending.state is State.STOPPED
    assert ending.reason == f"enough, snapshot of step {step} in the memory tier only"
    (said,) = [fields for kind, fields in sink.events if kind == "snapshot_not_durable"]
    assert said["at_step"] == step
    assert "snapshots" in said["last_error"] or "is at work still" in said["last_error"]
    assert [snapshot.global_step for snapshot in memory_of(tmp_path).snapshots()] == [step]
