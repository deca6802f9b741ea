"""A durable tier anywhere fsspec goes.

Object stores have no rename. The files are put first and checked (size, and content unless that is switched off), the
manifest is the last put: a reader sees a snapshot once all of it is there. Every error of a client becomes a
StorageError whose text holds no credentials.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from elastictrain.checkpoint import faults
from elastictrain.checkpoint.client import Client
from elastictrain.checkpoint.fence import FENCES_DIR, Fence
from elastictrain.checkpoint.format import MANIFEST_FILE, FileEntry, Manifest, check_content, parse_name
from elastictrain.checkpoint.pending_uploads import PendingUpload, abort, pending_uploads
from elastictrain.checkpoint.secrets import Redactor, redact_url
from elastictrain.checkpoint.store import (
    CHUNK_BYTES,
    MARK,
    PIN_PATIENCE_S,
    PIN_POLL_S,
    PINS_DIR,
    ExplainedStream,
    Progress,
    Source,
    Store,
    StoredSnapshot,
    hash_stream,
    newest_first,
    no_progress,
)
from elastictrain.errors import ConfigError, ElasticTrainError, SnapshotDamagedError, StorageError


class ObjectStore(Store):
    """Snapshots under a prefix of an fsspec file system.

    Args:
        url: where, with its protocol.
        storage_options: passed to fsspec.
        verify_uploads: read back what was put, and compare.

    Raises:
        ConfigError: fsspec does not know the protocol or refuses the options.
    """

    is_downloaded = True

    def __init__(self, url: str, storage_options: Mapping[str, Any], *, verify_uploads: bool = True) -> None:
        super().__init__(redact_url(url), verifies_puts=verify_uploads)
        self._redact = Redactor(url, storage_options)
        try:
            self._client = Client(url, storage_options)
        except ImportError as error:
            raise ConfigError(
                f"checkpoint.url = {self.where}: {self._redact(str(error))}",
                "For S3: pip install 'elastictrain[s3]'; for sftp: pip install 'elastictrain[sftp]'.",
            ) from error
        except Exception as error:  # noqa: BLE001 - each client has its own errors
            raise ConfigError(f"checkpoint.url = {self.where}: {self._redact(str(error))}") from None

    @property
    def _fs(self) -> Any:
        return self._client.fs

    @property
    def _root(self) -> str:
        return self._client.root

    def folders(self) -> list[tuple[StoredSnapshot, bool]]:
        with self._explained("listing"):
            return [(s, self._client.exists(self._path(s.name))) for s in newest_first(self._names(self._root))]

    def put(self, source: Source, progress: Progress = no_progress) -> None:
        manifest = source.manifest
        name = manifest.name
        faults.point("store.begin")
        with self._explained(f"writing {name}"):
            self.check_fence()
            if self._client.exists(self._path(name)):
                self._marks_that_stay(name)  # the try before may have published it, and not come to look for them
                if self._holds(source.manifest, progress):
                    return
                self._client.remove(self._path(name))
            self._client.make_folder(f"{self._root}/{name}")
            for file, entry in manifest.files.items():
                faults.point("store.file")
                # After an outage, what went through before it need not go again.
                if not (self.verifies_puts and self._is_sound(name, file, entry, progress)):
                    self._upload(source.map_file(file), name, file, entry, progress)
                    self._check_upload(name, file, entry, progress)
                faults.point("store.copied")
            faults.point("store.files")
            self._check_presence(name, manifest.files)  # nothing torn is published, not even for a moment
            self.check_fence()  # as close to the commit as can be: there is no way to have both in one
            self._fs.pipe_file(self._path(name), manifest.encoded)
            faults.point("store.manifest")
            self._check_publication(name, manifest)
            faults.point("store.committed")

    def _upload(self, view: memoryview, name: str, file: str, entry: FileEntry, progress: Progress) -> None:
        """Streams a file, comparing what is sent to the manifest."""
        hasher = xxhash.xxh3_128()
        self.check_fence()
        stream = self._fs.open(self._path(name, file), "wb")
        try:
            for begin in range(0, len(view), CHUNK_BYTES):
                chunk = view[begin : begin + CHUNK_BYTES]
                hasher.update(chunk)
                stream.write(chunk)
                progress(len(chunk))
            if damage := check_content(file, entry, len(view), hasher.hexdigest()):
                raise SnapshotDamagedError(str(damage))
            self.check_fence()  # it is only now that what is there is overwritten
        except BaseException:
            _abandon(stream)
            raise
        stream.close()

    def _check_upload(self, name: str, file: str, entry: FileEntry, progress: Progress) -> None:
        size_bytes = self._fs.info(self._path(name, file))["size"]
        found = entry.xxh3_128
        if self.verifies_puts and size_bytes == entry.size_bytes:
            with self._fs.open(self._path(name, file), "rb", block_size=CHUNK_BYTES) as stream:
                size_bytes, found = hash_stream(stream, progress)
        if damage := check_content(file, entry, size_bytes, found):
            raise StorageError(f"{self.where}/{name}: was stored wrongly: {damage}")

    def _check_presence(self, name: str, files: Mapping[str, FileEntry]) -> None:
        """Whether what was stored is still there: older than another snapshot of its run, as where a run goes on from
        before a damaged one, it looks like a leftover until it has its manifest, and anybody may clean those up."""
        for file, entry in files.items():
            size_bytes = None
            with contextlib.suppress(FileNotFoundError):
                size_bytes = self._fs.info(self._path(name, file))["size"]
            if size_bytes != entry.size_bytes:
                raise StorageError(f"{self.where}/{name}/{file}: was removed or replaced while the rest was written")

    def _check_publication(self, name: str, manifest: Manifest) -> None:
        """Whether what has been published just now is there to stay; else takes it back. (A store that fails says
        nothing of it: the next try looks again.)

        Who removes a leftover marks it first and then looks for a manifest; here the manifest comes first, and then a
        look for marks. So, however close together the two happen, one sees the other: the leftover is none and stays,
        or whoever writes it waits until it is gone, and says so (see `Store.delete_unless_pinned`).
        """
        marks = self._marks_that_stay(name)
        try:
            if marks:
                raise StorageError(
                    f"{self.where}/{name}: somebody is about to delete it, for more than {PIN_PATIENCE_S:g} s: "
                    f"{', '.join(marks)}",
                    "If nobody is, remove that mark.",
                )
            self._check_presence(name, manifest.files)
            if not self._client.exists(self._path(name)):
                raise StorageError(f"{self.where}/{name}: was deleted while it was published")
            if self._fs.cat_file(self._path(name)) != manifest.encoded:
                raise StorageError(f"{self.where}/{name}/{MANIFEST_FILE}: reads back differently")
        except StorageError:
            self.check_fence()  # it may be another's by now
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._path(name))
            raise

    def _marks_that_stay(self, name: str) -> list[str]:
        """Waits for whoever is about to delete it, but not for ever."""
        deadline_s = time.monotonic() + PIN_PATIENCE_S
        while (marks := self._marks(name)) and time.monotonic() < deadline_s:
            time.sleep(PIN_POLL_S)
        return marks

    def _is_sound(self, name: str, file: str, entry: FileEntry, progress: Progress) -> bool:
        if not self._client.exists(self._path(name, file)):
            return False
        try:
            self._check_upload(name, file, entry, progress)
        except StorageError:
            return False
        return True

    def read_file(self, name: str, file: str) -> bytes:
        with self._reading(name, file):
            return cast("bytes", self._fs.cat_file(self._path(name, file)))

    def fetch(self, name: str, file: str, scratch: Path, progress: Progress = no_progress) -> Path:
        target = scratch / f"{name}.{file}"
        partial = target.with_suffix(".part")
        target.unlink(missing_ok=True)  # before the download: the disk need not hold two
        with self._reading(name, file), self.open(name, file) as stream, partial.open("wb") as out:
            while chunk := stream.read(CHUNK_BYTES):
                out.write(chunk)
                progress(len(chunk))
        return partial.rename(target)

    def open(self, name: str, file: str) -> BinaryIO:
        with self._reading(name, file):
            stream = self._fs.open(self._path(name, file), "rb", block_size=CHUNK_BYTES, cache_type="readahead")
            return cast("BinaryIO", ExplainedStream(stream, lambda: self._explained(f"reading {name}/{file}")))

    def delete(self, name: str) -> None:
        with self._explained(f"deleting {name}"):
            self.check_fence()
            faults.point("store.delete")
            self._client.remove(self._path(name))
            faults.point("store.unpublished")
            # Marks last: whoever waits for them to go finds then what is left. And no more than what is there now: what
            # comes after it is that of somebody who writes the step anew.
            for file in sorted(self._names(f"{self._root}/{name}"), key=lambda file: file.startswith(MARK)):
                self._client.remove(self._path(name, file))
            self._client.remove_folder(f"{self._root}/{name}")
            faults.point("store.deleted")

    def leftovers(self) -> list[str]:
        """Only what is older than the newest complete snapshot of the same run: whoever began it has gone on since."""
        folders = self.folders()
        newest: dict[str, int] = {}
        for snapshot, is_complete in folders:
            if is_complete:
                newest[snapshot.run_id] = max(newest.get(snapshot.run_id, 0), snapshot.global_step)
        return sorted(
            snapshot.name
            for snapshot, is_complete in folders
            if not is_complete and snapshot.global_step < newest.get(snapshot.run_id, 0)
        )

    def _remove_leftover(self, name: str) -> None:
        mark = self._new_mark()
        self._mark(name, mark)
        faults.point("store.marked")
        with self._explained(f"looking at {name}"):
            is_complete = self._client.exists(self._path(name))
        if is_complete:  # it was none, but being written
            self._unmark(name, mark)
        else:
            self.delete(name)

    def dead_uploads(self) -> list[str]:
        with self._explained("looking for uploads that were cut off"):
            return sorted(upload.path for upload in self._dead_uploads())

    def abort_dead_uploads(self) -> Iterator[str]:
        doing = "aborting uploads that were cut off"
        with self._explained(doing):
            dead = self._dead_uploads()
        for upload in sorted(dead, key=lambda upload: upload.path):
            with self._explained(doing):
                self.check_fence()
                abort(self._fs, self._root, upload)
            yield upload.path

    def _dead_uploads(self) -> list[PendingUpload]:
        """Those begun before the last commit of their run, both by the server's clock: a run has one writer, and that
        one writes one snapshot after the other. So no step need be compared: a run may have gone back."""
        uploads: dict[str, list[PendingUpload]] = {}
        for upload in pending_uploads(self._fs, self._root):
            if (parsed := parse_name(upload.path.partition("/")[0])) is not None:
                uploads.setdefault(parsed[1], []).append(upload)
        if not uploads:
            return []
        dead = []
        committed = [s for s in self.snapshots() if s.run_id in uploads]
        for run_id, begun in uploads.items():
            commits = []
            for snapshot in (s for s in committed if s.run_id == run_id):
                with contextlib.suppress(FileNotFoundError):  # somebody has deleted it meanwhile; the others say enough
                    commits.append(self._fs.modified(self._path(snapshot.name)))
            dead += [upload for upload in begun if any(upload.began_at < commit for commit in commits)]
        return dead

    def _mark(self, name: str, mark: str) -> None:
        with self._explained("marking what is to be deleted"):
            self._fs.pipe_file(self._path(name, mark), b"deleting\n")  # some clients do not put empty files

    def _unmark(self, name: str, mark: str) -> None:
        with self._explained("unmarking"):
            self._client.remove(self._path(name, mark))

    def _marks(self, name: str) -> list[str]:
        with self._explained("looking for marks"):
            return [file for file in self._names(f"{self._root}/{name}") if file.startswith(MARK)]

    def read_fence(self, run_id: str) -> Fence | None:
        with self._explained("reading the fence"):
            try:
                return Fence.decode(self._fs.cat_file(f"{self._root}/{FENCES_DIR}/{run_id}.json"))
            except FileNotFoundError:
                return None

    def _write_fence(self, fence: Fence) -> None:
        with self._explained("writing the fence"):
            self._client.make_folder(f"{self._root}/{FENCES_DIR}")
            self._fs.pipe_file(f"{self._root}/{FENCES_DIR}/{fence.file}", fence.encode())

    def _read_pins(self) -> dict[str, bytes]:
        with self._explained("reading pins"):
            folder, pins = f"{self._root}/{PINS_DIR}", {}
            for name in self._names(folder):
                with contextlib.suppress(FileNotFoundError):  # taken back meanwhile; the others hold
                    pins[name] = self._fs.cat_file(f"{folder}/{name}")
            return pins

    def _write_pin(self, file: str, content: bytes) -> None:
        with self._explained("pinning"):
            self._client.make_folder(f"{self._root}/{PINS_DIR}")
            self._fs.pipe_file(f"{self._root}/{PINS_DIR}/{file}", content)

    def _delete_pin(self, file: str) -> None:
        with self._explained("unpinning"):
            self._client.remove(f"{self._root}/{PINS_DIR}/{file}")

    def _names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def _path(self, name: str, file: str = MANIFEST_FILE) -> str:
        return f"{self._root}/{name}/{file}"

    @contextlib.contextmanager
    def _reading(self, name: str, file: str) -> Iterator[None]:
        with self._explained(f"reading {name}/{file}"):
            try:
                yield
            except FileNotFoundError as error:
                raise SnapshotDamagedError(f"{file}: is missing") from error

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turns the errors of any client into ours, without credentials, and without the original's traceback."""
        try:
            yield
        except ElasticTrainError:
            raise
        except Exception as error:  # noqa: BLE001 - each client has its own errors
            self._client.let_go()
            text = self._redact(f"{type(error).__name__}: {error}")
            raise StorageError(f"{self.where}: {doing}: {text}") from None


def _abandon(stream: Any) -> None:
    """Lets go of a half-written upload without completing it."""
    with contextlib.suppress(Exception):
        stream.discard()
    with contextlib.suppress(Exception):
        stream.closed = True
