"""Several supervisors that agree, whatever happens to the network, the store, and to each other."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from functools import partial

import pytest

from elastictrain.core.membership import LONGEST_WARMING_S, Standing
from elastictrain.supervisor import links, muster
from tests.unit.muster_world import (
    COLLECTIVE_LIMIT_S,
    NODE_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    STORE,
    STORE_TIMEOUT_S,
    PlayedLinks,
    World,
    fake_listen,
    play,
)

NUM_SCHEDULES = int(os.environ.get("ELASTICTRAIN_TEST_SCHEDULES", "25"))
"""A second each; several hundred for whoever has changed how nodes agree."""


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muster, "Links", PlayedLinks)
    monkeypatch.setattr(links, "_is_reached", PlayedLinks.is_reached)
    monkeypatch.setattr(muster, "_listen", fake_listen)


def test_nodes_find_each_other_and_one_that_comes_later_joins() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.boot("c")
        await world.train_together("a", "b", "c")
        assert sorted(world.plans) == [1, 2]

    play("abc", it)


@pytest.mark.parametrize("most_of_a", [2, 4])
def test_nodes_need_not_agree_on_how_many_may_take_part(most_of_a: int) -> None:
    """Whoever makes the plan decides, and nobody ends the worker group for a node that is not taken then."""

    async def it(world: World) -> None:
        together = "abc"[: min(3, most_of_a)]
        for name, most in (("a", most_of_a), ("b", 6 - most_of_a), ("c", 6 - most_of_a)):
            world.bounds = replace(world.bounds, max_nodes=most)
            world.boot(name)
        await world.train_together(*together)
        number = world.last_number
        await world.more_steps(50)
        assert world.trains_with() == set(together)
        assert world.last_number == number, "nobody has ended it"

    play("abc", it)


def test_a_killed_node_is_done_without_and_taken_in_again() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        world.kill("b")
        await world.train_together("a", "c", limit_s=10.0)
        world.boot("b")
        await world.train_together("a", "b", "c", limit_s=10.0)

    play("abc", it)


def test_whenever_a_node_dies_the_others_know_as_soon_as_its_time_is_up() -> None:
    """Not at whatever look comes next."""
    late_s = []

    async def it(world: World, moment_s: float) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        await asyncio.sleep(moment_s)
        world.kill("b")
        died_s = world.now_s
        await world.until(lambda: any(kind == "abandoned" for kind, _ in world.nodes["a"].events))
        late_s.append(world.now_s - died_s - NODE_TIMEOUT_S)

    for number in range(10):
        play("abc", partial(it, moment_s=number * muster.CALM_S / 10))
    # Its last record is seen up to `CALM_S` late.
    assert max(late_s) < muster.CALM_S + muster.BUSY_S


def test_the_side_that_reaches_the_store_goes_on_and_the_other_stops() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        world.cut_off("a", "b")
        await world.train_together("c", limit_s=10.0)
        await world.until(lambda: world.nodes["a"].life is None and world.nodes["b"].life is None, 20.0)
        world.heal()
        await world.train_together("a", "b", "c")

    play("abc", it)


def test_who_is_cut_off_has_decided_in_time_though_each_of_three_members_is_waited_for() -> None:
    async def it(world: World) -> None:
        world.request_timeout_s = 3 * REQUEST_TIMEOUT_S
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.cut_off("b")
        await world.until(lambda: world.nodes["b"].life is None, COLLECTIVE_LIMIT_S + 5.0)
        await world.train_together("a")

    play("ab", it)


def test_one_request_that_fails_is_no_sign_of_a_cut_however_long_it_took() -> None:
    """As when all nodes stood still together: the ranks have waited, and the store is there."""

    async def it(world: World) -> None:
        world.request_timeout_s = 10 * COLLECTIVE_LIMIT_S
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.store.is_up = False
        world.cut("a", "b")
        await world.until(lambda: "store_away" in {kind for kind, _ in world.nodes["b"].events})
        world.heal()
        await world.more_steps(10)
        assert world.last_number == 1

    play("ab", it)


def test_of_nodes_that_reach_the_store_and_not_each_other_some_go_on() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        world.cut("a", "b")
        await world.train_together("a", "c", limit_s=20.0)
        world.heal()
        await world.train_together("a", "b", "c")

    play("abc", it)


def test_a_store_that_is_away_stops_nobody() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.store.is_up = False
        await world.more_steps(int(0.8 * STORE_TIMEOUT_S / 0.3))
        assert world.last_number == 1
        world.heal()
        await world.more_steps(10)
        assert world.last_number == 1, "nor does its return"

    play("ab", it)


def test_a_worker_group_stops_before_strangers_go_on_in_its_place() -> None:
    async def it(world: World) -> None:
        world.boot("a")
        await world.train_together("a")
        world.cut_off("a")
        world.boot("b")
        await world.more_steps(100)
        assert world.trains_with() == {"a"}
        await world.train_together("b", limit_s=2 * STORE_TIMEOUT_S)
        assert world.nodes["a"].life is None
        world.heal()
        await world.train_together("a", "b")

    play("ab", it)


def test_strangers_go_on_at_once_where_the_last_worker_group_took_leave() -> None:
    async def it(world: World) -> None:
        world.boot("a")
        await world.train_together("a")
        world.nodes["a"].stopped = "told to stop"
        world.nodes["a"].stop_ranks("told to stop")
        await world.until(world.nodes["a"].task.done)
        world.boot("b")
        await world.train_together("b", limit_s=10.0)

    play("ab", it)


def test_numbers_go_on_where_the_store_has_lost_its_data() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.store.lose_data()
        await world.more_steps(10)
        assert world.last_number == 1, "who trains goes on"
        world.boot("c")
        await world.train_together("a", "b", "c")
        for name in "abc":
            world.kill(name)
        world.store.lose_data()
        world.boot("c", "b", "a")
        await world.train_together("a", "b", "c")
        assert world.last_number > 2

    play("abc", it)


def test_after_a_loss_nobody_goes_on_beside_a_worker_group_that_it_does_not_know_of() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.cut_off("b")
        await world.train_together("a")
        world.heal()
        world.cut_off("a")
        world.store.lose_data()  # and with it the plan of a alone
        await world.more_steps(100)
        assert world.trains_with() == {"a"}
        await world.train_together("b", limit_s=2 * STORE_TIMEOUT_S)
        world.heal()
        await world.train_together("a", "b")

    play("ab", it)


def test_a_node_that_drains_leaves_the_others_to_it() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.nodes["a"].drain()
        await world.train_together("b", limit_s=10.0)
        world.nodes["a"].is_drained = False
        await world.train_together("a", "b", limit_s=10.0)

    play("ab", it)


@pytest.mark.parametrize("who", ["who writes it", "another member"])
def test_a_node_that_is_drained_before_it_hears_of_its_plan_is_not_waited_for(who: str) -> None:
    async def it(world: World) -> None:
        name = {"who writes it": "a", "another member": "b"}[who]
        (other,) = {"a", "b"} - {name}
        world.on_first_plan = lambda _plan: world.nodes[name].drain()
        world.boot("a", "b")
        await world.train_together(other)
        world.nodes[name].is_drained = False
        await world.train_together("a", "b", limit_s=10.0)

    play("ab", it)


def test_a_drained_node_hears_of_the_end_before_the_store_goes_with_the_node_that_serves_it() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.nodes["b"].drain()
        await world.train_together("a")
        last = world.nodes["a"].muster
        assert await last.finish()
        await last.close()
        assert not world.store.is_up
        await world.until(world.nodes["b"].task.done, limit_s=20.0)
        assert world.nodes["b"].completed

    play("ab", it, store_of="a")


def test_one_of_the_nodes_acts_for_all_that_were_in_the_last_worker_group() -> None:
    async def it(world: World) -> None:
        def first_left() -> set[str]:
            return {name for name, node in world.nodes.items() if node.muster.is_first_left()}

        world.boot("a", "b", "c")
        await world.train_together("a", "b")
        assert first_left() == {"a"}
        world.kill("a")
        await world.until(lambda: "b" in first_left(), limit_s=10.0)
        await world.train_together("b", "c")
        world.boot("a")  # it knows nothing any more
        await world.until(lambda: "a" in {node.node for node in world.nodes["b"].muster._seen.living})
        assert first_left() == {"b"}
        world.store.is_up = False
        await asyncio.sleep(10.0)
        assert first_left() == {"b", "c"}, "nobody can be asked"

    play("abc", it, max_nodes=2)


def test_who_has_done_the_last_step_waits_for_rank_zero_while_the_store_is_away() -> None:
    """Rank zero may still be writing, and fail."""

    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.store.is_up = False
        finishing = asyncio.create_task(world.nodes["b"].muster.finish())
        await asyncio.sleep(STORE_TIMEOUT_S / 2)
        assert not finishing.done()
        world.kill("a")
        world.store.is_up = True
        assert not await finishing, "there is more to do"

    play("ab", it)


def test_rank_zero_tells_the_others_that_all_is_done_however_late_the_store_is_back() -> None:
    """With a node that left, they could not even begin again."""

    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.store.is_up = False
        finishing = [asyncio.create_task(world.nodes[name].muster.finish()) for name in "ab"]
        await asyncio.sleep(STORE_TIMEOUT_S / 2)
        world.store.is_up = True
        assert await asyncio.gather(*finishing) == [True, True]

    play("ab", it, min_nodes=2)


def test_nobody_begins_anew_what_is_about_to_be_complete() -> None:
    async def it(world: World) -> None:
        world.boot("a", "c")
        await world.train_together("a")
        keeper = world.nodes["a"].muster
        keeper.stand(Standing.DONE, "all its steps are done")
        await asyncio.sleep(20.0)
        assert "about to be complete" in world.nodes["c"].muster.waits_for
        assert await keeper.finish()
        await world.until(world.nodes["c"].task.done)
        assert world.nodes["c"].completed
        assert world.last_number == 1

    play("ac", it, max_nodes=1)


def test_a_node_in_reserve_does_not_take_over_while_a_member_is_getting_ready() -> None:
    """However long it has been ready: what counts is how long the member has been getting ready."""

    async def it(world: World) -> None:
        world.boot("a", "c")
        await world.train_together("a")
        await asyncio.sleep(LONGEST_WARMING_S)
        member = world.nodes["a"]
        member.abandon("as if its rank had failed")
        await world.until(lambda: member.life is None)
        await world.train_together("a", limit_s=10.0)
        assert world.last_number == 2

    play("ac", it, max_nodes=1)


def test_all_stop_when_one_is_told_to_for_all() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        await world.nodes["b"].muster.stop_all("enough")
        await world.until(lambda: all(node.task.done() for node in world.nodes.values()))
        assert {node.stopped for node in world.nodes.values()} == {"enough"}
        assert world.last_number == 1

    play("abc", it)


def test_a_node_in_reserve_hears_that_the_job_is_complete_and_not_that_it_was_stopped() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b")
        reserve, keeper = world.nodes["c"], world.nodes["a"].muster
        await world.until(lambda: "not been asked yet" not in reserve.muster.waits_for)
        assert await keeper.finish()
        await world.nodes["b"].muster.stop_all("enough")  # it comes too late
        await world.until(reserve.task.done)
        assert reserve.completed

    play("abc", it, max_nodes=2)


def test_a_stop_is_heard_by_nodes_that_are_between_two_worker_groups() -> None:
    """None of them may begin another before all have heard."""

    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        for node in world.nodes.values():
            node.abandon("as if its ranks had failed")
        await world.until(lambda: all(node.life is None for node in world.nodes.values()))
        await world.nodes["b"].muster.stop_all("enough")
        await world.until(lambda: all(node.task.done() for node in world.nodes.values()))

    play("abc", it)


async def stop_two_that_wait(world: World, *, teller: str, reason: str) -> None:
    """Boots a and b, which wait for one more, and has one of them stop all; both hear of it, and are killed."""
    world.boot("a", "b")
    await world.until(lambda: all("1 more node" in world.nodes[name].muster.waits_for for name in "ab"))
    await world.nodes[teller].muster.stop_all(reason)
    await world.until(lambda: all(node.task.done() for node in world.nodes.values()))
    assert {node.stopped for node in world.nodes.values()} == {reason}
    for name in "ab":
        world.kill(name)


def test_a_stop_is_heard_by_nodes_that_were_started_again_after_another_stop() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        await world.nodes["b"].muster.stop_all("enough")
        await world.until(lambda: all(node.task.done() for node in world.nodes.values()))
        for name in "abc":
            world.kill(name)
        for again in range(2):
            await stop_two_that_wait(world, teller="a", reason=f"enough {again}")
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        assert world.last_number == 2

    play("abc", it, min_nodes=3)


def test_a_stop_is_heard_by_nodes_that_have_yet_to_begin() -> None:
    """And the next start is a first start, with all its waiting for others."""

    async def it(world: World) -> None:
        for again in range(2):
            await stop_two_that_wait(world, teller="b", reason=f"enough {again}")
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        assert world.last_number == 1

    play("abc", it, min_nodes=3)


def test_a_node_with_the_name_of_one_that_trains_is_refused_and_the_others_hear_nothing_of_it() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.called["z"] = "a"
        world.boot("z")
        await world.until(world.nodes["z"].task.done)
        assert world.nodes["z"].stopped == "this node cannot take part as a: another supervisor does, on a at a"
        await world.more_steps(50)
        assert world.last_number == 1
        plan = world.nodes["b"].disk.plan
        assert plan is not None
        assert not plan.is_over, "it does not say farewell in the other's name"

    play("abz", it, max_nodes=4)


OTHER = "this node cannot take part with a: torch is 3 here and 2 there"


def test_a_node_that_differs_is_refused_by_name_and_the_others_train_on() -> None:
    async def it(world: World) -> None:
        world.boot("a", "b")
        await world.train_together("a", "b")
        world.differing["c"] = {"torch": "3"}
        world.boot("c")
        await world.until(world.nodes["c"].task.done)
        assert world.nodes["c"].stopped == OTHER
        await world.more_steps(50)
        assert world.last_number == 1, "nobody has ended it"
        assert world.trains_with() == {"a", "b"}

    play("abc", it)


def test_a_node_that_comes_back_with_another_version_turns_nobody_away() -> None:
    """Though it was the first of the worker group, with which all others must agree."""

    async def it(world: World) -> None:
        world.boot("a", "b", "c")
        await world.train_together("a", "b", "c")
        plan = world.nodes["a"].disk.plan
        assert plan is not None
        first = plan.members[0].node
        world.kill(first)
        rest = sorted({*"abc"} - {first})
        await world.train_together(*rest)
        world.differing[first] = {"torch": "3"}
        world.boot(first)
        await world.until(world.nodes[first].task.done)
        refused = world.nodes[first].stopped
        assert refused == f"this node cannot take part with {rest[0]}: torch is 3 here and 2 there"
        await world.more_steps(20)
        assert world.trains_with() == {*rest}

    play("abc", it)


def test_of_two_nodes_with_one_name_that_start_together_one_is_refused() -> None:
    async def it(world: World) -> None:
        world.called["z"] = "a"
        world.boot("a", "z")
        await world.until(lambda: any(node.task.done() for node in world.nodes.values()))
        [refused] = [node for node in world.nodes.values() if node.task.done()]
        assert "this node cannot take part as a: another supervisor does" in refused.stopped
        [other] = [node for node in world.nodes.values() if node is not refused]
        await world.until(lambda: other.life is not None)
        assert world.plans.keys() == {1}

    play("az", it)


def test_a_record_that_a_killed_supervisor_has_left_turns_nobody_away() -> None:
    async def it(world: World) -> None:
        world.boot("a")
        await world.train_together("a")
        for _ in range(5):
            world.kill("a")
            world.boot("a")
            await world.train_together("a", limit_s=10.0)

    play("a", it)


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_random_schedules(seed: int) -> None:
    """Never two worker groups that make steps (`World` looks at every moment), and all together again in the end."""
    dice = random.Random(seed)
    names = "abcd"[: dice.randint(2, 4)]
    actions = ["cut", "cut", "cut_off", "cut_off", "heal", "heal", "kill", "boot", "outage", "loss", "drain"]

    def act(world: World) -> str:
        action = dice.choice(actions)
        one, other = dice.sample([*names, STORE], 2)
        if action == "cut":
            world.cut(one, other)
            return f"cut {one} {other}"
        if action == "cut_off":
            some = dice.sample(names, dice.randint(1, len(names) - 1))
            world.cut_off(*some)
            return f"cut off {some}"
        if action == "heal":
            world.heal()
        elif action == "kill":
            world.kill(name := dice.choice(names))
            return f"kill {name}"
        elif action == "boot":
            world.boot(*names)
        elif action == "outage":
            world.store.is_up = False
        elif action == "loss":
            world.store.lose_data()
        elif action == "drain" and world.nodes:
            node = world.nodes[dice.choice(sorted(world.nodes))]
            if node.is_drained:
                node.is_drained = False
            else:
                node.drain()
            return f"drain {node.name}: {node.is_drained}"
        return action

    async def it(world: World) -> None:
        world.boot(*names)
        await world.train_together(*names)
        for _ in range(dice.randint(3, 12)):
            world.log.append(f"{world.now_s:.2f} {act(world)}")
            await asyncio.sleep(dice.choice([0.05, 0.3, 1.0, 3.0, 10.0, 100.0]))
        world.heal()
        world.boot(*names)
        for node in world.nodes.values():
            node.is_drained = False
        world.log.append(f"{world.now_s:.2f} all is well again")
        await world.train_together(*names, limit_s=4 * STORE_TIMEOUT_S)
        assert world.num_steps > 0

    play(names, it)
