"""The etcd rendezvous where nobody answers: silent members, dropped packets, names that are never resolved.

A request that would wait for ever has no time of its own to be measured here: these tests end, or run into the limit
that all tests have.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastictrain.kv.bounded import MAX_LEFT_BEHIND, THREAD_NAME
from elastictrain.kv.client import EtcdClient, EtcdUnavailableError
from elastictrain.kv.settings import EtcdSettings
from elastictrain.rendezvous.backend import EtcdBackend
from tests.process.etcd_cluster import NEEDS_ETCD, etcd
from tests.process.etcd_proxy import proxies, trickling
from tests.process.etcd_runs import runs
from tests.process.helpers import ROOT, wait_until

TTL_S = 7200


def _client(*endpoints: str) -> EtcdClient:
    return EtcdClient(EtcdSettings(endpoints=endpoints, request_timeout_s=0.3))


@NEEDS_ETCD
def test_a_silent_member_costs_a_request_its_time_and_the_next_is_asked(tmp_path: Path) -> None:
    with etcd(tmp_path, size=1) as cluster, proxies(cluster.urls) as (proxy,):
        client = _client(proxy.url, cluster.urls[0])
        backend = EtcdBackend(client, "silent", TTL_S)
        assert backend.get_state() is None  # over the proxy: a connection is open now
        proxy.fall_silent()
        assert backend.get_state() is None
        alone = EtcdBackend(_client(proxy.url), "silent", TTL_S)
        with pytest.raises(RendezvousConnectionError, match=f"{proxy.url}: no answer within 0.3 s"):
            alone.get_state()
        proxy.speak()
        assert wait_until(lambda: _answers(alone))


def _answers(backend: EtcdBackend) -> bool:
    try:
        backend.get_state()
    except RendezvousConnectionError:
        return False
    return True


def test_an_answer_that_trickles_is_not_waited_for() -> None:
    with trickling() as url:
        client = _client(url)
        for _ in range(MAX_LEFT_BEHIND + 2):
            with pytest.raises(EtcdUnavailableError, match="no answer within"):
                client.get("key")
        left = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
        assert len(left) == MAX_LEFT_BEHIND, "no more wait than have to"
    wait_until(lambda: not any(thread.is_alive() for thread in left))


IN_A_NETWORK_OF_ITS_OWN = """
mount --bind "$1" /etc/resolv.conf
ip link set lo up
ip link add void type veth peer name beyond
ip link set beyond up
ip address add 192.0.2.1/24 dev void
ip link set void up
ip neighbour add 192.0.2.9 lladdr 02:00:00:00:00:09 dev void
exec "$2" -c 'import sys
from elastictrain.kv.client import EtcdClient, EtcdUnavailableError
from elastictrain.kv.settings import EtcdSettings
client = EtcdClient(EtcdSettings(endpoints=tuple(sys.argv[1:]), request_timeout_s=0.5))
try:
    client.get("key")
except EtcdUnavailableError as error:
    print(error)
' http://192.0.2.9:2379 http://etcd.example.org:2379
"""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="a network of its own needs root and ip")
def test_dropped_packets_and_a_name_server_that_is_silent(tmp_path: Path) -> None:
    """The kernel would try to connect for two minutes, the resolver for two and a half."""
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 192.0.2.9\noptions timeout:30 attempts:5\n")
    script = tmp_path / "script"
    script.write_text(IN_A_NETWORK_OF_ITS_OWN)
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-e", str(script), str(resolver), sys.executable],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "http://192.0.2.9:2379: no answer within 0.5 s; http://etcd.example.org:2379: no answer" in done.stdout, done


@pytest.mark.soak
@NEEDS_ETCD
def test_training_goes_on_while_all_of_etcd_is_silent(tmp_path: Path) -> None:
    """A restart waits until it speaks again; an end does not."""
    (tmp_path / "etcd").mkdir()
    with etcd(tmp_path / "etcd") as cluster, proxies(cluster.urls) as holes:
        endpoint = ",".join(hole.url for hole in holes)
        with runs(tmp_path, endpoint, "2") as run:
            run.start_agent()
            run.start_agent()
            group = run.wait_group(2, set())
            for hole in holes:
                hole.fall_silent()
            wait_until(lambda: "cannot see whether nodes wait" in run.logs())
            run.wait_steps(group, 1000)
            os.kill(min(group), signal.SIGKILL)
            wait_until(lambda: run.logs().count("rendezvous waits for etcd") >= 2)
            assert set(run.ranks()) == set(group)
            for hole in holes:
                hole.speak()
            second = run.wait_group(2, set(group))
            for hole in holes:
                hole.fall_silent()
            run.wait_steps(second, 100)
            run.finish(*run.agents)
