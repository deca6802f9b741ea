"""Writes docs/lifecycle.md from the table in `elastictrain.core.lifecycle`: `python docs/make_lifecycle.py`."""

from __future__ import annotations

from pathlib import Path

from elastictrain.core.lifecycle import TRANSITIONS, State, diagram

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


def page() -> str:
    rows = "\n".join(f"| `{state}` | {WHAT[state]} |" for state in TRANSITIONS)
    return f"""# What a supervisor is doing

Made from the table in `elastictrain/core/lifecycle.py` by `docs/make_lifecycle.py`; a test checks that it is current.

| state | what it means |
|---|---|
{rows}

```mermaid
{diagram()}```
"""


if __name__ == "__main__":
    (Path(__file__).parent / "lifecycle.md").write_text(page())
