"""The rendezvous backend `elastictrain-etcd`, on real etcd, and under plain torchrun."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import urllib3
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)

from elastictrain.drill.nodes.etcd import Etcd
from elastictrain.errors import ConfigError
from elastictrain.kv.client import EtcdClient
from elastictrain.kv.settings import EtcdSettings
from elastictrain.rendezvous.backend import PREFIX, EtcdBackend, EtcdRefusesError, RoundStore
from elastictrain.rendezvous.codec import decode, encode
from elastictrain.rendezvous.entry import BACKEND
from elastictrain.rendezvous.holder import EtcdStateHolder
from tests.nodes.clock import shifted_clock
from tests.process.etcd_cluster import NEEDS_ETCD, etcd
from tests.process.etcd_runs import runs
from tests.process.helpers import descendants, wait_until

pytestmark = NEEDS_ETCD

TTL_S = 7200


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """Three members that no test harms."""
    with etcd(tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


def _backend(cluster: Etcd, run_id: str = "run", ttl_s: int = TTL_S, **settings: Any) -> EtcdBackend:
    return EtcdBackend(EtcdClient(cluster.settings(**settings)), run_id, ttl_s)


def _state(round_number: int, *addresses: str) -> bytes:
    state = _RendezvousState()
    state.round = round_number
    state.participants = {_NodeDesc(address, 1, 0): 0 for address in addresses}
    return encode(state)


def _write(cluster: Etcd, key: str, value: bytes) -> None:
    client = EtcdClient(cluster.settings())
    client.put(key, value, client.grant_lease(TTL_S))


def _delete(cluster: Etcd, key: str) -> None:
    body = {"key": base64.b64encode(key.encode()).decode()}
    assert urllib3.request("POST", f"{cluster.urls[0]}/v3/kv/deleterange", json=body).json()["deleted"] == "1"


# ---- one key, many writers


def test_only_who_knows_the_present_state_may_change_it(shared: Etcd) -> None:
    one, two = _backend(shared, "swap"), _backend(shared, "swap")
    assert one.get_state() is None

    first = one.set_state(_state(0, "one"))
    assert first is not None
    assert first[2]
    late = two.set_state(_state(0, "two"))
    assert late == (*first[:2], False)

    second = two.set_state(_state(0, "one", "two"), late[1])
    assert second is not None
    assert second[2]
    assert one.set_state(_state(7, "one"), first[1]) == (*second[:2], False)
    assert one.get_state() == second[:2]


def test_of_two_writers_at_once_exactly_one_wins_each_time(shared: Etcd) -> None:
    writers = [_backend(shared, "race") for _ in range(2)]
    token = None
    with ThreadPoolExecutor(len(writers)) as pool:
        for turn in range(50):
            values = [_state(turn, f"writer{place}") for place in range(2)]
            answers = list(pool.map(lambda w, v, t=token: w.set_state(v, t), writers, values))
            assert sorted(answer[2] for answer in answers if answer) == [False, True]
            assert len({answer[:2] for answer in answers if answer}) == 1
            assert answers[0] is not None
            token = answers[0][1]


def test_a_write_whose_answer_was_lost_counts_as_written(shared: Etcd) -> None:
    backend = _backend(shared, "lost")
    first = backend.set_state(_state(0, "a"))
    assert first is not None
    second = backend.set_state(_state(1, "a"), first[1])
    assert second is not None
    assert backend.set_state(_state(1, "a"), first[1]) == second


def test_a_key_that_is_gone_is_told_from_one_that_was_changed(shared: Etcd) -> None:
    backend = _backend(shared, "gone")
    first = backend.set_state(_state(0, "a"))
    assert first is not None
    _delete(shared, backend.key)
    assert backend.set_state(_state(1, "a"), first[1]) is None
    again = backend.set_state(_state(1, "a"), None)
    assert again is not None
    assert again[2]


def test_a_state_that_etcd_has_lost_is_written_again_from_a_nodes_copy(shared: Etcd) -> None:
    node = _NodeDesc("a", 1, 0)
    minute = timedelta(minutes=1)
    settings = RendezvousSettings(
        "copy", 1, 2, RendezvousTimeout(), keep_alive_interval=minute, keep_alive_max_attempt=3
    )
    backend = _backend(shared, "copy")
    holder = EtcdStateHolder(backend, settings, node)
    holder.state.participants[node] = 0
    holder.state.complete = True
    holder.mark_dirty()
    assert holder.sync() is True
    _delete(shared, backend.key)
    holder.state.last_heartbeats[node] = datetime.now(UTC)
    holder.mark_dirty()
    assert holder.sync() is True
    stored = _stored(shared, "copy")
    assert stored.participants == {node: 0}
    assert set(stored.last_heartbeats) == {node}


def test_the_keys_of_a_run_go_with_its_lease_and_another_lease_is_taken(shared: Etcd) -> None:
    backend = _backend(shared, "leased", ttl_s=1)
    assert backend.set_state(_state(0, "a"))
    backend.publish_store(0, RoundStore(node="a_1_0", host="127.0.0.1", port=1))
    wait_until(lambda: backend.get_state() is None and backend.find_store(0) is None)
    answer = backend.set_state(_state(1, "a"))
    assert answer is not None
    assert answer[2]


def test_one_run_cannot_reach_into_the_keys_of_another(shared: Etcd) -> None:
    outer, inner = _backend(shared, "a"), _backend(shared, "a/store/0")
    inner.set_state(_state(3, "x"))
    assert outer.find_store(0) is None
    assert inner.key.startswith(PREFIX)


@pytest.mark.parametrize(
    "value", [b"", b"garbage", b"{}", pickle.dumps(_RendezvousState()), pickle.dumps(print)], ids=repr
)
def test_what_is_no_state_is_refused_with_the_name_of_the_key(shared: Etcd, value: bytes) -> None:
    backend = _backend(shared, "refused")
    _write(shared, backend.key, value)
    for request in (backend.get_state, lambda: backend.set_state(_state(0), None)):
        with pytest.raises(RendezvousStateError, match=f"{backend.key} in etcd .*Nothing was loaded"):
            request()
    _write(shared, f"{backend.key}/store/0", value)
    with pytest.raises(RendezvousStateError, match="store/0"):
        backend.find_store(0)


def test_a_pickled_state_is_not_written(shared: Etcd) -> None:
    backend = _backend(shared, "pickled")
    with pytest.raises(RendezvousStateError):
        backend.set_state(pickle.dumps(_RendezvousState()))
    assert backend.get_state() is None


# ---- members that fail


def test_a_member_is_killed_the_leader_stands_still_and_all_are_gone(tmp_path: Path) -> None:
    with etcd(tmp_path) as cluster:
        backend = _backend(cluster, request_timeout_s=2.0)
        written = backend.set_state(_state(0, "a"))
        assert written is not None
        state, token = written[:2]

        def survives(round_number: int) -> tuple[bytes, Any]:
            # While a leader is elected, requests fail: which is what a rendezvous waits out.
            def swapped() -> tuple[bytes, Any] | None:
                try:
                    answer = backend.set_state(_state(round_number, "a"), token)
                except RendezvousConnectionError:
                    return None
                assert answer is not None
                assert answer[2]
                return answer[:2]

            found: tuple[bytes, Any] = wait_until(swapped)
            return found

        cluster.kill(0)  # whichever it is
        state, token = survives(1)
        cluster.start(0)
        wait_until(lambda: _answers(cluster, 0))

        stopped = cluster.leader()
        cluster.signal(stopped, signal.SIGSTOP)
        state, token = survives(2)
        cluster.signal(stopped, signal.SIGCONT)

        cluster.kill()
        with pytest.raises(RendezvousConnectionError) as caught:
            backend.get_state()
        assert all(url in str(caught.value) for url in cluster.urls)
        cluster.start()
        cluster.wait_ready()
        assert backend.get_state() == (state, token)


def _answers(cluster: Etcd, member: int) -> bool:
    try:
        EtcdBackend(EtcdClient(EtcdSettings(endpoints=(cluster.urls[member],))), "any", TTL_S).get_state()
    except RendezvousConnectionError:
        return False
    return True


# ---- who may


def _administer(url: str, method: str, **body: Any) -> None:
    answer = urllib3.request("POST", f"{url}/v3/auth/{method}", json=body)
    assert answer.status == 200, answer.data


def test_user_and_password(tmp_path: Path) -> None:
    key, end = (base64.b64encode(text.encode()).decode() for text in (PREFIX, PREFIX[:-1] + chr(ord("/") + 1)))
    trainer: dict[str, Any] = {"user": "trainer", "password": "pass-w0rd"}
    with etcd(tmp_path, size=1) as cluster:
        url = cluster.urls[0]
        _administer(url, "role/add", name="rdzv")
        _administer(url, "role/grant", name="rdzv", perm={"permType": "READWRITE", "key": key, "range_end": end})
        for user, password in (("root", "r00t"), ("trainer", "pass-w0rd"), ("guest", "guest-w0rd")):
            _administer(url, "user/add", name=user, password=password)
        _administer(url, "user/grant", user="root", role="root")
        _administer(url, "user/grant", user="trainer", role="rdzv")
        _administer(url, "enable")

        backend = _backend(cluster, **trainer)
        written = backend.set_state(_state(0, "a"))
        assert written is not None
        for who in ({}, {**trainer, "password": "wr0ng"}, {"user": "guest", "password": "guest-w0rd"}):
            with pytest.raises(EtcdRefusesError, match=url) as caught:
                _backend(cluster, **who).get_state()
            assert str(who.get("password", "pass-w0rd")) not in str(caught.value)

        # A member that restarts has forgotten the tokens it gave.
        cluster.kill(0)
        cluster.start(0)
        cluster.wait_ready(cluster.settings(user="root", password="r00t"))
        assert backend.get_state() == written[:2]
        assert backend.set_state(_state(1, "a"), written[1])


def _certificate(folder: Path, name: str, *options: str) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}", *options),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    authority = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _certificate(tmp_path, "ca", *authority)
    _certificate(tmp_path, "other", *authority)
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    _certificate(tmp_path, "server", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    _certificate(tmp_path, "client", *signed)
    path = {name: tmp_path / name for name in ("ca.pem", "other.pem", "server.pem", "server.key", "client.key")}
    options = ["--cert-file", str(path["server.pem"]), "--key-file", str(path["server.key"])]
    options += ["--client-cert-auth", "--trusted-ca-file", str(path["ca.pem"])]
    good = {"ca_cert": path["ca.pem"], "cert": tmp_path / "client.pem", "key": path["client.key"]}
    with etcd(tmp_path, size=1, server_options=options, **good) as cluster:
        answer = _backend(cluster, **good).set_state(_state(0, "a"))
        assert answer is not None
        assert answer[2]
        for bad in ({"ca_cert": path["ca.pem"]}, {**good, "ca_cert": path["other.pem"]}):
            with pytest.raises(RendezvousConnectionError, match=cluster.urls[0]):
                _backend(cluster, **bad).get_state()


def test_certificates_and_a_password_by_options(tmp_path: Path) -> None:
    """As torchrun hands them over: to a handler, over TLS, with a user."""
    _certificate(tmp_path, "ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    _certificate(tmp_path, "server", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    (tmp_path / "password").write_text("r00t\n")
    served = ["--cert-file", str(tmp_path / "server.pem"), "--key-file", str(tmp_path / "server.key")]
    with etcd(tmp_path, size=1, server_options=served, ca_cert=tmp_path / "ca.pem") as cluster:
        admin = urllib3.PoolManager(ca_certs=str(tmp_path / "ca.pem"))
        user = {"name": "root", "password": "r00t"}
        for method, body in (("user/add", user), ("user/grant", {"user": "root", "role": "root"}), ("enable", {})):
            answer = admin.request("POST", f"{cluster.urls[0]}/v3/auth/{method}", json=body)
            assert answer.status == 200, answer.data

        options: dict[str, str] = {
            "user": "root",
            "password_file": f"{tmp_path}/password",
            "ca_cert": f"{tmp_path}/ca.pem",
        }
        (found,) = entry_points(group="torchrun.handlers", name=BACKEND)

        def handler(endpoint: str, run_id: str = "secured", **changes: str) -> RendezvousHandler:
            parameters = RendezvousParameters(BACKEND, endpoint, run_id, 1, 2, **{**options, **changes})
            made: RendezvousHandler = found.load()()(parameters)
            return made

        address = cluster.urls[0].removeprefix("https://")
        for endpoint in (address, cluster.urls[0]):
            made = handler(endpoint, endpoint)
            assert not made.is_closed()
            made.set_closed()
            assert handler(address, endpoint).is_closed()
        (tmp_path / "other").write_text("wr0ng")
        with pytest.raises(EtcdRefusesError) as caught:
            handler(address, password_file=f"{tmp_path}/other").set_closed()
        assert "wr0ng" not in str(caught.value)
        with pytest.raises(ConfigError, match=f"certificates for etcd cannot be used.*{tmp_path}/password"):
            handler(address, ca_cert=f"{tmp_path}/password")


# ---- under torchrun


def test_torch_finds_the_handler_by_its_entry_point(shared: Etcd) -> None:
    (found,) = entry_points(group="torchrun.handlers", name=BACKEND)
    handler = found.load()()(RendezvousParameters(BACKEND, shared.endpoint, "entry", 1, 2, timeout=900))
    assert handler.get_backend() == BACKEND
    assert handler.get_run_id() == "entry"
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()


def _stored(cluster: Etcd, run_id: str) -> _RendezvousState:
    found = _backend(cluster, run_id).get_state()
    assert found is not None
    return decode(found[0], run_id)


@pytest.mark.soak
def test_a_group_restarts_with_a_new_store_and_finishes(tmp_path: Path, shared: Etcd) -> None:
    with runs(tmp_path, shared.endpoint, "2") as run:
        run.start_agent()
        run.start_agent()
        known: set[int] = set()
        for _ in range(4):  # torch's own reuse of the store goes wrong in two of three
            group = run.wait_group(2, known)
            known |= set(group)
            os.kill(min(group), signal.SIGKILL)
        run.wait_group(2, known)
        run.finish(*run.agents)
    stored = _stored(shared, tmp_path.name)
    assert stored.closed
    assert stored.round == 4


@pytest.mark.soak
def test_training_goes_on_without_etcd_and_a_restart_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    with etcd(tmp_path / "etcd") as cluster, runs(tmp_path, cluster.endpoint, "2") as run:
        run.start_agent()
        run.start_agent()
        group = run.wait_group(2, set())
        cluster.kill()
        # Longer than the keep-alive: torch by itself would find every node dead now, itself included.
        wait_until(lambda: "cannot see whether nodes wait" in run.logs())
        run.wait_steps(group, 1000)
        cluster.start()
        cluster.wait_ready()
        before = _stored(cluster, tmp_path.name)
        assert len(before.participants) == 2
        # Both still take part, and say so: whoever joins now will be seen.
        wait_until(
            lambda: all(
                _stored(cluster, tmp_path.name).last_heartbeats[node] > before.last_heartbeats[node]
                for node in before.participants
            )
        )
        run.wait_steps(group, 200)
        assert _stored(cluster, tmp_path.name).participants == before.participants
        assert set(run.ranks()) == set(group)

        cluster.kill()
        os.kill(min(group), signal.SIGKILL)
        wait_until(lambda: run.logs().count("rendezvous waits for etcd") >= 2)
        assert set(run.ranks()) == set(group)
        cluster.start()
        run.wait_group(2, set(group))
        run.finish(*run.agents)


@pytest.mark.soak
def test_the_agent_that_serves_the_store_is_killed_and_another_joins(tmp_path: Path, shared: Etcd) -> None:
    with runs(tmp_path, shared.endpoint, "1:2") as run:
        agents = {run.start_agent().pid: run.agents[0], run.start_agent().pid: run.agents[1]}
        group = run.wait_group(2, set())
        first = next(rank.pid for rank in group.values() if rank.rank == 0)
        host = next(pid for pid in agents if first in {child.pid for child in descendants(pid)})
        agents.pop(host).kill()
        os.kill(first, signal.SIGKILL)
        (survivor,) = agents.values()
        alone = run.wait_group(1, set(run.ranks()))
        run.wait_steps(alone, 10)

        joined = run.start_agent()
        run.wait_group(2, set(run.ranks()))
        run.finish(survivor, joined)


@pytest.mark.soak
def test_nodes_whose_clocks_are_wrong(tmp_path: Path, shared: Etcd) -> None:
    """One whose clock is ahead has set the deadline of the round, and died.

    By the clock of the next it is two hours away. Then one comes whose clock is right, and neither takes the other for
    dead.
    """
    ghost = _NodeDesc("ghost", 1, 0)
    left = _RendezvousState()
    left.participants[ghost] = 0
    left.last_heartbeats[ghost] = datetime.now(UTC) + timedelta(hours=1)
    left.deadline = left.last_heartbeats[ghost] + timedelta(seconds=1)
    assert _backend(shared, tmp_path.name).set_state(encode(left))
    with runs(tmp_path, shared.endpoint, "1:3") as run:
        run.start_agent(shifted_clock(tmp_path, -3600))
        alone = run.wait_group(1, set())
        (behind,) = _stored(shared, tmp_path.name).last_heartbeats.values()
        assert datetime.now(UTC) - behind > timedelta(minutes=50), "its clock is wrong"
        run.wait_steps(alone, 10)
        run.start_agent()
        run.wait_group(2, set(alone))
        before = _stored(shared, tmp_path.name)
        longer = timedelta(seconds=10)  # than nodes may be silent
        wait_until(
            lambda: all(
                _stored(shared, tmp_path.name).last_heartbeats[node] > beat + longer
                for node, beat in before.last_heartbeats.items()
            )
        )
        after = _stored(shared, tmp_path.name)
        assert (after.round, set(after.participants)) == (before.round, set(before.participants))
        run.finish(*run.agents)
