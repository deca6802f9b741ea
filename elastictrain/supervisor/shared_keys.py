"""What the nodes of a job have in common in the store: a record of each node, and the plan.

All of it is JSON, checked on the way out; nothing is taken from the store that does not look as it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from elastictrain.core.membership import Node, Plan
from elastictrain.core.status import RankView
from elastictrain.kv.client import EtcdClient, EtcdError, EtcdLeaseGoneError, Stored

PREFIX = "/elastictrain/job/"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Record:
    """A node's record.

    Args:
        life: of its supervisor's process.
        turn: counts up.
        about: what it says of itself.
        ranks: for show.
        news: the last that rank zero has said of each kind, where it is on this node.
    """

    life: str
    turn: int
    about: Node
    ranks: tuple[RankView, ...] = ()
    news: dict[str, dict[str, Any]] = field(default_factory=dict)


_RECORD = TypeAdapter(Record)
_PLAN = TypeAdapter(Plan)


def encode_plan(plan: Plan) -> bytes:
    """As it is in the store, and in a node's state directory."""
    return json.dumps(asdict(plan)).encode()


def decode_plan(data: bytes) -> Plan | None:
    """None for what is no plan."""
    try:
        return _PLAN.validate_json(data)
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class Found:
    """What was there at one moment.

    Args:
        records: by node; what is no record is left out.
        plan: None where there is none.
        plan_revision: at which the plan's key was last written; 0 where there is no such key.
    """

    records: Mapping[str, Record]
    plan: Plan | None
    plan_revision: int


class SharedKeys:
    """The keys of one job. Requests are carried out one at a time, in a thread, each within the client's limit.

    Args:
        client: of the store.
        job: name of the job.
        node: this node's name.
        lease_ttl_s: how long the record of a node that nobody comes back to stays.
        clock: seconds, only forward.
        executor: carries out the requests; default: a thread of its own.
    """

    def __init__(
        self,
        client: EtcdClient,
        job: str,
        node: str,
        *,
        lease_ttl_s: int,
        clock: Callable[[], float],
        executor: Executor | None = None,
    ) -> None:
        self._client = client
        self._prefix = f"{PREFIX}{quote(job, safe='')}/"
        self._own_key = f"{self._prefix}node/{quote(node, safe='')}"
        self._plan_key = f"{self._prefix}plan"
        self._lease_ttl_s = lease_ttl_s
        self._clock = clock
        self._executor = executor if executor is not None else ThreadPoolExecutor(1, thread_name_prefix="store")
        self._lease: int | None = None
        self._lease_renewed_s = float("-inf")

    async def exchange(self, record: Record) -> Found:
        """Reads everything, and writes this node's record: what is found in its place is what was there before.

        Raises:
            EtcdError: it is unknown whether it was written.
        """
        value = json.dumps(asdict(record)).encode()
        found = await self._in_thread(lambda: self._get_and_put(value))
        records: dict[str, Record] = {}
        for key, stored in found.items():
            if key.startswith(f"{self._prefix}node/"):
                with contextlib.suppress(ValidationError):  # the one whose it is will write it again
                    decoded = _RECORD.validate_json(stored.value)
                    records[decoded.about.node] = decoded
        return Found(records, *_plan_in(found.get(self._plan_key)))

    async def read_plan(self) -> tuple[Plan | None, int]:
        """The plan, and its key's revision, as in `Found`.

        Raises:
            EtcdError: it could not be read.
        """
        return _plan_in(await self._in_thread(lambda: self._client.get(self._plan_key)))

    async def swap_plan(self, plan: Plan, revision: int) -> int | None:
        """Writes the plan, unless its key was written since that revision; then it returns None, else the new one.

        Raises:
            EtcdError: it is unknown whether it was written.
        """
        value = encode_plan(plan)
        written, stored = await self._in_thread(
            lambda: self._client.compare_and_swap(self._plan_key, value, revision, 0)
        )
        return stored.mod_revision if written and stored is not None else None

    async def delete_record(self) -> None:
        """Takes this node's record away.

        Raises:
            EtcdError: it is unknown whether it is gone.
        """
        await self._in_thread(lambda: self._client.delete(self._own_key))

    async def are_served(self) -> bool:
        """Whether the store answers."""
        try:
            await self.read_plan()
        except EtcdError:
            return False
        return True

    def close(self) -> None:
        """Gives up what is still under way."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _get_and_put(self, value: bytes) -> dict[str, Stored]:
        try:
            return self._client.get_prefix_and_put(self._prefix, self._own_key, value, self._living_lease())
        except EtcdLeaseGoneError:
            self._lease = None
            return self._client.get_prefix_and_put(self._prefix, self._own_key, value, self._living_lease())

    def _living_lease(self) -> int:
        now_s = self._clock()
        if self._lease is not None and now_s - self._lease_renewed_s < self._lease_ttl_s / 3:
            return self._lease
        if self._lease is None or not self._client.keep_lease_alive(self._lease):
            self._lease = self._client.grant_lease(self._lease_ttl_s)
        self._lease_renewed_s = now_s
        return self._lease

    async def _in_thread(self, request: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, request)


def _plan_in(stored: Stored | None) -> tuple[Plan | None, int]:
    return (None, 0) if stored is None else (decode_plan(stored.value), stored.mod_revision)
