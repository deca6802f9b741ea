"""Jobs that come to grief, as a user runs them: the culprit is found and named, and the job ends as if nothing was."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastictrain.cli.state_dir import StateDir
from elastictrain.config import LoadedJob, load_job
from elastictrain.core.lifecycle import State
from elastictrain.core.phases import Phase
from elastictrain.errors import BusyError, IllegalTransitionError
from elastictrain.heartbeat import heartbeat_path, heartbeat_paths, read_heartbeat
from elastictrain.protocol import ENV_RUN_DIR, JOURNAL_FILE, read_error_reports
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.journal_reader import JournalReader
from elastictrain.supervisor.supervisor import Supervisor
from elastictrain.supervisor.team import Assignment
from tests.process.faulty import GLOBAL_BATCH
from tests.process.helpers import (
    Finished,
    all_gone,
    run_cli,
    start_cli,
    train,
    wait_until,
    write_job,
)

STEPS = 12
RUN_DEADLINE_S = 240.0
Fault = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of the faulty task, at its end."""

    finished: Finished
    state: Path

    def kept(self, kind: str) -> list[dict[str, Any]]:
        """The supervisor's own events."""
        return events(self.state, kind)

    @property
    def causes(self) -> list[str]:
        return [event["cause"] for event in self.kept("incarnation_ended")]

    @property
    def digest(self) -> str:
        return digest(self.state)

    def stacks(self, incident: int, rank: int) -> str:
        return (self.state / "incidents" / f"{incident:04d}" / f"stacks-{rank}.txt").read_text()


def events(state: Path, kind: str) -> list[dict[str, Any]]:
    """The fields of the supervisor's events of a kind, from its journal."""
    return [dict(event.fields) for event in JournalReader(state / JOURNAL_FILE).read(kinds=[kind])]


def digest(state: Path) -> str:
    """Of the weights in the newest snapshot."""
    newest = max(state.glob("snapshots/**/manifest.json"), key=lambda path: json.loads(path.read_text())["global_step"])
    manifest = json.loads(newest.read_text())
    assert manifest["global_step"] == STEPS
    return str(manifest["model_digest"])


def write_faulty(
    folder: Path, faults: Sequence[Fault] = (), *, params: dict[str, Any] | None = None, **job: Any
) -> Path:
    """The job of the faulty task: two ranks, two microbatches each, a snapshot after every other step."""
    train_section = {"max_steps": STEPS, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1}
    return write_job(
        folder,
        "tests.process.faulty:Task",
        params={"faults": [list(fault) for fault in faults], "marks": str(folder), **(params or {})},
        train={**train_section, **job.pop("train", {})},
        data={"shuffle": False, **job.pop("data", {})},
        checkpoint={"every_steps": 2, **job.pop("checkpoint", {})},
        elastic={"nproc_per_node": 2, **job.pop("elastic", {})},
        supervisor={
            "min_step_timeout_s": 3.0,
            "teardown_timeout_s": 3.0,
            "backoff_s": 0.1,
            **job.pop("supervisor", {}),
        },
        **job,
    )


def run_faulty(folder: Path, faults: Sequence[Fault], **job: Any) -> Ran:
    path = write_faulty(folder, faults, **job)
    finished = run_cli("run", path, "--state-dir", folder / "state", "--output", "json", deadline_s=RUN_DEADLINE_S)
    return Ran(finished, folder / "state")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same job when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_faulty(folder)
    trained = train(folder, world_size=2)
    return digest(trained.state_dir)


def check_recovered(ran: Ran, undisturbed: str, num_failures: int) -> None:
    assert ran.finished.code == 0, ran.finished.stdout + ran.finished.stderr
    assert len(ran.causes) == num_failures + 1, ran.causes
    assert ran.causes[-1] == "complete"
    assert ran.digest == undisturbed, "the weights are not those of the undisturbed run"


# ---- crashes and hangs in training


@pytest.mark.long
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_one_thing_after_another(tmp_path: Path, undisturbed: str, fast: bool) -> None:
    """A rank is killed, one is stopped, one sleeps, one holds the interpreter lock: blamed one by one, and got over,
    whether ranks are forked or started anew."""
    faults = [
        ("loss", "kill", 1, 3),
        ("loss", "stop", 1, 5),
        ("loss", "sleep", 0, 7),
        ("loss", "lock", 1, 9),
    ]
    ran = run_faulty(tmp_path, faults, elastic={"fast_restart": fast})
    check_recovered(ran, undisturbed, len(faults))
    killed, stopped, slept, locked, _ = ran.causes
    assert "rank 1 was ended by SIGKILL" in killed
    assert "rank 1 hung: its process is stopped" in stopped
    assert "rank 0 hung: it stands still in forward" in slept
    assert "rank 1 hung: it holds the interpreter lock" in locked
    incidents = ran.kept("incident_opened")
    assert [incident["ranks"] for incident in incidents] == [[1], [0], [1]]
    assert all(incident["stood_still_s"] - incident["limit_s"] < 2.0 for incident in incidents), incidents
    assert [event["rank"] for event in ran.kept("rank_killed")] == [1, 0, 1]
    assert "faulty.py" in ran.stacks(2, 0)
    assert "strike" in ran.stacks(2, 0)
    assert "_engine_run_backward" in ran.stacks(2, 1), "the one that waits"
    assert "strike" in ran.stacks(3, 1), "also from a rank that holds the lock"
    judged = json.loads((tmp_path / "state/incidents/0001/incident.json").read_text())
    assert [rank["process"] for rank in judged["judged"]] == ["running", "stopped"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (("loss", "segv", 1, 3), "rank 1 was ended by SIGSEGV"),
        (("loss", "exit", 0, 3), "rank 0 ended with exit code 3, without a report"),
        (("loss", "raise", 1, 3), "rank 1, step 3: RuntimeError: struck"),
        (("item", "sleep", 1, 4), "rank 1 hung: it stands still in data"),
        (("loss", "barrier", 0, 4), "rank 1 hung: it waits in another collective"),
    ],
    ids=["segfault", "exit", "exception", "stuck dataset", "skipped collective"],
)
def test_each_alone(tmp_path: Path, undisturbed: str, fault: Fault, says: str) -> None:
    ran = run_faulty(tmp_path, [fault])
    check_recovered(ran, undisturbed, 1)
    assert says in ran.causes[0]


def test_what_nobody_could_keep_is_said(tmp_path: Path) -> None:
    """All ranks die at once, for there is one: the last regular snapshot counts, and status says what that has cost."""
    ran = run_faulty(
        tmp_path,
        [("loss", "kill", 0, 7)],
        params={"pause_s": 0.05},  # the snapshot of step 4 is complete by then
        elastic={"nproc_per_node": 1},
        checkpoint={"every_steps": 4},
    )
    assert ran.finished.code == 0, ran.finished.stderr
    (restart,) = json.loads(run_cli("status", "--state-dir", ran.state, "--json").stdout)["restarts"]
    told = [restart[key] for key in ("kept_step", "global_step", "resumed_step", "steps_lost")]
    assert told == [None, 7, 4, 3]
    shown = " ".join(run_cli("status", "--state-dir", ran.state).stdout.split())
    assert "7 → 4 3 steps (the last regular snapshot counts)" in shown


@pytest.mark.long
def test_a_stuck_loader_process(tmp_path: Path, undisturbed: str) -> None:
    ran = run_faulty(tmp_path, [("item", "sleep", 1, 6)], data={"num_workers": 1})
    check_recovered(ran, undisturbed, 1)
    assert "rank 1 hung: it stands still in data" in ran.causes[0]
    assert "its loader processes" in ran.stacks(1, 1)
    assert "strike" in ran.stacks(1, 1)


@pytest.mark.long
def test_all_ranks_blocked(tmp_path: Path, undisturbed: str) -> None:
    ran = run_faulty(tmp_path, [("loss", "sleep", 0, 4), ("loss", "sleep", 1, 4)])
    check_recovered(ran, undisturbed, 1)
    assert ran.kept("incident_opened")[0]["ranks"] == [0, 1]


@pytest.mark.long
def test_collectives_that_do_not_match(tmp_path: Path, undisturbed: str) -> None:
    """A barrier here, a sum there: no rank can be told from the other, so both are named, and why."""
    ran = run_faulty(tmp_path, [("loss", "barrier", 0, 4), ("loss", "reduce", 1, 4)])
    check_recovered(ran, undisturbed, 1)
    (incident,) = ran.kept("incident_opened")
    assert incident["ranks"] == [0, 1]
    assert "at the same place: their collectives do not match" in incident["why"]
    assert "strike" in ran.stacks(1, 0)
    assert "strike" in ran.stacks(1, 1), "the stacks show where each has gone wrong"


# ---- at the edges of a life


@pytest.mark.long
def test_a_hang_in_evaluation(tmp_path: Path, undisturbed: str) -> None:
    ran = run_faulty(
        tmp_path,
        [("metrics", "sleep", 1, 2)],
        params={"eval_length": 4},
        eval={"every_steps": 6},
        supervisor={"eval_timeout_s": 3.0},
    )
    check_recovered(ran, undisturbed, 1)
    assert "rank 1 hung: it stands still in eval" in ran.causes[0]


@pytest.mark.long
def test_a_hang_in_a_snapshot(tmp_path: Path, undisturbed: str) -> None:
    """Rank 0 stands still in it; rank 1 waits in the next reduction, for longer than a step may take."""
    ran = run_faulty(tmp_path, [("state", "sleep", 0, 2)], supervisor={"snapshot_timeout_s": 6.0})
    check_recovered(ran, undisturbed, 1)
    assert "rank 0 hung: it stands still in snapshot" in ran.causes[0]


@pytest.mark.long
def test_a_hang_at_exit_does_not_undo_a_complete_run(tmp_path: Path, undisturbed: str) -> None:
    ran = run_faulty(tmp_path, [("atexit", "sleep", 1, 0)], supervisor={"exit_timeout_s": 3.0})
    check_recovered(ran, undisturbed, 0)
    assert ran.kept("incident_opened")[0]["ranks"] == [1]
    assert ran.kept("incident_opened")[0]["phase"] == "exit"


@pytest.mark.long
def test_a_hang_before_the_first_step(tmp_path: Path, undisturbed: str) -> None:
    """Rank 1 stands still in model(); rank 0 waits for it in the setup of DistributedDataParallel."""
    ran = run_faulty(tmp_path, [("model", "sleep", 1, 0)], supervisor={"startup_timeout_s": 15.0})
    check_recovered(ran, undisturbed, 1)
    assert "rank 1 hung: it stands still in init" in ran.causes[0]


@pytest.mark.soak
@pytest.mark.parametrize("fast", [True, False])
def test_a_hang_before_the_first_heartbeat(tmp_path: Path, undisturbed: str, fast: bool) -> None:
    """Rank 1 does not even get as far as our code; or, where ranks are forked, their launcher does not."""
    struck = "'elastictrain.training.launcher' in sys.orig_argv" if fast else "os.environ.get('RANK') == '1'"
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(
        "import os, pathlib, sys, time\n"
        f"mark = pathlib.Path({str(tmp_path / 'struck')!r})\n"
        f"if {struck} and not mark.exists():\n"
        "    mark.touch()\n"
        "    time.sleep(10**6)\n"
    )
    path = write_faulty(tmp_path, supervisor={"startup_timeout_s": 20.0}, elastic={"fast_restart": fast})
    code = (
        "import os, sys; os.environ['PYTHONPATH'] += os.pathsep + sys.argv.pop(1);"
        "from elastictrain.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "hook"), "run", str(path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*command, "--state-dir", str(tmp_path / "state"), "--output", "json"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=False,
    )
    ran = Ran(Finished(done.returncode, done.stdout, done.stderr), tmp_path / "state")
    check_recovered(ran, undisturbed, 1)
    assert f"rank {0 if fast else 1} hung: it has sent no heartbeat" in ran.causes[0]


# ---- what is no hang


@pytest.mark.long
def test_slow_is_not_hung(tmp_path: Path, undisturbed: str) -> None:
    """One slow step under the floor, and an evaluation that takes longer than its limit but gets on."""
    ran = run_faulty(
        tmp_path,
        [("loss", "slow", 1, 5), ("metrics", "slow", 0, 0), ("metrics", "slow", 0, 1), ("metrics", "slow", 0, 2)],
        params={"eval_length": 8},
        eval={"micro_batch_size": 1},
        supervisor={"eval_timeout_s": 3.0},
    )
    check_recovered(ran, undisturbed, 0)
    assert not ran.kept("incident_opened")


# ---- giving up


@pytest.mark.long
def test_a_step_that_always_fails_halts_the_job(tmp_path: Path) -> None:
    """Three times the same step: it is the step. What it holds is said, the state is kept."""
    ran = run_faulty(tmp_path, [("loss", "raise", 1, 5)], params={"always": True})
    assert ran.finished.code == 79, ran.finished.stderr
    assert "step 6 fails: 3 times in a row" in ran.finished.stderr
    assert "RuntimeError: struck" in ran.finished.stderr
    assert "samples 20, 21, 22, 23 (epoch 0)" in ran.finished.stderr
    assert "Traceback (most recent call last)" not in ran.finished.stderr.split("task.py")[0]
    assert len(ran.causes) == 3
    assert ran.kept("halted")
    steps = [json.loads(p.read_text())["global_step"] for p in (tmp_path / "state").glob("snapshots/**/manifest.json")]
    assert max(steps) == 5, "the ranks that survive keep the step before"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("supervisor.step_timeout_s=700", "step_timeout_s = 700 is not below elastic.process_group_timeout_s = 600"),
        ("elastic.rendezvous_timeout_s=500", "rendezvous_timeout_s = 500 is not above"),
    ],
)
def test_timeouts_in_the_wrong_order_are_refused(tmp_path: Path, override: str, says: str) -> None:
    refused = run_cli("run", write_faulty(tmp_path), "--state-dir", tmp_path / "state", "--set", override)
    assert refused.code == 78
    assert says in refused.stderr


# ---- nothing outlives


def ours(state: Path) -> list[psutil.Process]:
    """Processes of the job, wherever they hang in the tree, but for a persister."""
    found = []
    for process in psutil.process_iter():
        try:
            run_dir = process.environ().get(ENV_RUN_DIR, "")
            if run_dir.startswith(str(state)) and "elastictrain.checkpoint.persister" not in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def trains(state: Path) -> bool:
    return bool(events(state, "ranks_training"))


@pytest.mark.parametrize("victim", ["supervisor", "launcher", "agent"])
def test_nothing_outlives(tmp_path: Path, victim: str) -> None:
    """kill -9: with the supervisor everything ends; without its agent, or the launcher, the group is replaced."""
    state = tmp_path / "state"
    path = write_faulty(tmp_path, params={"pause_s": 0.05}, train={"max_steps": 10**6}, data={"num_workers": 1})
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        assert process.stdout is not None
        wait_until(lambda: trains(state))
        family = ours(state)
        (launcher,) = [p for p in family if "elastictrain.training.launcher" in p.cmdline()]
        (agent,) = [p for p in family if "elastictrain.training.agent" in p.cmdline()]
        group = [p for p in family if p not in (launcher, agent)]
        assert len(group) == 4, "two ranks, a loader process each"
        listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1"}, "nobody from outside is listened to"
        {"supervisor": process, "launcher": launcher, "agent": agent}[victim].kill()
        wait_until(lambda: all_gone([*group, agent]), 10.0)
        first = state / "runs" / "0001"
        steps = [beat.step for path in heartbeat_paths(first).values() if (beat := read_heartbeat(path)) is not None]
        assert max(report.kept_step or 0 for report in read_error_reports(first)) == max(steps), "a step was lost"
        if victim != "supervisor":
            wait_until(lambda: len(ours(state)) == 6 and not {agent, *group} & set(ours(state)))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        wait_until(lambda: not ours(state), 10.0)


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        ("supervisor", "lock"),
        pytest.param("supervisor", "stop", marks=pytest.mark.soak),
        pytest.param("agent", "lock", marks=pytest.mark.soak),
        pytest.param("agent", "stop", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_cannot_hear_of_it_is_gone_as_well(tmp_path: Path, victim: str, kind: str) -> None:
    """It is stopped, or holds the interpreter lock: it is ended, and the one that waits for it keeps the state."""
    state = tmp_path / "state"
    path = write_faulty(
        tmp_path,
        [("loss", kind, 1, 5)],
        checkpoint={"every_steps": 1000},
        supervisor={"min_step_timeout_s": 60.0, "teardown_timeout_s": 30.0},
    )
    first = state / "runs" / "0001"

    def waits() -> bool:
        beat = read_heartbeat(heartbeat_path(first, 0))
        return beat is not None and beat.phase is Phase.REDUCE and beat.step == 5

    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until(lambda: (tmp_path / f"struck-0-{kind}").exists() and waits())
        family = ours(state)
        (launcher,) = [p for p in family if "elastictrain.training.launcher" in p.cmdline()]
        (agent,) = [p for p in family if "elastictrain.training.agent" in p.cmdline()]
        group = [p for p in family if p not in (launcher, agent)]
        assert len(group) == 2
        {"supervisor": process, "agent": agent}[victim].kill()
        wait_until(lambda: all_gone([*group, agent]), 10.0)
        assert {report.kept_step for report in read_error_reports(first)} == {5}
        if victim == "agent":
            assert process.wait(RUN_DEADLINE_S) == 0
            assert {event["global_step"] for event in events(state, "restored")} == {5}
        wait_until(lambda: not ours(state), 10.0)


@pytest.mark.long
def test_ranks_in_a_long_call_keep_their_state_when_the_agent_dies(tmp_path: Path, undisturbed: str) -> None:
    """They hear of it only when the call returns, seconds later."""
    state = tmp_path / "state"
    path = write_faulty(
        tmp_path,
        [("loss", "crunch", 0, 5), ("loss", "crunch", 1, 5)],
        checkpoint={"every_steps": 1000},
        supervisor={"min_step_timeout_s": 60.0, "teardown_timeout_s": 60.0},
    )
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until(lambda: all((tmp_path / f"struck-{rank}-crunch").exists() for rank in range(2)))
        (agent,) = [p for p in ours(state) if "elastictrain.training.agent" in p.cmdline()]
        agent.kill()
        assert process.wait(RUN_DEADLINE_S) == 0
    first, last = events(state, "incarnation_ended")
    assert (first["kept_step"], last["cause"]) == (5, "complete")
    assert [event["global_step"] for event in events(state, "restored")] == [5, 5]
    assert digest(state) == undisturbed


@pytest.mark.long
def test_a_stop_is_in_time_even_if_a_rank_hangs(tmp_path: Path) -> None:
    state = tmp_path / "state"
    path = write_faulty(
        tmp_path,
        [("loss", "sleep", 1, 5)],
        supervisor={"min_step_timeout_s": 60.0, "stop_timeout_s": 4.0},
    )
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        wait_until((tmp_path / "struck-0-sleep").exists)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - began_s < 8.0
        wait_until(lambda: not ours(state), 10.0)


@pytest.mark.long
def test_a_reader_that_does_not_read_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Its output is a pipe that is full."""
    state = tmp_path / "state"
    job = {"train": {"max_steps": 10**6}, "metrics": {"every_steps": 1, "tensorboard": False}}
    path = write_faulty(tmp_path, params={"pause_s": 0.005}, **job)
    with start_cli("run", path, "--state-dir", state, "--output", "json") as process:
        assert process.stdout is not None
        wait_until(lambda: room_in(process.stdout) == 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert events(state, "stopped")
    wait_until(lambda: not ours(state), 10.0)


def room_in(pipe: Any) -> int:
    """Bytes that fit in a pipe before who writes must wait, at least: each of its pages ends in room that was too small
    for a line."""
    held = array.array("i", [0])
    fcntl.ioctl(pipe.fileno(), termios.FIONREAD, held)
    return max(0, fcntl.fcntl(pipe.fileno(), fcntl.F_GETPIPE_SZ) * 3 // 4 - held[0])


# ---- commands


class Kept:
    """A sink that the test looks into."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def append(self, kind: str, fields: Any) -> None:
        self.events.append((kind, dict(fields)))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def watched(job: LoadedJob, state: StateDir, sink: Kept) -> Supervisor:
    """A supervisor of this process."""

    def prepare(assignment: Assignment) -> Incarnation:
        return state.prepare(job, assignment=assignment)

    return Supervisor(job.config, prepare, state_dir=state.path, sink=sink, stay_up=True)


async def until(condition: Any, deadline_s: float = 90.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, condition
        await asyncio.sleep(0.02)


@pytest.mark.long
def test_commands(tmp_path: Path) -> None:
    """A snapshot on request; drained, the supervisor stays; it resumes where it was, shows itself, and stops."""
    path = write_faulty(
        tmp_path, params={"pause_s": 0.02}, train={"max_steps": 10**6}, checkpoint={"every_steps": 10**6}
    )
    state = StateDir(tmp_path / "state")
    job = load_job(str(path))
    sink = Kept()

    async def scenario() -> None:
        supervisor = watched(job, state, sink)
        running = asyncio.create_task(supervisor.run())
        with pytest.raises(BusyError, match="starting"):
            await supervisor.checkpoint(1.0)
        await until(lambda: supervisor.state is State.TRAINING)
        step = await supervisor.checkpoint(30.0)
        assert step >= 1
        view = supervisor.view(time.monotonic())
        assert (view.incarnation, view.world_size, view.max_steps) == (1, 2, 10**6)
        assert view.global_step is not None
        assert view.global_step >= step
        assert [rank.rank for rank in view.ranks] == [0, 1]
        assert all(rank.pid and rank.memory_bytes > 1 << 20 and rank.device == "cpu" for rank in view.ranks)
        assert all(rank.heartbeat_age_s is not None and rank.heartbeat_age_s < 5 for rank in view.ranks)
        json.dumps(asdict(view))
        await supervisor.drain()
        assert supervisor.state is State.DRAINED
        await until(lambda: not ours(state.path))
        drained_at = supervisor.view(time.monotonic()).global_step
        with pytest.raises(IllegalTransitionError):
            await supervisor.restart("nothing runs")
        await supervisor.resume()
        await until(lambda: supervisor.state is State.TRAINING)
        with pytest.raises(IllegalTransitionError):
            await supervisor.resume()
        await supervisor.stop("the test is over")
        ending = await running
        assert (ending.state, ending.error) == (State.STOPPED, None)
        (restored,) = [fields for kind, fields in sink.events if kind == "restored" and fields["rank"] == 0]
        assert restored["global_step"] == drained_at, "the step at which it was drained"

    asyncio.run(scenario())
    assert [kind for kind in sink.kinds() if kind in ("drained", "stopped", "halted")] == ["drained", "stopped"]
    assert "restart_planned" not in sink.kinds()


@pytest.mark.long
def test_a_halt_waits_and_a_restart_is_no_failure(tmp_path: Path) -> None:
    path = write_faulty(
        tmp_path,
        [("loss", "raise", 1, 5)],
        params={"always": True, "pause_s": 0.02},
        supervisor={"same_step_failures": 1},
    )
    state = StateDir(tmp_path / "state")
    job = load_job(str(path))
    sink = Kept()

    async def scenario() -> None:
        supervisor = watched(job, state, sink)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: supervisor.state is State.HALTED)
        assert "step 6 fails" in supervisor.view(time.monotonic()).reason
        assert not running.done()
        await supervisor.resume()
        await until(lambda: len([k for k in sink.kinds() if k == "incarnation_started"]) == 2)
        await supervisor.restart("to see it work")
        await until(lambda: len([k for k in sink.kinds() if k == "incarnation_started"]) == 3)
        await until(lambda: supervisor.state is State.HALTED)
        await supervisor.stop("enough")
        assert (await running).state is State.STOPPED

    asyncio.run(scenario())
    assert len(supervisor_restarts(sink)) == 1


@pytest.mark.parametrize("order", ["regroup", "abandon"])
def test_what_other_nodes_ask_for_while_a_worker_group_is_laid_out_is_not_lost(tmp_path: Path, order: str) -> None:
    """Nobody asks twice. One that is abandoned before it began never begins."""
    path = write_faulty(
        tmp_path, params={"pause_s": 0.02}, train={"max_steps": 10**6}, checkpoint={"every_steps": 10**6}
    )
    state = StateDir(tmp_path / "state")
    job = load_job(str(path))
    sink = Kept()
    prepared: list[int] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def ask() -> None:
            getattr(supervisor, order)("node c joins")

        def prepare(assignment: Assignment) -> Incarnation:
            if not prepared:
                asyncio.run_coroutine_threadsafe(ask(), loop).result()
            incarnation = state.prepare(job, assignment=assignment)
            prepared.append(incarnation.number)
            return incarnation

        supervisor = Supervisor(job.config, prepare, state_dir=state.path, sink=sink)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: running.done() or (len(prepared) == 2 and supervisor.state is State.TRAINING))
        assert supervisor.view(time.monotonic()).incarnation == 2
        await supervisor.stop("the test is over")
        assert (await running).error is None

    asyncio.run(scenario())
    assert prepared == [1, 2], "what was asked for is done once"
    assert supervisor_restarts(sink) == ["node c joins"]
    ended = [fields["incarnation"] for kind, fields in sink.events if kind == "incarnation_ended"]
    assert ended == ([1, 2] if order == "regroup" else [2])
    abandoned = [fields["incarnation"] for kind, fields in sink.events if kind == "worker_group_abandoned"]
    assert abandoned == ([] if order == "regroup" else [1])


def supervisor_restarts(sink: Kept) -> list[str]:
    return [fields["reason"] for kind, fields in sink.events if kind == "restart_planned"]
