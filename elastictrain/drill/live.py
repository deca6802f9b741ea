"""A fault on a job that runs for real: from outside, by signals alone, and only such as every job must survive.

Nothing of the job is changed: no file, no setting. What happens to it, happens to it some night anyway.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elastictrain.armed import boot_clock_s
from elastictrain.core.drill_verdict import SeenLive, live_objections
from elastictrain.core.events import Event, Kind
from elastictrain.core.faults import Action, Fault, Outside, Who
from elastictrain.drill.judge import DETECTED, Row
from elastictrain.errors import NotRunningError, UsageError
from elastictrain.procs import command_of, read_stat, send_signal
from elastictrain.protocol import JOURNAL_FILE
from elastictrain.supervisor.journal_reader import JournalReader

POLL_S = 0.05
_SNAPSHOTS = (Kind.SNAPSHOT_TAKEN, Kind.SNAPSHOT_AT_FAILURE, Kind.RESTORED)
"""Events after which there is a snapshot of their step, and none of a later one in this run."""

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """The process that a fault happens to.

    Args:
        pid: of it.
        started_ticks: when it was started: with the pid, its identity.
        signum: what it is sent.
        words: what it is.
    """

    pid: int
    started_ticks: int
    signum: signal.Signals
    words: str


def check_live(fault: Fault) -> None:
    """Raises UsageError where a fault cannot be done to a running job."""
    if fault.is_live:
        return
    reasons = {
        Outside.START_AGAIN: "who would start it again is systemd's business: `systemctl kill -s KILL` does it",
        Outside.PREEMPT: "that is `elastictrain stop`, or `systemctl stop`",
        Outside.CORRUPT: "a running job's own snapshots are not damaged on purpose",
        Outside.TRUNCATE: "a running job's own snapshots are not damaged on purpose",
        Outside.STORE_AWAY: "a running job's own store is not taken away on purpose",
        Outside.STORE_FULL: "a running job's own store is not filled on purpose",
    }
    why = reasons.get(fault.outside, "it happens inside a rank, which must have been started for it")
    raise UsageError(
        f"{fault.name} cannot be done to a running job: {why}",
        f"`elastictrain drill {fault.name} job.toml` does it to a run of its own.",
    )


def find_target(fault: Fault, status: Status) -> Target:
    """The process of a running job that a fault is for.

    Args:
        fault: a live one.
        status: the job's status document.

    Raises:
        NotRunningError: the job does not train, or its process cannot be made out.
        UsageError: it has no such process.
    """
    job, supervisor = status["job"], status["daemon"]["pid"]
    if status["state"] != "training" or not status["ranks"] or supervisor is None:
        raise NotRunningError(
            f"{job} does not train: it is {status['state'].replace('_', ' ')}: {status['reason']}",
            "Try again once it does.",
        )
    ranks = {rank["rank"]: rank["pid"] for rank in status["ranks"]}
    number = 0 if fault.who is Who.ZERO else max(ranks)
    pid, words = ranks[number], f"rank {number}"
    signum = {Action.STOP: signal.SIGSTOP, Action.SEGFAULT: signal.SIGSEGV}.get(fault.action, signal.SIGKILL)
    if fault.action is Action.KILL_AGENT:
        pid, words = _agent_pid(Path(status["state_dir"])), "the agent"
    elif fault.action is Action.KILL_LOADER:
        # A loader process is a fork of its rank.
        workers = [p.pid for p in psutil.Process(pid).children() if command_of(p.pid) == command_of(pid)]
        if not workers:
            raise UsageError(f"{job} has no loader processes", "data.num_workers = 0: its ranks read by themselves.")
        pid, words = workers[0], f"a loader process of rank {number}"
    stat = read_stat(pid) if pid is not None else None
    if stat is None or supervisor not in [parent.pid for parent in psutil.Process(pid).parents()]:
        raise NotRunningError(
            f"{words} of {job}, process {pid}, is not below its supervisor, process {supervisor}",
            "It may have ended just now. Look at `elastictrain status`, and try again.",
        )
    return Target(pid, stat.started_ticks, signum, words)


def _agent_pid(state_dir: Path) -> int | None:
    started = JournalReader(state_dir / JOURNAL_FILE).read(kinds=[Kind.INCARNATION_STARTED], last=1)
    return started[0].fields.get("agent_pid") if started else None


def strike(fault: Fault, target: Target, status: Status, *, timeout_s: float, tell: Callable[[str], None]) -> Row:
    """Does it, and watches what becomes of the job.

    Args:
        fault: for the row.
        target: the process.
        status: the job's status document, from before.
        timeout_s: how long to wait for a new worker group that trains.
        tell: gets a line about what is being done.

    Raises:
        NotRunningError: the process ended before it could be signalled.
    """
    reader = JournalReader(Path(status["state_dir"]) / JOURNAL_FILE)
    since = max((event.id for event in reader.read(last=1)), default=0)
    step = max((rank["step"] or 0 for rank in status["ranks"]), default=0)
    at_s = boot_clock_s()
    if not send_signal(target.pid, target.signum, started_ticks=target.started_ticks):
        raise NotRunningError(f"{target.words}, process {target.pid}, has ended by itself")
    tell(f"{target.signum.name} sent to {target.words}, process {target.pid}; watching the job")
    deadline_s = time.monotonic() + timeout_s
    events: list[Event] = []
    final = (Kind.HALTED, Kind.STOPPED, Kind.COMPLETED)
    while time.monotonic() < deadline_s:
        events = [event for event in reader.read(since) if event.moment.boot_s >= at_s]
        if any(event.kind in (Kind.RANKS_TRAINING, *final) for event in events):
            break
        time.sleep(POLL_S)
    detected = _first(events, at_s, DETECTED)
    recovered = _first(events, at_s, [Kind.RANKS_TRAINING])
    ended = next((event for event in events if event.kind == Kind.INCARNATION_ENDED), None)
    restored = next((event for event in events if event.kind == Kind.RESTORED), None)
    seen = SeenLive(
        reached_step=ended.fields["global_step"] if ended is not None else None,
        restored_step=None if recovered is None else restored.fields["global_step"] if restored is not None else 0,
        snapshot_step=_snapshot_step(reader, since, at_s),
        world_size=status["world_size"] or len(status["ranks"]),
    )
    wrong = []
    if recovered is None:
        last = next((event for event in events if event.kind in final), None)
        words = f"the job is {last.kind}: {last.fields.get('reason', '')}" if last is not None else "it does not train"
        wrong.append(f"no new worker group trained within {timeout_s:g} s: {words}")
    wrong += live_objections(fault, seen)
    return Row(
        fault=fault.name,
        injected_at=f"{target.words}, about step {step}",
        detected_s=detected,
        recovered_s=recovered,
        steps_lost=seen.steps_lost,
        verdict="fails" if wrong else "holds",
        why="; ".join(wrong) if wrong else _remark(seen),
    )


def _snapshot_step(reader: JournalReader, since: int, at_s: float) -> int:
    """The step of the newest snapshot that was there at a moment; 0 if there was none.

    Args:
        reader: of the journal.
        since: the id of an event from before.
        at_s: the moment, of `boot_clock_s`.
    """
    newest = 0
    for event in reader.read(kinds=_SNAPSHOTS):
        if event.id <= since or event.moment.boot_s < at_s:
            newest = event.fields["global_step" if event.kind == Kind.RESTORED else "at_step"]
    return newest


def _remark(seen: SeenLive) -> str:
    words = "nothing to compare with: a running job has no reference"
    if seen.steps_lost:
        words = (
            f"{seen.steps_lost} step(s) done again, since nobody was left to keep them: those after the newest "
            f"snapshot, of step {seen.snapshot_step}; {words}"
        )
    return words


def _first(events: list[Event], at_s: float, kinds: Any) -> float | None:
    return next((round(event.moment.boot_s - at_s, 3) for event in events if event.kind in kinds), None)
