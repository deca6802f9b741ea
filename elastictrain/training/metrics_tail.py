"""The end of metrics.jsonl, read from the end: what of a run has been written down."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20


def records_backwards(metrics: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The records of a kind, last first; what is torn is left out.

    Args:
        metrics: the file; need not exist.
        kind: such as "step".

    Raises:
        OSError: it is there and cannot be read.
    """
    mark = json.dumps(kind).encode()
    try:
        with metrics.open("rb") as file:
            for line in _backwards(file):
                if mark in line:
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(record, dict) and record.get("kind") == kind:
                        yield record
    except FileNotFoundError:
        return


def last_step_of(metrics: Path, incarnation: int) -> int:
    """The last step that an incarnation has a line of; 0 where it has none.

    Args:
        metrics: the file; need not exist.
        incarnation: the newest that may have written.
    """
    try:
        for record in records_backwards(metrics, "step"):
            try:
                return int(record["step"]) if record["incarnation"] == incarnation else 0
            except (ValueError, KeyError, TypeError):
                continue  # not ours
    except OSError:
        pass
    return 0


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
