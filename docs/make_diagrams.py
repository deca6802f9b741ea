"""Writes lifecycle.md and phases.md here from the tables in `elastictrain.core`: `python docs/make_diagrams.py`."""

from __future__ import annotations

from pathlib import Path

from elastictrain.core import lifecycle, phases
from elastictrain.core.lifecycle import State
from elastictrain.core.phases import Phase

WHAT = {
    State.STARTING: "the first worker group is on its way to its first step",
    State.TRAINING: "every rank of this node has done a step",
    State.RECOVERING: "a worker group failed or is being replaced; the next one is on its way to its first step",
    State.STOPPING: "the ranks finish their step and keep their state; then the supervisor ends",
    State.DRAINING: "the same, but the supervisor stays, for a `resume`",
    State.DRAINED: "no rank runs, on request",
    State.HALTED: "going on would lead nowhere; the state is kept for a `resume`",
    State.COMPLETED: "all steps are done",
    State.STOPPED: "ended on request; the next start goes on from here",
}


DOES = {
    Phase.INIT: "before the first step: imports, process group, model, data",
    Phase.READY: "between two steps",
    Phase.DATA: "waits for the window's microbatches",
    Phase.FORWARD: "computes a microbatch's loss",
    Phase.BACKWARD: "computes its gradients",
    Phase.REDUCE: "its gradients are complete and wait for the other ranks'",
    Phase.OPTIMIZER: "unscales, clips, steps",
    Phase.COMMIT: "moves the counters",
    Phase.EVAL: "evaluates",
    Phase.SNAPSHOT: "copies its state into a snapshot",
    Phase.EXIT: "after the last step: closes files, leaves the process group",
}


def lifecycle_page() -> str:
    rows = "\n".join(f"| `{state}` | {WHAT[state]} |" for state in lifecycle.TRANSITIONS)
    return f"""# What a supervisor is doing

Made from the table in `elastictrain/core/lifecycle.py` by `docs/make_diagrams.py`; a test checks that it is current.

| state | what it means |
|---|---|
{rows}

```mermaid
{lifecycle.diagram()}```
"""


def phases_page() -> str:
    rows = "\n".join(
        f"| `{phase.name.lower()}` | {what} | {'yes' if phase in phases.IN_UPDATE else 'no'} |"
        for phase, what in DOES.items()
    )
    return f"""# What a rank is doing

Made from the table in `elastictrain/core/phases.py` by `docs/make_diagrams.py`; a test checks that it is current.

Every rank writes its phase into its heartbeat, and `elastictrain status` shows it. How long a rank may stand
still in it: [supervision.md](supervision.md). No snapshot can be taken where its weights may be half changed.

| phase | what the rank does | its weights may be half changed |
|---|---|---|
{rows}

```mermaid
{phases.diagram()}```

From every phase a rank may come to `exit`; only the usual way is shown.
"""


PAGES = {"lifecycle.md": lifecycle_page, "phases.md": phases_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page())
