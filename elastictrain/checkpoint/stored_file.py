"""A file of a snapshot, open for reading: on a disk, or mapped from the memory tier.

What lies on a disk is read with read(2) and never mapped: a disk that fails, a server that has lost the file and a file
that is cut short meanwhile are errors with a name then; of a mapping they are SIGBUS, and the process is gone. So it is
read twice, to be hashed and to be taken over; between the two it stays in the page cache, which the system can take
back. Nothing is held in memory beside it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

import xxhash

from elastictrain.checkpoint.store import CHUNK_BYTES, Progress
from elastictrain.errors import SnapshotDamagedError, StorageError, UnreadableFileError

BLOCK_BYTES: Final = 1 << 20
"""Read at once, to be hashed or copied while it is still in the processor's cache. The kernel's own copy into memory
that is not there takes three times as long as one into the cache and one from it."""
COPY_BYTES: Final = 8 << 20
"""A copy out of a mapping holds the interpreter lock for so many bytes, some milliseconds, at a time."""
_BROKEN: Final = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""The disk, or the file system's own checksum, says that these bytes are lost (EFSBADCRC and EFSCORRUPTED are the
latter two on Linux)."""


class ReadableFile(Protocol):
    """A file of a snapshot."""

    size_bytes: int

    def digest(self, progress: Progress) -> str:
        """xxh3-128 of all of it, in hex; `progress` is told of each piece. Raises as `read_into`."""
        ...

    def read(self, begin: int, end: int) -> memoryview:
        """Some of its bytes, read-only. Raises as `read_into`."""
        ...

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `begin` on.

        Raises:
            SnapshotDamagedError: it ends before.
            UnreadableFileError: these bytes cannot be read.
            StorageError: the store failed.
        """
        ...

    def close(self) -> None: ...


class MappedFile:
    """A file of the memory tier.

    Args:
        view: all of it.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size_bytes = len(view)

    def digest(self, progress: Progress) -> str:
        hasher = xxhash.xxh3_128()
        for begin in range(0, self.size_bytes, CHUNK_BYTES):
            piece = self._view[begin : begin + CHUNK_BYTES]
            hasher.update(piece)
            progress(len(piece))
        return hasher.hexdigest()

    def read(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]

    def read_into(self, begin: int, target: memoryview) -> None:
        source = self._view[begin : begin + len(target)]
        for at in range(0, len(target), COPY_BYTES):
            target[at : at + COPY_BYTES] = source[at : at + COPY_BYTES]

    def close(self) -> None:
        self._view = memoryview(b"")


class StoredFile:
    """A file on a disk.

    Args:
        path: where.

    Raises:
        SnapshotDamagedError: it is missing.
        StorageError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size_bytes = os.fstat(self._fd).st_size
        self._block = memoryview(bytearray(min(BLOCK_BYTES, self.size_bytes)))

    def digest(self, progress: Progress) -> str:
        hasher = xxhash.xxh3_128()
        for _, part in self._parts(0, self.size_bytes):
            hasher.update(part)
            progress(len(part))
        return hasher.hexdigest()

    def read(self, begin: int, end: int) -> memoryview:
        target = memoryview(bytearray(end - begin))
        self.read_into(begin, target)
        return target.toreadonly()

    def read_into(self, begin: int, target: memoryview) -> None:
        for at, part in self._parts(begin, begin + len(target)):
            target[at : at + len(part)] = part

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """What lies between two places, part after part: each with its distance from `begin`, and valid until the
        next."""
        at = begin
        while at < end:
            with explained(self._path):
                num_bytes = os.preadv(self._fd, [self._block[: end - at]], at)
            if num_bytes == 0:
                raise SnapshotDamagedError(
                    f"{self._path.name}: was cut short while it was read: it had {self.size_bytes} bytes, and ends "
                    f"before byte {at + 1}"
                )
            yield at - begin, self._block[:num_bytes]
            at += num_bytes

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def digests(
    files: Mapping[str, ReadableFile], progress: Progress, *, max_threads: int
) -> dict[str, str | SnapshotDamagedError | StorageError]:
    """The xxh3-128 of each file, in hex, or why it cannot be read to its end.

    Args:
        files: by name.
        progress: told of each piece, since a slow disk is read here; in this thread, since whoever is told may not be
            prepared for another.
        max_threads: files that are hashed side by side.
    """
    hashed: SimpleQueue[int | None] = SimpleQueue()

    def hash_file(file: ReadableFile) -> str | SnapshotDamagedError | StorageError:
        try:
            return file.digest(hashed.put)
        except (SnapshotDamagedError, StorageError) as error:
            return error
        finally:
            hashed.put(None)

    with ThreadPoolExecutor(max_workers=max_threads, thread_name_prefix="hash") as executor:
        hashing = {name: executor.submit(hash_file, file) for name, file in files.items()}
        for _ in hashing:
            while (num_bytes := hashed.get()) is not None:
                progress(num_bytes)
        return {name: done.result() for name, done in hashing.items()}


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file into ours.

    Raises:
        SnapshotDamagedError: there is no such file.
        UnreadableFileError: its bytes cannot be read.
        StorageError: anything else, such as a server that does not answer, or the lack of permission.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SnapshotDamagedError(f"{path.name}: is missing") from error
    except IsADirectoryError as error:
        raise SnapshotDamagedError(f"{path.name}: is a folder") from error
    except OSError as error:
        kind = UnreadableFileError if error.errno in _BROKEN else StorageError
        raise kind(f"{path}: {error.strerror or error}") from error
