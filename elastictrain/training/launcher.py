"""The launcher: parent of the agents, child of the supervisor.

    python -m elastictrain.training.launcher FD GRACE_S RUN_DIR [--preload]

With `--preload` it imports all that an agent and a rank need, once, and every agent is forked from it, and the ranks
from the agent: a new worker group costs no import. It never touches CUDA, starts no thread and computes nothing, since
a forked process can inherit none of that. Without `--preload` agents are started as commands.

It outlives the supervisor: when that is gone, however it went, the launcher ends the agent, lets the ranks keep their
state, and sees to it that nobody is left. Requests and reports go over a socket pair, see `protocol`.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from elastictrain.leftovers import LOOK_S, Farewell
from elastictrain.procs import EnvironmentSlot, die_with_parent, forget_parent, show_as
from elastictrain.protocol import (
    ENV_RUN_DIR,
    ENV_STORE_FD,
    IMPORTS_FILE,
    LOG_DIR,
    AgentEnded,
    AgentStarted,
    LaunchAgent,
    LauncherReady,
    read_message_with_fd,
)
from elastictrain.training.imports import import_quietly, package_of, probe, read_noted

PRELOADED = (
    "elastictrain.training.agent",
    "elastictrain.training.forking_agent",
    "elastictrain.training.worker",
    # The first DistributedDataParallel imports it, 800 modules deep.
    "torch._dynamo",
    "torch.utils.data",
)
NOTED_LOOK_S = 0.5
"""How often to look whether a rank has noted what it imports."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Whoever stops the job sends these to everybody; the end of the launcher is that of the supervisor."""


@dataclass(frozen=True, slots=True)
class _Probing:
    """A child that tries modules.

    Args:
        pid: of the child.
        result_fd: where it says which package must not be here.
        names: of the modules.
    """

    pid: int
    result_fd: int
    names: list[str]


class Launcher:
    """Starts agents as it is told to, until nobody is there to tell.

    Args:
        requests: socket to the supervisor.
        run_dirs: where an agent says which incarnation it is.
        ranks: where a rank says which it is.
        grace_s: how long ranks may take to keep their state once the supervisor is gone.
        forks: agents are forked from this process.
    """

    def __init__(
        self,
        requests: socket.socket,
        run_dirs: EnvironmentSlot,
        ranks: EnvironmentSlot,
        *,
        grace_s: float,
        forks: bool,
    ) -> None:
        self._requests = requests
        self._grace_s = grace_s
        self._forks = forks
        self._run_dirs = run_dirs
        self._ranks = ranks
        self._agents: dict[int, Path] = {}
        self._last_run_dir: Path | None = None
        self._has_learnt = False
        self._noted: Path | None = None
        self._spoilt: set[str] = set()
        self._probing: _Probing | None = None
        self._to_import: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serves until the supervisor is gone."""
        self._say(LauncherReady())
        while True:
            for key, _ in self._selector.select(self._idle_s()):
                if key.fileobj is self._requests:
                    if not self._serve():
                        self._end()
                        return
                elif self._probing is not None and key.data == self._probing.pid:
                    self._probed(key.fd, self._probing)
                else:
                    self._collect(key.fd, key.data)
            self._learn()

    # ---- what the ranks import

    def _idle_s(self) -> float | None:
        if self._to_import:
            return 0.0
        return NOTED_LOOK_S if self._noted is not None else None

    def _learn(self) -> None:
        """A little at a time: what is asked for comes first."""
        if self._to_import:
            import_quietly(self._to_import.pop(0))
            if not self._to_import:
                _settle()
        elif self._noted is not None and self._noted.exists():
            noted, self._noted = self._noted, None
            self._probe(read_noted(noted))

    def _probe(self, names: list[str]) -> None:
        """Has a child try the modules."""
        wanted = [name for name in names if package_of(name) not in self._spoilt]
        if not wanted:
            return
        read_end, write_end = os.pipe()
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            print(f"nobody tries the ranks' modules: {error}")
            return
        if pid:
            os.close(write_end)
            self._probing = _Probing(pid, read_end, wanted)
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            return
        try:
            die_with_parent(me)
            self._requests.close()
            os.write(write_end, (probe(wanted) or "").encode())
            os._exit(0)
        finally:
            os._exit(1)

    def _probed(self, fd: int, probing: _Probing) -> None:
        self._probing = None
        self._selector.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(probing.pid, 0)
        with os.fdopen(probing.result_fd) as result:
            spoilt = result.read()
        if status:
            print("the child that tried the ranks' modules has died: they are not preloaded")
        elif spoilt:
            print(f"{spoilt} starts a thread or opens a GPU when it is imported: it is not preloaded")
            self._spoilt.add(spoilt)
            self._probe(probing.names)
        else:
            self._to_import = probing.names

    # ---- agents

    def _serve(self) -> bool:
        """One request; False if there is nobody any more."""
        request, store_fd = read_message_with_fd(self._requests)
        if request is None:
            return False
        launch = LaunchAgent(**request)
        run_dir = Path(launch.run_dir)
        try:
            pid = self._start(launch, run_dir, store_fd)
        except OSError as error:
            self._say(AgentEnded(None, None, f"no agent could be started: {error}"))
            return True
        finally:
            if store_fd is not None:
                os.close(store_fd)
        self._agents[pid] = self._last_run_dir = run_dir
        if self._forks and not self._has_learnt:
            self._has_learnt = True
            self._noted = run_dir.parents[1] / IMPORTS_FILE
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        self._say(AgentStarted(pid))
        return True

    def _say(self, message: LauncherReady | AgentStarted | AgentEnded) -> None:
        try:
            self._requests.send(message.encoded)
        except OSError:
            return  # it is gone: the next `recv` says so

    def _start(self, launch: LaunchAgent, run_dir: Path, store_fd: int | None) -> int:
        (run_dir / LOG_DIR).mkdir(exist_ok=True)
        with (run_dir / LOG_DIR / "agent.out").open("ab") as output:
            if self._forks:
                return self._fork(run_dir, output.fileno(), store_fd)
            store = {ENV_STORE_FD: str(store_fd)} if store_fd is not None else {}
            return subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, ENV_RUN_DIR: str(run_dir), **store},
                pass_fds=[store_fd] if store_fd is not None else [],
                start_new_session=True,
                preexec_fn=_restore_signals,  # noqa: PLW1509 - this process has one thread
            ).pid

    def _fork(self, run_dir: Path, output_fd: int, store_fd: int | None) -> int:
        me = os.getpid()
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.setsid()
            die_with_parent(me)
            _restore_signals()
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            self._requests.close()
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)
            self._selector.close()
            self._run_dirs.write(str(run_dir))
            show_as([sys.executable, "-m", "elastictrain.training.agent", str(run_dir)])
            from elastictrain.training.forking_agent import run_agent

            code = run_agent(run_dir, self._ranks, store_fd)
        except BaseException:  # noqa: BLE001 - the child must not go on as a second launcher
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _collect(self, fd: int, pid: int) -> None:
        """An agent has ended."""
        self._selector.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        del self._agents[pid]
        self._say(AgentEnded(pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        """The supervisor is gone: nobody stays behind, and nothing is lost."""
        for pid in self._agents:
            os.kill(pid, signal.SIGKILL)  # its ranks are told by the kernel
            os.waitpid(pid, 0)
        if self._last_run_dir is None:
            return
        farewell = Farewell(self._last_run_dir, self._grace_s, time.monotonic())
        while not farewell.look(time.monotonic()):
            time.sleep(LOOK_S)


def _settle() -> None:
    """What is there now stays: collections in the children need not look at it, nor copy its pages."""
    gc.collect()
    gc.freeze()


def _restore_signals() -> None:
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_DFL)


def main(arguments: list[str]) -> int:
    """Runs until the supervisor closes its end of the socket."""
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(os.getppid())  # until there is somebody to look after
    requests = socket.socket(fileno=int(arguments[0]))
    forks = "--preload" in arguments
    slots = EnvironmentSlot(ENV_RUN_DIR), EnvironmentSlot("RANK")
    if forks:
        for module in PRELOADED:
            importlib.import_module(module)
        _settle()
    forget_parent()
    Launcher(requests, *slots, grace_s=float(arguments[1]), forks=forks).run()
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # taking down all that was imported would keep whoever waits for it half a second
