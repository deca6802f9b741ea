"""A snapshot in the memory tier, as its readers see it: the persister, a restore, the command line.

While one is open its slot is locked, shared: the writer leaves it alone. `memory_tier` is the writer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from elastictrain.checkpoint import safefs
from elastictrain.checkpoint.format import MANIFEST_FILE, Damage, Manifest, check_content, damage_of, digest
from elastictrain.errors import BusyError, SnapshotDamagedError, SnapshotError

LOCK_FILE = "lock"
UNUSED_FILE = "unused"
"""In a slot without a manifest: its writer has given it up, and has not been killed."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A complete snapshot in a slot.

    Args:
        path: folder of the slot.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def global_step(self) -> int:
        return self.manifest.global_step

    @property
    def run_id(self) -> str:
        return self.manifest.run_id


class Mappings:
    """Mappings of slots' files, kept from one snapshot to the next by who reads each of them.

    A slot's files stay the same while the state keeps its form, and the kernel gives a process each page once: for a
    mapping made anew that takes as long as hashing what is in it.
    """

    def __init__(self) -> None:
        self._views: dict[Path, tuple[tuple[int, int, int], memoryview]] = {}

    def map(self, path: Path, fd: int) -> memoryview:
        """Maps a whole file, read-only, unless it is mapped; closes the descriptor. One mapping is kept per path."""
        with safefs.closing(fd):
            status = os.fstat(fd)
            file = status.st_dev, status.st_ino, status.st_size
            known = self._views.get(path)
            if known is None or known[0] != file:
                known = self._views[path] = file, map_read_only(os.dup(fd))
        return known[1]


class OpenSnapshot:
    """A memory snapshot that cannot change while this is open: holds the slot's lock, shared.

    Args:
        path: folder of the slot.
        name: the snapshot's name.
        mappings: keeps the mappings of its files for the next snapshot of this slot.

    Raises:
        SnapshotDamagedError: the slot is gone, or holds no complete snapshot.
        BusyError: it is being written, or holds another snapshot by now.
    """

    def __init__(self, path: Path, name: str, mappings: Mappings | None = None) -> None:
        self.path = path
        self._mappings = mappings
        folder = safefs.open_folder(path.parent, (path.name,), create=False)
        if folder is None:
            raise SnapshotDamagedError(f"{path} is gone")
        self._folder_fd = folder
        self._lock_fd = -1
        try:
            try:
                self._lock_fd = safefs.open_file(folder, LOCK_FILE, path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError as error:  # nothing can be made in a folder that has just been removed
                raise SnapshotDamagedError(f"{path} is gone") from error
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BusyError(f"{path} is being written") from error
            try:
                self.manifest = Manifest.decode(safefs.read_file(folder, MANIFEST_FILE, path))
            except FileNotFoundError as error:
                raise SnapshotDamagedError(f"{path} holds no complete snapshot") from error
            if self.manifest.name != name:
                raise BusyError(f"{path} holds {self.manifest.name} by now, not {name}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenSnapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def map_file(self, name: str) -> memoryview:
        """A file's bytes, read-only; empty files too.

        Raises:
            SnapshotDamagedError: it is missing.
        """
        fd = self.open_file(name)
        return map_read_only(fd) if self._mappings is None else self._mappings.map(self.path / name, fd)

    def open_file(self, name: str) -> int:
        """Descriptor of a file; the caller closes it.

        Raises:
            SnapshotDamagedError: it is missing.
        """
        try:
            return safefs.open_file(self._folder_fd, name, self.path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise SnapshotDamagedError(f"{name}: is missing") from error

    def close(self) -> None:
        if self._lock_fd >= 0:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)  # also for children that were forked meanwhile
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1


def map_read_only(fd: int) -> memoryview:
    """Maps a whole file, closes its descriptor; the mapping lives as long as the view."""
    with safefs.closing(fd):
        size = os.fstat(fd).st_size
        if size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))


def verify_memory(snapshot: MemorySnapshot) -> list[Damage] | None:
    """Reads a memory snapshot and compares it to its manifest.

    Returns:
        what is wrong, empty if it is sound; None if it is gone: the slot is empty, or holds another snapshot by now.

    Raises:
        BusyError: it is there, and somebody has just locked its slot: most likely to overwrite it.
    """
    try:
        with OpenSnapshot(snapshot.path, snapshot.name) as opened:
            return list(_check_files(opened))
    except (SnapshotError, BusyError) as error:
        content = _read_manifest(snapshot.path)
        if content is None:
            return None
        try:
            found = Manifest.decode(content)
        except SnapshotError as damage:
            return [damage_of(MANIFEST_FILE, damage)]
        if found.name != snapshot.name:
            return None
        raise BusyError(error.what) from error


def _read_manifest(slot: Path) -> bytes | None:
    """What a slot has now, whoever has locked it; None if there is none."""
    folder = safefs.open_folder(slot.parent, (slot.name,), create=False)
    if folder is None:
        return None
    with safefs.closing(folder):
        try:
            return safefs.read_file(folder, MANIFEST_FILE, slot)
        except FileNotFoundError:
            return None


def _check_files(opened: OpenSnapshot) -> Iterator[Damage]:
    for name, entry in opened.manifest.files.items():
        try:
            view = opened.map_file(name)
        except SnapshotDamagedError:
            yield Damage(name, "is missing")
            continue
        damage = check_content(name, entry, len(view), digest(view) if len(view) == entry.size_bytes else "")
        if damage is not None:
            yield damage
