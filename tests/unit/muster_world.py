"""Supervisors of several nodes in one event loop, with a network and a store that a test takes away and gives back.

Real is what decides: `Muster`, with all of `core.membership`. Played are the ranks (they make steps while all of their
worker group can reach each other), the store, the network, and time, which passes as fast as nothing happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from elastictrain.core.membership import Bounds, Lineage, Plan, Standing
from elastictrain.core.status import RankView
from elastictrain.errors import ConfigError
from elastictrain.kv.client import EtcdClient, EtcdLeaseGoneError, EtcdUnavailableError, Stored
from elastictrain.supervisor.links import ATTEMPT_S, Links
from elastictrain.supervisor.muster import STOPPING_S, Muster, Self
from elastictrain.supervisor.shared_keys import decode_plan
from elastictrain.supervisor.store_process import StoreProcess
from elastictrain.supervisor.team import Assignment

STORE = "store"
NODE_TIMEOUT_S = 3.0
STORE_TIMEOUT_S = 60.0
LATENCY_S = 0.02
REQUEST_TIMEOUT_S = 1.0
STEP_S = 0.25
START_S = 0.8
"""From the plan to ranks that train."""
END_S = 0.3
"""For ranks to end."""
COLLECTIVE_LIMIT_S = 4.0
"""How long ranks may wait in a collective before they count as hung, as it is learnt from fast steps."""

_T = TypeVar("_T")


class _Instant(selectors.SelectSelector):
    """Does not wait: time goes forward instead."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen any more"
            self.now_s += timeout
        return ready


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop in which a minute passes at once."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now_s


class _Wire(Executor):
    """Requests of one node to the store, one after the other, each of which takes its time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, node: Node) -> None:
        self._loop = loop
        self._node = node
        self._queue: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        future: Future[_T] = Future()

        def ask() -> None:
            try:
                result = fn(*args, **kwargs)
            except EtcdUnavailableError as error:
                self._loop.call_later(self._node.world.request_timeout_s, answer, error, None)
            except BaseException as error:  # noqa: BLE001 - the caller's
                answer(error, None)
            else:
                self._loop.call_later(LATENCY_S, arrive, result)

        def arrive(result: _T) -> None:
            if self._node.reaches(STORE):
                answer(None, result)
            else:  # carried out, and nobody hears of it
                lost = EtcdUnavailableError("the answer was lost")
                self._loop.call_later(self._node.world.request_timeout_s, answer, lost, None)

        def answer(error: BaseException | None, result: _T | None) -> None:
            self._queue.pop(0)
            if self._queue:
                self._loop.call_later(LATENCY_S, self._queue[0])
            if self._node.is_dead or future.cancelled():
                return  # nobody is there to hear it
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast("_T", result))

        self._queue.append(ask)
        if len(self._queue) == 1:
            self._loop.call_later(LATENCY_S, ask)
        return future


class Store:
    """The data of the store."""

    def __init__(self) -> None:
        self.is_up = True
        self.revision = 0
        self.leases = itertools.count(1)
        self.living_leases: set[int] = set()
        self.data: dict[str, Stored] = {}

    def lose_data(self) -> None:
        self.data.clear()
        self.living_leases.clear()
        self.revision = 0

    def write(self, key: str, value: bytes) -> Stored:
        self.revision += 1
        self.data[key] = Stored(value, self.revision)
        return self.data[key]


class _Client:
    """What `Muster` asks of `EtcdClient`."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node

    @property
    def _store(self) -> Store:
        if not self._node.reaches(STORE) or self._node.is_dead:
            raise EtcdUnavailableError("no answer")
        return self._world.store

    def get(self, key: str) -> Stored | None:
        return self._store.data.get(key)

    def delete(self, key: str) -> bool:
        return self._store.data.pop(key, None) is not None

    def get_prefix_and_put(self, prefix: str, key: str, value: bytes, lease: int) -> dict[str, Stored]:
        store = self._store
        if lease not in store.living_leases:
            raise EtcdLeaseGoneError("no such lease", 5)
        found = {name: stored for name, stored in store.data.items() if name.startswith(prefix)}
        store.write(key, value)
        return found

    def compare_and_swap(self, key: str, value: bytes, mod_revision: int, lease: int) -> tuple[bool, Stored | None]:
        store = self._store
        before = store.data.get(key)
        if (before.mod_revision if before is not None else 0) != mod_revision:
            return before is not None and before.value == value, before
        written = store.write(key, value)
        plan = decode_plan(value)
        if plan is None:
            self._world.wrong.append(f"no plan: {value!r}")
            return True, written
        self._world.on_plan(plan)
        return True, written

    def grant_lease(self, ttl_s: int) -> int:
        lease = next(self._store.leases)
        self._store.living_leases.add(lease)
        return lease

    def keep_lease_alive(self, lease: int) -> bool:
        return lease in self._store.living_leases


class _Served:
    """The store, by the node that serves it: it goes when that one takes leave."""

    pid = None

    def __init__(self, world: World) -> None:
        self._world = world

    async def open(self) -> None: ...

    async def close(self) -> None:
        self._world.store.is_up = False


class _Listener:
    _ports = itertools.count(20_000)

    def __init__(self, _address: str) -> None:
        self._port = next(self._ports)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def close(self) -> None: ...


class PlayedLinks(Links):
    """Attempts to connect, over the played network."""

    world: World
    _ports = itertools.count(30_000)

    def __init__(self, address: str, on_finding: Callable[[], None]) -> None:
        super().__init__(address, on_finding)
        self._port = next(self._ports)

    @property
    def port(self) -> int:
        return self._port

    async def open(self) -> None: ...

    def look_after(self, places: Mapping[str, tuple[str, int]], *, all_again: bool) -> None:
        ways = {node: (f"{self._address} {address}", port) for node, (address, port) in places.items()}
        super().look_after(ways, all_again=all_again)

    @classmethod
    async def is_reached(cls, way: str, _port: int) -> bool:
        """In place of a real attempt."""
        one, other = way.split()
        await asyncio.sleep(LATENCY_S)
        if cls.world.are_linked(one, other) and other in cls.world.nodes:
            return True
        await asyncio.sleep(ATTEMPT_S)
        return False


def fake_listen(address: str) -> Any:
    """In place of a socket: there is nothing to connect to."""
    return _Listener(address)


@dataclass
class Disk:
    """What a node still knows after it was killed."""

    number: int = 0
    plan: Plan | None = None
    has_begun: bool = False


@dataclass
class Life:
    """The ranks of one node in one worker group."""

    plan: Plan
    began_s: float
    moved_s: float
    trains: bool = False
    ends_at_boundary: bool = False
    ends_at_s: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Node:
    """A node's supervisor, played, with its real `Muster`. Implements `team.Orders`."""

    def __init__(self, world: World, name: str, disk: Disk) -> None:
        self.world = world
        self.name = name
        self.disk = disk
        self.is_dead = False
        self.is_drained = False
        self.stopped = ""
        self.completed = False
        self.life: Life | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        loop = asyncio.get_running_loop()
        self.muster = Muster(
            Self("job", world.called.get(name, name), name, name, 1, world.differing.get(name, {"torch": "2"})),
            cast("EtcdClient", _Client(world, self)),
            world.bounds,
            node_timeout_s=NODE_TIMEOUT_S,
            store_timeout_s=STORE_TIMEOUT_S,
            lineage=Lineage("run", None, has_begun=disk.has_begun),
            last_number=disk.number,
            store=cast("StoreProcess", _Served(world)) if world.store_of == name else None,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            remembered=disk.plan,
            remember=self._remember,
            clock=loop.time,
            executor=_Wire(loop, self),
        )
        self.task = asyncio.create_task(self._run())

    def _remember(self, plan: Plan) -> None:
        if not self.is_dead:
            if self.disk.plan is not None and plan.number < self.disk.plan.number:
                self.world.wrong.append(f"{self.name} goes back to number {plan.number}")
            self.disk.plan = plan

    def reaches(self, other: str) -> bool:
        return self.world.are_linked(self.name, other)

    async def _run(self) -> None:
        await self.muster.open(self)
        while not self.stopped:
            if self.is_drained:
                self.muster.stand(Standing.AWAY, "drained")
                await self.world.until(lambda: self._is_wanted or bool(self.stopped), limit_s=float("inf"))
                continue
            self.muster.stand(Standing.WARMING, "starts")
            await asyncio.sleep(0.2)
            assembling = asyncio.create_task(self.muster.assemble())
            while not assembling.done() and self._is_wanted:
                await asyncio.wait({assembling}, timeout=0.1)
            if not assembling.done():
                assembling.cancel()
                await asyncio.wait({assembling})
                continue
            try:
                assignment = assembling.result()
            except ConfigError as error:
                self.stopped = error.what
                break
            await self._live(assignment)
        await self.muster.close()

    async def _live(self, assignment: Assignment) -> None:
        assert assignment.plan is not None
        assert assignment.plan.members[assignment.place].node == self.world.called.get(self.name, self.name)
        assert assignment.plan.number > self.disk.number, "no node takes part in one number twice"
        self.disk.number, self.disk.has_begun = assignment.plan.number, True
        now_s = self.world.now_s
        self.life = Life(assignment.plan, now_s, now_s)
        await self.life.ended.wait()
        self.life = None

    @property
    def _is_wanted(self) -> bool:
        return not self.is_drained and not self.stopped

    def drain(self) -> None:
        self.is_drained = True
        if self.life is not None:
            self.stop_ranks("asked to drain")
        else:
            self.muster.stand(Standing.AWAY, "asked to drain")

    # ---- orders

    def regroup(self, reason: str) -> None:
        if self.life is not None:
            self.life.ends_at_boundary = True

    def abandon(self, reason: str) -> None:
        self.events.append(("abandoned", {"reason": reason}))
        self._end_soon()

    def _end_soon(self) -> None:
        if self.life is not None and self.life.ends_at_s is None:
            self.life.ends_at_s = self.world.now_s + END_S

    def stop_with_all(self, reason: str) -> None:
        self.stopped = reason
        self.stop_ranks(reason)

    def complete_with_all(self) -> None:
        self.completed = True
        self.stop_with_all("the job is complete")

    def stop_ranks(self, reason: str) -> None:
        if self.life is not None:
            self.muster.stand(Standing.LEAVING, reason)
            self.life.ends_at_boundary = True
            if not self.life.trains:
                self._end_soon()

    def waits_since_s(self) -> tuple[float, float]:
        if self.life is None:
            return 0.0, 0.0
        limit_s = COLLECTIVE_LIMIT_S if self.life.trains else 10.0
        return self.world.now_s - self.life.moved_s, limit_s

    def rank_views(self) -> Sequence[RankView]:
        return ()

    def news(self) -> dict[str, dict[str, Any]]:
        return {}


class World:
    """All of it. What must never be is checked at every moment.

    Args:
        names: of the nodes.
        store_of: the one that serves the store; "" for none of them.
    """

    def __init__(self, names: Sequence[str], *, store_of: str = "", **bounds: int) -> None:
        self.names = tuple(names)
        self.store_of = store_of
        self.bounds = Bounds(
            min_nodes=bounds.get("min_nodes", 1),
            max_nodes=bounds.get("max_nodes", len(names)),
            last_call_s=2.0,
            micro_batch_size=1,
            global_batch_size=8,
            samples_per_rank=1,
            takeover_s=STORE_TIMEOUT_S + STOPPING_S,
        )
        self.store = Store()
        self.request_timeout_s = REQUEST_TIMEOUT_S
        self.cuts: set[frozenset[str]] = set()
        self.disks: dict[str, Disk] = {name: Disk() for name in names}
        self.called: dict[str, str] = {}
        """Nodes that go by the name of another."""
        self.differing: dict[str, Mapping[str, str]] = {}
        """What has to be the same on all nodes, of those where it is not."""
        self.nodes: dict[str, Node] = {}
        self.dead: list[Node] = []
        self.plans: dict[int, str] = {}
        self.on_first_plan: Callable[[Plan], None] = lambda _plan: None
        """Is called once, while whoever has written it has yet to hear that it is written."""
        self.num_steps = 0
        self.last_number = 0
        self.log: list[str] = []
        self.wrong: list[str] = []
        PlayedLinks.world = self
        self._ticking = asyncio.create_task(self._tick())

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Ends all; what went wrong in one of the tasks is raised here."""
        tasks = [self._ticking, *(node.task for node in self.nodes.values())]
        failed = [t.exception() for t in tasks if t.done() and not t.cancelled() and t.exception() is not None]
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for error in failed:
            assert error is not None
            raise error

    # ---- what a test does

    def are_linked(self, one: str, other: str) -> bool:
        if STORE in (one, other) and not self.store.is_up:
            return False
        return frozenset((one, other)) not in self.cuts

    def cut(self, one: str, other: str) -> None:
        self.cuts.add(frozenset((one, other)))

    def cut_off(self, *names: str) -> None:
        """From the store and from all other nodes, not from each other."""
        for name in names:
            for other in (STORE, *self.names):
                if other not in names:
                    self.cut(name, other)

    def heal(self) -> None:
        self.cuts.clear()
        self.store.is_up = True

    def boot(self, *names: str) -> None:
        for name in names:
            if name not in self.nodes:
                self.nodes[name] = Node(self, name, self.disks[name])

    def kill(self, name: str) -> None:
        """Power off: no farewell."""
        node = self.nodes.pop(name, None)
        if node is not None:
            node.is_dead = True
            node.task.cancel()
            self.dead.append(node)

    async def until(self, condition: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Waits; all of it in played time, so that how busy this machine is changes nothing."""
        deadline_s = self.now_s + limit_s
        while not condition():
            for task in (self._ticking, *(node.task for node in self.nodes.values())):
                if task.done() and not task.cancelled():
                    task.result()
            assert self.now_s < deadline_s, self.describe()
            await asyncio.sleep(0.1)

    async def train_together(self, *names: str, limit_s: float = 120.0) -> None:
        """Waits until these nodes, and no others, make steps together."""
        await self.until(lambda: self.trains_with() == frozenset(names), limit_s)
        await self.more_steps(3)

    async def more_steps(self, count: int, limit_s: float = 120.0) -> None:
        wanted = self.num_steps + count
        await self.until(lambda: self.num_steps >= wanted, limit_s)

    def trains_with(self) -> frozenset[str]:
        """The nodes whose ranks make steps now."""
        return frozenset(next(iter(self._moving().values()), ()))

    def describe(self) -> str:
        lines = [f"at {self.now_s:.1f} s, cuts {[sorted(c) for c in self.cuts]}, store up: {self.store.is_up}"]
        for name, node in self.nodes.items():
            plan = node.life.plan if node.life is not None else None
            lines.append(
                f"{name}: {plan.attempt if plan is not None else '-'} "
                f"{[m.node for m in plan.members] if plan is not None else ''}; {node.muster.waits_for}; "
                f"{[(kind, fields) for kind, fields in node.events[-4:]]}"
            )
        return "\n".join([*self.log, *lines])

    # ---- what is checked

    def on_plan(self, plan: Plan) -> None:
        if not self.plans:
            self.on_first_plan(plan)
        if self.plans.setdefault(plan.number, plan.attempt) != plan.attempt:
            self.wrong.append(f"number {plan.number} twice")

    def _moving(self) -> Mapping[str, tuple[str, ...]]:
        """Worker groups that could make a step now, and their nodes."""
        plans = {n.life.plan.attempt: n.life.plan for n in self.nodes.values() if n.life is not None}
        moving = {}
        for attempt, plan in plans.items():
            members = [member.node for member in plan.members]
            nodes = [self.nodes.get(name) for name in members]
            lives = [node.life for node in nodes if node is not None and node.life is not None]
            if (
                len(lives) == len(members)
                and all(life.plan.attempt == attempt and self.now_s - life.began_s >= START_S for life in lives)
                and all(self.are_linked(a, b) for a, b in itertools.combinations(members, 2))
            ):
                moving[attempt] = tuple(members)
        return moving

    async def _tick(self) -> None:
        stepped_s = self.now_s
        while True:
            await asyncio.sleep(0.1)
            moving = self._moving()
            for node in self.nodes.values():
                self.wrong += [f"{fields}" for kind, fields in node.events if "Error" in str(fields)]
            assert not self.wrong, self.wrong
            assert len(moving) <= 1, f"several worker groups make steps: {moving}\n{self.describe()}"
            for attempt in moving:
                number = next(number for number, each in self.plans.items() if each == attempt)
                assert number >= self.last_number, f"{attempt} trains on after number {self.last_number}"
                self.last_number = number
            if self.now_s - stepped_s >= STEP_S:
                stepped_s = self.now_s
                for members in moving.values():
                    self._step([life for name in members if (life := self.nodes[name].life) is not None])
            self._end_lives()

    def _step(self, lives: Sequence[Life]) -> None:
        self.num_steps += 1
        is_over = any(life.ends_at_boundary for life in lives)
        for life in lives:
            life.moved_s, life.trains = self.now_s, True
            if is_over and life.ends_at_s is None:
                life.ends_at_s = self.now_s

    def _end_lives(self) -> None:
        for node in self.nodes.values():
            life = node.life
            if life is None:
                continue
            if (
                life.trains
                and life.ends_at_s is None
                and any(self._sees_end_of(node, m.node) for m in life.plan.members)
            ):
                life.ends_at_s = self.now_s + END_S  # its collective fails
            if life.ends_at_s is not None and self.now_s >= life.ends_at_s:
                life.ended.set()

    def _sees_end_of(self, node: Node, name: str) -> bool:
        """A process that ends closes its connections, and who can hear of that does; a host without power does not."""
        assert node.life is not None
        other = self.nodes.get(name)
        if other is node or other is None or not self.are_linked(node.name, name):
            return False
        return other.life is None or other.life.plan.attempt != node.life.plan.attempt


def play(names: Sequence[str], play_it: Callable[[World], Any], *, store_of: str = "", **bounds: int) -> None:
    """Runs a coroutine in a world of its own."""

    async def main() -> None:
        world = World(names, store_of=store_of, **bounds)
        try:
            await play_it(world)
        except AssertionError as error:
            with contextlib.suppress(asyncio.CancelledError):
                await world.close()
            raise AssertionError(f"{error}\n{world.describe()}") from error
        await world.close()

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        runner.run(main())
