"""The memory tier: the newest snapshots of a job, on a tmpfs, where they outlive the processes that made them.

    <root>/slot-0/{lock, model.safetensors, ..., trainer.json, manifest.json}
    <root>/slot-1/...
    <root>/lock

One process writes: rank zero of the node; once ranks fail any of them, one after the other (`alone`). A snapshot is
copied straight into mapped files of a slot: `begin` takes the manifest away and hands out the mappings, the caller
fills them, `commit` hashes what is there and puts the new manifest in place by rename. A crash at any moment leaves
that slot without a manifest, and the other slot as it was: the slot that holds the newest snapshot is never written to.

Each slot's `lock` is flocked: exclusively while a writer fills the slot, shared while somebody reads it (the
persister; also one whose parent has died). A third slot is made only where the newest snapshot and the one that is
being persisted hold the first two.

Mappings are kept from one snapshot to the next: the kernel gives each page once, and from then on a snapshot is a
memory copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elastictrain.checkpoint import faults, safefs
from elastictrain.checkpoint.format import (
    MANIFEST_FILE,
    TRAINER_FILE,
    Damage,
    FileEntry,
    Layout,
    Manifest,
    digest,
)
from elastictrain.checkpoint.memory_snapshot import LOCK_FILE, MemorySnapshot
from elastictrain.errors import MemoryTierError, SnapshotError

MAX_SLOTS = 3
LOCK_POLL_S = 0.02
"""flock(2) waits for ever or not at all: whoever waits for less looks this often."""
_SLOT = re.compile(r"slot-\d")


@dataclass(frozen=True, slots=True)
class Declined:
    """No slot can be written now; the snapshot is left out.

    Args:
        reason: for the log.
    """

    reason: str


@dataclass
class _Slot:
    """A slot of this process: descriptors that stay open, mappings that are reused."""

    path: Path
    folder_fd: int
    lock_fd: int
    layouts: dict[str, Layout] = field(default_factory=dict)
    views: dict[str, memoryview] = field(default_factory=dict)
    inodes: dict[str, int] = field(default_factory=dict)


class SlotWriter:
    """A slot that is being filled. Ends with `commit` or `abort`; forgetting both leaves the slot locked.

    `buffers` maps each file's name to all its bytes, header included and already written; tensor `name` belongs at
    `layouts[file].offsets[name]`. A buffer is the same object as at an earlier snapshot of the same slot and layout,
    so views onto it can be kept.
    """

    def __init__(self, tier: MemoryTier, slot: _Slot) -> None:
        self._tier = tier
        self._slot = slot
        self._ended = False
        self.index = int(slot.path.name.removeprefix("slot-"))
        self.layouts: dict[str, Layout] = dict(slot.layouts)
        self.buffers: dict[str, memoryview] = dict(slot.views)

    def commit(
        self,
        *,
        job: str,
        run_id: str,
        global_step: int,
        versions: Mapping[str, str],
        trainer: Mapping[str, Any],
    ) -> MemorySnapshot:
        """Completes the snapshot: from its return on it exists.

        Args:
            job: name of the job.
            run_id: eight hex digits.
            global_step: windows consumed.
            versions: of elastictrain, torch, python.
            trainer: content of trainer.json, plain JSON.

        Raises:
            MemoryTierError: no room for the small files.
        """
        slot = self._slot
        try:
            faults.point("memory.filled")
            files = {}
            for name, view in self.buffers.items():
                files[name] = FileEntry(len(view), digest(view))
            faults.point("memory.hashed")
            text = (json.dumps(trainer, indent=1, allow_nan=False) + "\n").encode()
            files[TRAINER_FILE] = FileEntry(len(text), digest(text))
            manifest = Manifest(
                job=job,
                run_id=run_id,
                global_step=global_step,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                versions=dict(versions),
                files=dict(sorted(files.items())),
            )
            safefs.replace_file(slot.folder_fd, TRAINER_FILE, slot.path, text)
            faults.point("memory.trainer")
            # A manifest that could not be read again would make the snapshot worthless: better to fail here.
            Manifest.decode(manifest.encoded)
            faults.point("memory.manifest")
            safefs.replace_file(slot.folder_fd, MANIFEST_FILE, slot.path, manifest.encoded)
            faults.point("memory.committed")
        except OSError as error:
            raise _no_room(error, slot.path) from error
        finally:
            self._end()
        snapshot = MemorySnapshot(slot.path, manifest)
        self._tier.newest = snapshot
        return snapshot

    def abort(self) -> None:
        """Gives the slot up: it holds nothing. Harmless after `commit`."""
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            fcntl.flock(self._slot.lock_fd, fcntl.LOCK_UN)


class MemoryTier:
    """The slots of one job on one node.

    Nothing is made before the first `begin`.

    Args:
        root: the job's folder.
        base: the folder above that is not ours (such as /dev/shm); what lies between it and `root` is, and is
            checked. Default: the parent of `root`.
        budget_bytes: the most that all slots together may take; None leaves it to the file system.
    """

    def __init__(self, root: Path, *, base: Path | None = None, budget_bytes: int | None = None) -> None:
        self.root = root.absolute()
        self._base = base.absolute() if base is not None else self.root.parent
        self._parts = self.root.relative_to(self._base).parts
        self._budget_bytes = budget_bytes
        self._slots: dict[str, _Slot] = {}
        self._root_fd: int | None = None
        self.newest: MemorySnapshot | None = None
        """The snapshot whose slot is not written to: the last one committed here. Before the first, it can be set to
        the one that the run resumed from; else it is the newest there is."""

    @classmethod
    def for_job(cls, memory_path: Path, *, job: str, state_dir: Path, budget_bytes: int | None = None) -> MemoryTier:
        """On a tmpfs: `<memory_path>/elastictrain-<uid>/<job>-<digest of the state directory>`."""
        where = digest(os.fsencode(os.path.realpath(state_dir)))[:12]
        root = memory_path / f"elastictrain-{os.geteuid()}" / f"{job}-{where}"
        return cls(root, base=memory_path, budget_bytes=budget_bytes)

    @classmethod
    def staging(cls, state_dir: Path, *, budget_bytes: int | None = None) -> MemoryTier:
        """The same machinery in a folder of the state directory, where there is no memory tier."""
        return cls(state_dir / "staging", base=state_dir, budget_bytes=budget_bytes)

    def begin(self, layouts: Mapping[str, Layout]) -> SlotWriter | Declined:
        """Takes a slot to write a snapshot of these files.

        Returns:
            the slot's writer; or why there is none just now: every slot holds the newest snapshot or is being read.

        Raises:
            MemoryTierError: the budget or the file system is too small. Complete snapshots are unharmed.
            UnsafePathError: a folder or file is a link or somebody else's.
        """
        faults.point("memory.begin")
        size_bytes = sum(layout.size_bytes for layout in layouts.values())
        if self._budget_bytes is not None and 2 * size_bytes > self._budget_bytes:
            raise MemoryTierError(
                f"two snapshots of {_mib(size_bytes)} MiB do not fit into checkpoint.memory_budget_mb = "
                f"{self._budget_bytes >> 20}",
                "Raise it, or set checkpoint.memory_tier = false.",
            )
        try:
            slot = self._take_slot(layouts, size_bytes)
        except OSError as error:
            raise _no_room(error, self.root) from error
        if isinstance(slot, Declined):
            return slot
        try:
            _check_space(slot, size_bytes)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MANIFEST_FILE, dir_fd=slot.folder_fd)
            faults.point("memory.unpublished")
            self._map(slot, layouts)
            faults.point("memory.allocated")
        except OSError as error:
            _forget(slot)
            for name in layouts:  # half a slot only takes room
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=slot.folder_fd)
            fcntl.flock(slot.lock_fd, fcntl.LOCK_UN)
            raise _no_room(error, slot.path) from error
        except BaseException:
            fcntl.flock(slot.lock_fd, fcntl.LOCK_UN)
            raise
        return SlotWriter(self, slot)

    @contextlib.contextmanager
    def alone(self, timeout_s: float) -> Iterator[bool]:
        """Keeps other processes that ask for the same out while it is open: one of several writers goes first.

        Slots have locks of their own, so nothing is torn without it.

        Args:
            timeout_s: how long to wait for whoever is in. It may have been stopped, and must not hold up the others.

        Yields:
            whether we are alone.

        Raises:
            MemoryTierError: no room even for that, or the folder cannot be written.
            UnsafePathError: a folder or file is a link or somebody else's.
        """
        try:
            lock = safefs.open_file(self._open_root(), LOCK_FILE, self.root, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _no_room(error, self.root) from error
        deadline = time.monotonic() + timeout_s
        with safefs.closing(lock):
            while not (is_alone := _try_lock(lock)) and time.monotonic() < deadline:
                time.sleep(LOCK_POLL_S)
            yield is_alone

    def snapshots(self) -> list[MemorySnapshot]:
        """The complete snapshots, newest first."""
        return self._read_slots()[0]

    def damaged(self) -> list[tuple[Path, Damage]]:
        """Slots whose manifest is there and cannot be used: (folder, what is wrong)."""
        return self._read_slots()[1]

    def discard(self, snapshot: MemorySnapshot) -> None:
        """Takes back a snapshot that was found damaged: its slot is free again."""
        folder = safefs.open_folder(snapshot.path.parent, (snapshot.path.name,), create=False)
        if folder is not None:
            with safefs.closing(folder), contextlib.suppress(FileNotFoundError):
                os.unlink(MANIFEST_FILE, dir_fd=folder)
        if self.newest is not None and self.newest.path == snapshot.path:
            self.newest = None

    def clean(self, timeout_s: float = 0.0) -> bool:
        """Removes everything of the job, also what killed writers left.

        Args:
            timeout_s: how long to wait for readers of a slot.

        Returns:
            whether all is gone; what somebody still reads after the timeout stays.
        """
        self.close()
        root = safefs.open_folder(self._base, self._parts, create=False)
        if root is None:
            return True
        deadline = time.monotonic() + timeout_s
        with safefs.closing(root):
            complete = True
            for name in sorted(os.listdir(root)):  # noqa: PTH208 - through a descriptor
                if _SLOT.fullmatch(name):
                    complete &= _remove_slot(root, name, self.root / name, deadline)
                else:
                    with contextlib.suppress(IsADirectoryError):
                        os.unlink(name, dir_fd=root)
        if complete:
            for path in [self.root, *self.root.parents][: len(self._parts)]:
                try:
                    path.rmdir()
                except OSError:  # another job's folder is in it, or a new writer has begun
                    break
        self.newest = None
        return complete

    def close(self) -> None:
        """Lets go of all mappings and descriptors; snapshots stay."""
        for slot in self._slots.values():
            _forget(slot)
            os.close(slot.folder_fd)
            os.close(slot.lock_fd)
        self._slots.clear()
        if self._root_fd is not None:
            os.close(self._root_fd)
            self._root_fd = None

    def _open_root(self) -> int:
        if self._root_fd is None:
            self._root_fd = safefs.open_folder(self._base, self._parts, create=True)
            assert self._root_fd is not None
        return self._root_fd

    def _take_slot(self, layouts: Mapping[str, Layout], size_bytes: int) -> _Slot | Declined:
        """An exclusively locked slot: an empty one if there is, else the one with the oldest snapshot."""
        root_fd = self._open_root()
        held = {snapshot.path.name: place for place, snapshot in enumerate(self.snapshots())}
        newest = self.newest or next(iter(self.snapshots()), None)
        protected = newest.path.name if newest is not None else None
        names = [f"slot-{index}" for index in range(MAX_SLOTS)]
        existing = [name for name in names[2:] if _allocated_bytes(self.root / name)]
        usual = [name for name in [*names[:2], *existing] if name != protected]
        # Oldest first; a slot without a complete snapshot before all.
        for name in sorted(usual, key=lambda name: -held.get(name, len(names))):
            if slot := self._lock_slot(name):
                return slot
        extra = [name for name in names[2:] if name not in existing]
        if not extra:
            return Declined("storage does not keep up: all slots hold snapshots that are not yet persisted")
        allocated = sum(_allocated_bytes(self.root / name) for name in names)
        if self._budget_bytes is not None and allocated + size_bytes > self._budget_bytes:
            return Declined(
                f"storage does not keep up, and a third slot of {_mib(size_bytes)} MiB would exceed "
                f"checkpoint.memory_budget_mb = {self._budget_bytes >> 20}"
            )
        if (available := _free_bytes(root_fd)) < size_bytes:
            return Declined(
                f"storage does not keep up, and there is no room for a third slot: {_mib(size_bytes)} MiB needed, "
                f"{available >> 20} available"
            )
        return self._lock_slot(extra[0]) or Declined("storage does not keep up")

    def _lock_slot(self, name: str) -> _Slot | None:
        slot = self._slots.get(name)
        if slot is None:
            path = self.root / name
            folder = safefs.open_subfolder(self._open_root(), name, path, create=True)
            assert folder is not None
            try:
                lock = safefs.open_file(folder, LOCK_FILE, path, os.O_RDWR | os.O_CREAT)
            except BaseException:
                os.close(folder)
                raise
            slot = self._slots[name] = _Slot(path, folder, lock)
        return slot if _try_lock(slot.lock_fd) else None

    def _map(self, slot: _Slot, layouts: Mapping[str, Layout]) -> None:
        """Makes the slot's files, and only those, and maps them."""
        keep = {*layouts, LOCK_FILE}
        for name in os.listdir(slot.folder_fd):  # noqa: PTH208 - through a descriptor
            if name not in keep:
                os.unlink(name, dir_fd=slot.folder_fd)
        for name in [name for name in slot.views if name not in layouts]:
            _forget(slot, name)
        for name, layout in layouts.items():
            known = slot.layouts.get(name)
            if known is None or known.header != layout.header or not _is_same_file(slot, name, layout.size_bytes):
                _forget(slot, name)
                fd = safefs.open_file(slot.folder_fd, name, slot.path, os.O_RDWR | os.O_CREAT)
                with safefs.closing(fd):
                    os.ftruncate(fd, layout.size_bytes)
                    # Pages are given here: a full tmpfs shows as an error now, not as SIGBUS in the copy.
                    os.posix_fallocate(fd, 0, layout.size_bytes)
                    mapping = mmap.mmap(fd, layout.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                    slot.inodes[name] = os.fstat(fd).st_ino
                slot.layouts[name], slot.views[name] = layout, memoryview(mapping)
            slot.views[name][: len(layout.header)] = layout.header
        slot.layouts = {name: slot.layouts[name] for name in layouts}
        slot.views = {name: slot.views[name] for name in layouts}

    def _read_slots(self) -> tuple[list[MemorySnapshot], list[tuple[Path, Damage]]]:
        snapshots: list[MemorySnapshot] = []
        damaged: list[tuple[Path, Damage]] = []
        root = safefs.open_folder(self._base, self._parts, create=False)
        if root is None:
            return snapshots, damaged
        with safefs.closing(root):
            for name in sorted(os.listdir(root)):  # noqa: PTH208 - through a descriptor
                path = self.root / name
                if not _SLOT.fullmatch(name):
                    continue
                folder = safefs.open_subfolder(root, name, path, create=False)
                if folder is None:
                    continue
                with safefs.closing(folder):
                    try:
                        manifest = Manifest.decode(safefs.read_file(folder, MANIFEST_FILE, path))
                    except FileNotFoundError:
                        continue
                    except SnapshotError as error:
                        damaged.append((path, Damage(MANIFEST_FILE, error.what.removeprefix(f"{MANIFEST_FILE}: "))))
                        continue
                    snapshots.append(MemorySnapshot(path, manifest))
        # A run that began anew has smaller steps than the one before it: its lineage comes first all the same.
        latest: dict[str, str] = {}
        for snapshot in snapshots:
            latest[snapshot.run_id] = max(latest.get(snapshot.run_id, ""), snapshot.manifest.created)
        snapshots.sort(key=lambda s: (latest[s.run_id], s.run_id, s.global_step), reverse=True)
        return snapshots, damaged


def _is_same_file(slot: _Slot, name: str, size_bytes: int) -> bool:
    """Whether the mapped file is still the one in the folder, at full size."""
    try:
        status = os.stat(name, dir_fd=slot.folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return status.st_ino == slot.inodes[name] and status.st_size == size_bytes


def _check_space(slot: _Slot, size_bytes: int) -> None:
    """Raises MemoryTierError where the file system has not enough room: before the slot's old snapshot is given up."""
    available = _free_bytes(slot.folder_fd) + _allocated_bytes(slot.path)
    if available < size_bytes:
        raise _no_room(OSError(errno.ENOSPC, f"{_mib(size_bytes)} MiB needed, {available >> 20} available"), slot.path)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free_bytes(fd: int) -> int:
    system = os.fstatvfs(fd)
    return system.f_bavail * system.f_frsize


def _forget(slot: _Slot, name: str | None = None) -> None:
    """Drops mappings; they go once nobody has a view onto them."""
    for table in (slot.layouts, slot.views, slot.inodes):
        if name is None:
            table.clear()
        else:
            table.pop(name, None)


def _remove_slot(root_fd: int, name: str, path: Path, deadline: float) -> bool:
    """Removes one entry of the root; False if somebody reads it."""
    folder = safefs.open_subfolder(root_fd, name, path, create=False)
    if folder is None:
        return True
    with safefs.closing(folder):
        lock = safefs.open_file(folder, LOCK_FILE, path, os.O_RDWR | os.O_CREAT)
        with safefs.closing(lock):
            while not _try_lock(lock):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(LOCK_POLL_S)
            # The manifest first: what is half removed is no snapshot.
            names = os.listdir(folder)  # noqa: PTH208 - through a descriptor
            for file in sorted(names, key=lambda file: file != MANIFEST_FILE):
                os.unlink(file, dir_fd=folder)
    os.rmdir(name, dir_fd=root_fd)
    return True


def _allocated_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0


def _mib(size_bytes: int) -> int:
    return -(-size_bytes >> 20)


def _no_room(error: OSError, path: Path) -> MemoryTierError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
        return MemoryTierError(
            f"{path} has no room for a snapshot: {error.strerror}",
            "Free memory or enlarge the tmpfs, name another with checkpoint.memory_path, or set "
            "checkpoint.memory_tier = false.",
        )
    return MemoryTierError(f"{path} cannot be written: {error.strerror or error}")
