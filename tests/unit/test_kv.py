"""The store that nodes agree through, without its process: leases, room, and requests of every kind."""

from __future__ import annotations

import itertools
import json
import socket
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.kv import store as store_module
from elastictrain.kv.address import listen
from elastictrain.kv.gateway import Gateway
from elastictrain.kv.store import LeaseNotFoundError, Range, ServingClock, Store, StoreFullError

ALL = Range(b"\0", b"\0")


def _put(store: Store, key: bytes, value: bytes = b"", lease: int = 0) -> None:
    store.check_put([(key, value, lease)])
    store.put(key, value, lease, store.revision + 1)


def test_two_lives_of_a_store_have_no_revision_in_common() -> None:
    revisions = sorted(Store().revision for _ in range(100))
    assert all(later - earlier > 10**9 for earlier, later in itertools.pairwise(revisions))
    assert revisions[0] > 0
    assert revisions[-1] < 2**62  # room for as many changes again


def test_leases_end_in_time_and_not_before() -> None:
    store = Store()
    short, _ = store.grant(10, 0, now_s=100.0)
    long, _ = store.grant(60, 0, now_s=100.0)
    _put(store, b"short", lease=short)
    _put(store, b"long", lease=long)
    revision = store.revision
    store.expire(109.9)
    assert store.keep_alive(short, 109.9) == 10
    store.expire(119.8)
    assert [key for key, _ in store.get(ALL)] == [b"long", b"short"]
    assert store.revision == revision
    store.expire(119.9)
    assert [key for key, _ in store.get(ALL)] == [b"long"]
    assert store.revision == revision + 1
    assert store.keep_alive(short, 119.9) == 0
    with pytest.raises(LeaseNotFoundError):
        store.check_put([(b"short", b"", short)])


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans()), max_size=30))
def test_a_lease_lives_for_its_time_after_the_last_renewal(turns: list[tuple[int, int, bool]]) -> None:
    store, now_s = Store(), 0
    ttls: dict[int, int] = {}
    ends_s: dict[int, int] = {}
    for ttl_s, pass_s, renews in turns:
        now_s += pass_s
        store.expire(now_s)
        if renews and ends_s:
            lease = min(ends_s)
            if store.keep_alive(lease, now_s):
                ends_s[lease] = now_s + ttls[lease]
        else:
            lease, granted_s = store.grant(ttl_s, 0, now_s)
            ttls[lease] = granted_s
            ends_s[lease] = now_s + granted_s
            _put(store, str(lease).encode(), lease=lease)
        living = {str(lease).encode() for lease, end_s in ends_s.items() if end_s > now_s}
        assert {key for key, _ in store.get(ALL)} == living


def test_the_clock_of_the_leases_stands_while_the_store_does() -> None:
    clock = ServingClock(1000.0, longest_gap_s=1.0)
    assert clock.look(1000.5) == pytest.approx(0.5)
    assert clock.look(5000.0) == pytest.approx(1.5)
    assert clock.look(5001.0) == pytest.approx(2.5)


def test_a_full_store_refuses_more_and_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_SIZE_BYTES", 1000)
    store = Store()
    _put(store, b"a", b"x" * 700)
    with pytest.raises(StoreFullError):
        store.check_put([(b"b", b"x" * 200, 0)])
    _put(store, b"a", b"x" * 10)
    _put(store, b"b", b"x" * 200)
    store.delete(ALL, store.revision + 1)
    assert store.size_bytes == 0


KEYS = st.binary(min_size=1, max_size=3)


@given(st.lists(st.tuples(KEYS, st.binary(max_size=3), st.booleans())), KEYS, KEYS)
def test_a_range_holds_what_lies_in_it_in_order(
    changes: list[tuple[bytes, bytes, bool]], first: bytes, end: bytes
) -> None:
    store, model = Store(), {}
    for key, value, stays in changes:
        _put(store, key, value)
        model[key] = value
        if not stays:
            assert store.delete(Range(key), store.revision + 1) == 1
            del model[key]
    for wanted in (Range(first), Range(first, end), Range(first, b"\0")):
        expected = [(key, model[key]) for key in sorted(model) if wanted.holds(key)]
        assert [(key, entry.value) for key, entry in store.get(wanted)] == expected
    assert store.delete(ALL, store.revision + 1) == len(model)
    assert store.size_bytes == 0


# ---- requests

NAMES = st.sampled_from(
    [
        *("key", "value", "lease", "range_end", "compare", "success", "failure", "target", "result", "mod_revision"),
        *("request_put", "request_range", "request_delete_range", "TTL", "ID", "prev_kv", "limit"),
    ]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["MOD", "EQUAL", "VERSION", "YQ==", "AA==", "7", "-1", "9" * 30, "\ud800", ""]),
    st.text(max_size=8),
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=15
)
METHODS = st.sampled_from(
    [
        *("kv/range", "kv/put", "kv/deleterange", "kv/txn", "lease/grant", "lease/keepalive", "lease/revoke"),
        *("auth/authenticate", "", "kv/", "../kv/put"),
    ]
)


@given(METHODS, st.dictionaries(NAMES, ANYTHING, max_size=4).map(lambda body: json.dumps(body).encode()) | st.binary())
def test_every_request_is_answered_and_a_refused_one_changes_nothing(method: str, body: bytes) -> None:
    store = Store()
    gateway = Gateway(store)
    _put(store, b"a", b"1")
    before = store.revision, store.get(ALL), store.size_bytes
    answer = gateway.answer(method, body, 0.0)
    json.dumps(answer.body)
    if answer.status != 200:
        assert set(answer.body) == {"error", "message", "code"}
        assert (store.revision, store.get(ALL), store.size_bytes) == before
    assert gateway.answer("kv/txn", b"", 0.0).status == 200


@pytest.mark.parametrize(
    ("method", "body", "says"),
    [
        ("kv/range", {"key": "YQ==", "limit": "1"}, "'limit'"),
        ("kv/put", {"key": "YQ==", "prev_kv": True}, "'prev_kv'"),
        ("kv/txn", {"compare": [{"key": "YQ==", "target": "VERSION", "version": "1"}]}, "'version'"),
        ("kv/txn", {"compare": [{"key": "YQ==", "target": "VALUE"}]}, "MOD only"),
        ("kv/txn", {"success": [{"request_txn": {}}]}, "'request_txn'"),
        ("watch", {}, "/v3/watch is not served"),
    ],
)
def test_what_etcd_can_and_we_cannot_is_refused_by_name(method: str, body: dict[str, Any], says: str) -> None:
    answer = Gateway(Store()).answer(method, json.dumps(body).encode(), 0.0)
    assert (answer.status, answer.body["code"]) == (501, 12)
    assert says in answer.body["message"]


def test_a_transaction_that_cannot_be_finished_is_not_begun() -> None:
    store = Store()
    key = b64encode(b"a").decode()
    other = b64encode(b"b").decode()
    puts = [{"request_put": {"key": key}}, {"request_put": {"key": other, "lease": "5"}}]
    answer = Gateway(store).answer("kv/txn", json.dumps({"success": puts}).encode(), 0.0)
    assert answer.body["code"] == 5
    assert store.get(ALL) == []


def test_a_body_nested_too_deeply_is_refused() -> None:
    answer = Gateway(Store()).answer("kv/put", b"[" * 100_000, 0.0)
    assert answer.status == 400


# ---- where it listens


def _addresses(monkeypatch: pytest.MonkeyPatch, name: str, leads_to: dict[str, list[str]]) -> list[str]:
    """The addresses on which a store listens, where names lead to these."""
    real = socket.getaddrinfo

    def look_up(host: str | None, port: int, **options: Any) -> Any:
        return [found for address in leads_to.get(host or "", [host]) for found in real(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    sockets = listen(name, 0)
    found = [one.getsockname()[:2] for one in sockets]
    for one in sockets:
        one.close()
    assert len({port for _, port in found}) == 1
    return sorted(address for address, _ in found)


def test_a_host_whose_name_leads_to_loopback_is_reached_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "0.0.0.0" in _addresses(monkeypatch, "node-7", {"node-7": ["127.0.1.1"]})


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_who_says_loopback_means_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert _addresses(monkeypatch, name, {"localhost": ["127.0.0.1"]}) == ["127.0.0.1"]


def test_addresses_of_other_hosts_are_passed_over_where_one_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _addresses(monkeypatch, "node-7", {"node-7": ["203.0.113.1", "127.0.0.2"]}) == ["127.0.0.2"]
