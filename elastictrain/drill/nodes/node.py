"""One host of a cluster: namespaces of its own for network, PIDs, mounts, host name and IPC.

What is shared with the others is the disk, but for /dev/shm, /run and, as a rule, /tmp, which are lost when the node
dies; the folders that the cluster was given are seen everywhere, as on a network file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import psutil

from elastictrain.drill.nodes.process import NodeProcess
from elastictrain.errors import DrillError, NodesError

if TYPE_CHECKING:
    from elastictrain.drill.nodes.cluster import Cluster

INIT = Path(__file__).with_name("init.py")
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


class Namespaces:
    """What a process 1 of its own holds; all of it ends with that process.

    Args:
        arguments: of unshare: which namespaces.
        specification: for process 1; see `init.py`.
    """

    def __init__(self, arguments: Sequence[str], specification: Mapping[str, Any]) -> None:
        command = ["unshare", *arguments, "--pid", "--fork", "--mount-proc", "--kill-child"]
        command += [sys.executable, "-I", str(INIT), json.dumps(specification)]
        pipe = subprocess.PIPE
        # A Ctrl-C is for this process, which takes everything down in order.
        self._unshare = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            why = self._unshare.communicate()[1].strip()
            raise NodesError(
                f"{specification['hostname']} did not start: {why}", "Namespaces need root, with all its rights."
            )
        self.init = psutil.Process(self._unshare.pid).children()[0].pid
        """Its process 1, as this machine numbers it."""

    def enter(self, *which: str) -> list[str]:
        return ["nsenter", "--target", str(self.init), *which]

    def holds(self, pid: int) -> bool:
        """Whether this process, as the machine numbers it, lives in here."""
        try:
            return Path(f"/proc/{pid}/ns/pid").readlink() == Path(f"/proc/{self.init}/ns/pid").readlink()
        except OSError:  # it has ended
            return False

    def kill(self) -> None:
        """SIGKILL to process 1, as when the power fails: the kernel does the same to all the others."""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.init).kill()

    def wait(self) -> None:
        """Until nothing is left of it."""
        self._unshare.communicate()


class Node:
    """One host. Made by `Cluster`, which boots it.

    Args:
        cluster: the cluster it belongs to.
        index: its number, from 0.
    """

    def __init__(self, cluster: Cluster, index: int) -> None:
        self._cluster = cluster
        self.index = index
        self.name = f"node{index}"
        self.address = f"10.77.0.{index + 1}"
        self._namespaces: Namespaces | None = None
        self._processes: list[NodeProcess] = []

    # ---- programs

    @property
    def is_up(self) -> bool:
        return self._namespaces is not None

    @property
    def namespaces(self) -> Namespaces:
        assert self._namespaces is not None, f"{self.name} is down"
        return self._namespaces

    def popen(
        self,
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> NodeProcess:
        """Starts a program here; it ends with the node at the latest.

        Args:
            args: the program and its arguments.
            env: its environment; default: that of this process.
            cwd: where it starts; default: /.
            stdout: as for `subprocess.Popen`.
            stderr: as for `subprocess.Popen`.
        """
        # A go-between that was stopped with its program must not outlive this process: the node could not end either.
        command = ["setpriv", "--pdeathsig", "KILL"]
        command += self.namespaces.enter("--all", f"--wd={cwd or '/'}", "--", *map(str, args))
        process = NodeProcess(
            subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        )
        self._processes.append(process)
        return process

    def run(self, args: Sequence[str | Path], *, check: bool = True, deadline_s: float = 60.0) -> str:
        """Runs a program here to its end; returns its standard output, stripped."""
        command = self.namespaces.enter("--all", "--wd=/", "--", *map(str, args))
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=deadline_s
            )
        except subprocess.TimeoutExpired as error:
            raise DrillError(f"{self.name}: {' '.join(command)} did not end within {deadline_s:g} s") from error
        if check and done.returncode != 0:
            raise DrillError(f"{self.name}: {' '.join(command)} failed: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function of this process's on this node's network: sockets that it makes are the node's."""
        path = f"/proc/{self.namespaces.init}/ns/net"

        def inside() -> T:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                # The calling thread alone changes over (setns(2)); it ends with the call.
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter the network of {self.name}")
            finally:
                os.close(descriptor)
            return function()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inside).result()

    def processes(self) -> list[psutil.Process]:
        """All that runs here, process 1 left out."""
        namespaces = self.namespaces
        return [p for p in psutil.process_iter() if p.pid != namespaces.init and namespaces.holds(p.pid)]

    def tcp_counter(self, name: str) -> int:
        """What its kernel counts under this name in /proc/net/snmp, such as RetransSegs or OutRsts."""
        table = [line.split() for line in self.run(["cat", "/proc/net/snmp"]).splitlines() if line.startswith("Tcp:")]
        return int(dict(zip(*table, strict=True))[name])

    # ---- life and death

    def boot(self) -> None:
        """Starts the node, at first or after `kill`: an empty machine with the old name and address."""
        assert not self.is_up, f"{self.name} is up"
        specification = {
            "hostname": self.name,
            "hosts": self._cluster.hosts,
            "own": list(self._cluster.own),
            "kept": [str(path) for path in self._cluster.kept],
        }
        self._namespaces = Namespaces(["--net", "--mount", "--uts", "--ipc"], specification)
        self._cluster.network.plug_in(self)

    def kill(self) -> None:
        """The death of the whole node at once. The link goes first: nobody gets a FIN or RST, only silence."""
        self.cut()
        self.namespaces.kill()
        for process in self._processes:
            process.close()
        self.namespaces.wait()
        self._namespaces = None
        self._processes.clear()

    def pause(self) -> None:
        """SIGSTOP to all processes here at once; they do not see it coming, and others notice only silence."""
        self._signal_all("STOP")

    def resume(self) -> None:
        self._signal_all("CONT")
        for process in self._processes:
            process.wake_go_between()

    def _signal_all(self, name: str) -> None:
        # -1 is every process of the namespace but process 1 and the shell itself (kill(2)).
        subprocess.run(self.namespaces.enter("--pid", "--", "sh", "-c", f"kill -{name} -1"), check=False)

    # ---- its link

    def cut(self) -> None:
        """Takes the other end of the link off the bridge: silence both ways, while the node's own end stays up."""
        self._cluster.network.unplug(self)

    def heal(self) -> None:
        self._cluster.network.plug(self)
