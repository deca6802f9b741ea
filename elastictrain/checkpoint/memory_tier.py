"""The memory tier: the newest snapshots of a job, on a tmpfs, where they outlive the processes that made them.

    <root>/slot-0/{lock, model.safetensors, ..., trainer.json, manifest.json}
    <root>/slot-1/...
    <root>/lock

One process writes: rank zero of the node; once ranks fail any of them, one after the other (`alone`). A snapshot is
copied straight into mapped files of a slot: `begin` takes the manifest away and hands out the mappings, the caller
fills them, `commit` hashes what is there and puts the new manifest in place by rename. A crash at any moment leaves
that slot without a manifest, and the other slot as it was: the slot that holds the newest snapshot is never written to.
A slot that its writer has given up (`abort`) is told from that by a mark in it; its files serve the next snapshot.

Each slot's `lock` is flocked: exclusively while a writer fills the slot, shared while somebody reads it (the
persister; also one whose parent has died). A third slot is made only where the newest snapshot and the one that is
being persisted hold the first two.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastictrain.checkpoint import faults, safefs
from elastictrain.checkpoint.format import MANIFEST_FILE, Damage, Layout, Manifest, damage_of, digest
from elastictrain.checkpoint.memory_slot import Slot, allocated_bytes, empty, free_bytes, is_abandoned, mib, no_room
from elastictrain.checkpoint.memory_snapshot import LOCK_FILE, MemorySnapshot
from elastictrain.checkpoint.slot_writer import SlotFiles, SlotWriter
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


@dataclass(frozen=True, slots=True)
class _Found:
    """What the slots hold.

    Args:
        snapshots: complete ones, newest first.
        damaged: slots whose manifest cannot be used, and why.
        incomplete: slots that have none, though their writers have not given them up.
    """

    snapshots: list[MemorySnapshot]
    damaged: list[tuple[Path, Damage]]
    incomplete: list[Path]


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
        self._slots: dict[str, Slot] = {}
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
                f"two snapshots of {mib(size_bytes)} MiB do not fit into checkpoint.memory_budget_mb = "
                f"{self._budget_bytes >> 20}",
                "Raise it, or set checkpoint.memory_tier = false.",
            )
        try:
            slot = self._take_slot(layouts, size_bytes)
        except OSError as error:
            raise no_room(error, self.root) from error
        if isinstance(slot, Declined):
            return slot
        try:
            slot.prepare(layouts, size_bytes)
        except BaseException:
            slot.give_up()
            raise
        return SlotWriter(slot, self._committed)

    def make_room(self, layouts: Mapping[str, Layout], go_on: Callable[[int], bool]) -> Iterator[SlotFiles]:
        """Has the pages of the next two snapshots allocated and mapped beforehand, which takes several times as long as
        a copy. Complete snapshots are unharmed. In any thread, but nothing else may be asked of this tier meanwhile.

        Args:
            layouts: of their files.
            go_on: asked again and again, with the number of slots that are ready; once it says no, this ends.

        Yields:
            the files of each slot that is ready.

        Raises:
            MemoryTierError: no room. It is for `begin` to say so: by then there may be some.
            UnsafePathError: a folder or file is a link or somebody else's.
        """
        size_bytes = sum(layout.size_bytes for layout in layouts.values())
        if self._budget_bytes is not None and 2 * size_bytes > self._budget_bytes:
            return
        try:
            snapshots = self.snapshots()
            held = {snapshot.path.name: place for place, snapshot in enumerate(snapshots)}
            num_ready = 0
            # In the order in which `begin` takes them.
            for name in sorted(("slot-0", "slot-1"), key=lambda name: -held.get(name, len(snapshots))):
                slot = self._slot(name)
                if slot.make_room(layouts, size_bytes, partial(go_on, num_ready)):
                    num_ready += 1
                    yield SlotFiles(slot)
        except OSError as error:
            raise no_room(error, self.root) from error

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
            raise no_room(error, self.root) from error
        deadline = time.monotonic() + timeout_s
        with safefs.closing(lock):
            while not (is_alone := _try_lock(lock)) and time.monotonic() < deadline:
                time.sleep(LOCK_POLL_S)
            yield is_alone

    def snapshots(self) -> list[MemorySnapshot]:
        """The complete snapshots, newest first."""
        return self._read_slots().snapshots

    def damaged(self) -> list[tuple[Path, Damage]]:
        """Slots whose manifest is there and cannot be used: (folder, what is wrong)."""
        return self._read_slots().damaged

    def incomplete(self) -> list[Path]:
        """Slots with the files of a snapshot, and no manifest, that nobody writes to: whoever did was killed. A writer
        must not ask: whoever asks holds the slot's lock for a moment."""
        return [path for path in self._read_slots().incomplete if _is_left_behind(path)]

    def discard(self, snapshot: MemorySnapshot) -> None:
        """Takes back a snapshot that was found damaged: its slot is free again. One that somebody writes to, or that
        holds another snapshot by now, is left alone."""
        folder = safefs.open_folder(snapshot.path.parent, (snapshot.path.name,), create=False)
        if folder is not None:
            with safefs.closing(folder), contextlib.suppress(FileNotFoundError):
                lock = safefs.open_file(folder, LOCK_FILE, snapshot.path, os.O_RDWR | os.O_CREAT)
                with safefs.closing(lock):
                    # What is there counts once nobody can write: a writer may have committed until then.
                    if (
                        _try_lock(lock)
                        and safefs.read_file(folder, MANIFEST_FILE, snapshot.path) == snapshot.manifest.encoded
                    ):
                        empty(folder)
        if self.newest == snapshot:
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
            slot.close()
        self._slots.clear()
        if self._root_fd is not None:
            os.close(self._root_fd)
            self._root_fd = None

    def _committed(self, snapshot: MemorySnapshot) -> None:
        self.newest = snapshot

    def _open_root(self) -> int:
        if self._root_fd is None:
            self._root_fd = safefs.open_folder(self._base, self._parts, create=True)
            assert self._root_fd is not None
        return self._root_fd

    def _take_slot(self, layouts: Mapping[str, Layout], size_bytes: int) -> Slot | Declined:
        """An exclusively locked slot: an empty one if there is, else the one with the oldest snapshot."""
        root_fd = self._open_root()
        snapshots = self.snapshots()
        held = {snapshot.path.name: place for place, snapshot in enumerate(snapshots)}
        newest = self.newest or next(iter(snapshots), None)
        protected = newest.path.name if newest is not None else None
        names = [f"slot-{index}" for index in range(MAX_SLOTS)]
        existing = [name for name in names[2:] if allocated_bytes(self.root / name)]
        usual = [name for name in [*names[:2], *existing] if name != protected]
        # Oldest first; a slot without a complete snapshot before all.
        for name in sorted(usual, key=lambda name: -held.get(name, len(names))):
            if slot := self._lock_slot(name):
                return slot
        extra = [name for name in names[2:] if name not in existing]
        if not extra:
            return Declined("storage does not keep up: all slots hold snapshots that are not yet persisted")
        allocated = sum(allocated_bytes(self.root / name) for name in names)
        if self._budget_bytes is not None and allocated + size_bytes > self._budget_bytes:
            return Declined(
                f"storage does not keep up, and a third slot of {mib(size_bytes)} MiB would exceed "
                f"checkpoint.memory_budget_mb = {self._budget_bytes >> 20}"
            )
        if (available := free_bytes(root_fd)) < size_bytes:
            return Declined(
                f"storage does not keep up, and there is no room for a third slot: {mib(size_bytes)} MiB needed, "
                f"{available >> 20} available"
            )
        return self._lock_slot(extra[0]) or Declined("storage does not keep up")

    def _slot(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = Slot.open(self._open_root(), self.root / name)
        return slot

    def _lock_slot(self, name: str) -> Slot | None:
        slot = self._slot(name)
        return slot if slot.lock() else None

    def _read_slots(self) -> _Found:
        found = _Found([], [], [])
        root = safefs.open_folder(self._base, self._parts, create=False)
        if root is None:
            return found
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
                        if is_abandoned(folder):
                            found.incomplete.append(path)
                        continue
                    except SnapshotError as error:
                        found.damaged.append((path, damage_of(MANIFEST_FILE, error)))
                        continue
                    found.snapshots.append(MemorySnapshot(path, manifest))
        # A run that began anew has smaller steps than the one before it: its lineage comes first all the same.
        latest: dict[str, str] = {}
        for snapshot in found.snapshots:
            latest[snapshot.run_id] = max(latest.get(snapshot.run_id, ""), snapshot.manifest.created)
        found.snapshots.sort(key=lambda s: (latest[s.run_id], s.run_id, s.global_step), reverse=True)
        return found


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_left_behind(path: Path) -> bool:
    """Whether a slot is abandoned, and nobody writes to it or has finished a moment ago: looked at under its lock."""
    folder = safefs.open_folder(path.parent, (path.name,), create=False)
    if folder is None:
        return False
    with safefs.closing(folder):
        try:
            lock = safefs.open_file(folder, LOCK_FILE, path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # somebody has just removed the folder
            return False
        with safefs.closing(lock):
            return _try_lock(lock) and is_abandoned(folder)


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
            empty(folder)
            os.unlink(LOCK_FILE, dir_fd=folder)
    try:
        os.rmdir(name, dir_fd=root_fd)
    except OSError:  # somebody has just opened its lock
        return False
    return True
