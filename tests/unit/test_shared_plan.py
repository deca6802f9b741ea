"""The plan that all nodes share: what has happened to it is never forgotten, whoever writes it again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from elastictrain.core.membership import Lineage, Member, Plan
from elastictrain.supervisor.shared_keys import SharedKeys
from elastictrain.supervisor.shared_plan import SharedPlan

PLAN = Plan(3, "job-3-abc", (Member("a", "a", "a", 1, 4000), Member("b", "b", "b", 1, 4001)), Lineage("run", 8))
HAPPENED = [
    replace(PLAN, is_over=True),
    replace(PLAN, is_complete=True),
    replace(PLAN, stop_reason="enough", num_stops=1),
]


class Keys:
    """A store that holds the plan alone, changed by compare-and-swap."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self.revision = 1 if plan is not None else 0

    async def read_plan(self) -> tuple[Plan | None, int]:
        return self.plan, self.revision

    async def swap_plan(self, plan: Plan, revision: int) -> int | None:
        if revision != self.revision:
            return None
        self.plan, self.revision = plan, revision + 1
        return self.revision


def shared(keys: Keys, remembered: Plan | None) -> tuple[SharedPlan, list[Plan]]:
    """What one node knows of it, and what it has kept on its disk."""
    kept: list[Plan] = []
    return (
        SharedPlan(
            cast("SharedKeys", keys),
            remembered=remembered,
            remember=kept.append,
            lost=lambda _plan: None,
            clock=lambda: 0.0,
        ),
        kept,
    )


@pytest.mark.parametrize("happened", HAPPENED)
def test_a_copy_that_says_less_does_not_undo_what_has_happened_and_is_written_again(happened: Plan) -> None:
    keys = Keys(PLAN)
    plan, kept = shared(keys, happened)
    plan.take_in(keys.plan, keys.revision)
    assert plan.newest == happened
    assert not kept
    assert not plan.is_stored
    asyncio.run(plan.restore())
    assert keys.plan == happened
    plan.take_in(keys.plan, keys.revision)
    assert plan.is_stored


@pytest.mark.parametrize("happened", HAPPENED)
def test_what_another_node_has_said_already_is_remembered_as_if_it_had_been_said_here(happened: Plan) -> None:
    keys = Keys(happened)
    plan, kept = shared(keys, PLAN)
    assert asyncio.run(plan.change_once(lambda found: None if found == happened else happened))
    assert plan.newest == happened
    assert kept == [happened]
    assert keys.revision == 1, "there was nothing to write"


@pytest.mark.parametrize("happened", HAPPENED)
def test_what_only_this_node_knows_is_said_though_nothing_else_is_to_be_changed(happened: Plan) -> None:
    keys = Keys(PLAN)
    plan, _ = shared(keys, happened)
    assert asyncio.run(plan.change_once(lambda _plan: None))
    assert keys.plan == happened


def test_the_next_plan_begins_with_nothing_of_it() -> None:
    following = replace(PLAN, number=4, attempt="job-4-def")
    keys = Keys(following)
    plan, kept = shared(keys, HAPPENED[0])
    plan.take_in(keys.plan, keys.revision)
    assert plan.is_stored
    assert kept == [following]
