"""What a supervisor is doing, as a table of states and transitions. The diagram in docs/lifecycle.md is made from it.

The invariant: a state directory's training goes on in `STARTING`, `TRAINING` and `RECOVERING` only; in every other
state no rank runs, or the ranks that run have been told to end.
"""

from __future__ import annotations

from enum import StrEnum

from elastictrain.errors import IllegalTransitionError


class State(StrEnum):
    """The values are what `status` shows and the journal keeps."""

    NOT_RUNNING = "not_running"
    """No supervisor runs, and nobody meant that: killed, or the machine was switched off, or never started. What others
    see; no state of a supervisor, and so not in the table."""

    STARTING = "starting"
    """The first worker group is on its way to its first step."""
    TRAINING = "training"
    """Every rank of this node has done a step."""
    RECOVERING = "recovering"
    """A worker group failed; the next one is being waited for, or on its way to its first step."""
    STOPPING = "stopping"
    """The ranks finish their step and keep their state; then the supervisor ends."""
    DRAINING = "draining"
    """The same, but the supervisor stays, for a `resume`."""
    DRAINED = "drained"
    """No rank runs, on request, until `resume`."""
    HALTED = "halted"
    """Going on would lead nowhere. State is kept; `resume` tries again."""
    COMPLETED = "completed"
    """All steps are done."""
    STOPPED = "stopped"
    """Ended on request; the next start goes on from here."""


class Trigger(StrEnum):
    """What happened; the past tense says so."""

    RANKS_TRAINED = "ranks trained"
    GROUP_FAILED = "group failed"
    GROUP_COMPLETED = "group completed"
    """The worker group has done the last step; that of other nodes, where this one had no part in it."""
    GROUP_ENDED = "group ended"
    """Its ranks ended in order, before the last step, or are gone after a request to end."""
    GIVEN_UP = "given up"
    STOP_ASKED = "stop asked"
    DRAIN_ASKED = "drain asked"
    RESUME_ASKED = "resume asked"
    RESTART_ASKED = "restart asked"


TRANSITIONS: dict[State, dict[Trigger, State]] = {
    State.STARTING: {
        Trigger.RANKS_TRAINED: State.TRAINING,
        Trigger.GROUP_FAILED: State.RECOVERING,
        Trigger.GROUP_COMPLETED: State.COMPLETED,
        Trigger.GROUP_ENDED: State.STOPPED,
        Trigger.GIVEN_UP: State.HALTED,
        Trigger.STOP_ASKED: State.STOPPING,
        Trigger.DRAIN_ASKED: State.DRAINING,
        Trigger.RESTART_ASKED: State.RECOVERING,
    },
    State.TRAINING: {
        Trigger.GROUP_FAILED: State.RECOVERING,
        Trigger.GROUP_COMPLETED: State.COMPLETED,
        Trigger.GROUP_ENDED: State.STOPPED,
        Trigger.GIVEN_UP: State.HALTED,
        Trigger.STOP_ASKED: State.STOPPING,
        Trigger.DRAIN_ASKED: State.DRAINING,
        Trigger.RESTART_ASKED: State.RECOVERING,
    },
    State.RECOVERING: {
        Trigger.RANKS_TRAINED: State.TRAINING,
        Trigger.GROUP_FAILED: State.RECOVERING,
        Trigger.GROUP_COMPLETED: State.COMPLETED,
        Trigger.GROUP_ENDED: State.STOPPED,
        Trigger.GIVEN_UP: State.HALTED,
        Trigger.STOP_ASKED: State.STOPPING,
        Trigger.DRAIN_ASKED: State.DRAINING,
        Trigger.RESTART_ASKED: State.RECOVERING,
    },
    State.STOPPING: {
        Trigger.STOP_ASKED: State.STOPPING,
        Trigger.DRAIN_ASKED: State.STOPPING,
        Trigger.GROUP_COMPLETED: State.COMPLETED,
        Trigger.GROUP_ENDED: State.STOPPED,
    },
    State.DRAINING: {
        Trigger.STOP_ASKED: State.STOPPING,
        Trigger.DRAIN_ASKED: State.DRAINING,
        Trigger.GROUP_COMPLETED: State.COMPLETED,
        Trigger.GROUP_ENDED: State.DRAINED,
    },
    State.DRAINED: {
        Trigger.GROUP_COMPLETED: State.COMPLETED,
        Trigger.STOP_ASKED: State.STOPPED,
        Trigger.DRAIN_ASKED: State.DRAINED,
        Trigger.RESUME_ASKED: State.STARTING,
    },
    State.HALTED: {
        Trigger.GROUP_COMPLETED: State.COMPLETED,
        Trigger.STOP_ASKED: State.STOPPED,
        Trigger.DRAIN_ASKED: State.DRAINED,
        Trigger.RESUME_ASKED: State.STARTING,
    },
    State.COMPLETED: {},
    State.STOPPED: {},
}

FINAL: frozenset[State] = frozenset(state for state, row in TRANSITIONS.items() if not row)
RUNNING: frozenset[State] = frozenset({State.STARTING, State.TRAINING, State.RECOVERING})
ENDING: frozenset[State] = frozenset({State.STOPPING, State.DRAINING})


def after(state: State, trigger: Trigger) -> State:
    """The state that follows.

    Raises:
        IllegalTransitionError: the table does not know it.
    """
    try:
        return TRANSITIONS[state][trigger]
    except KeyError:
        allowed = ", ".join(sorted(TRANSITIONS[state])) or "nothing"
        raise IllegalTransitionError(
            f'"{trigger}" cannot happen in state {state}', f"In state {state} can happen: {allowed}."
        ) from None


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.STARTING}"]
    for state, row in TRANSITIONS.items():
        by_target: dict[State, list[str]] = {}
        for trigger, target in row.items():
            by_target.setdefault(target, []).append(str(trigger))
        lines += [f"    {state} --> {target}: {', '.join(names)}" for target, names in by_target.items()]
    lines += [f"    {state} --> [*]" for state in TRANSITIONS if state in FINAL]
    return "\n".join(lines) + "\n"
