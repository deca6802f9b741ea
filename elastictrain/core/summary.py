"""Folds a job's events into its status: what it is doing and why, what was lost, and how much of the time counted.

Time is counted once. Every second between the first event and now is in exactly one of four accounts:

    useful    ranks trained, and these steps still count
    lost      a failure was the cause: standing still, being down, doing steps again
    overhead  starting, stopping
    away      stopped, drained, halted or complete: not counted in the wall time

An interval belongs to the state that the job was in during it. Two things are known only later and moved from useful to
lost then: how long a hung group had stood still, and the steps that the next incarnation does again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from elastictrain.core.events import STAMPS, Event, Kind, Moment
from elastictrain.core.history import History, Life
from elastictrain.core.lifecycle import State
from elastictrain.core.readings import finite, first_known, integer, number, text
from elastictrain.core.status import (
    ACTIVE,
    Daemon,
    Evaluated,
    JournalHealth,
    Number,
    Restart,
    SnapshotAge,
    Snapshots,
    Status,
    StoreError,
    SupervisorView,
)

MAX_RESTARTS = 100
"""Restarts that are kept; all are counted."""
_AWAY = frozenset({State.STOPPED, State.DRAINED, State.HALTED, State.COMPLETED})


def fold(events: Iterable[Event], history: History | None = None) -> History:
    """The history after these events, in the order of their ids."""
    history = history if history is not None else History()
    for event in events:
        history = advance(history, event)
    return history


def advance(history: History, event: Event) -> History:
    """The history after one more event. Never raises, whatever the event holds."""
    is_orphan = event.kind == Kind.SUPERVISOR_STARTED and history.state in ACTIVE
    if history.last is not None:
        history = _spend(history, event.moment.since(history.last), unattended=is_orphan)
    history = replace(history, last=event.moment)
    f = event.fields
    match event.kind:
        case Kind.SUPERVISOR_STARTED:
            return _supervisor_started(history, event, is_orphan)
        case Kind.INCARNATION_STARTED:
            incarnation = integer(f, "incarnation")
            state = State.RECOVERING if history.state is State.RECOVERING else State.STARTING
            who = f"incarnation {incarnation if incarnation is not None else '?'}"
            return replace(
                history,
                state=state,
                reason=f"{who} starts" + (f", after: {history.failure}" if history.failure else ""),
                incarnation=first_known(incarnation, history.incarnation),
                attempt=text(f, "attempt") or history.attempt,
                world_size=first_known(integer(f, "world_size"), history.world_size),
                restored_step=None,
                alive=True,
            )
        case Kind.RANKS_TRAINING:
            return _training(history, f)
        case Kind.RESTORED:
            step = integer(f, "global_step", "at_step")
            if text(f, "from_tier") == "durable":
                history = replace(history, store_error=None)
            return replace(history, global_step=first_known(step, history.global_step), restored_step=step)
        case Kind.PROGRESS:
            return _progress(history, f)
        case Kind.SNAPSHOT_TAKEN | Kind.SNAPSHOT_AT_FAILURE:
            step = integer(f, "at_step", "global_step", "step")
            return replace(history, in_memory=(step, event.moment)) if step is not None else history
        case Kind.SNAPSHOT_DURABLE:
            step = integer(f, "at_step", "global_step", "step")
            history = replace(history, store_error=None)
            return replace(history, durable=(step, event.moment)) if step is not None else history
        case Kind.PERSISTER_RETRYING | Kind.PERSISTER_STALLED | Kind.PERSISTER_FAILED | Kind.STORE_RETRYING:
            since = history.store_error[1] if history.store_error is not None else event.moment
            return replace(history, store_error=(_store_words(f), since))
        case Kind.EVALUATED:
            numbers = {str(key): number(f, key) for key in f if key not in STAMPS}
            values = {key: value for key, value in numbers.items() if value is not None}
            return replace(history, evaluation=Evaluated(step=integer(f, "step", "global_step"), values=values))
        case Kind.RANK_FAILED:
            return _rank_failed(history, f)
        case Kind.INCIDENT_OPENED:
            return _incident(history, f)
        case Kind.INCARNATION_ENDED:
            return _incarnation_ended(history, event)
        case Kind.RESTART_PLANNED:
            why = text(f, "reason") or history.failure or "a worker group failed"
            delay_s = finite(f, "delay_s")
            when = f"; starts again in {delay_s:.0f} s" if delay_s is not None and delay_s >= 1 else ""
            return replace(history, state=State.RECOVERING, reason=why + when, failure=history.failure or why)
        case Kind.HALTED:
            history = _close_restart(history, resumed_step=None)
            reason = text(f, "reason") or history.failure or "no reason was given"
            return replace(history, state=State.HALTED, reason=reason, alive=False)
        case Kind.COMPLETED:
            reached = history.max_steps if history.max_steps is not None else history.global_step
            history = replace(_orderly(history), global_step=first_known(integer(f, "global_step"), reached))
            return replace(history, state=State.COMPLETED, reason=text(f, "reason") or "all steps are done")
        case Kind.STOPPED:
            return replace(_orderly(history), state=State.STOPPED, reason=text(f, "reason") or "on request")
        case Kind.DRAINED:
            return replace(_orderly(history), state=State.DRAINED, reason=text(f, "reason") or "on request")
        case _:
            return history


def describe(
    history: History,
    *,
    job: str,
    state_dir: str,
    now: Moment,
    view: SupervisorView | None = None,
    daemon_running: bool = False,
    socket: str | None = None,
    journal: JournalHealth | None = None,
) -> Status:
    """The status document.

    Args:
        history: the folded events.
        job: name.
        state_dir: for people.
        now: the present.
        view: what the supervisor knows, where it answers.
        daemon_running: whether it lives. One that lives and does not answer leaves only the journal.
        socket: path of its control socket, if it has one.
        journal: whether events are being kept.
    """
    is_dead = not daemon_running and view is None
    if history.last is not None:
        history = _spend(history, now.since(history.last), unattended=is_dead and history.state in ACTIVE)
    state = history.state
    reason = history.reason
    if is_dead and history.state in ACTIVE:
        state, reason = State.NOT_RUNNING, f"the supervisor is gone; its last word was {history.state}: {reason}"
    if view is not None:
        state, reason = view.state, view.reason or reason
    global_step = first_known(view.global_step if view is not None else None, history.global_step)
    max_steps = first_known(view.max_steps if view is not None else None, history.max_steps)
    open_restart = () if history.open_restart is None else (_settled(history, history.open_restart, None),)
    restarts = (*history.restarts, *open_restart)[-MAX_RESTARTS:]
    accounts = history.accounts
    return Status(
        job=job,
        state_dir=state_dir,
        state=state.value,
        reason=reason,
        daemon_running=not is_dead,
        daemon=Daemon(
            pid=history.pid,
            version=history.version,
            answers=view is not None,
            socket=socket,
            cgroup=view.cgroup if view is not None else None,
        ),
        global_step=global_step,
        max_steps=max_steps,
        steps_per_s=history.steps_per_s,
        samples_per_s=history.samples_per_s,
        tokens_per_s=history.tokens_per_s,
        loss=history.loss,
        eta_s=_eta_s(state, global_step, max_steps, history.steps_per_s),
        evaluation=history.evaluation,
        incarnation=first_known(view.incarnation if view is not None else None, history.incarnation),
        attempt=(view.attempt if view is not None else None) or history.attempt,
        world_size=first_known(view.world_size if view is not None else None, history.world_size),
        ranks=list(view.ranks) if view is not None else [],
        nodes=list(view.nodes) if view is not None else [],
        snapshots=Snapshots(
            memory=_age(history.in_memory, now),
            durable=_age(history.durable, now),
            store_error=_store_error(history.store_error, now),
        ),
        num_restarts=history.num_restarts + len(open_restart),
        restarts=list(restarts),
        num_incidents=history.num_incidents,
        wall_s=accounts.wall_s,
        useful_s=accounts.useful_s,
        lost_s=accounts.lost_s,
        goodput=accounts.useful_s / accounts.wall_s if accounts.wall_s > 0 else None,
        last_event_age_s=now.since(history.last) if history.last is not None else None,
        journal=journal if journal is not None else JournalHealth(),
    )


# ---- time


def _spend(history: History, seconds: float, *, unattended: bool) -> History:
    """Books an interval. Unattended: no supervisor lived at its end, so nobody knows what of it was training."""
    accounts = history.accounts
    if unattended or history.state is State.RECOVERING:
        accounts = replace(accounts, lost_s=accounts.lost_s + seconds)
        return replace(history, accounts=accounts, open_lost_s=history.open_lost_s + seconds)
    if history.state is State.TRAINING:
        life = replace(history.life, useful_s=history.life.useful_s + seconds)
        return replace(history, accounts=replace(accounts, useful_s=accounts.useful_s + seconds), life=life)
    if history.state in _AWAY:
        return replace(history, accounts=replace(accounts, away_s=accounts.away_s + seconds))
    return replace(history, accounts=replace(accounts, overhead_s=accounts.overhead_s + seconds))


def _take_back(history: History, seconds: float) -> History:
    """Moves time of the current life from useful to lost; what it does not have cannot be moved."""
    seconds = max(0.0, min(seconds, history.life.useful_s, history.accounts.useful_s))
    accounts = history.accounts
    accounts = replace(accounts, useful_s=accounts.useful_s - seconds, lost_s=accounts.lost_s + seconds)
    life = replace(history.life, useful_s=history.life.useful_s - seconds)
    return replace(history, accounts=accounts, life=life, open_lost_s=history.open_lost_s + seconds)


# ---- events


def _supervisor_started(history: History, event: Event, is_orphan: bool) -> History:
    history = replace(
        history,
        pid=integer(event.fields, "pid"),
        version=text(event.fields, "version") or None,
        alive=False,
    )
    if not is_orphan:
        history = replace(history, failure=None, failed_rank=None, incident=None, open_lost_s=0.0)
        return replace(history, state=State.STARTING, reason="the supervisor has started")
    cause = "the supervisor ended without a word: killed, or the machine was switched off"
    history = replace(history, failure=history.failure or cause)
    if history.open_restart is None:
        history = replace(history, open_restart=_restart(history, event, history.incarnation, cause))
    return replace(history, state=State.RECOVERING, reason=f"after: {history.failure}")


def _training(history: History, f: Mapping[str, Any]) -> History:
    step = integer(f, "global_step", "step")
    life = history.life
    if step is not None and life.reached_step > step and life.reached_step > life.first_step:
        redone = min(1.0, (life.reached_step - step) / (life.reached_step - life.first_step))
        history = _take_back(history, redone * life.useful_s)
    # By the time that every rank has done a step, and somebody has looked, they are some steps further.
    begun = first_known(history.restored_step, step)
    history = _close_restart(history, resumed_step=begun)
    start = step if step is not None else (history.global_step or 0)
    return replace(
        history,
        state=State.TRAINING,
        reason=f"training since step {first_known(begun, start)}",
        incarnation=first_known(integer(f, "incarnation"), history.incarnation),
        global_step=first_known(step, history.global_step),
        alive=True,
        life=Life(first_step=start, reached_step=start),
        failure=None,
        failed_rank=None,
        incident=None,
        open_lost_s=0.0,
    )


def _progress(history: History, f: Mapping[str, Any]) -> History:
    step = integer(f, "step", "global_step")
    if first_known(integer(f, "incarnation"), history.incarnation) != history.incarnation:
        return history  # a late word of an earlier incarnation
    if step is not None:
        life = replace(history.life, reached_step=max(history.life.reached_step, step))
        history = replace(history, global_step=step, life=life)
    if history.alive and history.state in (State.STARTING, State.RECOVERING):
        # It moves: what looked like a hang was none, or nobody said that the ranks had begun.
        history = replace(history, state=State.TRAINING, reason="training", failure=None, failed_rank=None)
    return replace(
        history,
        max_steps=first_known(integer(f, "max_steps"), history.max_steps),
        steps_per_s=number(f, "steps_per_s"),
        samples_per_s=number(f, "samples_per_s"),
        tokens_per_s=number(f, "tokens_per_s"),
        loss=number(f, "loss"),
    )


def _rank_failed(history: History, f: Mapping[str, Any]) -> History:
    if history.failure is not None or f.get("secondary") is True:
        return history  # a consequence
    rank = integer(f, "rank")
    who = f"rank {rank}" if rank is not None else "a rank"
    words = f"{who} failed: {text(f, 'cause', 'what', 'kind') or 'no cause is known'}"
    state = State.RECOVERING if history.state in (State.TRAINING, State.STARTING) else history.state
    return replace(history, failure=words, failed_rank=rank, state=state, reason=words)


def _incident(history: History, f: Mapping[str, Any]) -> History:
    ranks = f.get("ranks")
    named = ", ".join(str(rank) for rank in ranks) if isinstance(ranks, list | tuple) else ""
    who = f"rank {named}" if named else "a rank"
    stood_still_s = finite(f, "stood_still_s")
    how_long = f" for {stood_still_s:.1f} s" if stood_still_s is not None else ""
    kind, phase = text(f, "kind") or "hang", text(f, "phase")
    words = f"{kind}: {who} stood still{how_long}" + (f" in {phase}" if phase else "")
    if history.state is State.TRAINING and stood_still_s is not None:
        history = _take_back(history, stood_still_s)
    first = integer({"rank": ranks[0]}, "rank") if isinstance(ranks, list | tuple) and ranks else None
    return replace(
        history,
        num_incidents=history.num_incidents + 1,
        incident=text(f, "incident") or history.incident,
        state=State.RECOVERING if history.state in (State.TRAINING, State.STARTING) else history.state,
        failure=history.failure or words,
        failed_rank=first_known(history.failed_rank, first),
        reason=words,
    )


def _incarnation_ended(history: History, event: Event) -> History:
    f = event.fields
    step = integer(f, "global_step", "step")
    if step is not None:
        life = replace(history.life, reached_step=max(history.life.reached_step, step))
        history = replace(history, life=life, global_step=step)
    if history.open_restart is not None:  # it ended before its ranks trained
        history = _close_restart(history, resumed_step=None)
    incarnation = first_known(integer(f, "incarnation"), history.incarnation)
    cause = text(f, "cause") or history.failure or "no cause is known"
    history = replace(history, alive=False, open_restart=_restart(history, event, incarnation, cause))
    if history.state in (State.STOPPING, State.DRAINING, *_AWAY):
        return history
    return replace(history, state=State.RECOVERING, reason=f"incarnation {incarnation} ended: {cause}")


def _restart(history: History, ended: Event, incarnation: int | None, cause: str) -> Restart:
    return Restart(
        incarnation=incarnation,
        time=_iso(ended.moment.time_s),
        cause=cause,
        rank=history.failed_rank,
        incident=history.incident,
        global_step=history.global_step,
        kept_step=integer(ended.fields, "kept_step"),
    )


def _settled(history: History, restart: Restart, resumed_step: int | None) -> Restart:
    known = restart.global_step is not None and resumed_step is not None
    lost = max(0, (restart.global_step or 0) - (resumed_step or 0)) if known else None
    return replace(restart, resumed_step=resumed_step, steps_lost=lost, lost_s=history.open_lost_s)


def _close_restart(history: History, *, resumed_step: int | None) -> History:
    """The restart that was open is one of the list now."""
    if history.open_restart is None:
        return history
    closed = _settled(history, history.open_restart, resumed_step)
    return replace(
        history,
        restarts=(*history.restarts, closed)[-MAX_RESTARTS:],
        num_restarts=history.num_restarts + 1,
        open_restart=None,
        open_lost_s=0.0,
    )


def _orderly(history: History) -> History:
    """An end that was meant: the incarnation that ended for it is no restart, and no time was lost."""
    if history.failure is not None:
        return replace(_close_restart(history, resumed_step=None), alive=False)
    moved_s = min(history.open_lost_s, history.accounts.lost_s)
    accounts = history.accounts
    accounts = replace(accounts, lost_s=accounts.lost_s - moved_s, overhead_s=accounts.overhead_s + moved_s)
    return replace(history, accounts=accounts, open_lost_s=0.0, open_restart=None, alive=False)


# ---- values


def _eta_s(state: State, step: int | None, max_steps: int | None, steps_per_s: Number | None) -> float | None:
    if state is not State.TRAINING or step is None or max_steps is None:
        return None
    if not isinstance(steps_per_s, float) or steps_per_s <= 0:
        return None
    return max(0, max_steps - step) / steps_per_s


def _age(snapshot: tuple[int, Moment] | None, now: Moment) -> SnapshotAge | None:
    return SnapshotAge(step=snapshot[0], age_s=now.since(snapshot[1])) if snapshot is not None else None


def _store_words(f: Mapping[str, Any]) -> str:
    stalled_s = finite(f, "seconds")
    moved = f"the store moved nothing for {stalled_s:g} s" if stalled_s is not None else "the store fails"
    return text(f, "error") or moved


def _store_error(failing: tuple[str, Moment] | None, now: Moment) -> StoreError | None:
    if failing is None:
        return None
    return StoreError(error=failing[0], since=_iso(failing[1].time_s), lasts_s=now.since(failing[1]))


def _iso(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC).isoformat(timespec="milliseconds")
