"""The part of etcd's v3 JSON gateway that `EtcdClient` uses, over a `Store`: requests in, answers out, no I/O.

Names, codes, texts and the habit of leaving empty fields out are those of etcd 3.4, so that one client serves both. A
request that asks for more than is here (another comparison, a limit) is refused by name rather than half obeyed: that
is the one difference, since etcd passes over fields that it does not know.

See etcd's documentation, "gRPC gateway", and `rpc.proto`. Numbers of 64 bits are texts in JSON (protobuf's mapping).
"""

from __future__ import annotations

import binascii
import json
import operator
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from elastictrain.kv.store import (
    MAX_LEASE_TTL_S,
    Entry,
    LeaseExistsError,
    LeaseNotFoundError,
    Range,
    Store,
    StoreFullError,
)

MAX_OPERATIONS = 128
"""In one transaction, as in etcd."""

INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, OUT_OF_RANGE = 3, 5, 8, 9, 11
UNIMPLEMENTED, INTERNAL = 12, 13
_STATUS = {
    INVALID_ARGUMENT: 400,
    NOT_FOUND: 404,
    RESOURCE_EXHAUSTED: 429,
    FAILED_PRECONDITION: 412,
    OUT_OF_RANGE: 400,
    UNIMPLEMENTED: 501,
    INTERNAL: 500,
}

Body = dict[str, Any]
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "EQUAL": operator.eq,
    "GREATER": operator.gt,
    "LESS": operator.lt,
    "NOT_EQUAL": operator.ne,
}


class RefusedError(Exception):
    """A request that is not carried out.

    Args:
        code: gRPC's.
        text: what is wrong.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP status and JSON body."""

    status: int
    body: Body


@dataclass(frozen=True, slots=True)
class _Put:
    key: bytes
    value: bytes
    lease: int


@dataclass(frozen=True, slots=True)
class _Get:
    wanted: Range


@dataclass(frozen=True, slots=True)
class _Delete:
    wanted: Range


_Operation = _Put | _Get | _Delete


class Gateway:
    """Answers requests, one at a time.

    Args:
        store: what they read and change.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ids = {"cluster_id": str(secrets.randbelow(2**63)), "member_id": str(secrets.randbelow(2**63))}
        self._methods: Mapping[str, Callable[[Body, float], Body]] = {
            "kv/range": lambda body, _: self._alone(_get(body)),
            "kv/put": lambda body, _: self._alone(_put(body)),
            "kv/deleterange": lambda body, _: self._alone(_delete(body)),
            "kv/txn": lambda body, _: self._txn(body),
            "lease/grant": self._grant,
            "lease/keepalive": self._keep_alive,
            "lease/revoke": self._revoke,
        }

    def answer(self, method: str, body: bytes, now_s: float) -> Answer:
        """Carries a request out.

        Args:
            method: what comes after `/v3/` in the path.
            body: JSON.
            now_s: the clock of the leases.
        """
        self._store.expire(now_s)
        try:
            carry_out = self._methods.get(method)
            if carry_out is None:
                known = ", ".join(self._methods)
                raise RefusedError(UNIMPLEMENTED, f"/v3/{method[:100]} is not served by this store, only {known}")
            return Answer(200, carry_out(_parsed(body), now_s))
        except RefusedError as error:
            return refusal(error.code, str(error))
        except LeaseNotFoundError:
            return refusal(NOT_FOUND, "etcdserver: requested lease not found")
        except LeaseExistsError:
            return refusal(FAILED_PRECONDITION, "etcdserver: lease already exists")
        except StoreFullError:
            return refusal(RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")

    def _header(self) -> Body:
        return {**self._ids, "revision": str(self._store.revision), "raft_term": "1"}

    # ---- keys

    def _alone(self, operation: _Operation) -> Body:
        answer = self._run([operation])[0]
        return {**answer, "header": self._header()}

    def _txn(self, body: Body) -> Body:
        _only(body, "compare", "success", "failure")
        compares = [self._holds(compare) for compare in _list(body, "compare")]
        branches = [[_operation(request) for request in _list(body, name)] for name in ("success", "failure")]
        if max(len(compares), *map(len, branches)) > MAX_OPERATIONS:
            raise RefusedError(INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
        for branch in branches:
            _refuse_twice(branch)
        succeeded = all(compares)
        operations = branches[0 if succeeded else 1]
        answers = self._run(operations)
        names = {_Put: "response_put", _Get: "response_range", _Delete: "response_delete_range"}
        responses = [{names[type(op)]: answer} for op, answer in zip(operations, answers, strict=True)]
        return {
            "header": self._header(),
            **({"succeeded": True} if succeeded else {}),
            **({"responses": responses} if responses else {}),
        }

    def _holds(self, compare: Any) -> bool:
        if not isinstance(compare, dict):
            raise RefusedError(INVALID_ARGUMENT, "a comparison must be a JSON object")
        _only(compare, "key", "target", "result", "mod_revision")
        if compare.get("target") != "MOD":
            raise RefusedError(UNIMPLEMENTED, f"this store compares MOD only, not {str(compare.get('target'))[:40]}")
        result = compare.get("result") or "EQUAL"
        if not isinstance(result, str) or result not in _COMPARISONS:
            raise RefusedError(INVALID_ARGUMENT, f"unknown value {str(result)[:40]!r} for result")
        return _COMPARISONS[result](self._store.mod_revision(_key(compare)), _integer(compare, "mod_revision"))

    def _run(self, operations: list[_Operation]) -> list[Body]:
        """All of them or none, all at one revision."""
        store = self._store
        store.check_put((op.key, op.value, op.lease) for op in operations if isinstance(op, _Put))
        revision = store.revision + 1
        answers: list[Body] = []
        for operation in operations:
            answer: Body = {}
            match operation:
                case _Put(key, value, lease):
                    store.put(key, value, lease, revision)
                case _Delete(wanted):
                    if count := store.delete(wanted, revision):
                        answer = {"deleted": str(count)}
                case _Get(wanted):
                    if found := [_as_json(key, entry) for key, entry in store.get(wanted)]:
                        answer = {"kvs": found, "count": str(len(found))}
            # What comes before the first change of a transaction is answered at the revision before it.
            answers.append({"header": {"revision": str(store.revision)}, **answer})
        return answers

    # ---- leases

    def _grant(self, body: Body, now_s: float) -> Body:
        _only(body, "TTL", "ID")
        wanted_s = _integer(body, "TTL")
        if wanted_s > MAX_LEASE_TTL_S:
            raise RefusedError(OUT_OF_RANGE, "etcdserver: too large lease TTL")
        lease, ttl_s = self._store.grant(wanted_s, _integer(body, "ID"), now_s)
        return {"header": self._header(), "ID": str(lease), "TTL": str(ttl_s)}

    def _keep_alive(self, body: Body, now_s: float) -> Body:
        _only(body, "ID")
        lease = _integer(body, "ID")
        ttl_s = self._store.keep_alive(lease, now_s)
        answer = {"header": self._header(), "ID": str(lease)}
        return {"result": {**answer, "TTL": str(ttl_s)} if ttl_s else answer}

    def _revoke(self, body: Body, _now_s: float) -> Body:
        _only(body, "ID")
        self._store.revoke(_integer(body, "ID"))
        return {"header": self._header()}


def refusal(code: int, text: str) -> Answer:
    """A failure as etcd's gateway says it."""
    return Answer(_STATUS[code], {"error": text, "message": text, "code": code})


# ---- requests


def _parsed(body: bytes) -> Body:
    if not body.strip():
        return {}
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(INVALID_ARGUMENT, f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RefusedError(INVALID_ARGUMENT, "the body must be a JSON object")
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _operation(request: Any) -> _Operation:
    makers: dict[str, Callable[[Body], _Operation]] = {
        "request_put": _put,
        "request_range": _get,
        "request_delete_range": _delete,
    }
    if not isinstance(request, dict) or len(request) != 1:
        raise RefusedError(INVALID_ARGUMENT, f"an operation is one of {', '.join(makers)}")
    ((name, fields),) = request.items()
    if name not in makers:
        raise RefusedError(UNIMPLEMENTED, f"this store knows no operation {name[:40]!r}, only {', '.join(makers)}")
    if not isinstance(fields, dict):
        raise RefusedError(INVALID_ARGUMENT, f"{name} must be a JSON object")
    return makers[name](fields)


def _put(body: Body) -> _Put:
    _only(body, "key", "value", "lease")
    return _Put(_key(body), _bytes(body, "value"), _integer(body, "lease"))


def _get(body: Body) -> _Get:
    return _Get(_range(body))


def _delete(body: Body) -> _Delete:
    return _Delete(_range(body))


def _range(body: Body) -> Range:
    _only(body, "key", "range_end")
    return Range(_key(body), _bytes(body, "range_end") or None)


def _refuse_twice(branch: list[_Operation]) -> None:
    """What a key holds after a transaction must not depend on the order of its parts."""
    puts = [operation.key for operation in branch if isinstance(operation, _Put)]
    deletes = [operation.wanted for operation in branch if isinstance(operation, _Delete)]
    if len(set(puts)) < len(puts) or any(wanted.holds(key) for wanted in deletes for key in puts):
        raise RefusedError(INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")


def _only(body: Body, *known: str) -> None:
    for name in body:
        if name not in known:
            raise RefusedError(UNIMPLEMENTED, f"this store knows no field {name[:40]!r} here, only {', '.join(known)}")


def _list(body: Body, name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RefusedError(INVALID_ARGUMENT, f"{name} must be a list")
    return value


def _key(body: Body) -> bytes:
    key = _bytes(body, "key")
    if not key:
        raise RefusedError(INVALID_ARGUMENT, "etcdserver: key is not provided")
    return key


def _bytes(body: Body, name: str) -> bytes:
    value = body.get(name)
    if value is None:
        return b""
    if not isinstance(value, str):
        raise RefusedError(INVALID_ARGUMENT, f"{name} must be base64 in a text")
    try:
        return b64decode(value, validate=True)
    except (ValueError, binascii.Error) as error:
        raise RefusedError(INVALID_ARGUMENT, f"illegal base64 data in {name}: {error}") from error


def _integer(body: Body, name: str) -> int:
    value = body.get(name)
    if value is None:
        return 0
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
    except ValueError:
        number = 2**63
    if not -(2**63) <= number < 2**63:
        raise RefusedError(INVALID_ARGUMENT, f"{name} must be a whole number of 64 bits")
    return number


def _as_json(key: bytes, entry: Entry) -> Body:
    found = {
        "key": b64encode(key).decode(),
        "create_revision": str(entry.create_revision),
        "mod_revision": str(entry.mod_revision),
        "version": str(entry.version),
    }
    if entry.value:
        found["value"] = b64encode(entry.value).decode()
    if entry.lease:
        found["lease"] = str(entry.lease)
    return found
