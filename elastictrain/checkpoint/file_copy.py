"""Copies a file of a snapshot onto a disk durably, and hashes it meanwhile.

What is copied lies in memory already (a mapped file of the memory tier), and nobody reads the copy soon: by way of the
page cache it would be copied twice, push out pages that training wants (its data), and be written back by kernel
threads in bursts. So where the file system takes direct I/O (open(2), O_DIRECT), the disk reads straight from the
mapping. That takes a fifth of the processor time and half of the time. What direct I/O does not take (a file system
without it, the end of the file that is no whole block) goes the usual way.

Hashing runs in a thread of its own beside the writes: both let go of the interpreter lock, and a direct write is
mostly a wait for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

from elastictrain.checkpoint.store import CHUNK_BYTES, Progress

BLOCK_BYTES: Final = 4096
"""Direct I/O moves whole blocks: of 512 or 4096 bytes, whatever the disk."""
DIRECT_FROM_BYTES: Final = 1 << 20
"""Smaller files are written plainly, and hashed without a thread."""
FLUSH_BYTES: Final = 256 << 20
"""Without direct I/O the disk gets what was written after so many bytes: progress is real, and the last fsync short."""


def copy_durably(source: memoryview, target: Path, progress: Progress) -> str:
    """Writes a new file and waits until the disk has it; the folder's entry is the caller's to fsync.

    Args:
        source: the content; page-aligned (as a mapping is) for direct I/O.
        target: must not exist.
        progress: is told of what was written.

    Returns:
        the xxh3-128 of the content, as it was while it was written.

    Raises:
        OSError: the disk is full or fails.
    """
    stopped = threading.Event()
    with target.open("xb", buffering=0) as file:
        if len(source) < DIRECT_FROM_BYTES:
            _write(file.fileno(), source, progress, direct=False)
            os.fsync(file.fileno())
            return _digest(source, stopped)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as executor:
            hashing = executor.submit(_digest, source, stopped)
            try:
                _write(file.fileno(), source, progress, direct=True)
                os.fsync(file.fileno())
            except BaseException:
                stopped.set()
                raise
            return hashing.result()


def _digest(source: memoryview, stopped: threading.Event) -> str:
    hasher = xxhash.xxh3_128()
    for begin in range(0, len(source), CHUNK_BYTES):
        if stopped.is_set():
            break
        hasher.update(source[begin : begin + CHUNK_BYTES])
    return hasher.hexdigest()


def _write(fd: int, source: memoryview, progress: Progress, *, direct: bool) -> None:
    direct = direct and _set_direct(fd, True)
    position = flushed = 0
    while position < len(source):
        size = min(CHUNK_BYTES, len(source) - position)
        if direct:
            size -= size % BLOCK_BYTES
        if direct and (size == 0 or position % BLOCK_BYTES):
            direct = not _set_direct(fd, False)
            continue
        try:
            written = os.write(fd, source[position : position + size])
        except OSError as error:
            # Some file systems take the flag and refuse the write (open(2), O_DIRECT).
            if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            direct = not _set_direct(fd, False)
            continue
        position += written
        if not direct and position - flushed >= FLUSH_BYTES:
            os.fdatasync(fd)
            flushed = position
        progress(written)


def _set_direct(fd: int, on: bool) -> bool:
    """Switches direct I/O; False where the file system has none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if not on or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True
