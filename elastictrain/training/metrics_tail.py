"""The end of metrics.jsonl, read from the end: what of a run has been written down."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20


def last_step_of(metrics: Path, incarnation: int) -> int:
    """The last step that an incarnation has a line of; 0 where it has none.

    Args:
        metrics: the file; need not exist.
        incarnation: the newest that may have written.
    """
    try:
        with metrics.open("rb") as file:
            for line in backwards(file):
                if b'"step"' not in line:
                    continue
                try:
                    record = json.loads(line)
                    if record["kind"] == "step":
                        return int(record["step"]) if record["incarnation"] == incarnation else 0
                except (ValueError, KeyError, TypeError):
                    continue  # torn, or not ours
    except OSError:
        pass
    return 0


def backwards(file: BinaryIO) -> Iterator[bytes]:
    """The lines, last first."""
    end, rest = file.seek(0, os.SEEK_END), b""
    while end:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        rest, *lines = (file.read(end - start) + rest).split(b"\n")
        yield from reversed(lines)
        end = start
    yield rest
