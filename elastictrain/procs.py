"""Small facts about processes that the operating system offers and Python does not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ALARM_S = int(signal.SIGPWR)
"""How long after its parent's end a process of `outlive_parent` lives at most, unless it sets another timer."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends, however it ends (prctl(2), PR_SET_PDEATHSIG).

    Args:
        parent_pid: who the parent was when this process was started: if it is another one by now, the parent died
            before we could ask, and the signal is sent at once.
        signum: what to be sent.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def outlive_parent(parent_pid: int, when_gone: Callable[[], None]) -> None:
    """Has a function called, on a thread of its own, when this process's parent has ended; takes back what
    `die_with_parent` asked for. Some time after, the kernel ends this process, whatever code it is stuck in by then.

    Not by the signal at the parent's death: the kernel sends that already when the parent's first thread ends, and the
    parent may look alive to whoever asks then.

    The thread cannot act in a process whose interpreter lock is held for ever. For that the kernel sets an alarm: it
    sends SIGPWR, whose handler is alarm(2) itself, which takes the number of the signal, 30, for seconds. SIGALRM must
    have its default effect.

    Args:
        parent_pid: who the parent was when this process was started; if it is another one by now, it has ended.
        when_gone: called once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGPWR, ctypes.cast(libc.alarm, ctypes.c_void_p))
    asked = threading.Event()

    def wait_for_end() -> None:
        # What a process is to be sent at its parent's death is a property of each thread (prctl(2)).
        die_with_parent(parent_pid, signal.SIGPWR)
        asked.set()
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(parent_pid)
            try:
                if os.getppid() == parent_pid:  # else the number may be another process's by now
                    poll = select.poll()
                    poll.register(fd, select.POLLIN)
                    poll.poll()
            finally:
                os.close(fd)
        when_gone()

    threading.Thread(target=wait_for_end, name="parent", daemon=True).start()
    asked.wait()
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Has descendants whose parent died become children of this process (prctl(2), PR_SET_CHILD_SUBREAPER).

    So they can be found, and `reap_orphans` must collect them when they end.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The first line of what proc(5) knows about a process.

    Args:
        state: one letter: R running, S sleeping, D in the kernel, T stopped, t traced, Z ended and not collected.
        parent_pid: of the process that collects it.
        cpu_s: processor time it has used.
        started_ticks: when it was started, in clock ticks since boot: with the pid, its identity.
    """

    state: str
    parent_pid: int
    cpu_s: float
    started_ticks: int


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def read_stat(pid: int) -> ProcessStat | None:
    """What /proc/PID/stat says; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read for every rank, all the time
            line = file.read()
    except OSError:
        return None
    # The name, in parentheses, may hold anything, parentheses and spaces included.
    fields = line[line.rindex(b")") + 2 :].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return ProcessStat(fields[0].decode(), int(fields[1]), cpu_s, int(fields[19]))


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal: the others would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if it is gone, or somebody else's."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def all_pids() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            yield int(path.name)


def children_of(pid: int) -> list[int]:
    """The direct children of a process."""
    return [child for child in all_pids() if (stat := read_stat(child)) is not None and stat.parent_pid == pid]


def send_signal(pid: int, signum: int, *, started_ticks: int | None = None) -> bool:
    """Signals a process, if it is still the one we mean.

    Args:
        pid: of the process.
        signum: the signal.
        started_ticks: when that process was started; None sends it to whoever has the pid.

    Returns:
        whether it was sent.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Only now is it certain that the process behind the descriptor is the one we read about.
        stat = read_stat(pid)
        if stat is None or (started_ticks is not None and stat.started_ticks != started_ticks):
            return False
        signal.pidfd_send_signal(fd, signum)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def reap_orphans(spare: frozenset[int] = frozenset()) -> None:
    """Collects adopted processes that have ended.

    Args:
        spare: children that somebody else waits for.
    """
    me = os.getpid()
    for pid in children_of(me):
        stat = read_stat(pid)
        if pid not in spare and stat is not None and stat.state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot; 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
