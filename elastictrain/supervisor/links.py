"""Which of the other nodes are reached from this one, whatever the store says of them.

Two nodes may both reach the store and not each other: both are alive for everybody, and still their ranks could wait
for each other for ever. So each supervisor listens on a port of its own, for no other purpose than that the others can
connect to it, and tries theirs: the connection itself is the answer, nothing is said on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ATTEMPT_S = 1.5
"""How long a connection may take to come about: a packet that is lost is sent again after 1 s (RFC 6298)."""
NUM_ATTEMPTS = 2
"""So many in a row must fail before a node counts as not reached: an event loop that was held up for long would take
its own delay for the network's."""
AGAIN_S = 1.0
"""Between two attempts on a node of which it is asked again."""


@dataclass(slots=True)
class _Link:
    """What is known of the way to one node.

    Args:
        place: address and port that were tried.
        task: the attempt that is under way or was the last.
        ended_s: when that ended.
        reached: the finding; None before the first.
    """

    place: tuple[str, int]
    task: asyncio.Task[None]
    ended_s: float = float("-inf")
    reached: bool | None = None


class Links:
    """The ways from this node to the others.

    Args:
        address: of this node, on which it can be tried.
        on_finding: called when something new has been found.
    """

    def __init__(self, address: str, on_finding: Callable[[], None]) -> None:
        self._address = address
        self._on_finding = on_finding
        self._server: asyncio.Server | None = None
        self._links: dict[str, _Link] = {}

    async def open(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(_hang_up, self._address, 0)

    async def close(self) -> None:
        """Ends every attempt, and listens no more."""
        tasks = [link.task for link in self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            server, self._server = self._server, None
            server.close()
            await server.wait_closed()

    @property
    def port(self) -> int:
        """Where the others can try; 0 before `open` and after `close`."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server is not None else 0

    @property
    def found(self) -> dict[str, bool]:
        """By node, whether it is reached; those of which nothing is known yet are left out."""
        return {node: link.reached for node, link in self._links.items() if link.reached is not None}

    def look_after(self, places: Mapping[str, tuple[str, int]], *, all_again: bool) -> None:
        """Tries the nodes that have not been reached, and does not wait for what comes of it.

        Args:
            places: address and port by node; others are forgotten.
            all_again: also those that were reached when they were tried last.
        """
        for node in set(self._links) - set(places):
            self._links.pop(node).task.cancel()
        now_s = asyncio.get_running_loop().time()
        for node, place in places.items():
            link = self._links.get(node)
            if link is not None and link.place != place:  # its supervisor is another one
                link.task.cancel()
                link = None
            if link is None:
                self._links[node] = _Link(place, asyncio.create_task(self._try(node, place)))
            elif link.task.done() and (all_again or not link.reached) and now_s - link.ended_s >= AGAIN_S:
                link.task = asyncio.create_task(self._try(node, place))

    async def _try(self, node: str, place: tuple[str, int]) -> None:
        reached = False
        for _ in range(NUM_ATTEMPTS):
            if reached := await _is_reached(*place):
                break
        link = self._links[node]
        link.ended_s = asyncio.get_running_loop().time()
        if reached != link.reached:
            link.reached = reached
            self._on_finding()


async def _is_reached(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(ATTEMPT_S):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return True  # nobody listens there any more, says the host itself
    except OSError:  # TimeoutError is one
        return False
    await _hang_up(None, writer)
    return True


async def _hang_up(_reader: asyncio.StreamReader | None, writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
