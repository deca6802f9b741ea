"""The plan of the worker groups: the one key that all nodes share, and the newest that this node has seen of it.

It is changed by compare-and-swap alone. A store may lose its data. So every node remembers the newest plan that it has
seen, also after a restart, and writes it again into a store that does not have it: numbers only grow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from elastictrain.core.membership import Plan
from elastictrain.kv.client import EtcdError
from elastictrain.supervisor.shared_keys import SharedKeys

RETRY_S = 0.1
"""Between two tries to change the plan in a store that does not answer."""


class SharedPlan:
    """The plan in the store, and what this node knows of it.

    Args:
        keys: of the store.
        remembered: the newest plan that an earlier life of this supervisor has seen.
        remember: keeps that plan; must not fail.
        lost: is called when the store turns out to have lost a plan that it had.
        clock: seconds, only forward.

    Attributes:
        newest: that was ever seen, wherever; None if there was none yet.
        is_stored: whether the store has it.
    """

    def __init__(
        self,
        keys: SharedKeys,
        *,
        remembered: Plan | None,
        remember: Callable[[Plan], None],
        lost: Callable[[Plan], None],
        clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._remember = remember
        self._lost = lost
        self._clock = clock
        self._revision = 0
        self._has_been_read = False
        self.newest = remembered
        self.is_stored = True

    def take_in(self, found: Plan | None, revision: int) -> None:
        """Takes note of what the store has: the newest plan that was ever seen, unless it has lost its data.

        Args:
            found: plan in the store.
            revision: of its key.
        """
        has_been_read, self._has_been_read = self._has_been_read, True
        self._revision = revision
        known = self.newest
        if known is None or (found is not None and found.number >= known.number):
            self.is_stored = True
            if found is None:
                return
            if known is not None and found.attempt == known.attempt and found.joined(known) != found:
                # A copy that was written again by a node that had not heard of all that happened to the plan.
                self.is_stored = False
            self._know(found)
            return
        if self.is_stored and has_been_read:
            self._lost(known)
        self.is_stored = False
        self._know(replace(known, may_be_outdated=True))

    async def restore(self) -> None:
        """Writes the newest plan into a store that does not have it."""
        assert self.newest is not None
        await self.put(self.newest)

    async def put(self, plan: Plan) -> bool:
        """Writes a plan, unless somebody else has written one since the store was read; returns whether it did."""
        return await self._swap(plan, self._revision)

    async def change(
        self, change: Callable[[Plan], Plan | None], within_s: float, *, if_none: Plan | None = None
    ) -> None:
        """Changes the plan that is there; gives up where there is none, nothing is to be changed, or time is up.

        Args:
            change: what it is to be; None if it is already.
            within_s: how long to try.
            if_none: is changed where there is no plan.
        """
        deadline_s = self._clock() + within_s
        while self._clock() < deadline_s:
            try:
                if await self.change_once(change, if_none=if_none):
                    return
            except EtcdError:
                await asyncio.sleep(RETRY_S)

    async def change_once(self, change: Callable[[Plan], Plan | None], *, if_none: Plan | None = None) -> bool:
        """Returns whether there is nothing (more) to change.

        Raises:
            EtcdError: the store cannot be reached.
        """
        found, revision = await self._keys.read_plan()
        if found is not None and (self.newest is None or found.number >= self.newest.number):
            self._know(found)
            plan = self.newest
        else:
            found = None  # the store has lost it, if there ever was one
            plan = self.newest if self.newest is not None else if_none
        changed = change(plan) if plan is not None else None
        if changed is None and found is not None and found != plan:
            changed = plan  # what was to be said is known here alone
        return changed is None or await self._swap(changed, revision)

    async def _swap(self, plan: Plan, revision: int) -> bool:
        written = await self._keys.swap_plan(plan, revision)
        if written is not None and (self.newest is None or plan.number >= self.newest.number):
            self._revision, self.is_stored = written, True
            self._know(plan)
        return written is not None

    def _know(self, plan: Plan) -> None:
        if self.newest is not None and self.newest.attempt == plan.attempt:
            plan = plan.joined(self.newest)
        if plan != self.newest:
            self.newest = plan
            self._remember(plan)
