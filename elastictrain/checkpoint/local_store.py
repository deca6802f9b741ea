"""A durable tier in a folder: a local disk, or a shared file system.

A snapshot is written into a folder of a temporary name beside its place, every file and folder is fsynced, and the
folder is renamed: it exists completely or not at all, whenever the power goes. The name of the temporary folder says
who writes it, so that those of dead writers can be told from those of living ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from elastictrain.checkpoint import faults
from elastictrain.checkpoint.fence import FENCES_DIR, Fence
from elastictrain.checkpoint.file_copy import copy_durably
from elastictrain.checkpoint.format import MANIFEST_FILE, FileEntry, check_content, parse_name
from elastictrain.checkpoint.store import (
    MARK,
    PINS_DIR,
    ExplainedStream,
    Progress,
    Source,
    Store,
    StoredSnapshot,
    newest_first,
    no_progress,
)
from elastictrain.checkpoint.stored_file import explained
from elastictrain.errors import SnapshotDamagedError, StorageError
from elastictrain.procs import Identity
from elastictrain.protocol import write_atomically

_TEMPORARY = re.compile(
    r"\.tmp-(?P<name>step-.*)-(?P<host>[A-Za-z0-9_.]+)-(?P<pid>\d+)\.(?P<ticks>\d+)\.(?P<boot>[0-9a-f]*)"
    r"(?:\.(?P<incarnation>\d+))?-[0-9a-f]{8}"
)
_SET_ASIDE = ".damaged-"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class LocalStore(Store):
    """Snapshots in a folder; made when the first is put.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path.absolute()

    def folders(self) -> list[tuple[StoredSnapshot, bool]]:
        try:
            entries = [entry.name for entry in self.path.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(self.path, error) from error
        return [(s, _is_file(self.path / s.name / MANIFEST_FILE)) for s in newest_first(entries)]

    def put(self, source: Source, progress: Progress = no_progress) -> None:
        manifest = source.manifest
        faults.point("store.begin")
        try:
            _make_folder(self.path)
            self.check_fence()  # before the work, not to do it for nothing
            final = self.path / manifest.name
            if _mode_of(final / MANIFEST_FILE) is not None and self._holds(source.manifest, progress):
                _fsync_folder(self.path)  # whoever renamed it may have been killed before it could
                return
            temporary = self.path / _temporary_name(manifest.name, self.fence)
            temporary.mkdir()
            try:
                for name, entry in manifest.files.items():
                    faults.point("store.file")
                    _copy(source.map_file(name), temporary / name, name, entry, progress)
                    faults.point("store.copied")
                faults.point("store.files")
                _write(temporary / MANIFEST_FILE, manifest.encoded)
                faults.point("store.manifest")
                _fsync_folder(temporary)
                faults.point("store.rename")
                with self._allowed():
                    self._replace(temporary, final)
                faults.point("store.renamed")
                _fsync_folder(self.path)
                faults.point("store.committed")
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        except OSError as error:
            raise _failed(self.path, error) from error

    def _replace(self, temporary: Path, final: Path) -> None:
        """Renames into place; what is there and damaged is set aside first, and removed after."""
        aside = None
        if _mode_of(final) is not None:
            aside = self.path / f"{_SET_ASIDE}{final.name}-{secrets.token_hex(4)}"
            final.rename(aside)
        temporary.rename(final)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)

    def read_file(self, name: str, file: str) -> bytes:
        path = self.path / name / file
        with explained(path):
            return path.read_bytes()

    def fetch(self, name: str, file: str, scratch: Path, progress: Progress = no_progress) -> Path:
        path = self.path / name / file
        if not _is_file(path):
            raise SnapshotDamagedError(f"{file}: is missing")
        return path

    def open(self, name: str, file: str) -> BinaryIO:
        path = self.path / name / file
        with explained(path):
            return cast("BinaryIO", ExplainedStream(path.open("rb"), lambda: explained(path)))

    def delete(self, name: str) -> None:
        folder = self.path / name
        try:
            with self._allowed():
                faults.point("store.delete")
                with contextlib.suppress(FileNotFoundError):
                    (folder / MANIFEST_FILE).unlink()
                    _fsync_folder(folder)
                faults.point("store.unpublished")
                if _mode_of(folder) is not None:
                    shutil.rmtree(folder)
                faults.point("store.deleted")
        except OSError as error:
            raise _failed(folder, error) from error

    def leftovers(self) -> list[str]:
        try:
            return sorted(path.name for path in self.path.iterdir() if _is_dir(path) and self._is_leftover(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(self.path, error) from error

    def _is_leftover(self, path: Path) -> bool:
        """Whether a folder is none that anybody needs: half deleted, set aside, or of a writer that is dead."""
        half_deleted = parse_name(path.name) is not None and _mode_of(path / MANIFEST_FILE) is None
        return half_deleted or path.name.startswith(_SET_ASIDE) or self._is_abandoned(path)

    def _is_abandoned(self, path: Path) -> bool:
        """Whether a temporary folder's writer is dead. Of one on another host nobody can tell; but once a newer worker
        group has begun, it may complete nothing any more, alive or not."""
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            return False
        if match["host"] == _host():
            return not Identity(int(match["pid"]), int(match["ticks"]), match["boot"]).is_there
        parsed = parse_name(match["name"])
        if parsed is None or match["incarnation"] is None:
            return False
        fence = self.read_fence(parsed[1])
        return fence is not None and int(match["incarnation"]) < fence.incarnation

    def _remove_leftover(self, name: str) -> None:
        shutil.rmtree(self.path / name, ignore_errors=True)

    def _mark(self, name: str, mark: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
                (self.path / name / mark).touch()
        except OSError as error:
            raise _failed(self.path / name, error) from error

    def _unmark(self, name: str, mark: str) -> None:
        try:
            (self.path / name / mark).unlink(missing_ok=True)
        except OSError as error:
            raise _failed(self.path / name, error) from error

    def _marks(self, name: str) -> list[str]:
        try:
            return [path.name for path in (self.path / name).iterdir() if path.name.startswith(MARK)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(self.path / name, error) from error

    def read_fence(self, run_id: str) -> Fence | None:
        path = self.path / FENCES_DIR / f"{run_id}.json"
        try:
            return Fence.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed(path, error) from error

    def _write_fence(self, fence: Fence) -> None:
        path = self.path / FENCES_DIR / fence.file
        try:
            write_atomically(path, fence.encode())
        except OSError as error:
            raise _failed(path, error) from error

    @contextlib.contextmanager
    def _fence_held(self, fence: Fence) -> Iterator[None]:
        """A lock on a file beside it: no other worker group begins between the check and what follows from it."""
        folder = self.path / FENCES_DIR
        try:
            _make_folder(folder)
            fd = os.open(folder / f".{fence.run_id}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _failed(folder, error) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:  # without locks it is as good as in an object store
                    raise _failed(folder, error) from error
            yield
        finally:
            os.close(fd)

    def _read_pins(self) -> dict[str, bytes]:
        folder = self.path / PINS_DIR
        pins = {}
        try:
            for path in folder.iterdir():
                if not path.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):  # taken back meanwhile; the others hold
                        pins[path.name] = path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _failed(folder, error) from error
        return pins

    def _write_pin(self, file: str, content: bytes) -> None:
        folder = self.path / PINS_DIR
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / file, content)
            _fsync_folder(self.path)
        except OSError as error:
            raise _failed(folder, error) from error

    def _delete_pin(self, file: str) -> None:
        try:
            (self.path / PINS_DIR / file).unlink(missing_ok=True)
        except OSError as error:
            raise _failed(self.path / PINS_DIR, error) from error


def _temporary_name(name: str, fence: Fence | None) -> str:
    me = Identity.mine()
    group = f".{fence.incarnation}" if fence is not None else ""
    return f".tmp-{name}-{_host()}-{me.pid}.{me.started_ticks}.{me.boot}{group}-{secrets.token_hex(4)}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname()) or "host"


def _copy(source: memoryview, target: Path, name: str, entry: FileEntry, progress: Progress) -> None:
    """Copies a file durably, comparing what is copied to the manifest."""
    if len(source) != entry.size_bytes:
        raise SnapshotDamagedError(f"{name}: has {len(source)} bytes instead of {entry.size_bytes}")
    found_digest = copy_durably(source, target, progress)
    if damage := check_content(name, entry, len(source), found_digest):
        raise SnapshotDamagedError(str(damage))


def _is_file(path: Path) -> bool:
    """Whether there is such a file. Raises StorageError where that cannot be known."""
    try:
        mode = _mode_of(path)
    except OSError as error:
        raise _failed(path, error) from error
    return mode is not None and stat.S_ISREG(mode)


def _is_dir(path: Path) -> bool:
    mode = _mode_of(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode_of(path: Path) -> int | None:
    """What is there, by its st_mode; None for nothing.

    pathlib's own `exists` and `is_file` take any error for "no" from Python 3.14 on. Here a "no" deletes a snapshot, or
    passes over it.

    Raises:
        OSError: that cannot be known: a folder that may not be entered, a server that does not answer.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _make_folder(path: Path) -> None:
    """Makes a folder and those above it, durably."""
    if not _is_dir(path):
        _make_folder(path.parent)
        with contextlib.suppress(FileExistsError):  # another made it meanwhile; if it is a file, the next call says so
            path.mkdir()
        _fsync_folder(path.parent)


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _failed(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: {error.strerror or error}")
