"""What snapshots there are, in both tiers, and how to open the newest one that is sound.

Walking back is the caller's loop made safe: newest first, read and compared to the manifest while it is opened, and
every one that is passed over is reported with file and reason.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from elastictrain.checkpoint.format import (
    MANIFEST_FILE,
    MAX_HEADER_BYTES,
    TRAINER_FILE,
    Damage,
    Layout,
    Manifest,
    check_content,
    damage_of,
    digest,
    read_layout,
)
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot, OpenSnapshot, verify_memory
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.store import Progress, Store, no_progress
from elastictrain.checkpoint.stored_file import MappedFile, ReadableFile, StoredFile, digests
from elastictrain.errors import (
    BusyError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotVersionError,
    StorageError,
    UnreadableFileError,
)

HASH_THREADS = 2
"""A snapshot has two large files, the model and the optimizer's state: they are read and hashed side by side."""

Tier = Literal["memory", "durable"]
PassedOver = SnapshotError | BusyError | StorageError
"""Why a snapshot cannot be used, and an older one may be looked at."""
T = TypeVar("T")


class Attempt(Protocol):
    """How one call of a store is made: once, or again while the store fails."""

    def __call__(self, act: Callable[[], T], /) -> T: ...


def once(act: Callable[[], T], /) -> T:
    """For those who do not wait for a store that fails."""
    return act()


@dataclass(frozen=True)
class Candidate:
    """A snapshot in one tier; nothing of its content has been looked at.

    Args:
        name: its name.
        global_step: windows consumed.
        run_id: the run it belongs to.
        tier: where it is.
        memory: the snapshot, in the memory tier.
        store: the store, in the durable tier.
    """

    name: str
    global_step: int
    run_id: str
    tier: Tier
    memory: MemorySnapshot | None = None
    store: Store | None = None

    @property
    def where(self) -> str:
        """For people."""
        if self.memory is not None:
            return str(self.memory.path)
        assert self.store is not None
        return f"{self.store.where}/{self.name}"

    def read_manifest(self) -> Manifest:
        """Raises SnapshotError where it cannot be used, StorageError where the store fails."""
        if self.memory is not None:
            return self.memory.manifest
        assert self.store is not None
        return self.store.read_manifest(self.name)

    def read_trainer(self) -> dict[str, Any]:
        """trainer.json, compared to the manifest. Raises as `read_manifest`."""
        entry = self.read_manifest().files[TRAINER_FILE]
        if self.memory is not None:
            with OpenSnapshot(self.memory.path, self.name) as opened:
                data = bytes(opened.map_file(TRAINER_FILE))
        else:
            assert self.store is not None
            data = self.store.read_file(self.name, TRAINER_FILE)
        return _decode_trainer(data, check_content(TRAINER_FILE, entry, len(data), digest(data)))

    def verify(self, progress: Progress = no_progress) -> list[Damage] | None:
        """Reads everything, while a job may be writing and deleting.

        Returns:
            what is wrong, empty if it is sound; None if it is gone by now, which is no damage.

        Raises:
            BusyError: it is just being overwritten, in the memory tier.
            StorageError: the store failed, so nothing is known.
        """
        if self.memory is not None:
            return verify_memory(self.memory)
        assert self.store is not None
        while (manifest := self._read_stored_manifest()) is not None:
            damages = self.store.verify(self.name, progress)
            # Who deletes a snapshot takes its manifest away first; who does its step again replaces all of it.
            if not damages or self._read_stored_manifest() == manifest:
                return damages
        return None

    def is_gone(self) -> bool:
        """Whether it is not in its store any more. Raises StorageError. For the durable tier."""
        return self._read_stored_manifest() is None

    def _read_stored_manifest(self) -> bytes | None:
        assert self.store is not None
        try:
            return self.store.read_file(self.name, MANIFEST_FILE)
        except UnreadableFileError:
            return b""  # it is there
        except SnapshotDamagedError:
            return None


class SnapshotReader:
    """A snapshot that has been opened and found sound.

    In the memory tier the slot is locked while this is open; it may be written again after `close`: copy what you need
    before.

    Args:
        candidate: the snapshot.
        manifest: likewise.
        files: all of them, open; closed at the end.
        reopened: opens a file anew, and compares it to the manifest: it need not be the one it was.
        attempt: how each read is made. A file that has failed is opened anew at the next try.
        on_close: called at the end.
    """

    def __init__(
        self,
        candidate: Candidate,
        manifest: Manifest,
        files: dict[str, ReadableFile],
        *,
        reopened: Callable[[str], ReadableFile],
        attempt: Attempt,
        on_close: Callable[[], None],
    ) -> None:
        self.candidate = candidate
        self.manifest = manifest
        self.trainer: dict[str, Any] = {}
        """Content of trainer.json, from `open_candidate`."""
        self._files = files
        self._reopened = reopened
        self._attempt = attempt
        self._on_close = on_close

    @property
    def files(self) -> list[str]:
        """Names of its files."""
        return list(self.manifest.files)

    def read(self, file: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Bytes of a file, read-only; all of them by default. Raises as `ReadableFile.read_into`."""
        size_bytes = self.manifest.files[file].size_bytes
        return self._try(file, lambda opened: opened.read(begin, size_bytes if end is None else end))

    def read_into(self, file: str, begin: int, target: memoryview) -> None:
        """Fills `target` with the bytes of a file from `begin` on. Raises as `ReadableFile.read_into`."""
        self._try(file, lambda opened: opened.read_into(begin, target))

    def _try(self, file: str, act: Callable[[ReadableFile], T]) -> T:
        def act_on_open_file() -> T:
            opened = self._files.get(file)
            if opened is None:
                opened = self._files[file] = self._reopened(file)
            try:
                return act(opened)
            except StorageError:
                self._files.pop(file).close()
                raise

        return self._attempt(act_on_open_file)

    def layout(self, file: str) -> Layout:
        """Where the tensors of a tensor file are. Raises SnapshotDamagedError if it is none."""
        size_bytes = self.manifest.files[file].size_bytes
        head = self.read(file, 0, min(size_bytes, 8))
        header_bytes = 8 + int.from_bytes(head, "little")
        return read_layout(self.read(file, 0, min(size_bytes, header_bytes, MAX_HEADER_BYTES)), size_bytes)

    def close(self) -> None:
        for opened in self._files.values():
            opened.close()
        self._files = {}
        self._on_close()

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def newest_first(memory: MemoryTier | None, store: Store | None, run_id: str | None = None) -> list[Candidate]:
    """All complete snapshots, newest step first; at one step, the memory tier first.

    Args:
        memory: the memory tier, or None.
        store: the durable tier, or None.
        run_id: only this run's; None for all.

    Raises:
        StorageError: the store cannot be listed.
    """
    found: list[Candidate] = []
    if memory is not None:
        found += [Candidate(s.name, s.global_step, s.run_id, "memory", memory=s) for s in memory.snapshots()]
    if store is not None:
        found += [Candidate(s.name, s.global_step, s.run_id, "durable", store=store) for s in store.snapshots()]
    if run_id is not None:
        found = [candidate for candidate in found if candidate.run_id == run_id]
    return sorted(found, key=lambda c: (-c.global_step, c.run_id, c.tier != "memory"))


def latest_run(
    candidates: Iterable[Candidate], on_out_of_reach: Callable[[Candidate, StorageError], None] | None = None
) -> str | None:
    """The run that wrote last, of those whose newest snapshot's manifest can be read. For a store of several runs.

    Args:
        candidates: newest first.
        on_out_of_reach: called for each whose manifest the store does not give, which is passed over then.

    Raises:
        StorageError: the store does not give one, and `on_out_of_reach` is None; or it gives none of a run's, which may
            be the one that wrote last.
    """
    latest: tuple[str, str] | None = None
    seen: set[str] = set()
    out_of_reach: dict[str, StorageError] = {}
    for candidate in candidates:
        if candidate.run_id in seen:
            continue
        try:
            created = candidate.read_manifest().created
        except (SnapshotError, StorageError) as error:
            if isinstance(error, StorageError) and is_out_of_reach(error):
                if on_out_of_reach is None:
                    raise
                on_out_of_reach(candidate, error)
                out_of_reach.setdefault(candidate.run_id, error)
            continue
        seen.add(candidate.run_id)
        latest = max(latest or ("", ""), (created, candidate.run_id))
    for run_id, newest in out_of_reach.items():
        if run_id not in seen:
            raise StorageError(
                f"{newest.what}; nor does the store give any other manifest of run {run_id}, so whether that is the "
                "run that wrote last is not known",
                newest.hint,
            ) from newest
    return latest[1] if latest else None


def open_candidate(
    candidate: Candidate, scratch: Path, progress: Progress = no_progress, attempt: Attempt = once
) -> SnapshotReader:
    """Opens a snapshot, having read all of it and compared it to its manifest.

    Args:
        candidate: which.
        scratch: folder for what must be downloaded; the caller removes it when done.
        progress: called, in this thread, with the bytes of each piece that was downloaded, and once more when they are
            hashed.
        attempt: how each file is fetched from the durable tier, and read: to be hashed, and later from the reader. One
            that has arrived, or is hashed, need not come again when the store fails at another.

    Raises:
        SnapshotDamagedError: names every file that is wrong, and why.
        SnapshotVersionError: the format is newer than this program.
        BusyError: it was overwritten meanwhile.
        UnreadableFileError: a file cannot be read.
        StorageError: the store failed.
    """
    with contextlib.ExitStack() as stack:
        if candidate.memory is not None:
            opened = stack.enter_context(OpenSnapshot(candidate.memory.path, candidate.name))
            manifest = opened.manifest

            def open_file(file: str) -> ReadableFile:
                return MappedFile(opened.map_file(file))

        else:
            store, name = candidate.store, candidate.name
            assert store is not None
            manifest = attempt(lambda: store.read_manifest(name))

            def open_file(file: str) -> ReadableFile:
                return StoredFile(store.fetch(name, file, scratch, progress))

        files = _open_files(manifest, open_file, stack, progress, attempt)

        def reopened(file: str) -> ReadableFile:
            found = open_file(file)
            try:
                if damage := check_content(file, manifest.files[file], found.size_bytes, found.digest(progress)):
                    raise SnapshotDamagedError(str(damage))
            except BaseException:
                found.close()
                raise
            return found

        on_close = stack.pop_all().close
        reader = SnapshotReader(candidate, manifest, files, reopened=reopened, attempt=attempt, on_close=on_close)
        try:
            # Through the reader: a second read can fail as the first one can.
            reader.trainer = _decode_trainer(bytes(reader.read(TRAINER_FILE)), None)
        except BaseException:
            reader.close()
            raise
        return reader


def _open_files(
    manifest: Manifest,
    open_file: Callable[[str], ReadableFile],
    stack: contextlib.ExitStack,
    progress: Progress,
    attempt: Attempt,
) -> dict[str, ReadableFile]:
    """Opens all files and compares them to the manifest; `stack` closes them."""
    files: dict[str, ReadableFile] = {}
    damages: dict[str, Damage] = {}
    unchecked = list(manifest.files)

    def open_one(file: str) -> None:
        try:
            files[file] = stack.enter_context(contextlib.closing(open_file(file)))
        except SnapshotDamagedError as error:
            damages[file] = damage_of(file, error)
            unchecked.remove(file)

    def check() -> None:
        """What is read here for the first time can fail as a download can. What has failed is opened anew at the next
        try, since a server that comes back need not know what was open before."""
        for file in [file for file in unchecked if file not in files]:
            open_one(file)
        whole = {f: files[f] for f in unchecked if files[f].size_bytes == manifest.files[f].size_bytes}
        hashed = digests(whole, progress, max_threads=HASH_THREADS)
        failed: StorageError | None = None
        for file in list(unchecked):
            found = hashed.get(file, "")
            if isinstance(found, StorageError):
                files.pop(file).close()
                failed = failed or found
                continue
            unchecked.remove(file)
            if isinstance(found, SnapshotDamagedError):
                damages[file] = damage_of(file, found)
            elif damage := check_content(file, manifest.files[file], files[file].size_bytes, found):
                damages[file] = damage
        if failed is not None:
            raise failed

    for file in manifest.files:
        attempt(partial(open_one, file))
    attempt(check)
    if TRAINER_FILE not in manifest.files:
        damages[TRAINER_FILE] = Damage(TRAINER_FILE, "is missing")
    if damages:
        raise SnapshotDamagedError("; ".join(map(str, damages.values())))
    return files


def is_out_of_reach(error: PassedOver) -> bool:
    """Whether it says nothing of the snapshot, which may be sound: the store does not give it, now or to us."""
    return isinstance(error, StorageError) and not isinstance(error, UnreadableFileError)


def first_sound(
    candidates: Iterable[Candidate],
    opened: Callable[[Candidate], SnapshotReader],
    on_passed_over: Callable[[Candidate, PassedOver], None],
    *,
    rewinds: bool = False,
) -> SnapshotReader | None:
    """Opens the first candidate that is sound.

    Args:
        candidates: newest first.
        opened: opens one, as `open_candidate` does.
        on_passed_over: called for each that is not, with the reason, which names the file. One that is BusyError is
            not damaged: somebody writes to it, or has written another in its place.
        rewinds: pass over those as well that are not damaged, and cannot be had all the same: one that a newer program
            wrote, one that the store lists and does not give. What they hold is not to be done again unasked.

    Returns:
        the open snapshot; None if none is sound.

    Raises:
        StorageError: the store failed, so nothing is known about the rest; not if it `rewinds`.
        SnapshotVersionError: see `rewinds`.
    """
    for candidate in candidates:
        try:
            return opened(candidate)
        except (SnapshotError, BusyError, StorageError) as error:
            if not rewinds and isinstance(error, SnapshotVersionError):
                raise SnapshotVersionError(f"{candidate.where}/{error.what}", error.hint) from error
            if not rewinds and is_out_of_reach(error):
                raise
            on_passed_over(candidate, error)
    return None


def _decode_trainer(data: bytes, damage: Damage | None) -> dict[str, Any]:
    if damage is not None:
        raise SnapshotDamagedError(str(damage))
    try:
        decoded = json.loads(data)
    except ValueError as error:
        raise SnapshotDamagedError(f"{TRAINER_FILE}: not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise SnapshotDamagedError(f"{TRAINER_FILE}: not an object")
    return decoded
