"""Keeps the writers of a note in the state directory out of each other's way: one reads, changes and writes at a time.

Readers need no lock, since a note is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone_with(note: Path) -> Iterator[None]:
    """Holds the lock beside a note. Raises OSError if there can be none."""
    fd = os.open(note.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
