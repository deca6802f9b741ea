"""A node that does not find the others yet: its name service, played."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from elastictrain.config.schema import ElasticConfig
from elastictrain.core.membership import Standing
from elastictrain.errors import ConfigError, RendezvousError
from elastictrain.supervisor import arrival, endpoint
from elastictrain.supervisor.arrival import Arrival
from elastictrain.supervisor.endpoint import Way, endpoint_of
from elastictrain.supervisor.team import Alone, Assignment, Orders

RESOLVE = socket.getaddrinfo


class Names:
    """A name service in which `known` grows; counts look-ups."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.num_look_ups = 0
        self.answer = threading.Event()
        self.answer.set()

    def getaddrinfo(self, host: str, *args: Any, **kwargs: Any) -> Any:
        self.num_look_ups += 1
        self.answer.wait()
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return RESOLVE("127.0.0.1", *args, **kwargs)


class Others(Alone):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def open(self, orders: Orders) -> None:
        self.calls.append("open")

    def stand(self, standing: Standing, reason: str = "") -> None:
        self.calls.append(standing)

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    played = Names()
    monkeypatch.setattr(endpoint.socket, "getaddrinfo", played.getaddrinfo)
    monkeypatch.setattr(arrival, "LOOK_UP_S", 0.001)
    return played


def config(rendezvous: str) -> ElasticConfig:
    return ElasticConfig(nodes="1:2", rendezvous=rendezvous)


def arriving(
    rendezvous: str, *, patience_s: float = 60.0, others: Others | None = None
) -> tuple[Arrival, list[tuple[str, dict[str, Any]]], list[Way]]:
    events: list[tuple[str, dict[str, Any]]] = []
    ways: list[Way] = []

    def make(way: Way) -> Others:
        ways.append(way)
        return others if others is not None else Others()

    def emit(kind: str, /, **fields: Any) -> None:
        events.append((kind, fields))

    return Arrival(endpoint_of(config(rendezvous)), make, patience_s=patience_s, emit=emit), events, ways


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_name_that_is_not_known_yet_is_waited_for(names: Names) -> None:
    others = Others()
    team, events, ways = arriving("c10d://train-0.train:29400", others=others)

    async def it() -> Assignment:
        await team.open(cast("Orders", None))
        team.stand(Standing.READY)
        assembling = asyncio.create_task(team.assemble())
        await until(lambda: names.num_look_ups > 3)
        assert "train-0.train is no host that is known here (Name or service not known)" in team.waits_for
        assert not assembling.done()
        assert team.nodes == ()
        names.known.add("train-0.train")
        assignment = await assembling
        await team.close()
        return assignment

    assert asyncio.run(it()) == Assignment()
    assert [kind for kind, _ in events] == ["rendezvous_unknown", "rendezvous_found"]
    assert ways == [Way(ways[0].address, is_here=True)]
    assert others.calls == [Standing.READY, "open", "close"]


async def assembled(team: Arrival) -> Assignment:
    """From its begin to its end."""
    await team.open(cast("Orders", None))
    try:
        return await team.assemble()
    finally:
        await team.close()


def test_patience_with_a_name_ends_with_a_code_that_is_started_again(names: Names) -> None:
    team, _, ways = arriving("c10d://nosuch:29400", patience_s=0.05)

    with pytest.raises(RendezvousError, match=r"nosuch is no host .* \(waited for 0.05 s\)") as raised:
        asyncio.run(assembled(team))
    assert raised.value.exit_code == 75
    assert ways == []


def test_a_stop_need_not_wait_for_the_name_service(names: Names) -> None:
    names.answer.clear()
    team, _, ways = arriving("c10d://slow:29400")

    async def it() -> None:
        await team.open(cast("Orders", None))
        assembling = asyncio.create_task(team.assemble())
        await until(lambda: names.num_look_ups == 1)
        assert "slow" in team.waits_for
        assembling.cancel()
        await asyncio.gather(assembling, return_exceptions=True)
        await team.close()

    asyncio.run(it())  # it ends though the look-up has not
    names.answer.set()
    assert ways == []


def test_what_the_others_cannot_be_opened_with_is_said(names: Names) -> None:
    class Busy(Others):
        async def open(self, orders: Orders) -> None:
            raise ConfigError("no")

    names.known.add("here")
    team, _, _ = arriving("c10d://here:29400", others=Busy())

    with pytest.raises(ConfigError, match="no"):
        asyncio.run(assembled(team))


def test_one_member_of_etcd_whose_name_is_known_is_enough(names: Names) -> None:
    names.known.add("etcd-1")
    found = endpoint_of(config("etcd://etcd-0:2379,etcd-1:2379"))
    assert found.hosts == ("etcd-0", "etcd-1")
    assert not found.find_way().is_here  # etcd is no process of ours


@pytest.mark.parametrize("host", ["300.1.1.1", "1.2.3.4.5", "a..b", "x" * 64])
def test_what_can_never_be_a_host_is_refused_at_once(host: str, names: Names) -> None:
    with pytest.raises(ConfigError, match="neither a host's name nor an IP address") as raised:
        endpoint_of(config(f"c10d://{host}:29400"))
    assert raised.value.exit_code == 78
    assert names.num_look_ups == 0


@pytest.mark.parametrize("host", ["10.0.0.1", "train-0.train", "gpu_1", "[fe80::1]", "host."])
def test_what_may_be_a_host_is_not(host: str, names: Names) -> None:
    assert endpoint_of(config(f"c10d://{host}:29400")).hosts == (host.strip("[]"),)
