"""A control group for every worker group, where one can be made (cgroups(7), version 2): whatever its processes start
belongs to it, however it hides, and one write ends all of it.

The agent makes the group, below its own, and enters it; its ranks and all that they start are born there. A rank takes
the persister out, for it may outlive them. What it is called stands in the incarnation's folder, for whoever has to end
it:

    runs/0001/cgroup        the group's folder

Where none can be made (no version 2, nothing delegated to this user, a service with `ProtectControlGroups=`, Linux
before 5.14), processes are found by their environment alone (`leftovers`). systemd ends all of a service itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from elastictrain.protocol import write_atomically

CGROUP_FILE = "cgroup"
_PREFIX = "elastictrain-"
_EMPTY_S = 0.5
"""How long to wait for killed processes to be gone, before the group is left for the next who looks."""
_LOOK_S = 0.002


def enter(run_dir: Path) -> Path | None:
    """Makes the group of an incarnation and moves this process into it.

    Returns:
        the group's folder; None where there can be none.
    """
    mine = _own_group()
    if mine is None:
        return None
    made = mine / f"{_PREFIX}{secrets.token_hex(6)}"
    try:
        _move_to(mine)  # it is there already: this finds out whether the persister may come back
        made.mkdir()
    except OSError:
        return None
    try:
        if not (made / "cgroup.kill").exists():
            raise FileNotFoundError  # it could not be ended
        # First the name, then the processes: there is never one that nobody finds.
        write_atomically(run_dir / CGROUP_FILE, f"{made}\n".encode())
        _move_to(made)
    except OSError:
        with contextlib.suppress(OSError):
            made.rmdir()
        (run_dir / CGROUP_FILE).unlink(missing_ok=True)
        return None
    return made


def take_out(run_dir: Path, pid: int) -> None:
    """Moves a process out of an incarnation's group, to where that was made."""
    group = group_of(run_dir)
    if group is not None:
        with contextlib.suppress(OSError):
            _move_to(group.parent, pid)


def group_of(run_dir: Path) -> Path | None:
    """The group of an incarnation, while there is one."""
    try:
        path = Path((run_dir / CGROUP_FILE).read_text().strip())
    except (OSError, ValueError):
        return None
    return path if path.name.startswith(_PREFIX) and (path / "cgroup.kill").exists() else None


def end(run_dir: Path) -> bool:
    """Kills whoever is in the group of an incarnation, and removes it once it is empty.

    Returns:
        whether anybody was there.
    """
    group = group_of(run_dir)
    if group is None:
        return False
    was_populated = _is_populated(group)
    with contextlib.suppress(OSError):
        if was_populated:
            (group / "cgroup.kill").write_text("1")
        deadline_s = time.monotonic() + _EMPTY_S
        while _is_populated(group) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        group.rmdir()
        (run_dir / CGROUP_FILE).unlink(missing_ok=True)
    return was_populated


def _is_populated(group: Path) -> bool:
    with contextlib.suppress(OSError):
        return "populated 1" in (group / "cgroup.events").read_text()
    return False


def _move_to(group: Path, pid: int | None = None) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid() if pid is None else pid))


def _own_group() -> Path | None:
    """The folder of the group that this process is in; None without cgroups of version 2."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((Path(line.removeprefix("0::")) for line in lines if line.startswith("0::")), None)
    for mount in mounts:
        fields = mount.split()
        if path is not None and "cgroup2" in fields[fields.index("-") + 1 :][:1] and path.is_relative_to(fields[3]):
            return Path(fields[4]) / path.relative_to(fields[3])
    return None
