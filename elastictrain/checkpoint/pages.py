"""Pages of a file that is mapped to be written: allocated and mapped piece by piece, with the interpreter lock let go.

A page that is touched for the first time costs a fault, in which the kernel finds and clears it: several times the
copy of what goes into it. `mmap` with MAP_POPULATE would do all of them in one call; but Python's holds the interpreter
lock meanwhile, so that a thread could not do it beside the training, nor stop in the middle of it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Final

MADV_POPULATE_READ: Final = 22
"""Maps pages as reading them would (madvise(2), Linux 5.14). In a shared mapping of a tmpfs they can be written from
then on without a fault; on a disk, unlike by MADV_POPULATE_WRITE, they are not dirty and need not be written back."""
PIECE_BYTES: Final = 8 << 20
"""Allocated or mapped at once: a few milliseconds, after which whoever waits for the thread is given way to."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def always() -> bool:
    """For those who need it done."""
    return True


def allocate(fd: int, size_bytes: int, go_on: Callable[[], bool]) -> bool:
    """Has the file system allocate a file's pages, or blocks; those it has stay.

    Args:
        fd: of the file.
        size_bytes: of all of it.
        go_on: asked before each piece; once it says no, the rest is left out.

    Returns:
        whether all is allocated.

    Raises:
        OSError: there is no room.
    """
    for begin in range(0, size_bytes, PIECE_BYTES):
        if not go_on():
            return False
        os.posix_fallocate(fd, begin, min(PIECE_BYTES, size_bytes - begin))
    return True


def map_populated(fd: int, size_bytes: int, go_on: Callable[[], bool]) -> memoryview | None:
    """Maps a file to be read and written by way of the mapping, its pages mapped as well.

    Args:
        fd: of the file, which has that size.
        size_bytes: likewise.
        go_on: asked before each piece; once it says no, there is no mapping.

    Returns:
        the bytes; None if it was told not to go on.
    """
    mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for begin in range(0, size_bytes, PIECE_BYTES):
        if not go_on():
            return None
        if _libc.madvise(address + begin, min(PIECE_BYTES, size_bytes - begin), MADV_POPULATE_READ) != 0:
            if ctypes.get_errno() == errno.EINVAL:  # an older kernel: all at once then
                return memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
            break  # whatever it is (no memory, a bad disk), the one who writes there will meet it
    return memoryview(mapping)
