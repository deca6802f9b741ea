"""The supervisors of several nodes, through a key-value store that all of them reach: etcd, or one of our own.

Each writes its own record, now and then, and reads everybody's in the same request (`Outlook`), and the plan of the
next worker group (`SharedPlan`). What follows from what is read is decided in `core.membership`. A store that cannot be
reached stops nobody who trains: a step needs the ranks of all nodes, so as long as steps are made all nodes are there.
Only after `store_timeout_s` a node stops its ranks all the same: from then on, nodes that took no part in this worker
group may go on in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from elastictrain.core.membership import (
    RUNS,
    Bounds,
    End,
    Lineage,
    Node,
    Plan,
    Standing,
    asks_to_stop,
    differences,
    lost_members,
    next_plan,
    parted_members,
    reference,
    regroup_reason,
)
from elastictrain.core.status import NodeView, RankView
from elastictrain.errors import BusyError, ConfigError
from elastictrain.kv.client import EtcdClient, EtcdError
from elastictrain.supervisor.links import Links
from elastictrain.supervisor.namesake import Namesake
from elastictrain.supervisor.outlook import Outlook
from elastictrain.supervisor.shared_keys import Found, Record, SharedKeys
from elastictrain.supervisor.shared_plan import SharedPlan
from elastictrain.supervisor.store_process import StoreProcess
from elastictrain.supervisor.team import Assignment, Orders

CALM_S = 0.5
"""Between two looks at the others while ranks run."""
BUSY_S = 0.1
"""The same while a worker group is being put together, and while ranks wait and a member is not heard of."""
WONDER_S = 1.0
"""Ranks that have stood still for so long may wait for a node that is not reached."""
MIN_LEASE_S = 30
STOPPING_S = 30.0
"""A worker group that nobody hears of has stopped itself so long after its own limit, the store's answers included."""
SERVED_TRIES = 5
"""How often to ask whether it is a store that listens where ours should: it may be on its way up."""
FAREWELL_S = 10.0
"""How long to wait, at the end, for the others to hear of it."""


@dataclass(frozen=True, slots=True)
class Self:
    """What a node says of itself that does not change.

    Args:
        job: name of the job.
        node: its name, unique within the job.
        host: as its users know it.
        address: under which its ranks are reached.
        num_ranks: that it has.
        must_agree: what has to be the same on all nodes.
    """

    job: str
    node: str
    host: str
    address: str
    num_ranks: int
    must_agree: Mapping[str, str]


class Muster:
    """This node among the others. Implements `team.Team`.

    Args:
        me: this node.
        client: of the store.
        bounds: how many may take part.
        node_timeout_s: after which a node that is not heard of is done without.
        store_timeout_s: after which the ranks of a node that does not reach the store stop; shorter than the bounds'
            `takeover_s` by what that may take.
        lineage: the run that this node goes on with.
        last_number: of the worker groups that this node took part in.
        store: the process that serves the store, where that is this node's to do.
        emit: takes events.
        remembered: the newest plan that an earlier life of this supervisor has seen.
        remember: keeps that plan; must not fail.
        clock: seconds, only forward.
        executor: carries out requests to the store, one at a time; default: a thread of its own.
    """

    def __init__(
        self,
        me: Self,
        client: EtcdClient,
        bounds: Bounds,
        *,
        node_timeout_s: float,
        store_timeout_s: float,
        lineage: Lineage,
        last_number: int,
        store: StoreProcess | None,
        emit: Callable[..., None],
        remembered: Plan | None,
        remember: Callable[[Plan], None],
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        self._me = me
        self._bounds = bounds
        self._timeout_s = node_timeout_s
        self._store_timeout_s = store_timeout_s
        self._lineage = lineage
        self._number = last_number
        self._store = store
        self._emit = emit
        self._clock = clock
        lease_ttl_s = int(max(MIN_LEASE_S, 10 * node_timeout_s))
        self._keys = SharedKeys(client, me.job, me.node, lease_ttl_s=lease_ttl_s, clock=clock, executor=executor)
        self._life = secrets.token_hex(8)
        self._turn = 0
        self._namesake = Namesake(self._life, me.address, node_timeout_s)
        self._standing = Standing.WARMING
        self._reason = "its supervisor has just started"
        self._listener: socket.socket | None = None
        self._seen = Outlook(timeout_s=node_timeout_s, gap_s=max(2 * CALM_S, node_timeout_s / 2))
        self._news: dict[str, dict[str, Any]] = {}
        self._plan = SharedPlan(
            self._keys,
            remembered=remembered,
            remember=remember,
            lost=lambda known: emit("store_lost_data", attempt=known.attempt),
            clock=clock,
        )
        self._mine: Plan | None = None
        self._has_acted = False
        self._end_heard: End | None = None
        self._has_looked = False
        self._has_taken_part = False
        self._looked_s = 0.0
        self._away_since_s: float | None = None
        self._away_why = ""
        self._is_ordered = False
        self._waits_for = "the store has not been asked yet"
        self._poke = asyncio.Event()
        self._changed = asyncio.Condition()
        self._assembled: asyncio.Future[Assignment] | None = None
        self._orders: Orders | None = None
        self._task: asyncio.Task[None] | None = None
        self._links = Links(me.address, self._poke.set)

    # ---- for the supervisor

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def waits_for(self) -> str:
        if self._away_since_s is not None:
            away_s = self._clock() - self._away_since_s
            return f"the store of the rendezvous cannot be reached since {away_s:.0f} s: {self._away_why}"
        return self._waits_for

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        plan = self._mine if self._mine is not None else self._plan.newest
        return self._seen.views(self._about(), plan, self._clock())

    @property
    def other_ranks(self) -> tuple[RankView, ...]:
        plan = self._mine if self._mine is not None else self._plan.newest
        return self._seen.ranks(plan) if plan is not None else ()

    async def open(self, orders: Orders) -> None:
        self._orders = orders
        if self._store is not None:
            await self._open_store(self._store)
        await self._links.open()
        self._task = asyncio.create_task(self._run())

    async def _open_store(self, store: StoreProcess) -> None:
        try:
            await store.open()
        except BusyError:
            # Another supervisor of the same job on this host, with a state directory of its own, may serve it already.
            self._store = None
            for _ in range(SERVED_TRIES):
                if await self._keys.are_served():
                    return
            raise

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(pid for pid in [self._store.pid if self._store is not None else None] if pid is not None)

    def stand(self, standing: Standing, reason: str = "") -> None:
        self._standing, self._reason = standing, reason
        if standing not in RUNS and standing is not Standing.DONE:
            self._mine = None
        self._poke.set()

    async def assemble(self) -> Assignment:
        """Waits until this node is part of a plan.

        Raises:
            ConfigError: this node has something different from the others that has to be the same.
        """
        self._is_ordered = False
        self._assembled = asyncio.get_running_loop().create_future()
        if self._listener is None:
            self._listener = _listen(self._me.address)
        self.stand(Standing.READY)
        try:
            return await self._assembled
        except ConfigError as error:
            self.stand(Standing.AWAY, error.what)
            raise
        except asyncio.CancelledError:
            self.stand(Standing.AWAY, "told to stop")
            raise
        finally:
            self._assembled = None

    async def others_ended(self) -> bool:
        plan = self._mine
        if plan is None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s + CALM_S), self._changed:
                await self._changed.wait_for(lambda: bool(lost_members(plan, self._seen.living, self._me.node)))
        return bool(lost_members(plan, self._seen.living, self._me.node))

    async def finish(self) -> bool:
        plan = self._mine
        if plan is None:
            return False  # abandoned at the last moment: the others have gone on
        self.stand(Standing.DONE, "all its steps are done")
        keeper = plan.members[0].node
        if keeper == self._me.node:
            await self._plan.change(
                lambda known: replace(known, is_complete=True) if known.number == plan.number else None,
                max(FAREWELL_S, self._store_timeout_s),  # the others wait as long, and would do the last steps again
            )
            return True
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_decided(plan, keeper))
        return self._is_complete(plan)

    def _is_complete(self, plan: Plan) -> bool:
        newest = self._plan.newest
        return newest is not None and newest.number == plan.number and newest.is_complete

    def _is_decided(self, plan: Plan, keeper: str) -> bool:
        """Whether the first member has kept the last state, or will not any more."""
        if self._away_since_s is not None:  # nothing is heard of it, and nothing of what the others do
            return self._clock() - self._away_since_s > self._store_timeout_s
        return self._is_complete(plan) or self._is_lost(plan, keeper)

    def _is_lost(self, plan: Plan, keeper: str) -> bool:
        if self._plan.newest is not None and self._plan.newest.attempt != plan.attempt:
            return True  # it has gone on without this node, which was cut off for long
        return keeper in {lost.node for lost in lost_members(plan, self._seen.living, self._me.node)}

    def is_first_left(self) -> bool:
        plan = self._plan.newest
        place = plan.place_of(self._me.node) if plan is not None else None
        if plan is None or place is None:
            return False
        if self._away_since_s is not None:
            return True  # nobody can be asked: rather all than none
        earlier = {member.node for member in plan.members[:place]}
        # One whose supervisor was started again knows nothing of what its ranks have left.
        return not any(node.node in earlier and node.has_taken_part for node in self._seen.living)

    async def stop_all(self, reason: str) -> None:
        asked: Plan | None = None

        def ask(plan: Plan) -> Plan | None:
            nonlocal asked
            if asked is not None and plan.attempt == asked.attempt and plan.num_stops >= asked.num_stops:
                return None  # the answer was lost, or somebody else has asked at the same moment
            asked = replace(plan, stop_reason=reason, num_stops=plan.num_stops + 1)
            return asked

        first = asks_to_stop(self._me.job, self._lineage, secrets.token_hex(3))
        await self._plan.change(ask, FAREWELL_S, if_none=first)

    async def close(self) -> None:
        """Says farewell; where the store is this node's own, waits until the others have heard all there is to hear."""
        if self._task is None:
            return
        task, self._task = self._task, None
        if self._store is not None and self._has_looked:
            deadline_s = self._clock() + FAREWELL_S
            away = self._seen.turns(Standing.AWAY)  # they stay, so their going shows nothing; they look now and then
            while self._clock() < deadline_s and self._away_since_s is None and self._is_heard_of(away):
                await asyncio.sleep(BUSY_S)
                self._poke.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._links.close()
        if self._away_since_s is None and self._has_looked and not self._namesake.lives:  # else it would be the other's
            with contextlib.suppress(EtcdError):
                await self._say_it_is_over()
                await self._keys.delete_record()
        self._keys.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._store is not None:
            await self._store.close()

    async def _say_it_is_over(self) -> None:
        """When nobody is left of the last worker group, others need not wait for a sign of it."""
        number, me = self._number, self._me.node
        await self._plan.change_once(
            lambda plan: (
                replace(plan, is_over=True)
                if plan.number <= number and plan.place_of(me) is not None and not plan.is_over
                else None
            )
        )

    def _is_heard_of(self, away: Mapping[str, int]) -> bool:
        """Whether somebody may still want to know how the job ended.

        Args:
            away: nodes that take no part, and how often they had looked when it had ended.
        """
        plan = self._plan.newest
        others = [node for node in self._seen.living if node.node != self._me.node]
        # One turn may have been on its way when the end was written; the next was not.
        turns = self._seen.turns(Standing.AWAY)
        unaware = {node for node, turn in away.items() if turns.get(node, turn + 2) < turn + 2}
        return (plan is not None and plan.end is not None) and any(
            node.standing is not Standing.AWAY or node.node in unaware for node in others
        )

    # ---- looking out

    def _about(self) -> Node:
        return Node(
            node=self._me.node,
            host=self._me.host,
            address=self._me.address,
            num_ranks=self._me.num_ranks,
            standing=self._standing,
            number=self._number,
            store_port=self._store_port,
            lineage=self._lineage,
            must_agree=dict(self._me.must_agree),
            reason=self._reason,
            has_taken_part=self._has_taken_part,
            links_port=self._links.port,
            links=self._links.found,
        )

    async def _run(self) -> None:
        while True:
            self._poke.clear()
            began_s = self._clock()
            interval_s = CALM_S if self._standing in (Standing.RUNNING, Standing.AWAY) else BUSY_S
            try:
                await self._look()
                interval_s = self._interval_s()
            except EtcdError as error:
                self._could_not_look(str(error), began_s)
            except Exception as error:  # noqa: BLE001 - whatever it is: who looks no more is lost, and hears of nothing
                self._could_not_look(f"{type(error).__name__}: {error}", began_s)
            async with self._changed:
                self._changed.notify_all()
            # Unlike `wait_for` of 3.11 a time-out never swallows a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._poke.wait()

    def _interval_s(self) -> float:
        """Until the next look."""
        if self._standing not in (Standing.RUNNING, Standing.AWAY):
            return BUSY_S
        assert self._orders is not None
        late = self._mine is not None and self._seen.are_late(self._mine, WONDER_S, self._clock())
        # Every moment in which a member is not yet known to be lost is one in which nobody trains.
        return BUSY_S if late and self._orders.waits_since_s()[0] >= WONDER_S else CALM_S

    async def _look(self) -> None:
        self._turn += 1
        orders = self._orders
        assert orders is not None
        has_rank_zero = self._mine is not None and self._mine.place_of(self._me.node) == 0
        news = orders.news() if has_rank_zero else {}
        record = Record(self._life, self._turn, self._about(), tuple(orders.rank_views()), news)
        began_s = self._clock()
        found = await self._keys.exchange(record)
        now_s = self._clock()
        self._looked_s = began_s
        if self._away_since_s is not None:
            self._emit("store_back", away_s=round(now_s - self._away_since_s, 3))
            self._away_since_s = None
        self._take_in(found, now_s)
        self._has_looked = True
        self._look_after_links(orders)
        await self._act(orders, now_s)

    def _look_after_links(self, orders: Orders) -> None:
        """Finds out who is reached: before a worker group is put together, and while this node's ranks wait."""
        others = [node for node in self._seen.living if node.node != self._me.node and node.links_port]
        waits = self._standing in RUNS and orders.waits_since_s()[0] >= WONDER_S
        self._links.look_after(
            {node.node: (node.address, node.links_port) for node in others},
            all_again=waits or self._standing is Standing.READY,
        )

    def _take_in(self, found: Found, now_s: float) -> None:
        others = dict(found.records)
        self._namesake.look(others.pop(self._me.node, None), now_s)
        self._plan.take_in(found.plan, found.plan_revision)
        self._seen.take_in(self._about(), others, self._plan.newest, now_s)
        plan = self._mine if self._mine is not None else self._plan.newest
        if plan is not None and plan.members:
            self._hear_news(self._seen.news(plan.members[0].node))

    def _hear_news(self, news: Mapping[str, dict[str, Any]]) -> None:
        """What rank zero says, every node keeps: whoever asks, and whoever is left, knows how far the job was."""
        for kind, fields in news.items():
            if self._news.get(kind) != fields:
                self._news[kind] = fields
                self._emit(kind, **fields)

    async def _act(self, orders: Orders, now_s: float) -> None:
        if not self._plan.is_stored:
            await self._plan.restore()
            return
        plan = self._plan.newest
        end = plan.end if plan is not None else None
        if not self._has_acted:
            self._has_acted, self._end_heard = True, end  # of an earlier start of the job
        if end is not None and end != self._end_heard and self._standing is not Standing.DONE:
            self._end_heard = end
            if end.is_complete:
                orders.complete_with_all()
            else:
                orders.stop_with_all(end.reason)
            return
        mine = self._mine
        if self._standing in RUNS and mine is not None:
            assert plan is not None
            if plan.attempt != mine.attempt:
                self._order_to_abandon(f"the other nodes have gone on without this one, as {plan.attempt}")
            else:
                self._look_after(mine, orders)
        elif self._standing is Standing.READY and self._assembled is not None and not self._assembled.done():
            await self._line_up(now_s)

    def _look_after(self, mine: Plan, orders: Orders) -> None:
        lost = lost_members(mine, self._seen.living, self._me.node)
        apart = parted_members(mine, self._seen.living)
        if lost or apart:
            waits_s, _ = orders.waits_since_s()
            if waits_s >= self._timeout_s:
                hosts = ", ".join(sorted(each.host for each in lost or apart))
                is_or_are = "is" if len(lost) == 1 else "are"
                self._order_to_abandon(f"{hosts} {is_or_are} gone" if lost else f"{hosts} do not all reach each other")
        elif self._standing is Standing.RUNNING and not self._is_ordered:
            reason = regroup_reason(mine, self._seen.living, self._me.node, self._bounds)
            if reason:
                self._is_ordered = True
                orders.regroup(reason)

    def _order_to_abandon(self, reason: str) -> None:
        assert self._orders is not None
        self._mine = None
        self._orders.abandon(reason)

    def _could_not_look(self, why: str, began_s: float) -> None:
        """One failure may come of this process having stood still. Two in a row are the store's, since the first began:
        where several members are silent, each takes seconds."""
        now_s = self._clock()
        self._away_why = why
        has_failed_before = self._away_since_s is not None
        if self._away_since_s is None:
            self._away_since_s = began_s
            self._emit("store_away", why=why)
        if self._standing in RUNS and self._mine is not None and self._orders is not None:
            waits_s, limit_s = self._orders.waits_since_s()
            away_s = now_s - self._away_since_s
            if has_failed_before and min(waits_s, away_s) > max(limit_s, self._timeout_s):
                self._order_to_abandon("this node is cut off: its ranks wait for others, and the store is not reached")
            elif now_s - self._looked_s > self._store_timeout_s:
                why = f"the store has not been reached for {self._store_timeout_s:g} s"
                self._order_to_abandon(f"{why}: nodes that took no part may go on in this one's place")

    async def _line_up(self, now_s: float) -> None:
        assembled = self._assembled
        assert assembled is not None
        if refusal := self._namesake.refusal(self._about()):
            assembled.set_exception(refusal)
            return
        if self._namesake.may_live:
            self._waits_for = f"waits to see whether another supervisor is node {self._me.node} as well"
            return
        plan = self._plan.newest
        if plan is not None and plan.number > self._number and (place := plan.place_of(self._me.node)) is not None:
            if plan.members[place].store_port == self._store_port:
                self._take(plan, place)
            else:
                self._number = plan.number  # of an earlier life of this supervisor: that part is over
            return
        ruler = reference(plan, self._seen.living)
        about = self._about()
        if ruler is not None and ruler.node != about.node and (found := differences(about, ruler)):
            assembled.set_exception(
                ConfigError(
                    f"this node cannot take part with {ruler.host}: {'; '.join(found)}",
                    "All nodes of a job need the same job.toml, code and versions.",
                )
            )
            return
        token = secrets.token_hex(3)
        decided = next_plan(
            plan,
            self._seen.living,
            self._me.node,
            self._bounds,
            quiet_s=self._seen.quiet_s(now_s),
            unheard_s=self._seen.unheard_s(plan, now_s),
            stood_s=self._seen.stood_s(now_s),
            token=token,
            job=self._me.job,
        )
        if not isinstance(decided, Plan):
            self._waits_for = decided.reason
        elif await self._plan.put(decided):
            if self._standing is Standing.READY and self._assembled is assembled and not assembled.done():
                self._take(decided, 0)
            else:
                self._number = decided.number  # drained, or told to stop, meanwhile: that part is over before it began

    def _take(self, plan: Plan, place: int) -> None:
        self._mine = plan
        self._number = plan.number
        self._has_taken_part = True
        self._lineage = replace(plan.lineage, has_begun=True)
        self._standing, self._reason = Standing.RUNNING, f"takes part in {plan.attempt}"
        listener = None
        if place == 0 and len(plan.members) > 1:
            listener, self._listener = self._listener, None
        if self._assembled is not None and not self._assembled.done():
            self._assembled.set_result(Assignment(plan, place, listener))
        self._poke.set()

    @property
    def _store_port(self) -> int:
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0


def _listen(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
