"""What a run has evaluated before it was interrupted, by its lines in metrics.jsonl.

A snapshot is taken before the evaluation of its step. So who goes on from one must know whether that evaluation came to
its end: its line is the only thing that is there if, and only if, it did.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from elastictrain.training.collectives import broadcast_bytes
from elastictrain.training.device import Place

BLOCK_BYTES = 1 << 20


def find_evaluation(metrics: Path, run_id: str, global_step: int) -> dict[str, float] | None:
    """The values that a run had at a step, where that is the furthest that it has evaluated of late; else None.

    Args:
        metrics: the file; need not exist.
        run_id: only lines of this run count, since a folder may have seen several.
        global_step: the step.
    """
    try:
        with metrics.open("rb") as file:
            for line in _backwards(file):
                if b'"eval"' not in line:
                    continue
                try:
                    record = json.loads(line)
                    if record["kind"] != "eval" or record["run_id"] != run_id or record["step"] > global_step:
                        continue
                    if record["step"] < global_step:
                        return None  # it was never so far, or has gone back since
                    return {str(name): float(value) for name, value in record["values"].items()}
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # torn, or not ours
    except FileNotFoundError:
        pass
    return None


def recall_evaluation(metrics: Path, run_id: str, global_step: int, place: Place) -> dict[str, float] | None:
    """What rank zero finds, on every rank. Collective."""
    found = find_evaluation(metrics, run_id, global_step) if place.is_rank_zero else None
    told: dict[str, float] | None = json.loads(broadcast_bytes(json.dumps(found).encode(), 0, place))
    return told


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    """The lines, last first."""
    end, rest = file.seek(0, os.SEEK_END), b""
    while end:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        rest, *lines = (file.read(end - start) + rest).split(b"\n")
        yield from reversed(lines)
        end = start
    yield rest
