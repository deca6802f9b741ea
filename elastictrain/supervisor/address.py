"""Where a job's control socket is, for the supervisor that makes it and the clients that look for it.

In the state directory, or in the runtime directory that systemd gives. The path of a Unix socket holds 107 bytes
(unix(7)), that of a folder 4096: a path that is too long is reached through a descriptor of its folder,
`/proc/self/fd/N/control.sock`, for binding and for connecting alike. Where the folder's file system knows no sockets
(some network and FUSE file systems), it is made in a folder of ours under XDG_RUNTIME_DIR or /tmp instead.

    control.json    in the state directory: {"socket": path, "pid": pid}, written by the supervisor when it listens
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastictrain.errors import BusyError, ConfigError, StateDirError, UnsafePathError
from elastictrain.protocol import SERVICE_RUNTIME, SERVICE_STATE, write_json

SOCKET_FILE = "control.sock"
ADDRESS_FILE = "control.json"
MAX_PATH_BYTES = 107
SOCKET_MODE = 0o660
_PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a supervisor listens, or listened.

    Args:
        socket: path of its socket.
        pid: its process; None if unknown.
    """

    socket: Path
    pid: int | None


def find_address(state_dir: Path) -> Address | None:
    """Where to look for a job's supervisor; None if none has listened here, or it has left in good order."""
    try:
        fields = json.loads((state_dir / ADDRESS_FILE).read_text())
        path, pid = Path(fields["socket"]), fields["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        path, pid = _usual_place(state_dir), None
    try:
        is_there = path.exists()
    except OSError:
        is_there = True  # in a folder that is not for us: who asks will be told
    return Address(path, pid if isinstance(pid, int) else None) if is_there else None


def _usual_place(state_dir: Path) -> Path:
    """Where the socket most likely is, if its record could not be written or cannot be read."""
    of_service = SERVICE_RUNTIME / state_dir.name / SOCKET_FILE
    is_there = False
    if state_dir.parent == SERVICE_STATE:
        with contextlib.suppress(OSError):
            is_there = of_service.exists()
    return of_service if is_there else state_dir / SOCKET_FILE


def choose_folders(state_dir: Path, job: str, environment: Mapping[str, str]) -> list[Path]:
    """Where the socket may go, best first."""
    # systemd gives several folders, separated by colons, if the unit asks for several (systemd.exec(5)).
    runtime = [Path(p) for p in environment.get("RUNTIME_DIRECTORY", "").split(":") if p]
    named = [p for p in runtime if p.name == job]
    unique = hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:12]
    private = Path(environment.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"elastictrain-{os.getuid()}" / unique
    return [*(named or runtime)[:1], state_dir, private]


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to the socket at `path`, however long that is. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _short(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def listen(
    state_dir: Path, job: str, *, group: str | None, environment: Mapping[str, str]
) -> tuple[socket.socket, Path]:
    """Makes the control socket and records where it is. A dead supervisor's socket is replaced.

    Args:
        state_dir: the job's state directory.
        job: its name.
        group: who may connect besides us; None leaves our own group.
        environment: for RUNTIME_DIRECTORY and XDG_RUNTIME_DIR.

    Returns:
        (listening socket, its path)

    Raises:
        BusyError: a living supervisor answers there.
        ConfigError: there is no such group, or we are not in it.
        StateDirError: no socket can be made anywhere.
    """
    previous = find_address(state_dir)
    if previous is not None and _answers(previous.socket):
        who = f"process {previous.pid}" if previous.pid is not None else "another process"
        raise BusyError(f"{job} has a supervisor already: {who} answers at {previous.socket}", "Stop that one first.")
    problems = []
    for folder in choose_folders(state_dir, job, environment):
        path = folder / SOCKET_FILE
        try:
            if folder.parent.name == f"elastictrain-{os.getuid()}":
                _make_private(folder.parent)
                _make_private(folder)
            listening = _bind(path, group)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        with contextlib.suppress(OSError):  # a full disk: clients look in the usual place
            write_json(state_dir / ADDRESS_FILE, {"socket": str(path), "pid": os.getpid()})
        return listening, path
    raise StateDirError(f"no control socket can be made: {'; '.join(problems)}")


def leave(state_dir: Path, path: Path) -> None:
    """Removes socket and record, at the end."""
    for file in (path, state_dir / ADDRESS_FILE):
        with contextlib.suppress(OSError):
            file.unlink()


def _answers(path: Path) -> bool:
    try:
        connect(path, _PROBE_S).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        return True  # it is there, only too busy, or not for us: not ours to replace
    return True


def _bind(path: Path, group: str | None) -> socket.socket:
    """Binds under a temporary name and renames: at no time may others connect than those who shall, and whoever
    connects during the change reaches the old socket or the new."""
    temporary = path.with_name(f".{SOCKET_FILE}.{secrets.token_hex(4)}")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short(temporary) as address:
            mask = os.umask(0o177)
            try:
                listening.bind(address)
            finally:
                os.umask(mask)
        if group is not None:
            _give_to_group(temporary, group)
        temporary.chmod(SOCKET_MODE)
        listening.listen(128)
        listening.setblocking(False)
        temporary.rename(path)
    except BaseException:
        listening.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return listening


def _give_to_group(path: Path, group: str) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except KeyError as error:
        raise ConfigError(f"there is no group {group}", "Name one of those in /etc/group.") from error
    except PermissionError as error:
        raise ConfigError(
            f"the control socket cannot be given to the group {group}: {error.strerror}",
            "The supervisor's user must be a member of it.",
        ) from error


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path, or a short one for the same place while this is open."""
    if len(os.fsencode(path)) <= MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _make_private(folder: Path) -> None:
    """A folder that only we may look into. Raises UnsafePathError if someone else has it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UnsafePathError(f"{folder} belongs to someone else, or others may write to it", "Remove it.")
