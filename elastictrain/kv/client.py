"""etcd's v3 API over its JSON gateway, as far as nodes need it: read, write, compare and swap, leases.

The same client serves etcd and our own store (`server`). Several members, of which any may be down, slow or cut off: a
request goes to the member that answered last, and from there to the others in turn, each within the time-out. Every
request may therefore be carried out though it seemed to fail; callers see that by comparing, as ours do.

Calls block: from an event loop, use `asyncio.to_thread`. How long, at worst, `EtcdSettings.call_timeout_s` says, and a
tenth of a second for each member; the look-up of names is part of that (`bounded`).

The gateway is described in etcd's documentation, "gRPC gateway"; the codes are those of gRPC.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

import urllib3

from elastictrain.errors import ConfigError
from elastictrain.kv.bounded import Bounded
from elastictrain.kv.settings import EtcdSettings

_INVALID_ARGUMENT, _NOT_FOUND, _PERMISSION_DENIED, _UNAUTHENTICATED = 3, 5, 7, 16
_UNIMPLEMENTED = 12
_REFUSALS = {_INVALID_ARGUMENT, _NOT_FOUND, _PERMISSION_DENIED, 9, 11, _UNIMPLEMENTED, _UNAUTHENTICATED}
_MAX_IDLE_CONNECTIONS = 8
"""Of one member: more threads than that open connections that are closed again."""
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


class EtcdClient:
    """One cluster. Any number of threads may use it."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._pool = urllib3.PoolManager(maxsize=_MAX_IDLE_CONNECTIONS, retries=False, **_tls(settings))
        self._members = {endpoint: Bounded() for endpoint in settings.endpoints}
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

    def get_prefix(self, prefix: str) -> dict[str, Stored]:
        """All keys that begin with a text, in order, and their values, as they were at one moment.

        Raises:
            EtcdError: they could not be read.
        """
        return _all(self._call("kv/range", _prefix(prefix)))

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

    def get_prefix_and_put(self, prefix: str, key: str, value: bytes, lease: int) -> dict[str, Stored]:
        """Reads all keys that begin with a text, and writes a key right after that, whatever it held: one request.

        Args:
            prefix: what the keys begin with that are read.
            key: what is written; it need not begin with `prefix`.
            value: its value from now on.
            lease: with which the key goes; 0: it stays.

        Raises:
            EtcdLeaseGoneError: there is no such lease (any more).
            EtcdError: it is unknown whether it was written.
        """
        write = {"key": _b64(key), "value": _b64(value), "lease": str(lease)}
        answer = self._call("kv/txn", {"success": [{"request_range": _prefix(prefix)}, {"request_put": write}]})
        return _all(answer["responses"][0]["response_range"])

    def delete(self, key: str) -> bool:
        """Removes the key. False if there was none, or if it was removed by a request whose answer was lost.

        Raises:
            EtcdError: it is unknown whether it was removed.
        """
        return int(self._call("kv/deleterange", {"key": _b64(key)}).get("deleted", 0)) > 0

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

    def revoke_lease(self, lease: int) -> bool:
        """Ends the lease, and removes the keys that hang on it. False if there is no such lease (any more).

        Raises:
            EtcdError: it is unknown whether it was.
        """
        try:
            self._call("lease/revoke", {"ID": str(lease)})
        except EtcdLeaseGoneError:
            return False
        return True

    def close(self) -> None:
        """Closes the connections that no thread uses. A later call opens new ones."""
        self._pool.clear()

    def _call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        call_s = self._settings.call_timeout_s
        deadline_s = None if call_s is None else time.monotonic() + call_s
        if self._settings.user is None:
            return self._anywhere(method, body, {}, deadline_s)
        token = self._token or self._authenticate(deadline_s)
        try:
            return self._anywhere(method, body, {"Authorization": token}, deadline_s)
        except EtcdRefusedError as error:
            if not any(text in str(error) for text in _STALE_TOKEN):
                raise
        # Tokens expire, and a member that restarts has forgotten them.
        return self._anywhere(method, body, {"Authorization": self._authenticate(deadline_s)}, deadline_s)

    def _authenticate(self, deadline_s: float | None) -> str:
        credentials = {"name": self._settings.user, "password": self._settings.password}
        answer = self._anywhere("auth/authenticate", credentials, {}, deadline_s)
        self._token = token = str(answer["token"])
        return token

    def _anywhere(
        self, method: str, body: dict[str, Any], headers: dict[str, str], deadline_s: float | None
    ) -> dict[str, Any]:
        endpoints = self._settings.endpoints
        with self._lock:
            first = self._preferred
        failures = []
        for step in range(len(endpoints)):
            place = (first + step) % len(endpoints)
            timeout_s = self._settings.request_timeout_s
            if deadline_s is not None:
                timeout_s = min(timeout_s, (deadline_s - time.monotonic()) / (len(endpoints) - step))
            if timeout_s <= 0:
                failures.append(
                    f"{endpoints[place]}: not asked, the call's {self._settings.call_timeout_s:g} s are over"
                )
                continue
            try:
                answer = self._at(endpoints[place], method, body, headers, timeout_s)
            except EtcdUnavailableError as error:
                failures.append(str(error))
            else:
                with self._lock:
                    self._preferred = place
                return answer
        raise EtcdUnavailableError("; ".join(failures))

    def _at(
        self, endpoint: str, method: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float
    ) -> dict[str, Any]:
        def request() -> urllib3.BaseHTTPResponse:
            return self._pool.request(
                "POST",
                f"{endpoint}/v3/{method}",
                body=json.dumps(body).encode(),
                headers={"Content-Type": "application/json", **headers},
                timeout=urllib3.Timeout(total=timeout_s),
                redirect=False,
            )

        try:
            response = self._members[endpoint].carry_out(request, timeout_s)
        except (urllib3.exceptions.HTTPError, TimeoutError) as error:
            raise EtcdUnavailableError(f"{endpoint}: {_reason(error, timeout_s)}") from None
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


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "connection refused or no such host"
    if isinstance(error, urllib3.exceptions.TimeoutError | TimeoutError):
        return f"no answer within {timeout_s:.3g} s"
    return f"{type(error).__name__}: {error}"


def _first(answer: dict[str, Any]) -> Stored | None:
    return next(iter(_all(answer).values()), None)


def _all(answer: dict[str, Any]) -> dict[str, Stored]:
    # The gateway leaves empty fields out. A key that is no text is somebody else's, and comes back as it is.
    return {
        b64decode(found["key"]).decode(errors="surrogateescape"): Stored(
            b64decode(found.get("value", "")), int(found["mod_revision"])
        )
        for found in answer.get("kvs", ())
    }


def _prefix(prefix: str) -> dict[str, str]:
    """All keys from the prefix up to the first that is beyond it; without one, all keys there are."""
    first = prefix.encode(errors="surrogateescape")
    cut = first.rstrip(b"\xff")
    if not cut:
        return {"key": _b64(first or b"\0"), "range_end": _b64(b"\0")}
    return {"key": _b64(first), "range_end": _b64(cut[:-1] + bytes([cut[-1] + 1]))}


def _b64(data: str | bytes) -> str:
    return b64encode(data.encode(errors="surrogateescape") if isinstance(data, str) else data).decode()
