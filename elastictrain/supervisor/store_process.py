"""The store through which the nodes of a job agree, on the host that serves it: a process of its own, kept running.

The supervisor listens itself and hands its sockets to the process (`elastictrain.kv.server`). So the port stays ours
while a process that died is replaced, who connects meanwhile is served when the next one is up, and an address that
cannot be had is known before anything is started. What has a lease is lost with the old process, and nodes write it
again; the rest is in a file.

The process ends with the supervisor, however that ends: nobody finds a store there that nobody looks after.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from elastictrain.errors import BusyError, NotRunningError
from elastictrain.kv.address import listen
from elastictrain.kv.client import EtcdClient, EtcdError
from elastictrain.kv.settings import EtcdSettings
from elastictrain.supervisor.events import EventSink, NullSink
from elastictrain.supervisor.output import Event, parse_line

READY_S = 30.0
"""How long a process may take until it serves: it imports aiohttp, on a host that may be busy."""
PORT_WAIT_S = 3.0
"""How long the store of a supervisor that was killed may take to be gone: the kernel ends both at once."""
PORT_POLL_S = 0.1
CLOSE_S = 3.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
STEADY_S = 30.0
"""After a process that lived so long, the pauses begin anew with the first."""
PROBE_S = 2.0
"""A process that runs is asked so often, and has as long to answer."""
NUM_SILENT_PROBES = 5
"""In a row, after which it is replaced. Probes, not seconds: a machine that was suspended has missed one of them."""
NUM_LAST_LINES = 20


class StoreProcess:
    """A store that is there while this is open. Belongs to the event loop that opens it, in the main thread.

    Args:
        address: name or address of this host, as the rendezvous endpoint has it.
        port: 0 lets the system choose.
        sink: hears `store_started`, `store_ended`, `store_hung`, `store_start_failed`, and what the process has to say.
        keep: file for the keys without a lease; None: they end with the process.
        port_wait_s: how long to wait for a port that is taken.
        probe_s: see `PROBE_S`.
    """

    def __init__(
        self,
        address: str,
        port: int,
        sink: EventSink | None = None,
        *,
        keep: Path | None = None,
        port_wait_s: float = PORT_WAIT_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self._address = address
        self._port = port
        self._sink: EventSink = sink if sink is not None else NullSink()
        self._keep_file = keep
        self._port_wait_s = port_wait_s
        self._probe_s = probe_s
        self._sockets: list[socket.socket] = []
        self._child: _Child | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens, once open."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else self._port

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none. Whoever collects orphans must spare it."""
        child = self._child
        return child.pid if child is not None and not child.ended.is_set() else None

    async def open(self) -> None:
        """Listens, starts the process, and returns when it serves.

        Raises:
            BusyError: somebody else listens on the port, and went on doing so.
            ConfigError: the address is none of this host.
            NoPermissionError: the port is not for this user.
            NotRunningError: the process does not come up.
        """
        self._sockets = await self._listen()
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Ends the process, and frees the port."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
        child, self._child = self._child, None
        if child is not None:
            await child.end(CLOSE_S)
        for one in self._sockets:
            one.close()
        self._sockets = []

    async def _listen(self) -> list[socket.socket]:
        deadline_s = time.monotonic() + self._port_wait_s
        while True:
            try:
                return await asyncio.to_thread(listen, self._address, self._port)
            except BusyError:
                if time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(PORT_POLL_S)

    async def _start(self) -> None:
        """Starts a process and waits until it serves.

        Raises:
            NotRunningError: it could not be started, ended, or took too long.
        """
        try:
            child = _Child(self._sockets, self._keep_file, self._sink)
        except OSError as error:
            raise NotRunningError(f"the store cannot be started: {error.strerror or error}") from error
        self._child = child
        is_ready = await child.ready(READY_S)
        if not is_ready:
            why = f"ended with {child.exit_code}" if child.ended.is_set() else f"did not serve within {READY_S:g} s"
            await child.end(0.0)
            raise NotRunningError(f"the store {why}", "\n".join(child.last_lines))
        self._sink.append("store_started", {"pid": child.pid, "address": self._address, "port": self.port})

    async def _until_end(self, child: _Child) -> None:
        """Waits for the process's end, and ends one that answers no more."""
        host, port = self._sockets[0].getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        client = EtcdClient(EtcdSettings(endpoints=(url,), request_timeout_s=self._probe_s))
        num_silent = 0
        try:
            while not child.ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._probe_s):
                        await child.ended.wait()
                        return
                try:
                    await asyncio.to_thread(client.get, "/")
                    num_silent = 0
                except EtcdError as error:
                    num_silent += 1
                    if num_silent >= NUM_SILENT_PROBES and not child.ended.is_set():
                        self._sink.append("store_hung", {"pid": child.pid, "error": str(error)})
                        await child.end(0.0)
        finally:
            client.close()

    async def _keep(self) -> None:
        """Replaces a process that died, at first at once, and more and more slowly where that does not help."""
        pause_s = FIRST_PAUSE_S
        while True:
            child = self._child
            assert child is not None
            began_s = time.monotonic()
            await self._until_end(child)
            fields = {"pid": child.pid, "exit_code": child.exit_code, "last_lines": list(child.last_lines)}
            self._sink.append("store_ended", fields)
            if time.monotonic() - began_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                try:
                    await self._start()
                except NotRunningError as error:
                    self._sink.append("store_start_failed", {"error": str(error), "next_try_s": pause_s})
                else:
                    break


class _Child:
    """One process, from its start to its end.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, listening: list[socket.socket], keep: Path | None, sink: EventSink) -> None:
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._sink = sink
        self._told = asyncio.Event()
        self._is_serving = False
        self._partial = b""
        self._loop = asyncio.get_running_loop()
        read_ready, write_ready = os.pipe()
        try:
            fds = [one.fileno() for one in listening]
            command = [sys.executable, "-m", "elastictrain.kv.server", "--listen-fd", *map(str, fds)]
            command += ["--ready-fd", str(write_ready), "--parent-pid", str(os.getpid())]
            command += ["--keep", str(keep)] if keep is not None else []
            # A Ctrl-C is for the supervisor, which needs the store until its own end.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[*fds, write_ready],
                start_new_session=True,
            )
        except BaseException:
            os.close(read_ready)
            raise
        finally:
            os.close(write_ready)
        self.pid = self._process.pid
        assert self._process.stderr is not None
        self._ready_fd = read_ready
        self._stderr_fd = self._process.stderr.fileno()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            self._process.stderr.close()
            os.close(read_ready)
            raise
        os.set_blocking(self._stderr_fd, False)
        self._loop.add_reader(self._ready_fd, self._on_ready)
        self._loop.add_reader(self._stderr_fd, self._on_output)
        self._loop.add_reader(self._pidfd, self._on_end)

    async def ready(self, limit_s: float) -> bool:
        """Waits until it serves: False if it ended, or did not within the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._told.wait()
        return self._is_serving

    async def end(self, grace_s: float) -> None:
        """Ends it, by force after the grace."""
        if self.ended.is_set():
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.ended.wait()
        except TimeoutError:
            self._process.kill()
            await self.ended.wait()

    def _on_ready(self) -> None:
        # A line, or nothing from one that ended.
        self._is_serving = bool(os.read(self._ready_fd, 100))
        self._loop.remove_reader(self._ready_fd)
        if self._is_serving:
            self._told.set()

    def _on_output(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._stderr_fd, 65536)
            if not data:
                self._loop.remove_reader(self._stderr_fd)
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial[-65536:]
            for line in lines:
                self._say(line.decode(errors="replace"))

    def _say(self, line: str) -> None:
        self.last_lines.append(line[:1000])
        match parse_line(line):
            case Event(name, fields):
                self._sink.append(name, {key: value for key, value in fields.items() if key != "event"})

    def _on_end(self) -> None:
        # Somebody who collects orphans may have been faster; then subprocess takes the code for 0.
        self.exit_code = self._process.wait()
        self._on_output()  # its last words, which may come after
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._ready_fd)
        self._loop.remove_reader(self._stderr_fd)
        os.close(self._pidfd)
        os.close(self._ready_fd)
        assert self._process.stderr is not None
        self._process.stderr.close()
        self.ended.set()
        self._told.set()
