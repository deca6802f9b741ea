"""A key-value store in a process of its own, for jobs whose nodes have no etcd to agree through.

    python -m elastictrain.kv.server (ADDRESS PORT | --listen-fd FD...) [--keep FILE] [--ready-fd FD] [--parent-pid PID]

It speaks the part of etcd's v3 JSON gateway that `EtcdClient` uses, over HTTP/1.1 with keep-alive, and has everything
in memory. When the process ends, keys with a lease are gone, and nodes write theirs again; keys without one are kept in
a file, if it is given one. It ends with its parent, and on SIGTERM. There is no password: it belongs on the network of
the nodes, like torch's own store.

`address` finds where to listen; `gateway` and `store` know what requests mean; `kept` knows the file; aiohttp parses
HTTP. Here are the limits that keep one client from harming the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from elastictrain.errors import ElasticTrainError, UsageError
from elastictrain.kv.address import listen
from elastictrain.kv.gateway import (
    INTERNAL,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    Answer,
    Gateway,
    refusal,
)
from elastictrain.kv.keeping import WARN_EVERY_S, Keeping, read_kept
from elastictrain.kv.store import ServingClock, Store
from elastictrain.logs import Logger, make_logger
from elastictrain.procs import die_with_parent

MAX_BODY_BYTES = 4 * 2**20
MAX_LINE_BYTES = 8190
"""Of the request line, and of each header."""
MAX_HEADERS = 64
MAX_CONNECTIONS = 4096
"""A node holds a handful. Fewer where the process may not open as many files."""
SPARE_FILES = 64
IDLE_S = 300.0
"""After which a connection without a whole request is closed. Nodes are heard from every few seconds."""
BODY_S = 30.0
"""Within which the body of a request must be there."""
TICK_S = 0.5


class StoreServer:
    """Serves a store on sockets that listen, while it is open.

    Args:
        store: what it serves.
        logger: for what its owner should know.
        keep: file for the keys without a lease; None: they end with the process.
        max_connections: at the same time; more are closed as they come.
        idle_s: see `IDLE_S`.
    """

    def __init__(
        self,
        store: Store,
        logger: Logger,
        *,
        keep: Path | None = None,
        max_connections: int = MAX_CONNECTIONS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._gateway = Gateway(store)
        self._logger = logger
        self._keeping = Keeping(store, keep, logger) if keep is not None else None
        self._max_connections = max_connections
        self._idle_s = idle_s
        self._connections: dict[asyncio.BaseProtocol, _Connection] = {}  # by aiohttp's end of each
        self._warned_s: float | None = None

    async def open(self, listening: Sequence[socket.socket]) -> None:
        """Begins to answer."""
        self._loop = asyncio.get_running_loop()
        self._clock = ServingClock(self._loop.time(), longest_gap_s=2 * TICK_S)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # What clients do wrong is answered to them, and no news here.
        quiet = logging.getLogger("elastictrain.kv.server")
        quiet.propagate = False
        quiet.addHandler(logging.NullHandler())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet,
            handle_signals=False,
            shutdown_timeout=1.0,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        await self._runner.setup()
        self._servers = [await self._loop.create_server(self._connected, sock=one, backlog=1024) for one in listening]
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Answers what is being answered, and ends."""
        self._ticking.cancel()
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    def _connected(self) -> asyncio.Protocol:
        # Counted here and not by the runner, which has not heard yet of those that came at the same moment.
        if len(self._connections) >= self._max_connections:
            now_s = self._loop.time()
            if self._warned_s is None or now_s - self._warned_s >= WARN_EVERY_S:
                self._warned_s = now_s
                self._logger.warning("store_connections_refused", limit=self._max_connections)
            return _Refused()
        serve = self._runner.server
        assert serve is not None
        connection = _Connection(serve(), self._connections, self._loop.time())
        self._connections[connection.http] = connection
        return connection

    async def _tick(self) -> None:
        """Time goes on for the leases, and connections that say nothing are closed."""
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            self._clock.look(now_s)
            for connection in list(self._connections.values()):
                if now_s - connection.heard_s > self._idle_s:
                    connection.abort()

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            answer = await self._answer(request)
        except TimeoutError:
            answer = refusal(INVALID_ARGUMENT, f"the body was not there within {BODY_S:g} s")
        except web.HTTPRequestEntityTooLarge:
            answer = refusal(RESOURCE_EXHAUSTED, f"the body has more than {MAX_BODY_BYTES} bytes")
        except web.HTTPException as error:
            answer = refusal(INVALID_ARGUMENT, error.reason)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - a defect here must not take the other nodes' store away
            self._logger.error("store_request_failed", path=request.path[:100], error=repr(error))
            answer = refusal(INTERNAL, f"{type(error).__name__}: this is a defect of elastictrain")
        if (connection := self._connections.get(request.protocol)) is not None:
            connection.heard_s = self._loop.time()
        text = json.dumps(answer.body, separators=(",", ":"))
        return web.Response(text=text, status=answer.status, content_type="application/json")

    async def _answer(self, request: web.Request) -> Answer:
        path = request.path
        if request.method != "POST" or not path.startswith("/v3/"):
            return refusal(UNIMPLEMENTED, f"this store answers POST /v3/..., not {request.method} {path[:100]}")
        async with asyncio.timeout(BODY_S):
            body = await request.read()
        # Nothing is awaited in it, so requests are carried out one after another.
        answer = self._gateway.answer(path.removeprefix("/v3/"), body, self._clock.look(self._loop.time()))
        if self._keeping is not None:
            await self._keeping.keep()
        return answer


class _Connection(asyncio.Protocol):
    """Passes on to aiohttp what happens on a connection, and is listed for as long as that is open.

    Args:
        http: aiohttp's end.
        listed: where it is taken off at its end.
        heard_s: when it was opened; from then on, when it last brought a whole request.
    """

    def __init__(self, http: asyncio.Protocol, listed: dict[asyncio.BaseProtocol, _Connection], heard_s: float) -> None:
        self.http = http
        self.heard_s = heard_s
        self._listed = listed
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.http.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._listed.pop(self.http, None)
        self.http.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self.http.data_received(data)

    def eof_received(self) -> bool | None:
        return self.http.eof_received()

    def pause_writing(self) -> None:
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.http.resume_writing()

    def abort(self) -> None:
        self._listed.pop(self.http, None)
        if self._transport is not None:
            self._transport.abort()


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


# ---- the process


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.format_usage().strip())


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m elastictrain.kv.server", description="A key-value store for one job's nodes.")
    parser.add_argument("address", metavar="ADDRESS", nargs="?", help="name or IP address of this host to listen on")
    parser.add_argument("port", metavar="PORT", type=int, nargs="?", help="0 lets the system choose")
    parser.add_argument("--listen-fd", metavar="FD", type=int, nargs="+", help="sockets of the parent's that listen")
    parser.add_argument("--keep", metavar="FILE", type=Path, help="keep the keys without a lease there")
    parser.add_argument("--ready-fd", metavar="FD", type=int, help="write the port there, as a line, once it listens")
    parser.add_argument("--parent-pid", metavar="PID", type=int, help="end with this process, the parent")
    arguments = parser.parse_args(argv)
    if (arguments.port is None) == (arguments.listen_fd is None):
        parser.error("give ADDRESS and PORT, or --listen-fd")
    return arguments


def _listening(arguments: argparse.Namespace) -> list[socket.socket]:
    if arguments.listen_fd is None:
        return listen(arguments.address, arguments.port)
    try:
        return [socket.socket(fileno=fd) for fd in arguments.listen_fd]
    except OSError as error:
        raise UsageError(f"--listen-fd names what is no socket: {error.strerror}") from error


async def _serve(
    listening: Sequence[socket.socket], keep: Path | None, max_connections: int, ready_fd: int | None
) -> None:
    logger = make_logger()
    server = StoreServer(read_kept(keep, logger), logger, keep=keep, max_connections=max_connections)
    told = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, told.set)
    await server.open(listening)
    if ready_fd is not None:
        with suppress(OSError):  # nobody reads it any more
            os.write(ready_fd, f"{listening[0].getsockname()[1]}\n".encode())
            os.close(ready_fd)
    await told.wait()
    await server.close()


def main(argv: Sequence[str]) -> int:
    """Serves until told to end.

    Returns:
        the exit code: 0; that of the error otherwise, with its text on standard error.
    """
    try:
        arguments = _arguments(argv)
        die_with_parent(os.getppid() if arguments.parent_pid is None else arguments.parent_pid)
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        max_connections = MAX_CONNECTIONS
        if most_files != resource.RLIM_INFINITY:
            max_connections = max(1, min(MAX_CONNECTIONS, most_files - SPARE_FILES))
        asyncio.run(_serve(_listening(arguments), arguments.keep, max_connections, arguments.ready_fd))
    except ElasticTrainError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
