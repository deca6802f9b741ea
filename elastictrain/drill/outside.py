"""What a drill does itself, while a rank holds at the point of the fault or the job is stopped: to the supervisor, to
snapshots, to the store."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
from pathlib import Path

from elastictrain.armed import boot_clock_s
from elastictrain.checkpoint.format import MODEL_FILE
from elastictrain.core.events import Kind
from elastictrain.core.faults import Outside
from elastictrain.drill.trial import Trial
from elastictrain.errors import DrillError, UsageError

DAMAGE_BYTES = 64
FILLER = "filler"
"""The file that a small file system is filled with."""
_CLONE_NEWNS = 0x20000
_MNT_DETACH = 2
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18


def act(outside: Outside, trial: Trial, fault_id: str, deadline_s: float) -> tuple[float, list[str]]:
    """Carries out a fault on a run whose rank holds at its point (but for `START_AGAIN`, where the rank has done it and
    goes on), and sees to what belongs to it afterwards: starts the supervisor again, gives the store back.

    Args:
        outside: what to do.
        trial: the run.
        fault_id: of the rank that holds.
        deadline_s: of `time.monotonic`; gives up then, with the run as it is.

    Returns:
        (when it happened, of `boot_clock_s`; snapshots that were damaged, by their places)
    """
    damaged: list[str] = []
    at_s = boot_clock_s()
    match outside:
        case Outside.START_AGAIN:
            at_s = trial.drill.fired_at_s(fault_id) or at_s
            # In a soak the one that was killed may have been gone already, for an earlier fault, and replaced.
            if trial.started_s < at_s and trial.wait_end(deadline_s) is not None:
                _start_again(trial, deadline_s)
        case Outside.PREEMPT:
            if _stop(trial, fault_id, deadline_s) == 0:
                _start_again(trial, deadline_s)
        case Outside.CORRUPT | Outside.TRUNCATE:
            # One to fall back to must be there: a fast run is ahead of its persister.
            trial.wait_for(lambda: _num_durable(trial) >= 1, deadline_s)
            if _stop(trial, fault_id, deadline_s) == 0:
                at_s = boot_clock_s()
                damaged = damage_newest(trial, truncate=outside is Outside.TRUNCATE)
                _start_again(trial, deadline_s)
        case Outside.STORE_AWAY:
            away = trial.store_path.with_name("store.away")
            trial.store_path.rename(away)
            trial.store_path.write_text("The drill storage-outage has put this file in the place of the store.\n")
            trial.drill.release(fault_id)
            _wait_two_snapshots(trial, deadline_s)
            trial.store_path.unlink()
            away.rename(trial.store_path)
        case Outside.STORE_FULL:
            filler = trial.store_path / FILLER
            _fill(filler)
            trial.drill.release(fault_id)
            _wait_two_snapshots(trial, deadline_s)
            filler.unlink()
        case _:
            raise AssertionError(outside)
    return at_s, damaged


def _start_again(trial: Trial, deadline_s: float) -> None:
    """Starts the supervisor, and waits until it listens to signals: in a soak the next fault may be one."""
    trial.start()
    trial.wait_for(
        lambda: any(e.moment.boot_s >= trial.started_s for e in trial.events([Kind.SUPERVISOR_STARTED])), deadline_s
    )


def _stop(trial: Trial, fault_id: str, deadline_s: float) -> int | None:
    """Stops the job in good order, as a preemption does."""
    trial.signal(signal.SIGTERM)
    trial.drill.release(fault_id)
    return trial.wait_end(deadline_s)


def _num_durable(trial: Trial) -> int:
    return len(trial.store().snapshots())


def _wait_two_snapshots(trial: Trial, deadline_s: float) -> None:
    """Until the run is two intervals on, or over but for what it waits for from the store."""
    wanted = min(trial.job.fault_step + 2 * trial.job.snapshot_every_steps, trial.job.steps)
    trial.wait_for(lambda: trial.reached_step() >= wanted, deadline_s)


# ---- snapshots


def damage_newest(trial: Trial, *, truncate: bool) -> list[str]:
    """Damages the newest snapshot of a stopped run in every tier that has it; returns where that was."""
    places: list[tuple[int, Path]] = [
        (stored.global_step, trial.store_path / stored.name) for stored in trial.store().snapshots()
    ]
    for tier in trial.tiers():
        places += [(snapshot.global_step, snapshot.path) for snapshot in tier.snapshots()]
    newest = max((step for step, _ in places), default=None)
    if newest is None:
        raise DrillError("there is no snapshot to damage", "Give the drill more steps: --steps.")
    if all(step == newest for step, _ in places):
        raise DrillError(f"there is no snapshot before that of step {newest} to fall back to", "Use more --steps.")
    damaged = [path for step, path in places if step == newest]
    for path in damaged:
        damage_file(path / MODEL_FILE, truncate=truncate)
    return [str(path) for path in damaged]


def damage_file(path: Path, *, truncate: bool) -> None:
    """Cuts a file in half, or turns over some bytes in its middle."""
    size_bytes = path.stat().st_size
    if truncate:
        os.truncate(path, size_bytes // 2)
        return
    with path.open("r+b") as file:
        # Behind the header, which may be longer than the tensors of a small model.
        at = max(size_bytes - DAMAGE_BYTES, size_bytes // 2)
        file.seek(at)
        data = file.read(DAMAGE_BYTES)
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in data))


# ---- a store that is full


def mount_small(path: Path, size_bytes: int) -> None:
    """Mounts a file system of this size at `path`, for this process and those it starts: gone with the last of them.

    Raises:
        UsageError: this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size_bytes}".encode()
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        # Or what is mounted here would show everywhere.
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
        or libc.mount(b"elastictrain-drill", os.fsencode(path), b"tmpfs", _MS_NOSUID | _MS_NODEV, options) != 0
    ):
        raise UsageError(
            f"disk-full: a small file system cannot be mounted: {os.strerror(ctypes.get_errno())}",
            "Only root may; leave this one out.",
        )


def unmount(path: Path, *, keep: bool) -> None:
    """Unmounts it again.

    Args:
        path: where it was mounted.
        keep: what is in it stays there, as far as there is room, but for what it was filled with.
    """
    aside = path.with_name(f"{path.name}.aside")
    if keep:
        with contextlib.suppress(OSError, shutil.Error):  # what cannot be copied is not worth the rest
            shutil.copytree(path, aside, symlinks=True, ignore=shutil.ignore_patterns(FILLER))
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(path), _MNT_DETACH)
    if aside.is_dir():
        aside.replace(path)


def _fill(path: Path) -> None:
    """Writes until the file system has no byte left."""
    with path.open("wb", buffering=0) as file:
        block = bytes(1 << 20)
        while block:
            try:
                written = file.write(block)
            except OSError:
                written = 0
            if not written:
                block = block[: len(block) // 2]


# ---- memory


class MemoryCgroup:
    """A memory cgroup of the drill's own, for one rank to be killed in.

    Raises:
        UsageError: none can be made here.
    """

    LIMIT_BYTES = 64 << 20

    def __init__(self, name: str) -> None:
        self.path = self._make(name)

    def _make(self, name: str) -> Path:
        for parent, limit_file, swap_file in self._parents():
            path = parent / name
            try:
                path.mkdir()
            except OSError:
                continue
            try:
                (path / limit_file).write_text(str(self.LIMIT_BYTES))
                if (path / swap_file).exists():
                    (path / swap_file).write_text(str(self.LIMIT_BYTES if "memsw" in swap_file else 0))
            except OSError:
                path.rmdir()
                continue
            return path
        raise UsageError("oom-kill: no memory cgroup can be made here", "Only root may; leave this one out.")

    @staticmethod
    def _parents() -> list[tuple[Path, str, str]]:
        """Where one may be made: (folder, file of the limit, file of the limit with swap), cgroup v1 and v2."""
        found: list[tuple[Path, str, str]] = []
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, inner = line.split(":", 2)
            if "memory" in controllers.split(","):
                root = Path("/sys/fs/cgroup/memory")
                found.append((root / inner.lstrip("/"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"))
            elif not controllers:
                root = Path("/sys/fs/cgroup")
                own = root / inner.lstrip("/")
                # A cgroup with processes in it cannot give controllers to those below it: a sibling, not a child.
                for parent in (own.parent, root):
                    if parent.is_relative_to(root):
                        found.append((parent, "memory.max", "memory.swap.max"))
        return found

    def remove(self) -> None:
        """To be called when no process is in it any more."""
        if self.path.exists():
            self.path.rmdir()
