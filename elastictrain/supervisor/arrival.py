"""A node on its way to the others: the name of the store's host may not be known yet.

Under Kubernetes a pod's name is in the DNS only once the pod runs; at boot a service may be faster than the network. So
the name is looked up until there is a way to its host; only then a node knows its own address, and whether the store
is for it to serve. All that time the supervisor is up: it says what it waits for, and can be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from elastictrain.core.membership import Standing
from elastictrain.core.status import NodeView, RankView
from elastictrain.errors import RendezvousError
from elastictrain.supervisor.endpoint import Endpoint, Way
from elastictrain.supervisor.team import Assignment, Orders, Team

LOOK_UP_S = 0.5
"""Between two look-ups of the name."""


class Arrival:
    """This node, before and after it has found the others. Implements `team.Team`.

    Args:
        endpoint: where they meet.
        make: this node among the others, from where it is.
        patience_s: how long `assemble` waits for a way to the endpoint.
        emit: takes events.
    """

    def __init__(
        self, endpoint: Endpoint, make: Callable[[Way], Team], *, patience_s: float, emit: Callable[..., None]
    ) -> None:
        self._endpoint = endpoint
        self._make = make
        self._patience_s = patience_s
        self._emit = emit
        self._team: Team | None = None
        self._task: asyncio.Task[Team] | None = None
        self._stands: tuple[Standing, str] | None = None
        self._has_looked_up = asyncio.Event()
        """No more is waited for: there is a way, or looking for it has failed for good."""
        self._error: RendezvousError | None = None
        self._lost_since_s = 0.0

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def waits_for(self) -> str:
        if self._team is not None:
            return self._team.waits_for
        if self._error is None:
            return f"{self._endpoint.host}, which elastic.rendezvous names, is being looked up"
        return f"for {time.monotonic() - self._lost_since_s:.0f} s now, {self._error.what}"

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        return self._team.nodes if self._team is not None else ()

    @property
    def other_ranks(self) -> tuple[RankView, ...]:
        return self._team.other_ranks if self._team is not None else ()

    @property
    def pids(self) -> frozenset[int]:
        return self._team.pids if self._team is not None else frozenset()

    async def open(self, orders: Orders) -> None:
        self._task = asyncio.create_task(self._arrive(orders))

    async def _arrive(self, orders: Orders) -> Team:
        try:
            way = await self._find_way()
        finally:
            self._has_looked_up.set()
        self._team = self._make(way)
        if self._stands is not None:
            self._team.stand(*self._stands)
        await self._team.open(orders)
        return self._team

    async def _find_way(self) -> Way:
        while True:
            try:
                way = await _in_thread(self._endpoint.find_way)
            except RendezvousError as error:
                if self._error is None:
                    self._lost_since_s = time.monotonic()
                    self._emit("rendezvous_unknown", why=error.what)
                self._error = error
                await asyncio.sleep(LOOK_UP_S)
                continue
            if self._error is not None:
                away_s = round(time.monotonic() - self._lost_since_s, 3)
                self._emit("rendezvous_found", away_s=away_s, address=way.address)
            return way

    async def assemble(self) -> Assignment:
        """As of the others.

        Raises:
            RendezvousError: there was no way to the endpoint for as long as there is patience.
        """
        assert self._task is not None
        try:
            async with asyncio.timeout(self._patience_s):
                await self._has_looked_up.wait()
        except TimeoutError:
            what = self._error.what if self._error is not None else f"{self.waits_for}, and there is no answer"
            raise RendezvousError(
                f"{what} (waited for {self._patience_s:g} s)",
                "Use a name that all nodes know, or an IP address; elastic.rendezvous_timeout_s is how long to wait.",
            ) from None
        team = await asyncio.shield(self._task)
        return await team.assemble()

    def stand(self, standing: Standing, reason: str = "") -> None:
        self._stands = (standing, reason)
        if self._team is not None:
            self._team.stand(standing, reason)

    async def others_ended(self) -> bool:
        assert self._team is not None
        return await self._team.others_ended()

    async def finish(self) -> bool:
        assert self._team is not None
        return await self._team.finish()

    def is_first_left(self) -> bool:
        return self._team is not None and self._team.is_first_left()

    async def stop_all(self, reason: str) -> None:
        if self._team is not None:
            await self._team.stop_all(reason)

    async def close(self) -> None:
        if self._task is None:
            return
        if self._team is None:
            self._task.cancel()
        # Otherwise it may be starting processes, which have to be ended again. What it fails with, `assemble` says.
        await asyncio.gather(self._task, return_exceptions=True)
        if self._team is not None:
            await self._team.close()


async def _in_thread(look_up: Callable[[], Way]) -> Way:
    """In a thread that the process does not wait for when it ends: a resolver may take half a minute to answer."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Way] = loop.create_future()

    def tell(way: Way | None, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is not None:
            answer.set_exception(error)
        elif way is not None:
            answer.set_result(way)

    def run() -> None:
        way, problem = None, None
        try:
            way = look_up()
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, way, problem)

    threading.Thread(target=run, name="rendezvous look-up", daemon=True).start()
    return await answer
