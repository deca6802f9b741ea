"""Whether other nodes are reached, over real sockets."""

from __future__ import annotations

import asyncio
import socket

from elastictrain.supervisor import links
from elastictrain.supervisor.links import Links

DEADLINE_S = 30.0


async def find(mine: Links, places: dict[str, tuple[str, int]], changed: asyncio.Event) -> dict[str, bool]:
    """What is found about all the places."""
    async with asyncio.timeout(DEADLINE_S):
        while set(mine.found) != set(places):
            changed.clear()
            mine.look_after(places, all_again=False)
            await changed.wait()
    return mine.found


def test_two_that_listen_reach_each_other_and_one_that_has_ended_is_reached_as_a_host() -> None:
    async def run() -> None:
        changed = asyncio.Event()
        mine, other, ended = (Links("127.0.0.1", changed.set) for _ in range(3))
        for each in (mine, other, ended):
            await each.open()
        places = {"other": ("127.0.0.1", other.port), "ended": ("127.0.0.1", ended.port)}
        await ended.close()
        assert ended.port == 0
        assert await find(mine, places, changed) == {"other": True, "ended": True}
        mine.look_after({}, all_again=False)
        assert mine.found == {}
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_silence_is_not_reached_until_somebody_answers() -> None:
    async def run() -> None:
        changed = asyncio.Event()
        mine = Links("127.0.0.1", changed.set)
        with socket.socket() as deaf, socket.socket() as filler:
            # With its queue full, a listener's kernel lets further attempts go unanswered, as a dead host does.
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            place = deaf.getsockname()
            filler.connect(place)
            assert await find(mine, {"deaf": place}, changed) == {"deaf": False}
            deaf.settimeout(DEADLINE_S)
            deaf.accept()[0].close()
            async with asyncio.timeout(DEADLINE_S):
                while not mine.found["deaf"]:
                    mine.look_after({"deaf": place}, all_again=False)
                    await asyncio.sleep(links.AGAIN_S / 10)
            await mine.close()

    asyncio.run(run())
