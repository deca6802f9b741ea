"""What a run has evaluated before it was interrupted, by its lines in metrics.jsonl.

A snapshot is taken before the evaluation of its step. So who goes on from one must know whether that evaluation came to
its end: its line is the only thing that is there if, and only if, it did.
"""

from __future__ import annotations

import json
from pathlib import Path

from elastictrain.training.collectives import broadcast_bytes
from elastictrain.training.device import Place
from elastictrain.training.metrics_tail import records_backwards


def find_evaluation(metrics: Path, run_id: str, global_step: int) -> dict[str, float] | None:
    """The values that a run had at a step, where that is the furthest that it has evaluated of late; else None.

    Args:
        metrics: the file; need not exist.
        run_id: only lines of this run count, since a folder may have seen several.
        global_step: the step.
    """
    for record in records_backwards(metrics, "eval"):
        try:
            if record["run_id"] != run_id or record["step"] > global_step:
                continue
            if record["step"] < global_step:
                return None  # it was never so far, or has gone back since
            return {str(name): float(value) for name, value in record["values"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # not ours
    return None


def recall_evaluation(metrics: Path, run_id: str, global_step: int, place: Place) -> dict[str, float] | None:
    """What rank zero finds, on every rank. Collective."""
    found = find_evaluation(metrics, run_id, global_step) if place.is_rank_zero else None
    told: dict[str, float] | None = json.loads(broadcast_bytes(json.dumps(found).encode(), 0, place))
    return told
