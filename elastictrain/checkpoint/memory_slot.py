"""One slot of the memory tier as its writer holds it: a folder, its lock, the files and their mappings.

Mappings are kept from one snapshot to the next: the kernel gives each page once, and from then on a snapshot is a
memory copy. Where there is time before the first one, the pages are had beforehand (`make_room`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.checkpoint import faults, safefs
from elastictrain.checkpoint.format import MANIFEST_FILE, Layout
from elastictrain.checkpoint.memory_snapshot import LOCK_FILE, UNUSED_FILE
from elastictrain.checkpoint.pages import allocate, always, map_populated
from elastictrain.errors import MemoryTierError, UnsafePathError


@dataclass
class Slot:
    """A slot of this process: descriptors that stay open, mappings that are reused.

    Args:
        path: its folder.
        folder_fd: that folder.
        lock_fd: its lock file.
    """

    path: Path
    folder_fd: int
    lock_fd: int
    layouts: dict[str, Layout] = field(default_factory=dict)
    views: dict[str, memoryview] = field(default_factory=dict)
    inodes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, root_fd: int, path: Path) -> Slot:
        """The slot of this folder of the root, made if missing. Raises OSError or UnsafePathError."""
        folder = safefs.open_subfolder(root_fd, path.name, path, create=True)
        assert folder is not None
        try:
            lock = safefs.open_file(folder, LOCK_FILE, path, os.O_RDWR | os.O_CREAT)
        except BaseException:
            os.close(folder)
            raise
        return cls(path, folder, lock)

    def lock(self) -> bool:
        """Takes it for writing; False if somebody reads it."""
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.lock_fd, fcntl.LOCK_UN)

    def prepare(self, layouts: Mapping[str, Layout], size_bytes: int) -> None:
        """Gives up what it holds, and makes and maps these files, headers included.

        Raises:
            MemoryTierError: the file system has not enough room. Where that is known beforehand, what it holds stays.
            UnsafePathError: a file is a link or somebody else's.
        """
        try:
            self._check_space(size_bytes)
            # In this order: whoever is killed before the manifest goes has taken nothing away, and is told of after it.
            for name in (UNUSED_FILE, MANIFEST_FILE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.folder_fd)
            faults.point("memory.unpublished")
            self._map(layouts)
            faults.point("memory.allocated")
        except OSError as error:
            self._give_back()  # half a slot only takes room
            raise no_room(error, self.path) from error

    def make_room(self, layouts: Mapping[str, Layout], size_bytes: int, go_on: Callable[[], bool]) -> bool:
        """Does beforehand what takes long in `prepare`, and takes nothing away: a slot that holds a snapshot keeps it,
        and has its files mapped as far as they are of the right size. Without the lock; what is in the slot by then
        decides.

        Args:
            layouts: of the snapshot to come.
            size_bytes: of all of them.
            go_on: asked again and again; once it says no, this returns.

        Returns:
            whether the files are there and mapped.

        Raises:
            MemoryTierError, UnsafePathError: as in `prepare`. The room taken is given back.
        """
        if not self._holds_snapshot() and self.lock():
            if self._holds_snapshot():  # somebody has committed it just now
                self.unlock()
            else:
                try:
                    return self._make_files(layouts, size_bytes, go_on)
                finally:
                    self.unlock()
        for name, layout in layouts.items():
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=self.folder_fd, follow_symlinks=False)
                if status.st_size == layout.size_bytes and not self._is_mapped(name, layout):
                    with safefs.closing(safefs.open_file(self.folder_fd, name, self.path, os.O_RDWR)) as fd:
                        self._map_file(name, layout, fd, go_on)
        return all(self._is_mapped(name, layout) for name, layout in layouts.items())

    def _make_files(self, layouts: Mapping[str, Layout], size_bytes: int, go_on: Callable[[], bool]) -> bool:
        """In a locked slot without a snapshot. The mark goes first: whoever is killed over this has lost nothing."""
        try:
            self._check_space(size_bytes)
            os.close(safefs.open_file(self.folder_fd, UNUSED_FILE, self.path, os.O_WRONLY | os.O_CREAT))
            return self._make_and_map(layouts, {LOCK_FILE, UNUSED_FILE}, go_on)
        except OSError as error:
            self._give_back()
            raise no_room(error, self.path) from error

    def _holds_snapshot(self) -> bool:
        try:
            os.stat(MANIFEST_FILE, dir_fd=self.folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def give_up(self) -> None:
        """Unlocks it without a snapshot. Its files stay, with the pages they have; a mark beside them says that nobody
        was killed over them."""
        try:
            if is_abandoned(self.folder_fd):
                os.close(safefs.open_file(self.folder_fd, UNUSED_FILE, self.path, os.O_WRONLY | os.O_CREAT))
        except (OSError, UnsafePathError):  # not even room for that
            self._give_back()
        finally:
            self.unlock()

    def forget(self, name: str | None = None) -> None:
        """Drops the mapping of a file, or all; they go once nobody has a view onto them."""
        for table in (self.layouts, self.views, self.inodes):
            if name is None:
                table.clear()
            else:
                table.pop(name, None)

    def _give_back(self) -> None:
        """Its room, as far as that goes."""
        self.forget()
        with contextlib.suppress(OSError):
            empty(self.folder_fd)

    def close(self) -> None:
        """Lets go of it; its snapshot stays."""
        self.forget()
        os.close(self.folder_fd)
        os.close(self.lock_fd)

    def _map(self, layouts: Mapping[str, Layout]) -> None:
        """Makes the slot's files, and only those, and maps them."""
        self._make_and_map(layouts, {LOCK_FILE}, always)
        for name, layout in layouts.items():
            self.views[name][: len(layout.header)] = layout.header
        self.layouts = {name: self.layouts[name] for name in layouts}
        self.views = {name: self.views[name] for name in layouts}

    def _make_and_map(self, layouts: Mapping[str, Layout], beside: set[str], go_on: Callable[[], bool]) -> bool:
        """The files, with nothing but `beside` beside them; no content. False if it was told not to go on."""
        keep = {*layouts, *beside}
        for name in os.listdir(self.folder_fd):  # noqa: PTH208 - through a descriptor
            if name not in keep:
                os.unlink(name, dir_fd=self.folder_fd)
        for name in [name for name in self.views if name not in layouts]:
            self.forget(name)
        for name, layout in layouts.items():
            if not self._is_mapped(name, layout):
                fd = safefs.open_file(self.folder_fd, name, self.path, os.O_RDWR | os.O_CREAT)
                with safefs.closing(fd):
                    os.ftruncate(fd, layout.size_bytes)
                    # Pages are given here: a full tmpfs shows as an error now, not as SIGBUS in the copy.
                    if not allocate(fd, layout.size_bytes, go_on) or not self._map_file(name, layout, fd, go_on):
                        return False
        return True

    def _map_file(self, name: str, layout: Layout, fd: int, go_on: Callable[[], bool]) -> bool:
        """Maps a file that has its size. False if it was told not to go on."""
        self.forget(name)
        view = map_populated(fd, layout.size_bytes, go_on)
        if view is None:
            return False
        self.inodes[name] = os.fstat(fd).st_ino
        self.layouts[name], self.views[name] = layout, view
        return True

    def _is_mapped(self, name: str, layout: Layout) -> bool:
        known = self.layouts.get(name)
        return known is not None and known.header == layout.header and self._is_same_file(name, layout.size_bytes)

    def _is_same_file(self, name: str, size_bytes: int) -> bool:
        """Whether the mapped file is still the one in the folder, at full size."""
        try:
            status = os.stat(name, dir_fd=self.folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_ino == self.inodes[name] and status.st_size == size_bytes

    def _check_space(self, size_bytes: int) -> None:
        """Raises where the file system has not enough room: before the old snapshot is given up."""
        available = free_bytes(self.folder_fd) + allocated_bytes(self.path)
        if available < size_bytes:
            what = f"{mib(size_bytes)} MiB needed, {available >> 20} available"
            raise no_room(OSError(errno.ENOSPC, what), self.path)


def is_abandoned(folder_fd: int) -> bool:
    """Whether a slot that nobody writes to holds files of a snapshot without a manifest: its writer was killed."""
    names = {*os.listdir(folder_fd)}
    return bool(names - {LOCK_FILE}) and not names & {MANIFEST_FILE, UNUSED_FILE}


def empty(folder_fd: int) -> None:
    """Removes all files of a locked slot but its lock. The manifest first, what is half removed is no snapshot; and
    the mark of one that was given up last."""
    names = [name for name in os.listdir(folder_fd) if name != LOCK_FILE]
    for name in sorted(names, key=lambda name: (name != MANIFEST_FILE, name == UNUSED_FILE)):
        os.unlink(name, dir_fd=folder_fd)


def free_bytes(fd: int) -> int:
    """Room in the file system of a folder."""
    system = os.fstatvfs(fd)
    return system.f_bavail * system.f_frsize


def allocated_bytes(path: Path) -> int:
    """What the files of a folder take."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0


def mib(size_bytes: int) -> int:
    """In MiB, rounded up."""
    return -(-size_bytes >> 20)


def no_room(error: OSError, path: Path) -> MemoryTierError:
    """What a write to the tier failed of, in words that help."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
        return MemoryTierError(
            f"{path} has no room for a snapshot: {error.strerror}",
            "Free memory or enlarge the tmpfs, name another with checkpoint.memory_path, or set "
            "checkpoint.memory_tier = false.",
        )
    return MemoryTierError(f"{path} cannot be written: {error.strerror or error}")
