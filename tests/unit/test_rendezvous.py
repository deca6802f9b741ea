"""The parts of the etcd rendezvous that need no etcd: codec, settings, judgement of the dead."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from elastictrain.errors import ConfigError
from elastictrain.kv.settings import PASSWORD_VARIABLE, parse_settings
from elastictrain.rendezvous.codec import MAX_SIZE_BYTES, decode, encode
from elastictrain.rendezvous.holder import Moments, Silence

COUNTS = st.integers(0, 2**63 - 1)
NODES = st.builds(_NodeDesc, st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), COUNTS, COUNTS)
MOMENTS = st.datetimes(
    datetime(1970, 1, 2),
    datetime(2999, 1, 1),
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45)), timezone(timedelta(hours=-8))]),
)


@st.composite
def states(draw: st.DrawFn) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.closed = draw(COUNTS), draw(st.booleans()), draw(st.booleans())
    state.deadline = draw(st.none() | MOMENTS)
    participants = draw(st.lists(NODES, max_size=5, unique=True))
    ranks = draw(st.lists(COUNTS, min_size=len(participants), max_size=len(participants), unique=state.complete))
    state.participants = dict(zip(participants, ranks, strict=True))
    some = NODES if not participants else NODES | st.sampled_from(participants)
    state.wait_list = draw(st.sets(some, max_size=3))
    state.redundancy_list = draw(st.sets(some, max_size=3))
    state.last_heartbeats = draw(st.dictionaries(some, MOMENTS, max_size=5))
    return state


@given(states())
def test_a_state_comes_back_as_it_was_and_equal_states_are_equal_bytes(state: _RendezvousState) -> None:
    value = encode(state)
    back = decode(value, "the key")
    assert vars(back) == vars(state)
    assert encode(back) == value
    assert json.loads(value)["format"] == 1


@given(st.binary(max_size=200))
def test_bytes_that_are_no_state_are_refused_by_name(value: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="the key of run 7"):
        decode(value, "the key of run 7")


class _Trap:
    loaded = False

    def __setstate__(self, _: Any) -> None:
        _Trap.loaded = True


def test_a_pickle_is_refused_and_not_loaded() -> None:
    trap = _Trap()
    trap.__dict__["x"] = 1
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(RendezvousStateError, match="Nothing was loaded"):
            decode(pickle.dumps(trap, protocol), "the key")
        with pytest.raises(RendezvousStateError):
            decode(pickle.dumps(_RendezvousState(), protocol), "the key")
    assert not _Trap.loaded


def _damaged(**changes: Any) -> bytes:
    state = _RendezvousState()
    state.participants[_NodeDesc("a", 1, 0)] = 0
    stored = json.loads(encode(state))
    return json.dumps({**stored, **changes}).encode()


NODE = {"addr": "a", "pid": 1, "local_id": 0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "format"),
        ({"round": -1}, "round"),
        ({"round": "1"}, "round"),
        ({"complete": 1}, "complete"),
        ({"extra": 1}, "extra"),
        ({"deadline": "2026-01-01T00:00:00"}, "deadline"),
        ({"nodes": [{**NODE, "pid": True}]}, r"nodes\.0\.pid"),
        ({"nodes": [{**NODE, "addr": ""}]}, r"nodes\.0\.addr"),
        ({"nodes": [NODE, NODE]}, "twice"),
        ({"complete": True, "nodes": [{**NODE, "rank": 0}, {**NODE, "pid": 2, "rank": 0}]}, "same rank"),
    ],
)
def test_what_is_wrong_with_a_state_is_said(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RendezvousStateError, match=says):
        decode(_damaged(**changes), "the key")


def test_a_value_too_large_to_be_a_state_is_not_even_parsed() -> None:
    with pytest.raises(RendezvousStateError, match="more than a state can have"):
        decode(b" " * MAX_SIZE_BYTES + _damaged(), "the key")


# ---- settings


def test_endpoints_are_completed() -> None:
    assert parse_settings("a, b:1 ,http://[::1]:7,https://c", {}).endpoints == (
        "http://a:2379",
        "http://b:1",
        "http://[::1]:7",
        "https://c:2379",
    )


def test_certificates_mean_tls(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    assert parse_settings("a,https://b", {"ca_cert": str(ca)}).endpoints == ("https://a:2379", "https://b:2379")


def test_the_password_comes_from_a_file_or_the_environment_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    by_file = parse_settings("a", {"user": "u", "password_file": str(file)}, {})
    by_variable = parse_settings("a", {"user": "u"}, {PASSWORD_VARIABLE: "s3cret"})
    assert by_file == by_variable
    assert by_file.password == "s3cret"
    assert "s3cret" not in repr(by_file)


@pytest.mark.parametrize(
    ("endpoint", "options", "says"),
    [
        ("", {}, "HOST:PORT"),
        ("a,,b", {}, "HOST:PORT"),
        ("a:port", {}, "'a:port'"),
        ("ftp://a", {}, "HOST:PORT"),
        ("a/path", {}, "HOST:PORT"),
        ("u:p@a", {}, "a user or a password"),
        ("a", {"pasword_file": "x"}, "pasword_file"),
        ("a", {"password": "x"}, "torchrun logs it"),
        ("a", {"user": "u"}, "no password"),
        ("a", {"password_file": "/nowhere"}, "no `user`"),
        ("a", {"user": "u", "password_file": "/nowhere/at/all"}, "No such file"),
        ("a", {"cert": __file__}, "`cert` and `key`"),
        ("a", {"ca_cert": "/nowhere"}, "no such file"),
        ("http://a", {"ca_cert": __file__}, "names http://"),
        ("a", {"request_timeout_s": "soon"}, "request_timeout_s=soon"),
        ("a", {"request_timeout_s": "0"}, "request_timeout_s=0"),
        ("a", {"lease_ttl_s": "nan"}, "lease_ttl_s=nan"),
    ],
)
def test_what_cannot_be_meant_is_refused(endpoint: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_settings(endpoint, options, {})


# ---- who is dead

A, B = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def _beat(count: int) -> datetime:
    return EPOCH + timedelta(seconds=count)


def test_a_node_is_dead_when_its_heartbeat_stood_still_for_the_limit() -> None:
    silence = Silence(limit_s=15, gap_s=6)
    found = [silence.look({A: _beat(now // 5), B: _beat(0)}, now) for now in range(16)]
    assert found == [[]] * 15 + [[B]]


def test_a_clock_that_is_an_hour_off_kills_nobody() -> None:
    silence = Silence(limit_s=15, gap_s=6)
    assert not any(silence.look({A: _beat(now - 3600), B: _beat(now + 3600)}, now) for now in range(100))


@pytest.mark.parametrize("noticed", [True, False])
def test_time_in_which_nobody_could_look_does_not_count(noticed: bool) -> None:
    silence = Silence(limit_s=15, gap_s=6)
    for now in range(5):
        assert not silence.look({B: _beat(0)}, now)
    if noticed:
        silence.forget()
    back = 10 if noticed else 100
    found = [silence.look({B: _beat(0)}, now) for now in range(back, back + 16)]
    assert found == [[]] * 15 + [[B]]


# ---- whose time it is

HOUR = timedelta(hours=1)
OFFSETS = st.timedeltas(-HOUR, HOUR)
LAST_CALL_S = 30.0


def _with_moments(deadline: datetime | None = None, heartbeat: datetime | None = None) -> _RendezvousState:
    state = _RendezvousState()
    state.deadline = deadline
    if heartbeat is not None:
        state.last_heartbeats[A] = heartbeat
    return state


@given(OFFSETS, OFFSETS, st.lists(OFFSETS, min_size=1, max_size=4))
def test_a_deadline_comes_one_last_call_after_it_was_first_seen(
    setters: timedelta, ours: timedelta, jumps: list[timedelta]
) -> None:
    """Whatever the clock of the node that has set it says, and however ours is set meanwhile."""
    stored = EPOCH + setters + timedelta(seconds=LAST_CALL_S)
    moments = Moments(last_call_s=LAST_CALL_S, node=A)
    for place, jump in enumerate([timedelta(), *jumps]):
        passed_s = place * LAST_CALL_S / len(jumps)
        now = EPOCH + ours + jump + timedelta(seconds=passed_s)
        state = _with_moments(stored)
        moments.take_in(state, 1000.0 + passed_s, now)
        assert state.deadline is not None
        left_s = (state.deadline - now).total_seconds()
        assert left_s == pytest.approx(LAST_CALL_S - passed_s, abs=1e-4)
        moments.give_out(state)
        assert state.deadline == stored, "others would count anew"


def test_another_deadline_counts_anew() -> None:
    moments = Moments(last_call_s=LAST_CALL_S, node=A)
    for stored, now_s in ((EPOCH, 0.0), (EPOCH - HOUR, 20.0)):
        state = _with_moments(stored)
        moments.take_in(state, now_s, EPOCH)
        assert state.deadline == EPOCH + timedelta(seconds=LAST_CALL_S)


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
def test_our_next_heartbeat_is_due_in_time_though_our_clock_is_set(jump: timedelta) -> None:
    moments = Moments(last_call_s=LAST_CALL_S, node=A)
    state = _with_moments(heartbeat=EPOCH)
    moments.take_in(state, 0.0, EPOCH)
    for now_s in (2.0, 5.0):  # as at a look that etcd is not asked for
        moments.give_out(state)
        assert state.last_heartbeats == {A: EPOCH}
        moments.take_in(state, now_s, EPOCH + jump)
        assert EPOCH + jump - state.last_heartbeats[A] == timedelta(seconds=now_s)


def test_what_torch_has_set_meanwhile_is_given_out_as_it_is() -> None:
    moments = Moments(last_call_s=LAST_CALL_S, node=A)
    state = _with_moments(EPOCH, EPOCH)
    moments.take_in(state, 0.0, EPOCH)
    state.deadline = state.last_heartbeats[A] = EPOCH + HOUR
    moments.give_out(state)
    assert (state.deadline, state.last_heartbeats[A]) == (EPOCH + HOUR, EPOCH + HOUR)
