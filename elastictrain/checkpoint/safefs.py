"""Opens files in folders that only we may own: through descriptors, never through a symbolic link.

/dev/shm is writable by everybody. A name that we would create there may have been made by someone else first, as a
folder of theirs or as a link to anywhere; both are refused, not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from elastictrain.errors import StateDirError, UnsafePathError

DIR_MODE = 0o700
FILE_MODE = 0o600

_HINT = "Remove it, or name another folder with checkpoint.memory_path."


def open_folder(base: Path, parts: tuple[str, ...], *, create: bool) -> int | None:
    """Descriptor of `base/parts...`; every one of `parts` is a real folder of ours.

    Args:
        base: an existing folder, whoever it belongs to.
        parts: names below it; made with mode 0700 if missing and `create`.

    Returns:
        the descriptor, or None if it does not exist and is not to be made.

    Raises:
        UnsafePathError: one of `parts` is a link, no folder, or somebody else's.
        StateDirError: it cannot be made, or opened.
    """
    path = base
    try:
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if not create:
            return None
        raise StateDirError(f"{base} does not exist", "Set checkpoint.memory_path to a folder that does.") from error
    except OSError as error:
        raise StateDirError(
            f"{base} cannot be opened: {error.strerror}", "Set checkpoint.memory_path to a folder that can."
        ) from error
    for part in parts:
        path = path / part
        try:
            inner = open_subfolder(fd, part, path, create=create)
        finally:
            os.close(fd)
        if inner is None:
            return None
        fd = inner
    return fd


def open_subfolder(parent_fd: int, name: str, path: Path, *, create: bool) -> int | None:
    """As `open_folder`, for one name; `path` is for messages."""
    try:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, DIR_MODE, dir_fd=parent_fd)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    except FileNotFoundError:
        if not create:
            return None
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafePathError(f"{path} is a symbolic link or no folder: it is not used", _HINT) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the caller knows what needed the room
        raise StateDirError(f"{path} cannot be opened: {error.strerror}") from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        os.close(fd)
        raise UnsafePathError(f"{path} belongs to user {status.st_uid}, not to us ({os.geteuid()})", _HINT)
    if stat.S_IMODE(status.st_mode) != DIR_MODE:
        os.fchmod(fd, DIR_MODE)
    return fd


def open_file(folder_fd: int, name: str, path: Path, flags: int) -> int:
    """Descriptor of a regular file of ours in an opened folder; made with mode 0600.

    Raises:
        UnsafePathError: it is a link, not a regular file, or somebody else's.
        FileNotFoundError: it does not exist, and `flags` have no O_CREAT.
    """
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE, dir_fd=folder_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePathError(f"{path / name} is a symbolic link: it is not followed", _HINT) from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(fd)
        raise UnsafePathError(f"{path / name} is not a regular file of ours alone", _HINT)
    if flags & os.O_CREAT and stat.S_IMODE(status.st_mode) != FILE_MODE:
        os.fchmod(fd, FILE_MODE)
    return fd


def read_file(folder_fd: int, name: str, path: Path, limit_bytes: int = 1 << 30) -> bytes:
    """The content of a small file, opened as `open_file` does."""
    with os.fdopen(open_file(folder_fd, name, path, os.O_RDONLY), "rb") as file:
        return file.read(limit_bytes)


def replace_file(folder_fd: int, name: str, path: Path, data: bytes) -> None:
    """Writes a small file under a temporary name and renames it: a reader sees the old content or the new."""
    temporary = f".{name}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder_fd)
    with os.fdopen(open_file(folder_fd, temporary, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Closes a descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)
