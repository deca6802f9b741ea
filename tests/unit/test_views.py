"""What a person sees of a run's events."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from elastictrain.cli.views import PrettyView
from elastictrain.supervisor.output import Event

STAMPS = {"level": "info", "timestamp": "2026-01-01T00:00:00+00:00", "rank": 0, "incarnation": 1, "attempt": "a-1"}


def shown(kind: str, /, **fields: Any) -> str:
    out = io.StringIO()
    with PrettyView(Console(file=out, width=120), "job") as view:
        view.show(Event(kind, {"event": kind, **STAMPS, **fields}))
    return out.getvalue()


def test_an_evaluation_is_shown_with_its_values_alone() -> None:
    assert shown("evaluated", step=20, eval_loss=2.5, accuracy=0.25).split() == [
        "step", "20", "evaluated:", "eval_loss", "2.5000", "accuracy", "0.2500",
    ]  # fmt: skip


def test_other_events_are_shown_without_their_stamps() -> None:
    assert shown("model_compiled", backend="inductor").split() == [
        "rank",
        "0:",
        "model",
        "compiled",
        "backend=inductor",
    ]


@pytest.mark.parametrize("kind", ["training_started", "progress", "evaluated", "incident_opened", "restart_planned"])
def test_what_only_looks_like_an_event_is_shown_all_the_same(kind: str) -> None:
    assert "mine=of the user's own" in shown(kind, mine="of the user's own")
