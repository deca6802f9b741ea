"""The durable tier: snapshots in a folder or in an object store, listed, read, verified, deleted and pinned.

A snapshot is a folder named `step-<step>-<run id>`; it exists if its manifest does. How a snapshot is put there so
that it exists completely or not at all differs: `local_store` renames, `object_store` writes the manifest last.
Whoever opens a store gets one or the other by its URL, and need not know which.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Protocol

import xxhash

from elastictrain.checkpoint import faults
from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.format import (
    MANIFEST_FILE,
    Damage,
    Manifest,
    check_content,
    damage_of,
    digest,
    parse_name,
    snapshot_name,
)
from elastictrain.checkpoint.secrets import redact_url
from elastictrain.errors import (
    ConfigError,
    FencedError,
    MissingInputError,
    SnapshotDamagedError,
    SnapshotError,
    UnreadableFileError,
)

CHUNK_BYTES: Final = 8 << 20
"""Files are moved in pieces of this size: what a transfer takes of memory."""
PINS_DIR: Final = "pins"
MARK: Final = "deleting-"
"""A file of this prefix in a snapshot's folder: somebody is about to delete it, and looks for pins first."""
PIN_POLL_S: Final = 0.05
PIN_PATIENCE_S: Final = 10.0
"""How long a pin, or a snapshot that has just been published, waits for somebody who is about to delete: for so long as
it takes to read the pins."""

Progress = Callable[[int], None]
"""Called with the number of bytes just moved or checked."""


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot in a store.

    Args:
        name: its folder.
        global_step: windows consumed.
        run_id: the run it belongs to.
    """

    name: str
    global_step: int
    run_id: str


class Source(Protocol):
    """Where the files of a snapshot come from."""

    manifest: Manifest

    def map_file(self, name: str) -> memoryview:
        """A file's bytes. Raises SnapshotDamagedError if it is missing."""
        ...


def no_progress(_num_bytes: int) -> None:
    """For those who do not watch."""


class Store(ABC):
    """Snapshots in one place.

    Args:
        where: the place, fit to be shown.
        verifies_puts: see there.
    """

    is_downloaded: ClassVar[bool] = False
    """Whether `fetch` downloads: what arrives damaged may be sound where it lies."""

    def __init__(self, where: str, *, verifies_puts: bool = True) -> None:
        self.where = where
        self.verifies_puts = verifies_puts
        """What has been put is known to be sound. Else retention must read it back first."""
        self.fence: Fence | None = None

    @abstractmethod
    def folders(self) -> list[tuple[StoredSnapshot, bool]]:
        """All folders of snapshots, newest step first, and whether each has a manifest.

        Raises:
            StorageError: that cannot be known.
        """

    def snapshots(self) -> list[StoredSnapshot]:
        """All snapshots, newest step first: what has a manifest. Raises as `folders`."""
        return [snapshot for snapshot, is_complete in self.folders() if is_complete]

    def incomplete(self) -> list[StoredSnapshot]:
        """What would be a snapshot and has no manifest, newest step first: half written, half deleted, or robbed of
        it. Raises as `folders`."""
        return [snapshot for snapshot, is_complete in self.folders() if not is_complete]

    @abstractmethod
    def put(self, source: Source, progress: Progress = no_progress) -> None:
        """Stores a snapshot durably. One that is there and sound is left as it is, a damaged one is replaced.

        Raises:
            SnapshotDamagedError: the source is not what its manifest says. Trying again does not help.
            FencedError: a newer worker group has begun; see `claim`. Nor does it here.
            StorageError: the store failed; what looks complete, is. Trying again may help.
        """

    @abstractmethod
    def read_file(self, name: str, file: str) -> bytes:
        """A small file of a snapshot. Raises SnapshotDamagedError if it is missing, StorageError if unreachable."""

    @abstractmethod
    def fetch(self, name: str, file: str, scratch: Path, progress: Progress = no_progress) -> Path:
        """A file of a snapshot as a local file: where it lies, or a copy in `scratch`, which replaces one from before.

        Args:
            name: of the snapshot.
            file: likewise.
            scratch: folder for a copy.
            progress: called with the bytes of each piece that was downloaded.

        Raises:
            SnapshotDamagedError: it is missing.
            UnreadableFileError: its bytes cannot be read.
            StorageError: the store failed.
        """

    @abstractmethod
    def open(self, name: str, file: str) -> BinaryIO:
        """Opens a file for reading. Raises as `fetch` does, and so does reading."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes a snapshot, its manifest first. None of that name is fine."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Names of what killed writers left; never of what a living one may still be writing."""

    @abstractmethod
    def _remove_leftover(self, name: str) -> None: ...

    @staticmethod
    def _new_mark() -> str:
        """A name that is nobody else's."""
        return f"{MARK}{secrets.token_hex(8)}"

    @abstractmethod
    def _mark(self, name: str, mark: str) -> None:
        """Puts an empty file into a snapshot's folder. Visible to everybody when this returns."""

    @abstractmethod
    def _unmark(self, name: str, mark: str) -> None: ...

    @abstractmethod
    def _marks(self, name: str) -> list[str]:
        """The marks in a snapshot's folder."""

    def claim(self, fence: Fence) -> None:
        """From now on only this worker group, or a newer one, may write and delete snapshots of its run.

        Raises:
            FencedError: a newer one has begun already.
            StorageError: the store cannot be read or written.
        """
        self.fence = fence
        self.check_fence()

    def check_fence(self) -> None:
        """Raises FencedError if a newer worker group than the one that has claimed this store has begun."""
        with self._allowed():
            pass

    @contextlib.contextmanager
    def _allowed(self) -> Iterator[None]:
        """Around what must not happen once a newer worker group has begun. Writes a fence that is not there: whoever
        looked before us may have overwritten it after.

        Raises:
            FencedError: it has.
        """
        if self.fence is None:
            yield
            return
        with self._fence_held(self.fence):
            if not self.fence.check(self.read_fence(self.fence.run_id)):
                self._write_fence(self.fence)
            yield

    @abstractmethod
    def read_fence(self, run_id: str) -> Fence | None:
        """The newest worker group of a run that has begun, of those that say so. Raises StorageError."""

    @abstractmethod
    def _write_fence(self, fence: Fence) -> None: ...

    @contextlib.contextmanager
    def _fence_held(self, _fence: Fence) -> Iterator[None]:
        """Keeps others from moving the fence, where there is a way to."""
        yield

    @abstractmethod
    def _read_pins(self) -> dict[str, bytes]:
        """Pin files by name."""

    @abstractmethod
    def _write_pin(self, file: str, content: bytes) -> None: ...

    @abstractmethod
    def _delete_pin(self, file: str) -> None: ...

    def read_manifest(self, name: str) -> Manifest:
        """A snapshot's manifest.

        Raises:
            SnapshotDamagedError: it is missing, damaged, or that of another snapshot.
            SnapshotVersionError: it is newer than this program.
            StorageError: the store failed.
        """
        manifest = Manifest.decode(self.read_file(name, MANIFEST_FILE))
        if manifest.name != name:
            raise SnapshotDamagedError(f"{MANIFEST_FILE}: is that of {manifest.name}")
        return manifest

    def verify(self, name: str, progress: Progress = no_progress) -> list[Damage]:
        """Reads all of a snapshot and compares it to its manifest; empty if it is sound.

        Raises:
            StorageError: the store failed, so nothing is known. (What cannot be read of a file is damage.)
        """
        try:
            manifest = self.read_manifest(name)
        except (SnapshotError, UnreadableFileError) as error:
            return [damage_of(MANIFEST_FILE, error)]
        damages = []
        for file, entry in manifest.files.items():
            try:
                with self.open(name, file) as stream:
                    damage = check_content(file, entry, *hash_stream(stream, progress))
            except (SnapshotDamagedError, UnreadableFileError) as error:
                damage = damage_of(file, error)
            if damage is not None:
                damages.append(damage)
        return damages

    def _holds(self, manifest: Manifest, progress: Progress) -> bool:
        """Whether this very snapshot is there, and sound. Another try of the same step may have other content, and one
        of a newer program is there only for a run that has given it up."""
        try:
            return self.read_manifest(manifest.name).files == manifest.files and not self.verify(
                manifest.name, progress
            )
        except (SnapshotError, UnreadableFileError):
            return False

    def dead_uploads(self) -> list[str]:
        """Names of what killed writers have uploaded in part, where that is in no listing: `<snapshot>/<file>`.

        Raises:
            StorageError: that cannot be known. Many a store lets its users write, and not ask this.
        """
        return []

    def abort_dead_uploads(self) -> Iterator[str]:
        """Drops them, one after the other. Yields the name of each that is gone. Raises as `dead_uploads`, and
        FencedError."""
        return iter(())

    def clean_leftovers(self) -> list[str]:
        """Removes what killed writers left. Returns the names."""
        names = self.leftovers()
        for name in names:
            with self._allowed():
                self._remove_leftover(name)
        return names

    def delete_unless_pinned(self, name: str) -> bool:
        """Deletes a snapshot that is superfluous, unless somebody needs it; returns whether it did.

        Who deletes marks first and then looks for pins; who pins does so first and then looks for marks. So, however
        close together the two happen, one sees the other: the pin holds, or whoever pins is told that it came too late
        (Dekker's way of mutual exclusion, with files). A mark bears its owner's name: nobody takes away another's.
        """
        parsed = parse_name(name)
        key = (parsed[1], parsed[0]) if parsed is not None else None
        if key in self.pins():
            return False
        self.check_fence()
        mark = self._new_mark()
        self._mark(name, mark)
        faults.point("store.marked")
        if key in self.pins():
            self._unmark(name, mark)
            return False
        try:
            self.delete(name)
        except FencedError:
            self._unmark(name, mark)  # it is another's now
            raise
        return True

    def pin(self, run_id: str, global_step: int, owner: str, patience_s: float = PIN_PATIENCE_S) -> None:
        """Keeps a snapshot from being deleted by anybody's retention, for `owner` (any text that names it).

        Args:
            run_id: of the snapshot.
            global_step: likewise.
            owner: any text.
            patience_s: how long to wait for somebody who is about to delete it.

        Raises:
            MissingInputError: it is deleted, or somebody is at it. There is no pin then.
            StorageError: the store cannot be read and written.
        """
        file = _pin_file(run_id, global_step, owner)
        content = json.dumps({"run_id": run_id, "global_step": global_step, "owner": owner}).encode()
        name = snapshot_name(global_step, run_id)
        self._write_pin(file, content)
        deadline_s = time.monotonic() + patience_s
        # What the last look said counts: a mark that is set after it gives way to the pin.
        while (marks := self._marks(name)) and time.monotonic() < deadline_s:
            time.sleep(PIN_POLL_S)
        if marks or all(snapshot.name != name for snapshot in self.snapshots()):
            self._delete_pin(file)
            raise MissingInputError(
                f"the snapshot of step {global_step} in {self.where} is deleted, or just being deleted, as superfluous",
                "Name another step; `elastictrain checkpoints list --url` shows which there are.",
            )

    def unpin(self, run_id: str, global_step: int, owner: str) -> None:
        """Takes the owner's pin back; none is fine."""
        self._delete_pin(_pin_file(run_id, global_step, owner))

    def pins(self) -> dict[tuple[str, int], list[str]]:
        """(run id, global step) of all pinned snapshots, with the owners of their pins."""
        pins: dict[tuple[str, int], list[str]] = {}
        for file, content in self._read_pins().items():
            where, owner = parse_name(file.rpartition("-")[0]), "unknown"
            # A pin counts by its name: a torn one must not free the snapshot.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                owner = str(json.loads(content)["owner"])
            if where is not None:
                pins.setdefault((where[1], where[0]), []).append(owner)
        return pins


def _pin_file(run_id: str, global_step: int, owner: str) -> str:
    return f"step-{global_step:012d}-{run_id}-{digest(owner.encode())[:12]}"


def newest_first(names: Iterable[str]) -> list[StoredSnapshot]:
    """Snapshots from folder names; other names are passed over."""
    found = [StoredSnapshot(name, *parsed) for name in names if (parsed := parse_name(name)) is not None]
    return sorted(found, key=lambda s: (s.global_step, s.run_id), reverse=True)


class ExplainedStream:
    """A stream whose errors become ours.

    Args:
        stream: what is read.
        explained: makes a context manager that turns its errors into ours.
    """

    def __init__(self, stream: BinaryIO, explained: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._stream = stream
        self._explained = explained

    def read(self, size: int = -1) -> bytes:
        with self._explained():
            return self._stream.read(size)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> ExplainedStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def hash_stream(stream: BinaryIO, progress: Progress = no_progress) -> tuple[int, str]:
    """(size in bytes, xxh3-128) of what a stream holds."""
    hasher, size_bytes = xxhash.xxh3_128(), 0
    while chunk := stream.read(CHUNK_BYTES):
        hasher.update(chunk)
        size_bytes += len(chunk)
        progress(len(chunk))
    return size_bytes, hasher.hexdigest()


def open_store(
    url: str | Path, storage_options: Mapping[str, Any] | None = None, *, verify_uploads: bool = True
) -> Store:
    """The store at a URL.

    Args:
        url: a path, `file://...`, or whatever fsspec knows: `s3://bucket/prefix`, `gs://`, `az://`, `memory://`.
        storage_options: passed to fsspec.
        verify_uploads: read back what was uploaded to an object store.

    Raises:
        ConfigError: there is no such protocol, its package is missing, or it refuses the options.
    """
    from elastictrain.checkpoint.local_store import LocalStore

    text = str(url)
    protocol, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(Path(text))
    if protocol in ("file", "local"):
        if not rest.startswith("/"):
            raise ConfigError(
                f"checkpoint.url = {redact_url(text)}: needs an absolute path", "Three slashes: file:///path."
            )
        return LocalStore(Path(rest))
    # fsspec is slow to import, and most jobs do not need it.
    from elastictrain.checkpoint.object_store import ObjectStore

    return ObjectStore(text, storage_options or {}, verify_uploads=verify_uploads)
