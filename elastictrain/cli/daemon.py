"""The command line's end of the control socket, and what it does where nobody answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastictrain.cli.job_dirs import JobDir
from elastictrain.errors import BY_NAME, ElasticTrainError, NotRunningError, UnresponsiveError
from elastictrain.supervisor.address import connect, find_address

if TYPE_CHECKING:
    from http.client import HTTPResponse

STATUS_TIMEOUT_S = 1.5
"""A supervisor that does not answer `status` for so long is passed over; the journal is read instead."""


class Daemon:
    """A job's supervisor, reached through its socket. Each request is a connection of its own.

    Args:
        job: whose.
        path: of its socket.
        pid: of its process, if known.
    """

    def __init__(self, job: JobDir, path: Path, pid: int | None) -> None:
        self.job = job
        self.path = path
        self.pid = pid

    @classmethod
    def find(cls, job: JobDir) -> Daemon | None:
        """The supervisor of a job; None if none listens. Says nothing about whether it will answer."""
        address = find_address(job.path)
        if address is None:
            return None
        try:
            connect(address.socket, STATUS_TIMEOUT_S).close()
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError:
            pass  # it is there: the request will explain
        return cls(job, address.socket, address.pid)

    def get(self, path: str, timeout_s: float = STATUS_TIMEOUT_S) -> Any:
        """The decoded answer. Raises as `post`."""
        return self._exchange("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        """The decoded answer.

        Raises:
            UnresponsiveError: no answer in time, or no permission to ask.
            NotRunningError: it went away.
            ElasticTrainError: what the supervisor said.
        """
        return self._exchange("POST", path, body, timeout_s)

    def stream(self, path: str) -> Iterator[dict[str, Any]]:
        """The JSON lines of a streamed answer, until the supervisor ends it."""
        from elastictrain.cli.unix_http import HTTPException

        try:
            response = self._request("GET", path, None, timeout_s=None)
            for line in response:
                yield json.loads(line)
        except (OSError, HTTPException, ValueError):
            return

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        from elastictrain.cli.unix_http import HTTPException

        who = f"the supervisor of {self.job.name}" + (f" (process {self.pid})" if self.pid is not None else "")
        try:
            response = self._request(method, path, body, timeout_s)
            decoded = json.loads(response.read())
        except TimeoutError as error:
            raise UnresponsiveError(f"{who} does not answer within {timeout_s:g} s") from error
        except PermissionError as error:
            raise UnresponsiveError(
                f"{self.path} may not be used by this user", "Join the socket's group, or use sudo."
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            raise NotRunningError(f"{who} went away: {error}") from error
        if response.status >= 400:
            raise _as_error(decoded)
        return decoded

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> HTTPResponse:
        from elastictrain.cli.unix_http import UnixConnection

        connection = UnixConnection(self.path, STATUS_TIMEOUT_S, timeout_s)
        text = json.dumps(body) if body is not None else None
        connection.request(method, path, text, {"Connection": "close", "Content-Type": "application/json"})
        return connection.getresponse()


def _as_error(decoded: Any) -> ElasticTrainError:
    fields = decoded.get("error", {}) if isinstance(decoded, dict) else {}
    cls = BY_NAME.get(fields.get("kind", ""), ElasticTrainError)
    return cls(fields.get("what", "the supervisor answered with an error"), fields.get("hint", ""))


def require_daemon(job: JobDir) -> Daemon:
    """The supervisor of a job.

    Raises:
        NotRunningError: there is none; says what the job's last state was.
    """
    daemon = Daemon.find(job)
    if daemon is not None:
        return daemon
    status = status_of(job)
    raise NotRunningError(
        f"no supervisor of {job.name} runs on this host; the job is {status['state'].replace('_', ' ')}: "
        f"{status['reason']}",
        f"`elastictrain run`, or `systemctl start elastictrain@{job.name}`, starts one; it goes on where the job was.",
    )


def status_of(job: JobDir) -> dict[str, Any]:
    """The status document: the supervisor's own, or else what the journal says."""
    daemon = Daemon.find(job)
    note = ""
    if daemon is not None:
        try:
            decoded: dict[str, Any] = daemon.get("/status")
            return decoded
        except UnresponsiveError as error:
            note = error.what
        except ElasticTrainError:
            daemon = None
    from elastictrain.supervisor.record import read_status

    status = asdict(
        read_status(
            job.path,
            job.name,
            daemon_running=daemon is not None,
            socket=str(daemon.path) if daemon is not None else None,
        )
    )
    if note:
        status["reason"] = f"{note}; its journal says: {status['reason']}"
    return status
