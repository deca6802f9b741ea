"""How far a rank of a script is: a small mapped file that it writes after every step, and that the benchmark reads."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("=qqqq")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank says.

    Args:
        pid: of the rank.
        first_step: the step it began with.
        step: steps done.
        at_ns: when the last one was done, CLOCK_MONOTONIC.
    """

    pid: int
    first_step: int
    step: int
    at_ns: int


class ProgressWriter:
    """Writes this rank's file; a new process replaces it."""

    def __init__(self, folder: Path, rank: int, first_step: int) -> None:
        path = folder / f"progress-{rank}"
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(_RECORD.pack(os.getpid(), first_step, first_step, time.monotonic_ns()))
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        temporary.replace(path)
        self._first_step = first_step

    def tell(self, step: int) -> None:
        _RECORD.pack_into(self._map, 0, os.getpid(), self._first_step, step, time.monotonic_ns())


def read_progress(folder: Path, rank: int) -> Progress | None:
    """A rank's file; None while there is none."""
    try:
        return Progress(*_RECORD.unpack((folder / f"progress-{rank}").read_bytes()))
    except (OSError, struct.error):
        return None
