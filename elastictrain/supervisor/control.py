"""The control interface: HTTP over a Unix socket, for the command line, for curl, for a scheduler.

It shows what the record holds and hands commands on; it decides nothing. Only `/metrics`, which tells no secrets and
changes nothing, may also be had over TCP, and only on loopback. Everything that is wrong with a request is answered as
JSON, {"error": {"what", "hint"}}; nothing that a client sends, or fails to send, holds up the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import web

from elastictrain.core.events import Event
from elastictrain.core.status import Status, SupervisorView
from elastictrain.errors import (
    BusyError,
    ConfigError,
    ElasticTrainError,
    IllegalTransitionError,
    MissingInputError,
    StorageError,
    UsageError,
)
from elastictrain.supervisor import address, kept_files
from elastictrain.supervisor.commands import Commands
from elastictrain.supervisor.journal_reader import as_json
from elastictrain.supervisor.metrics import CONTENT_TYPE, render_metrics
from elastictrain.supervisor.record import Record

MAX_BODY_BYTES = 64 * 1024
DEFAULT_CHECKPOINT_TIMEOUT_S = 600.0
_POLL_S = 0.1
_MAX_EVENTS = 10_000
MAX_LOG_LINES = 10_000
_JSON_LINES = "application/x-ndjson"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Who may reach the control interface.

    Args:
        group: members of this group may use the socket; None: those of the supervisor's own group.
        metrics_host: loopback address on which `/metrics` is served too.
        metrics_port: its port; 0 takes a free one; None serves no TCP at all.
    """

    group: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None


class Control:
    """Serves one job's control interface while it is open.

    Args:
        commands: who obeys.
        view: what the supervisor knows now.
        record: journal and history.
        settings: who may reach it.
        environment: for RUNTIME_DIRECTORY and XDG_RUNTIME_DIR.
    """

    def __init__(
        self,
        commands: Commands,
        view: Callable[[], SupervisorView],
        record: Record,
        settings: ControlSettings | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._commands = commands
        self._view = view
        self._record = record
        self._settings = settings if settings is not None else ControlSettings()
        self._environment = environment
        self._runners: list[web.AppRunner] = []
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.socket: Path | None = None
        """Path of the socket, while open."""
        self.metrics_port: int | None = None
        """Port of `/metrics` on loopback, while open and if asked for."""

    async def open(self) -> None:
        """Begins to listen.

        Raises:
            BusyError: another supervisor answers on the socket.
            ConfigError: the group, or the address for metrics, cannot be had.
            StateDirError: no socket can be made.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_explain_errors])
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/status", self._status),
                web.get("/events", self._events),
                web.get("/logs", self._logs),
                web.get("/incidents", self._incidents),
                web.get(r"/incidents/{number:\d{1,9}}", self._incident),
                web.get("/metrics", self._metrics),
                web.post("/stop", self._stop),
                web.post("/checkpoint", self._checkpoint),
                web.post("/drain", self._drain),
                web.post("/resume", self._resume),
                web.post("/restart", self._restart),
            ]
        )
        self._check_metrics_host()
        listening, path = address.listen(
            self._record.state_dir, self._record.job, group=self._settings.group, environment=self._environment
        )
        try:
            await web.SockSite(await self._runner(app), listening, backlog=128).start()
            self.socket = path
            if self._settings.metrics_port is not None:
                await self._open_metrics()
        except BaseException:
            await self.close()
            address.leave(self._record.state_dir, path)
            listening.close()
            raise

    async def close(self) -> None:
        """Ends the streams, answers what is being answered, and removes the socket."""
        self._closing = True
        path, self.socket = self.socket, None
        if path is not None:
            address.leave(self._record.state_dir, path)
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    async def _runner(self, app: web.Application) -> web.AppRunner:
        # Errors of clients are answered to the client; they are no news for the supervisor's own log.
        quiet = logging.getLogger("elastictrain.supervisor.control")
        quiet.propagate = False
        quiet.addHandler(logging.NullHandler())
        runner = web.AppRunner(
            app, access_log=None, logger=quiet, shutdown_timeout=2.0, keepalive_timeout=15.0, handle_signals=False
        )
        self._runners.append(runner)
        await runner.setup()
        return runner

    def _check_metrics_host(self) -> None:
        if self._settings.metrics_port is None:
            return
        host = self._settings.metrics_host
        try:
            is_loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_loopback = host == "localhost"
        if not is_loopback:
            raise ConfigError(
                f"metrics cannot be served on {host}: it is no loopback address",
                "Anyone on the network could read them. Use 127.0.0.1, with a proxy in front where others must.",
            )

    async def _open_metrics(self) -> None:
        host, port = self._settings.metrics_host, self._settings.metrics_port
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_explain_errors])
        app.add_routes([web.get("/metrics", self._metrics)])
        try:
            site = web.TCPSite(await self._runner(app), host, port)
            await site.start()
        except OSError as error:
            raise ConfigError(f"metrics cannot be served on {host}:{port}: {error.strerror or error}") from error
        self.metrics_port = int(self._runners[-1].addresses[0][1])

    # ---- reading

    async def _index(self, _request: web.Request) -> web.Response:
        return _json(
            {
                "job": self._record.job,
                "get": [
                    "/status",
                    "/events?since=ID&kind=KIND&follow=1",
                    "/logs?rank=RANK&lines=NUMBER",
                    "/incidents",
                    "/incidents/NUMBER",
                    "/metrics",
                ],
                "post": ["/stop", "/checkpoint", "/drain", "/resume", "/restart"],
            }
        )

    def _now(self) -> Status:
        return self._record.status(self._view(), socket=str(self.socket))

    async def _status(self, _request: web.Request) -> web.Response:
        return _json(asdict(self._now()))

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=render_metrics(self._now()), headers={"Content-Type": CONTENT_TYPE})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        since = _whole_number(query.get("since", "0"), "since")
        kinds = frozenset(kind for value in query.getall("kind", []) for kind in value.split(",") if kind)
        if query.get("follow", "0") in ("", "0", "false"):
            limit = _whole_number(query.get("limit", str(_MAX_EVENTS)), "limit")
            found = [e for e in await asyncio.to_thread(self._record.events, since) if not kinds or e.kind in kinds]
            return _json([as_json(event) for event in found[-limit:] if limit])
        return await self._stream(request, since, kinds)

    async def _logs(self, request: web.Request) -> web.Response:
        query = request.query
        rank = _whole_number(query["rank"], "rank") if "rank" in query else None
        num_lines = _whole_number(query.get("lines", "100"), "lines")
        if not 0 < num_lines <= MAX_LOG_LINES:
            raise UsageError(f"lines must be between 1 and {MAX_LOG_LINES}, got {num_lines}")
        return _json(await asyncio.to_thread(kept_files.recent_output, self._record.state_dir, rank, num_lines))

    async def _incidents(self, _request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(kept_files.incidents, self._record.state_dir))

    async def _incident(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return _json(await asyncio.to_thread(kept_files.incident, self._record.state_dir, number))

    async def _stream(self, request: web.Request, since: int, kinds: frozenset[str]) -> web.StreamResponse:
        """JSON lines for as long as the client stays. Holds no queue for it: a slow one reads on where it was."""
        response = web.StreamResponse(headers={"Content-Type": _JSON_LINES, "Cache-Control": "no-store"})
        await response.prepare(request)
        is_last = False
        batch = await asyncio.to_thread(self._record.events, since)
        with contextlib.suppress(ConnectionError):
            while True:
                if batch:
                    since = batch[-1].id
                    wanted = [e for e in batch if not kinds or e.kind in kinds]
                    if wanted:
                        await response.write(_json_lines(wanted))
                if is_last or request.transport is None or request.transport.is_closing():
                    break
                await asyncio.sleep(_POLL_S)
                # What was said before the end is read after it: the last word is never missed.
                is_last = self._closing
                batch = self._record.journal.recent(since)
            await response.write_eof()
        return response

    # ---- commands

    async def _stop(self, request: web.Request) -> web.Response:
        body = await _body(request, {"reason": str})
        await self._obey(self._commands.stop(body.get("reason", "on request")))
        return _json({"done": "stop"})

    async def _checkpoint(self, request: web.Request) -> web.Response:
        body = await _body(request, {"timeout_s": float})
        timeout_s = body.get("timeout_s", DEFAULT_CHECKPOINT_TIMEOUT_S)
        if not 0 < timeout_s <= 86_400:
            raise UsageError(f"timeout_s must be between 0 and 86400, got {timeout_s:g}")
        began_s = monotonic()
        step = await self._obey(self._commands.checkpoint(timeout_s))
        return _json({"done": "checkpoint", "global_step": step, "took_s": round(monotonic() - began_s, 3)})

    async def _drain(self, request: web.Request) -> web.Response:
        await _body(request, {})
        await self._obey(self._commands.drain())
        return _json({"done": "drain"})

    async def _resume(self, request: web.Request) -> web.Response:
        await _body(request, {})
        await self._obey(self._commands.resume())
        return _json({"done": "resume"})

    async def _restart(self, request: web.Request) -> web.Response:
        body = await _body(request, {"reason": str})
        await self._obey(self._commands.restart(body.get("reason", "on request")))
        return _json({"done": "restart"})

    async def _obey(self, command: Any) -> Any:
        """A command that has begun is carried to its end, also when the client goes away."""
        task = asyncio.ensure_future(command)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the client, if it is still there, has been told


# ---- requests and answers

_STATUS_OF: tuple[tuple[type[ElasticTrainError], int], ...] = (
    (UsageError, 400),
    (MissingInputError, 404),
    (BusyError, 409),
    (IllegalTransitionError, 409),
    (StorageError, 504),
)


@web.middleware
async def _explain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ElasticTrainError as error:
        status = next((code for cls, code in _STATUS_OF if isinstance(error, cls)), 500)
        return _error(status, error.what, error.hint, type(error).__name__)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        return _error(405, f"{request.path} takes {allowed}, not {request.method}", headers={"Allow": allowed})
    except web.HTTPNotFound:
        return _error(404, f"there is nothing at {request.path}", "GET / lists what there is.")
    except web.HTTPException as error:
        return _error(error.status, error.reason)
    except (UnicodeError, ValueError) as error:
        return _error(400, f"the request makes no sense: {error}")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - a defect here must not take the supervisor with it
        return _error(500, f"{type(error).__name__}: {error}", "This is a defect of elastictrain.")


def _error(
    status: int, what: str, hint: str = "", kind: str = "", headers: Mapping[str, str] | None = None
) -> web.Response:
    error = {"what": what, "hint": hint, "kind": kind}
    return _json({"error": error}, status=status, headers=headers)


def _json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        text=json.dumps(value, indent=2) + "\n", status=status, content_type="application/json", headers=headers
    )


def _json_lines(events: list[Event]) -> bytes:
    return b"".join(json.dumps(as_json(event)).encode() + b"\n" for event in events)


async def _body(request: web.Request, known: Mapping[str, type]) -> dict[str, Any]:
    """The request's JSON object; parameters may stand in the query as well, for curl's sake."""
    fields: Any = dict(request.query)
    if text := (await request.text()).strip():
        try:
            decoded = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the body is not JSON: {error}") from error
        if not isinstance(decoded, dict):
            raise UsageError("the body must be a JSON object")
        fields |= decoded
    for key, value in fields.items():
        if key not in known:
            takes = f"{request.path} takes {', '.join(known)}" if known else f"{request.path} takes nothing"
            raise UsageError(f"unknown key {key}", takes)
        if known[key] is float:
            try:
                fields[key] = float(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise UsageError(f"{key} must be a number, got {value!r}") from error
        elif not isinstance(value, str) or len(value) > 1000:
            raise UsageError(f"{key} must be a text of at most 1000 characters")
    return dict(fields)


def _whole_number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise UsageError(f"{name} must be a whole number, got {text[:40]!r}")
    return int(text)
