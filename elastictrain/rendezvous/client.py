"""etcd's v3 API over its JSON gateway, as far as a rendezvous needs it: read, compare and swap, leases.

Several members, of which any may be down, slow or cut off: a request goes to the member that answered last, and from
there to the others in turn, each within the time-out. Every request may therefore be carried out though it seemed to
fail; callers see that by comparing, as ours do.

A socket's time-outs bound neither the look-up of a name nor an answer that trickles. So each request has a thread of
its own, which is left behind if it does not come back in time: the agent that asks must look after its ranks.

The gateway is described in etcd's documentation, "gRPC gateway"; the codes are those of gRPC.
"""

from __future__ import annotations

import json
import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import urllib3

from elastictrain.errors import ConfigError
from elastictrain.rendezvous.settings import EtcdSettings

_INVALID_ARGUMENT, _NOT_FOUND, _PERMISSION_DENIED, _UNAUTHENTICATED = 3, 5, 7, 16
_REFUSALS = {_INVALID_ARGUMENT, _NOT_FOUND, _PERMISSION_DENIED, 9, 11, _UNAUTHENTICATED}
MAX_LEFT_BEHIND = 4
"""Requests to one member that have not come back; while there are so many, it is not asked again."""
_RETURN_S = 0.5
"""What a request gets beyond its time-out to end by itself, and say why."""
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")


class EtcdError(Exception):
    """What every failure of a request is. The text names the member, and never a password."""


class EtcdUnavailableError(EtcdError):
    """No member could carry the request out now. It may have been carried out nevertheless."""


class EtcdRefusedError(EtcdError):
    """etcd answered that it will not: wrong password, no permission, a request that it does not understand."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class EtcdLeaseGoneError(EtcdRefusedError):
    """The lease has expired or was revoked."""


@dataclass(frozen=True)
class Stored:
    """A key's value, and the revision of the store at which it was written."""

    value: bytes
    mod_revision: int


_T = TypeVar("_T")


class _Bounded:
    """Requests to one member, none of which is waited for longer than its time."""

    def __init__(self) -> None:
        self._left_behind: list[threading.Thread] = []

    def carry_out(self, request: Callable[[], _T], limit_s: float) -> _T:
        """What the request returns, or raises.

        Raises:
            TimeoutError: it has not come back, or too many before it have not.
        """
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= MAX_LEFT_BEHIND:
            raise TimeoutError
        returned: list[_T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                returned.append(request())
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                raised.append(error)

        thread = threading.Thread(target=run, name="etcd request", daemon=True)
        thread.start()
        thread.join(limit_s)
        if raised:
            raise raised[0]
        if not returned:
            self._left_behind.append(thread)
            raise TimeoutError
        return returned[0]


class EtcdClient:
    """One cluster. Any number of threads may use it."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(total=settings.request_timeout_s), retries=False, **_tls(settings)
        )
        self._members = {endpoint: _Bounded() for endpoint in settings.endpoints}
        self._lock = threading.Lock()
        self._preferred = 0  # place in the endpoints of the member that answered last
        self._token: str | None = None

    @property
    def where(self) -> str:
        """The cluster, for errors."""
        return ", ".join(self._settings.endpoints)

    def get(self, key: str) -> Stored | None:
        """The key's value as the majority has it; None if there is no such key.

        Raises:
            EtcdError: it could not be read.
        """
        return _first(self._call("kv/range", {"key": _b64(key)}))

    def compare_and_swap(self, key: str, value: bytes, mod_revision: int, lease: int) -> tuple[bool, Stored | None]:
        """Writes the key if it was last written at `mod_revision`; 0 means that there is no such key.

        Returns:
            Whether it was written, and what the key holds now.

        Raises:
            EtcdLeaseGoneError: there is no such lease (any more).
            EtcdError: it is unknown whether it was written.
        """
        name = _b64(key)
        answer = self._call(
            "kv/txn",
            {
                "compare": [{"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(mod_revision)}],
                "success": [{"request_put": {"key": name, "value": _b64(value), "lease": str(lease)}}],
                "failure": [{"request_range": {"key": name}}],
            },
        )
        if answer.get("succeeded"):
            return True, Stored(value, int(answer["header"]["revision"]))
        found = _first(answer["responses"][0]["response_range"])
        # Our own write, of which the answer was lost and which was sent again to another member.
        return found is not None and found.value == value, found

    def put(self, key: str, value: bytes, lease: int) -> None:
        """Writes the key, whatever it holds.

        Raises:
            EtcdLeaseGoneError: there is no such lease (any more).
            EtcdError: it is unknown whether it was written.
        """
        self._call("kv/put", {"key": _b64(key), "value": _b64(value), "lease": str(lease)})

    def grant_lease(self, ttl_s: int) -> int:
        """A new lease. Keys that hang on it go when nobody has kept it alive for `ttl_s` seconds.

        Raises:
            EtcdError: there is none.
        """
        return int(self._call("lease/grant", {"TTL": str(ttl_s)})["ID"])

    def keep_lease_alive(self, lease: int) -> bool:
        """Starts the lease's time anew. False if there is no such lease any more.

        Raises:
            EtcdError: it is unknown whether it was.
        """
        return int(self._call("lease/keepalive", {"ID": str(lease)})["result"].get("TTL", 0)) > 0

    def _call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._settings.user is None:
            return self._anywhere(method, body, {})
        token = self._token or self._authenticate()
        try:
            return self._anywhere(method, body, {"Authorization": token})
        except EtcdRefusedError as error:
            if not any(text in str(error) for text in _STALE_TOKEN):
                raise
        # Tokens expire, and a member that restarts has forgotten them.
        return self._anywhere(method, body, {"Authorization": self._authenticate()})

    def _authenticate(self) -> str:
        answer = self._anywhere(
            "auth/authenticate", {"name": self._settings.user, "password": self._settings.password}, {}
        )
        self._token = token = str(answer["token"])
        return token

    def _anywhere(self, method: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        endpoints = self._settings.endpoints
        with self._lock:
            first = self._preferred
        failures = []
        for step in range(len(endpoints)):
            place = (first + step) % len(endpoints)
            try:
                answer = self._at(endpoints[place], method, body, headers)
            except EtcdUnavailableError as error:
                failures.append(str(error))
            else:
                with self._lock:
                    self._preferred = place
                return answer
        raise EtcdUnavailableError("; ".join(failures))

    def _at(self, endpoint: str, method: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        def request() -> urllib3.BaseHTTPResponse:
            return self._pool.request(
                "POST",
                f"{endpoint}/v3/{method}",
                body=json.dumps(body).encode(),
                headers={"Content-Type": "application/json", **headers},
                redirect=False,
            )

        limit_s = self._settings.request_timeout_s + _RETURN_S
        try:
            response = self._members[endpoint].carry_out(request, limit_s)
        except (urllib3.exceptions.HTTPError, TimeoutError) as error:
            raise EtcdUnavailableError(f"{endpoint}: {_reason(error, self._settings)}") from None
        try:
            answer = json.loads(response.data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EtcdUnavailableError(f"{endpoint}: HTTP {response.status}, and not what etcd's v3 gateway answers")
        failure = answer.get("error")
        if response.status == 200 and failure is None:
            return answer
        # Unary calls have the code beside the text, streams (keepalive) have both inside.
        details = failure if isinstance(failure, dict) else answer
        code = int(details.get("code") or details.get("grpc_code") or 2)
        text = f"{endpoint}: {details.get('message') or failure or f'HTTP {response.status}'}"
        if "lease not found" in text:
            raise EtcdLeaseGoneError(text, code)
        if code in _REFUSALS:
            raise EtcdRefusedError(text, code)
        raise EtcdUnavailableError(text)


def _tls(settings: EtcdSettings) -> dict[str, Any]:
    if not any(endpoint.startswith("https:") for endpoint in settings.endpoints):
        return {}
    try:
        context = ssl.create_default_context(cafile=settings.ca_cert)
        if settings.cert is not None:
            context.load_cert_chain(settings.cert, settings.key)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(str(path) for path in (settings.ca_cert, settings.cert, settings.key) if path)
        raise ConfigError(f"the certificates for etcd cannot be used: {error} ({files})", "give PEM files") from error
    return {"ssl_context": context}


def _reason(error: Exception, settings: EtcdSettings) -> str:
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "connection refused or no such host"
    if isinstance(error, urllib3.exceptions.TimeoutError | TimeoutError):
        return f"no answer within {settings.request_timeout_s:g} s"
    return f"{type(error).__name__}: {error}"


def _first(answer: dict[str, Any]) -> Stored | None:
    for found in answer.get("kvs", ()):
        # The gateway leaves empty fields out.
        return Stored(b64decode(found.get("value", "")), int(found["mod_revision"]))
    return None


def _b64(data: str | bytes) -> str:
    return b64encode(data.encode() if isinstance(data, str) else data).decode()
