"""The phases of a rank, as a table.

What a loop is doing at a moment is one of these. The table says which may follow which; a loop that does
something else gets an `IllegalTransitionError` and its phase stays as it was. After `REDUCE` and until the step is
committed the rank is *in update*: its weights may be half changed, so no snapshot can be taken. Everywhere else,
also while it waits in a collective, its weights are those of the last committed step.
"""

from __future__ import annotations

from enum import IntEnum

from elastictrain.errors import IllegalTransitionError


class Phase(IntEnum):
    """The numbers are written into heartbeat records: never renumber them."""

    INIT = 0
    """Before the first step: imports, process group, model, data."""
    READY = 1
    """Between two steps."""
    DATA = 2
    """Waiting for the window's microbatches."""
    FORWARD = 3
    BACKWARD = 4
    REDUCE = 5
    """Gradients are complete on this rank and wait for the others'."""
    OPTIMIZER = 6
    """Unscale, clip, step."""
    COMMIT = 7
    """The counters move."""
    EVAL = 8
    SNAPSHOT = 9
    EXIT = 10
    """After the last step: closing files, leaving the process group."""


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.INIT: frozenset({Phase.READY, Phase.EXIT}),
    Phase.READY: frozenset({Phase.DATA, Phase.EVAL, Phase.SNAPSHOT, Phase.EXIT}),
    Phase.DATA: frozenset({Phase.FORWARD, Phase.REDUCE, Phase.READY, Phase.EXIT}),
    Phase.FORWARD: frozenset({Phase.BACKWARD, Phase.EXIT}),
    Phase.BACKWARD: frozenset({Phase.FORWARD, Phase.REDUCE, Phase.OPTIMIZER, Phase.DATA, Phase.EXIT}),
    Phase.REDUCE: frozenset({Phase.OPTIMIZER, Phase.EXIT}),
    Phase.OPTIMIZER: frozenset({Phase.COMMIT, Phase.EXIT}),
    Phase.COMMIT: frozenset({Phase.READY, Phase.EXIT}),
    Phase.EVAL: frozenset({Phase.READY, Phase.EXIT}),
    Phase.SNAPSHOT: frozenset({Phase.READY, Phase.EXIT}),
    Phase.EXIT: frozenset(),
}

IN_UPDATE: frozenset[Phase] = frozenset({Phase.OPTIMIZER, Phase.COMMIT})

INTERRUPTIBLE: frozenset[Phase] = frozenset(
    {Phase.INIT, Phase.READY, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE}
)
"""Where a rank that gives up can be interrupted at any instruction: its state is that of the last commit, or can be
brought back to it. An evaluation may have put other weights in, and a snapshot holds files that are half written: those
are left where they say that they get on."""


def check_transition(current: Phase, target: Phase) -> None:
    """Raises IllegalTransitionError unless `target` may follow `current`."""
    if target not in TRANSITIONS[current]:
        allowed = ", ".join(sorted(p.name.lower() for p in TRANSITIONS[current])) or "nothing"
        raise IllegalTransitionError(
            f"phase {target.name.lower()} cannot follow {current.name.lower()}",
            f"After {current.name.lower()} comes: {allowed}. See docs/session.md.",
        )


def diagram() -> str:
    """The table as a Mermaid state diagram, without the ways to `EXIT` but the usual one, from `READY`."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.INIT.name.lower()}"]
    for phase, row in TRANSITIONS.items():
        targets = sorted(row - {Phase.EXIT}) if phase is not Phase.READY else sorted(row)
        lines += [f"    {phase.name.lower()} --> {target.name.lower()}" for target in targets]
    lines.append(f"    {Phase.EXIT.name.lower()} --> [*]")
    return "\n".join(lines) + "\n"
