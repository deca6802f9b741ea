"""Small facts about processes that the operating system offers and Python does not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
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


def forget_parent() -> None:
    """Takes `die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


class EnvironmentSlot:
    """An environment variable of a process that forks, so that proc(5) shows each child's own value.

    /proc/PID/environ is the memory that the environment had when the program was started. A forked child shows that of
    its parent, whatever it sets, unless the value is written over in place. The program must be started with a value of
    the variable that is long enough (`EnvironmentSlot.placeholder`). Make it before anything changes the variable; it
    leaves the environment as this program sees it.

    Args:
        name: of the variable.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        self._address: int | None = getenv(name.encode())
        self._size = len(os.fsencode(os.environ.pop(name, "")))

    @staticmethod
    def placeholder(longest: int) -> str:
        """A value to start the program with.

        Args:
            longest: size of the longest value to come, in bytes.
        """
        return "-" * (longest + 2)

    def write(self, value: str) -> None:
        """Sets the variable, for this process, for its children, and for whoever looks from outside.

        Raises:
            ValueError: the value is longer than the placeholder.
        """
        data = os.fsencode(value)
        if self._address is not None:
            room = self._size - 2
            if len(data) > room:
                raise ValueError(f"{self._name} has room for {room} bytes, not for {len(data)}")
            # An empty entry would look like the end of the environment: what is left over becomes one without a value.
            ctypes.memmove(self._address, (data + b"\0").ljust(self._size, b"_"), self._size)
        os.environ[self._name] = value


def show_as(command: Sequence[str]) -> None:
    """Has proc(5), and so `ps`, show another command line for this process: for one that was forked, not started.

    Like its environment, a forked process shows the memory of its parent's command line. What does not fit is cut off.

    Args:
        command: program and arguments.
    """
    try:
        line = Path("/proc/self/stat").read_bytes()
        fields = line[line.rindex(b")") + 2 :].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    except (OSError, ValueError, IndexError):
        return
    size = end - begin
    if begin and size > 1:
        data = b"\0".join(os.fsencode(argument) for argument in command)[: size - 1]
        ctypes.memmove(begin, data.ljust(size, b"\0"), size)


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


def read_living(pid: int) -> ProcessStat | None:
    """As `read_stat`; None also for a process that has ended and only waits to be collected."""
    stat = read_stat(pid)
    return stat if stat is not None and stat.state not in ("Z", "X") else None


def boot_id() -> str:
    """Which boot of the machine this is; "" where the kernel does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process as no other ever was on its machine, whatever any clock says.

    Args:
        pid: of the process.
        started_ticks: when it was started, in clock ticks since boot.
        boot: the first digits of the id of that boot.
    """

    pid: int
    started_ticks: int
    boot: str

    @classmethod
    def mine(cls) -> Identity:
        """Of this process."""
        stat = read_stat(os.getpid())
        return cls(os.getpid(), stat.started_ticks if stat is not None else 0, boot_id()[:8])

    @property
    def is_there(self) -> bool:
        """Whether the process still runs."""
        stat = read_living(self.pid)
        return self.boot == boot_id()[:8] and stat is not None and stat.started_ticks == self.started_ticks


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
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
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
