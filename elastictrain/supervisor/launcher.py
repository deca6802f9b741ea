"""The supervisor's end of the launcher: has agents started, and hears of their end.

The launcher is a process of its own (`elastictrain.training.launcher`): it has torch imported, which the supervisor
must not, and it outlives the supervisor for as long as it takes to leave nobody behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elastictrain.procs import EnvironmentSlot, send_signal
from elastictrain.protocol import COMPILE_CACHE_DIR, ENV_RUN_DIR, LAUNCHER_LOG, RUNS_DIR, LaunchAgent, read_message

LONGEST_NUMBER = 12
"""Digits of the longest number of an incarnation, or rank."""
READY_LOOK_S = 1.0
"""How often to look whether a launcher that is not ready yet still lives."""
CLOSE_S = 1.0
"""Beyond the grace: how long the launcher may take to end once it was told to."""


COPY_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x200000"
"""How ranks copy blocks of 2 MiB and more: around the caches. glibc reads this when a process begins. Its own limit is
a large share of the last cache, on some machines hundreds of MiB."""


class AgentProcess:
    """One agent, from the request to start it on.

    Args:
        on_change: called when it has started, and when it has ended.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.pid: int | None = None
        """None until it has started."""
        self.has_ended = False
        self.exit_code: int | None = None
        """Negative for a signal; None while it runs, or where it never did."""
        self.error = ""
        """Why it could not be started, or was lost."""
        self._on_change = on_change

    def started(self, pid: int) -> None:
        self.pid = pid
        self._on_change()

    def ended(self, exit_code: int | None, error: str) -> None:
        if not self.has_ended:
            self.has_ended, self.exit_code, self.error = True, exit_code, error
            self._on_change()

    def kill(self) -> None:
        """Ends it at once, as far as it has got."""
        if self.pid is not None and not self.has_ended:
            send_signal(self.pid, 9)


class Launcher:
    """Starts agents. A launcher that dies is replaced at the next start.

    It belongs to the event loop that it was opened in.

    Args:
        state_dir: of the job.
        fork: agents are forked from it, see `elastic.fast_restart`.
        grace_s: how long ranks may take to keep their state once the supervisor is gone.
    """

    def __init__(self, state_dir: Path, *, fork: bool, grace_s: float) -> None:
        self._state_dir = state_dir
        self._fork = fork
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._agent: AgentProcess | None = None
        self._is_ready = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def open(self) -> None:
        """Starts the launcher, if there is none: what it imports is there when the first agent is wanted."""
        if self._process is not None and self._process.poll() is None and self._socket is not None:
            return
        self._forget()
        self._is_ready.clear()
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        run_dir = self._state_dir / RUNS_DIR / EnvironmentSlot.placeholder(LONGEST_NUMBER)
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            ENV_RUN_DIR: str(run_dir),
            "RANK": EnvironmentSlot.placeholder(LONGEST_NUMBER),
        }
        # Without a limit every rank of a node would take all its cores; a rank sets its own share of threads.
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("GLIBC_TUNABLES", COPY_TUNABLES)
        # What one incarnation has compiled, the next one finds. torch chooses at its import, so it is told here.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self._state_dir / COMPILE_CACHE_DIR / "inductor"))
        env.setdefault("TRITON_CACHE_DIR", str(self._state_dir / COMPILE_CACHE_DIR / "triton"))
        command = [sys.executable, "-m", "elastictrain.training.launcher", str(its.fileno()), str(self._grace_s)]
        command += [str(run_dir), *(["--preload"] if self._fork else [])]
        with its, (self._state_dir / LAUNCHER_LOG).open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[its.fileno()],
                # A Ctrl-C is for the supervisor, which has the ranks end in order.
                start_new_session=True,
            )
        mine.setblocking(False)
        self._socket = mine
        asyncio.get_running_loop().add_reader(mine.fileno(), self._on_readable)

    async def ready(self) -> None:
        """Waits until the next agent would start at once; opens it first where it is closed, or has died."""
        while True:
            self.open()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READY_LOOK_S):
                    await self._is_ready.wait()
                return

    def launch(
        self,
        run_dir: Path,
        command: list[str] | None,
        on_change: Callable[[], None],
        listener: socket.socket | None = None,
    ) -> AgentProcess:
        """Has an agent started; there is one at a time.

        Args:
            run_dir: folder of its incarnation.
            command: what to run, where agents are not forked; None: the agent.
            on_change: called when it has started, and when it has ended.
            listener: where it serves the store of a worker group of several nodes.
        """
        self.open()
        assert self._socket is not None
        self._agent = agent = AgentProcess(on_change)
        command = (
            command if command is not None else [sys.executable, "-m", "elastictrain.training.agent", str(run_dir)]
        )
        try:
            message = LaunchAgent(str(run_dir), command).encoded
            socket.send_fds(self._socket, [message], [listener.fileno()] if listener is not None else [])
        except OSError:
            self._lost()
        return agent

    def _on_readable(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                message = read_message(self._socket)
                if message is None:
                    self._lost()
                    return
                if "ready" in message:
                    self._is_ready.set()
                    continue
                if self._agent is None:
                    continue
                if "started" in message:
                    self._agent.started(int(message["started"]))
                else:
                    self._agent.ended(message["exit_code"], message["error"])

    def _lost(self) -> None:
        """The launcher is gone, and with it, by the kernel, its agent."""
        code = self._process.wait() if self._process is not None else None
        self._forget()
        if self._agent is not None:
            self._agent.ended(-9, f"the launcher that it was forked from ended with {code}, see {LAUNCHER_LOG}")

    def kill(self) -> None:
        """Ends the launcher itself: it stands still where an agent should start."""
        if self._process is not None:
            self._process.kill()
            self._lost()

    def _forget(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """Has the launcher end, and whoever it still looks after."""
        self._forget()
        if self._process is None:
            return
        deadline_s = time.monotonic() + self._grace_s + CLOSE_S
        while self._process.poll() is None:
            if time.monotonic() > deadline_s:
                self._process.kill()
                self._process.wait()
                break
            await asyncio.sleep(0.01)
        self._process = None
