"""Who takes part: pure decisions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.core.membership import (
    Bounds,
    Lineage,
    Member,
    Node,
    Plan,
    Sightings,
    Standing,
    Wait,
    agreed_lineage,
    asks_to_stop,
    differences,
    is_over,
    line_up,
    lost_members,
    next_plan,
    parted_members,
    reference,
    regroup_reason,
)

BOUNDS = Bounds(
    min_nodes=1,
    max_nodes=4,
    last_call_s=3.0,
    micro_batch_size=2,
    global_batch_size=16,
    samples_per_rank=2,
    takeover_s=60.0,
)
FOREVER = float("inf")


def make_node(name: str, standing: Standing = Standing.READY, **fields: Any) -> Node:
    defaults = {
        "host": f"host-{name}",
        "address": f"10.0.0.{ord(name[0])}",
        "num_ranks": 1,
        "number": 0,
        "store_port": 4000 + ord(name[0]),
        "lineage": Lineage("run", None),
        "must_agree": {"torch": "2"},
    }
    return Node(node=name, standing=standing, **{**defaults, **fields})


def plan_of(*nodes: Node, number: int = 5, **fields: Any) -> Plan:
    members = tuple(Member(n.node, n.host, n.address, n.num_ranks, n.store_port) for n in nodes)
    return Plan(number, f"job-{number}-abc", members, replace(nodes[0].lineage, has_begun=True), **fields)


def decide(
    plan: Plan | None,
    nodes: list[Node],
    me: str,
    bounds: Bounds = BOUNDS,
    *,
    quiet_s: float = FOREVER,
    unheard_s: float = FOREVER,
    stood_s: float = 0.0,
) -> Plan | Wait:
    return next_plan(
        plan,
        nodes,
        me,
        bounds,
        quiet_s=quiet_s,
        unheard_s=unheard_s,
        stood_s={node.node: stood_s for node in nodes},
        token="t0",
        job="job",
    )


def planned(decided: Plan | Wait) -> Plan:
    assert isinstance(decided, Plan), decided
    return decided


def waits(decided: Plan | Wait) -> str:
    assert isinstance(decided, Wait), decided
    return decided.reason


# ---- the next plan, by example


def test_the_first_plan_waits_for_the_last_call_and_no_longer() -> None:
    nodes = [make_node("a"), make_node("b")]
    assert "more may come" in waits(decide(None, nodes, "a", quiet_s=2.9))
    plan = planned(decide(None, nodes, "a", quiet_s=3.0))
    assert (plan.number, plan.attempt) == (1, "job-1-t0")
    assert [member.node for member in plan.members] == ["a", "b"]
    full = replace(BOUNDS, max_nodes=2)
    assert planned(decide(None, nodes, "a", full, quiet_s=0.0)).world_size == 2, "nobody else is wanted"


def test_only_the_first_of_the_line_writes_the_plan() -> None:
    nodes = [make_node("a"), make_node("b")]
    assert waits(decide(None, nodes, "b")) == "host-a makes the plan"


def test_too_few_nodes_wait_and_say_for_how_many() -> None:
    bounds = replace(BOUNDS, min_nodes=3)
    assert waits(decide(None, [make_node("a"), make_node("b")], "a", bounds)) == (
        "waits for 1 more node: host-a, host-b are ready, elastic.nodes asks for 3"
    )
    assert "waits for 3 more nodes: none is ready" in waits(decide(None, [make_node("a", Standing.AWAY)], "a", bounds))


def test_no_plan_while_ranks_of_the_last_one_may_still_run() -> None:
    for standing in (Standing.RUNNING, Standing.LEAVING):
        nodes = [make_node("a"), make_node("b", standing)]
        assert waits(decide(None, nodes, "a")) == "the ranks on host-b have not ended yet"


def test_former_members_that_warm_up_are_waited_for_and_strangers_are_not() -> None:
    a, b, c = make_node("a", number=5), make_node("b", Standing.WARMING, number=5), make_node("c", Standing.WARMING)
    last = plan_of(a, b)
    assert waits(decide(last, [a, b, c], "a", stood_s=59.9)) == "waits for host-b, which will be ready soon"
    assert [member.node for member in planned(decide(last, [a, b, c], "a", stood_s=60.0)).members] == ["a"]
    assert planned(decide(last, [a, c], "a")).place_of("a") == 0
    assert "host-c" in waits(decide(None, [a, c], "a")), "at the first start all are waited for"


def test_the_number_is_above_all_that_are_known() -> None:
    a, b = make_node("a", number=7), make_node("b", Standing.AWAY, number=9)
    assert planned(decide(plan_of(a, number=8), [a, b], "a")).number == 10


def test_former_members_keep_the_order_of_their_ranks_and_others_come_after() -> None:
    a, b, c, d = (make_node(name, number=5 if name in "bd" else 0) for name in "abcd")
    line = line_up(plan_of(d, b), [a, b, c, d], BOUNDS)
    assert [node.node for node in line.nodes] == ["d", "b", "a", "c"]


def test_whom_the_bounds_leave_out_is_told_why() -> None:
    a, b, c = make_node("a"), make_node("b", num_ranks=8), make_node("c")
    line = line_up(None, [a, b, c], replace(BOUNDS, max_nodes=2))
    assert [node.node for node in line.nodes] == ["a", "c"]
    assert line.reserve == {"b": "a step has 8 microbatches, too few for its ranks as well"}
    assert line_up(None, [a, c], replace(BOUNDS, max_nodes=1)).reserve == {"c": "there are 1 nodes already"}
    assert waits(decide(None, [a, b, c], "b")).startswith("this node is in reserve: a step has 8")


def test_the_first_plan_makes_the_global_batch_where_the_job_file_leaves_it_open() -> None:
    bounds = replace(BOUNDS, global_batch_size=None, samples_per_rank=6)
    nodes = [make_node("a", num_ranks=2), make_node("b")]
    plan = planned(decide(None, nodes, "a", bounds))
    assert plan.lineage.global_batch_size == 18
    later = [replace(node, number=1, lineage=plan.lineage) for node in nodes] + [make_node("c", num_ranks=7)]
    line = line_up(plan, later, bounds)
    assert line.reserve == {"c": "a step has 9 microbatches, too few for its ranks as well"}


def test_a_node_that_does_not_fit_has_no_say_in_the_microbatches() -> None:
    """Its run, and with it the size of its batch, is none of the others' business."""
    bounds = replace(BOUNDS, global_batch_size=None)
    a = make_node("a", lineage=Lineage("run", 8))
    b = make_node("b", lineage=Lineage("run", 8), num_ranks=3)
    other = make_node("c", lineage=Lineage("other", 800, is_asked_for=True), must_agree={"torch": "3"})
    plan = planned(decide(None, [a, b, other], "a", bounds))
    assert plan.lineage.run_id == "run"
    assert plan.world_size == 4 == bounds.max_ranks(plan.lineage)
    big = replace(b, num_ranks=4)
    assert planned(decide(None, [a, big, other], "a", bounds)).world_size == 1, "five ranks for four microbatches"


# ---- those that took no part in the last worker group


def test_strangers_wait_until_the_last_worker_group_has_stopped_itself() -> None:
    last = plan_of(make_node("a"), make_node("b"))
    stranger = make_node("c")
    assert waits(decide(last, [stranger], "c", unheard_s=20.0)) == (
        "host-a, host-b may train still, cut off from here, and no node here took part: goes on without them in 40 s"
    )
    assert planned(decide(last, [stranger], "c", unheard_s=60.0)).number == 6


def test_strangers_go_on_at_once_when_a_member_has_ended() -> None:
    a = make_node("a", Standing.AWAY, number=5)
    last = plan_of(a, make_node("b"))
    assert planned(decide(last, [a, make_node("c")], "c", unheard_s=0.0)).number == 6
    for end in ({"is_over": True}, {"is_complete": True}):
        assert planned(decide(replace(last, **end), [make_node("c")], "c", unheard_s=0.0)).number == 6
    behind = replace(a, number=4)
    assert "may train still" in waits(decide(last, [behind, make_node("c")], "c", unheard_s=0.0)), "it never began"


def test_any_member_goes_on_at_once() -> None:
    a, b = make_node("a", number=5), make_node("b", number=5)
    assert planned(decide(plan_of(a, b), [b], "b", unheard_s=0.0)).number == 6


def test_after_a_loss_of_data_members_wait_for_those_that_are_missing() -> None:
    """They may have gone on meanwhile, under a plan that is lost."""
    a, b = make_node("a", number=5), make_node("b", number=5)
    last = plan_of(a, b, may_be_outdated=True)
    assert "the store has lost its data" in waits(decide(last, [b], "b", unheard_s=59.0))
    assert planned(decide(last, [b], "b", unheard_s=60.0)).number > 1000, "none of a plan that is lost"
    new = planned(decide(last, [a, b], "a", unheard_s=0.0))
    assert new.number > 1000, "none is missing of those that are known"
    assert not new.may_be_outdated


def test_what_shows_that_a_worker_group_is_over() -> None:
    a = make_node("a", number=5)
    last = plan_of(a)
    for standing in Standing:
        ended = standing not in (Standing.RUNNING, Standing.LEAVING)
        assert is_over(last, [replace(a, standing=standing)]) == ended
        assert not is_over(last, [replace(a, standing=standing, number=4)])
        assert not is_over(last, [make_node("z", standing, number=9)])


# ---- agreement


def test_the_reference_is_a_member_that_has_gone_on_before_one_that_comes_back() -> None:
    a, b, c = make_node("a"), make_node("b", has_taken_part=True), make_node("c")
    assert reference(plan_of(a, b), [c, a, b]) == b
    assert reference(plan_of(a, b), [c, replace(b, has_taken_part=False), a]) == a
    assert reference(None, [c, b]) == b
    assert reference(plan_of(a), [c]) == c
    assert reference(plan_of(a), [make_node("a", Standing.AWAY)]) is None


def test_differences_are_named_from_both_sides() -> None:
    here, there = make_node("a", must_agree={"torch": "2", "code": "x"}), make_node("b", must_agree={"torch": "3"})
    assert differences(here, there) == ["code is x here and unknown there", "torch is 2 here and 3 there"]
    assert differences(here, here) == []


@pytest.mark.parametrize(
    ("lineages", "expected"),
    [
        ([{}, {"has_begun": True}], "run1"),
        ([{"has_begun": True}, {"is_asked_for": True}], "run1"),
        ([{"has_begun": True}, {"has_begun": True, "number": 3}], "run1"),
        ([{}, {}], "run0"),
        ([{"has_begun": True, "has_taken_part": True}, {"is_asked_for": True}], "run0"),
        ([{"has_begun": True, "has_taken_part": True}, {"has_begun": True, "number": 99}], "run0"),
    ],
)
def test_which_run_goes_on(lineages: list[dict[str, Any]], expected: str) -> None:
    nodes = []
    for place, fields in enumerate(lineages):
        own = {key: fields.pop(key) for key in ("number", "has_taken_part") if key in fields}
        nodes.append(make_node("ab"[place], lineage=Lineage(f"run{place}", None, **fields), **own))
    agreed = agreed_lineage(nodes)
    assert agreed.run_id == expected
    assert not agreed.is_asked_for, "it was, once"


def test_a_run_has_begun_if_it_has_on_any_node() -> None:
    nodes = [make_node("a", number=9), make_node("b", lineage=Lineage("run", None, has_begun=True))]
    assert agreed_lineage(nodes).has_begun


# ---- while a worker group runs


def running(*names: str, **fields: Any) -> list[Node]:
    return [make_node(name, Standing.RUNNING, number=5, has_taken_part=True, **fields) for name in names]


def linked(name: str, **links: bool) -> Node:
    return make_node(name, links_port=5000 + ord(name[0]), links=links)


def test_a_worker_group_has_only_nodes_that_reach_each_other() -> None:
    nodes = [linked("a", b=False, c=True), linked("b", a=False, c=True), linked("c", a=True, b=True)]
    plan = planned(decide(None, nodes, "a", quiet_s=FOREVER))
    assert [member.node for member in plan.members] == ["a", "c"]
    assert "host-a" in line_up(None, nodes, BOUNDS).reserve["b"]


def test_one_side_that_does_not_reach_the_other_is_enough() -> None:
    nodes = [linked("a", b=True), linked("b", a=False)]
    assert [node.node for node in line_up(None, nodes, BOUNDS).nodes] == ["a"]


def test_who_is_reached_by_few_does_not_keep_the_many_from_going_on() -> None:
    nodes = [linked("a", b=False, c=False), linked("b", a=False, c=True), linked("c", a=False, b=True)]
    assert [node.node for node in line_up(plan_of(*nodes), nodes, BOUNDS).nodes] == ["b", "c"]


def test_no_plan_before_somebody_has_tried_each_way() -> None:
    assert "try to reach each other" in waits(decide(None, [linked("a"), linked("b")], "a", quiet_s=FOREVER))
    assert planned(decide(None, [linked("a", b=True), linked("b")], "a", quiet_s=FOREVER)).world_size == 2


def test_members_that_do_not_reach_each_other_are_parted_and_nobody_else() -> None:
    nodes = [linked("a", b=False), linked("b"), linked("c"), linked("d", c=False)]
    assert [node.node for node in parted_members(plan_of(*nodes[:3]), nodes)] == ["a", "b"]


def test_a_node_that_members_do_not_reach_is_not_called_to_join() -> None:
    plan = plan_of(make_node("a"))
    member = make_node("a", Standing.RUNNING, links_port=1, links={"b": False})
    assert regroup_reason(plan, [member, linked("b", a=False)], "a", BOUNDS) == ""
    assert "host-b" in regroup_reason(plan, [replace(member, links={"b": True}), linked("b", a=True)], "a", BOUNDS)


def test_a_node_that_is_ready_joins_and_one_that_is_not_does_not() -> None:
    members = running("a", "b")
    plan = plan_of(*members)
    assert regroup_reason(plan, members, "a", BOUNDS) == ""
    assert regroup_reason(plan, [*members, make_node("c")], "a", BOUNDS) == "host-c joins"
    assert regroup_reason(plan, [*members, make_node("c"), make_node("d")], "a", BOUNDS) == "host-c, host-d join"
    for standing in Standing:
        if standing is not Standing.READY:
            assert regroup_reason(plan, [*members, make_node("c", standing)], "a", BOUNDS) == ""
    assert regroup_reason(plan, [*members, make_node("c", must_agree={"torch": "3"})], "a", BOUNDS) == ""
    assert regroup_reason(plan, [*members, make_node("c")], "a", replace(BOUNDS, max_nodes=2)) == ""
    assert regroup_reason(plan, [members[0], make_node("c")], "a", BOUNDS) == "", (
        "one is being lost: first things first"
    )


def test_only_the_first_member_calls_for_others_and_any_ends_the_group_for_one_that_leaves() -> None:
    members = running("a", "b")
    assert regroup_reason(plan_of(*members), [*members, make_node("c")], "b", BOUNDS) == ""
    leaving = replace(members[0], standing=Standing.LEAVING)
    assert regroup_reason(plan_of(*members), [leaving, members[1]], "b", BOUNDS) == "host-a leaves"


def test_a_node_that_leaves_ends_the_worker_group_unless_the_job_is_done() -> None:
    a, b = running("a", "b")
    leaving = replace(b, standing=Standing.LEAVING)
    assert regroup_reason(plan_of(a, b), [a, leaving], "a", BOUNDS) == "host-b leaves"
    done = replace(b, standing=Standing.DONE)
    assert regroup_reason(plan_of(a, b), [a, done, make_node("c")], "a", BOUNDS) == ""


def test_who_is_lost() -> None:
    a, b = running("a", "b")
    plan = plan_of(a, b)
    assert lost_members(plan, [a, b], "a") == []
    assert [member.node for member in lost_members(plan, [a], "a")] == ["b"]
    assert lost_members(plan, [b], "a") == [], "not this node itself"
    for standing in Standing:
        has_ended = standing in (Standing.READY, Standing.WARMING, Standing.AWAY)
        assert bool(lost_members(plan, [a, replace(b, standing=standing)], "a")) == has_ended
        has_yet_to_begin = standing is not Standing.AWAY  # it left before it heard of the plan
        assert bool(lost_members(plan, [a, replace(b, standing=standing, number=4)], "a")) != has_yet_to_begin


def test_a_stop_before_the_first_plan_leaves_the_first_plan_as_it_was() -> None:
    told = replace(asks_to_stop("job", Lineage("run", None), "abc"), stop_reason="enough", num_stops=1)
    nodes = [make_node("a"), make_node("b", number=3)]
    for quiet_s, unheard_s in itertools.product((0.0, FOREVER), repeat=2):
        decided = [decide(p, nodes, "a", quiet_s=quiet_s, unheard_s=unheard_s) for p in (None, told)]
        assert decided[0] == decided[1]


def test_what_has_happened_to_a_plan_is_never_undone() -> None:
    plan = plan_of(make_node("a"))
    told = replace(plan, is_over=True, stop_reason="enough", num_stops=1)
    done = replace(plan, is_complete=True, may_be_outdated=True)
    assert plan.joined(told) == told.joined(plan) == told
    assert done.joined(told) == replace(told, is_complete=True, may_be_outdated=True)
    again = replace(told, stop_reason="enough now", num_stops=2)
    assert told.joined(again).end == again.joined(told).end == again.end != told.end
    assert again.joined(told).stop_reason == told.joined(again).stop_reason == "enough now"


# ---- by hypothesis

NAMES = "abcdef"
lineages = st.builds(
    Lineage,
    run_id=st.sampled_from(["r1", "r2"]),
    global_batch_size=st.sampled_from([None, 4, 8, 64]),
    is_asked_for=st.booleans(),
    has_begun=st.booleans(),
)


@st.composite
def worlds(draw: st.DrawFn, *, has_plan: bool | None = None) -> tuple[Plan | None, list[Node], Bounds]:
    """Any nodes in any standing, and any last plan."""
    everybody = [
        make_node(
            name,
            draw(st.sampled_from(list(Standing))),
            num_ranks=draw(st.integers(1, 4)),
            number=draw(st.integers(0, 9)),
            lineage=draw(lineages),
            must_agree={"torch": draw(st.sampled_from(["2", "2", "3"]))},
            has_taken_part=draw(st.booleans()),
        )
        for name in NAMES
    ]
    plan = None
    if has_plan or (has_plan is None and draw(st.booleans())):
        members = draw(st.lists(st.sampled_from(everybody), min_size=1, unique_by=lambda node: node.node))
        plan = plan_of(*members, number=draw(st.integers(1, 9)), is_over=draw(st.booleans()))
    nodes = draw(st.lists(st.sampled_from(everybody), min_size=1, unique_by=lambda node: node.node))
    least = draw(st.integers(1, 3))
    bounds = Bounds(
        least,
        draw(st.integers(least, 5)),
        3.0,
        2,
        draw(st.sampled_from([None, 4, 16])),
        2,
        60.0,
    )
    return plan, nodes, bounds


def all_decisions(
    plan: Plan | None, nodes: list[Node], bounds: Bounds, *, unheard_s: float = FOREVER
) -> Mapping[str, Plan]:
    """What each of the nodes would write."""
    decided = {node.node: decide(plan, nodes, node.node, bounds, unheard_s=unheard_s) for node in nodes}
    return {name: each for name, each in decided.items() if isinstance(each, Plan)}


@given(worlds())
def test_of_nodes_that_see_the_same_one_at_most_writes_and_it_is_fit_to(
    world: tuple[Plan | None, list[Node], Bounds],
) -> None:
    plan, nodes, bounds = world
    by_name = {node.node: node for node in nodes}
    written = all_decisions(plan, nodes, bounds)
    assert len(written) <= 1
    for writer, new in written.items():
        assert new.members[0].node == writer
        assert new.number > max(node.number for node in nodes)
        assert plan is None or new.number > plan.number
        assert bounds.min_nodes <= len(new.members) <= bounds.max_nodes
        assert all(by_name[member.node].standing is Standing.READY for member in new.members)
        assert not any(node.standing in (Standing.RUNNING, Standing.LEAVING) for node in nodes)
        limit = bounds.max_ranks(new.lineage)
        assert limit is not None, "a plan fixes the global batch"
        assert new.world_size <= limit
        assert len({by_name[member.node].must_agree["torch"] for member in new.members}) == 1
        ruler = reference(plan, nodes)
        assert ruler is not None
        assert not any(differences(by_name[member.node], ruler) for member in new.members)


@given(worlds())
def test_ranks_keep_their_order_and_everybody_ready_is_in_line_or_told_why(
    world: tuple[Plan | None, list[Node], Bounds],
) -> None:
    plan, nodes, bounds = world
    line = line_up(plan, nodes, bounds)
    names = [node.node for node in line.nodes]
    assert sorted([*names, *line.reserve]) == sorted(n.node for n in nodes if n.standing is Standing.READY)
    assert line_up(plan, nodes[::-1], bounds) == line, "in whatever order they are seen"
    if plan is not None:
        places = [place for name in names if (place := plan.place_of(name)) is not None]
        assert places == sorted(places), "former members in their order"
        assert all(plan.place_of(name) is None for name in names[len(places) :]), "and before the others"


@given(worlds(has_plan=True), st.floats(0, 59))
def test_no_plan_without_a_member_while_the_last_worker_group_may_run(
    world: tuple[Plan | None, list[Node], Bounds], unheard_s: float
) -> None:
    plan, nodes, bounds = world
    assert plan is not None
    for new in all_decisions(plan, nodes, bounds, unheard_s=unheard_s).values():
        has_member = any(plan.place_of(member.node) is not None for member in new.members)
        assert has_member or is_over(plan, nodes)


@st.composite
def running_worlds(draw: st.DrawFn) -> tuple[Plan, list[Node], list[Node], Bounds]:
    """A worker group that runs, its members, and others beside it."""
    size = draw(st.sampled_from([4, 8, 64]))
    lineage = Lineage("running", size, has_begun=True)
    count = draw(st.integers(1, 3))
    names = draw(st.permutations(NAMES))
    members = [
        make_node(name, Standing.RUNNING, number=5, lineage=lineage, num_ranks=draw(st.integers(1, 2)))
        for name in names[:count]
    ]
    members = [replace(node, has_taken_part=True) for node in members]
    others = [
        make_node(
            name,
            draw(st.sampled_from([Standing.READY, Standing.READY, Standing.WARMING, Standing.AWAY])),
            num_ranks=draw(st.integers(1, 4)),
            number=draw(st.integers(0, 9)),
            lineage=draw(lineages),
            must_agree={"torch": draw(st.sampled_from(["2", "2", "3"]))},
        )
        for name in names[count : draw(st.integers(count, len(names)))]
    ]
    bounds = replace(
        BOUNDS, max_nodes=draw(st.integers(count, 5)), global_batch_size=draw(st.sampled_from([None, size]))
    )
    return plan_of(*members), members, others, bounds


@given(running_worlds())
def test_who_is_called_to_join_is_taken(world: tuple[Plan, list[Node], list[Node], Bounds]) -> None:
    """Else worker groups would end for it again and again."""
    plan, members, others, bounds = world
    first = members[0].node
    reason = regroup_reason(plan, [*members, *others], first, bounds)
    assert regroup_reason(plan, [*members[1:], *others], first, bounds) == "", "never while one is being lost"
    ready = [replace(node, standing=Standing.READY) for node in members] + others
    fits = sum(node.num_ranks for node in members) <= (bounds.max_ranks(plan.lineage) or 0)
    if not fits:
        return  # no such plan is ever made
    for member in members[1:]:
        assert regroup_reason(plan, [*members, *others], member.node, bounds) == "", "it does not make the next plan"
    [new] = all_decisions(plan, ready, bounds, unheard_s=0.0).values()
    joined = {member.node for member in new.members} - {node.node for node in members}
    assert bool(joined) == bool(reason)
    assert all(f"host-{name}" in reason for name in joined)
    assert new.lineage.run_id == "running", "who joins does not take the run away"
    taken = {member.node for member in new.members}
    after = [replace(n, standing=Standing.RUNNING, number=6) if n.node in taken else n for n in ready]
    assert taken >= {node.node for node in members}
    assert regroup_reason(new, after, first, bounds) == "", "and that is that"


# ---- sightings


def test_a_record_that_changes_lives_and_one_that_stands_still_does_not() -> None:
    sightings = Sightings(gap_s=2.0)
    for now_s in range(10):
        sightings.look({"a": str(now_s), "b": "same"}, float(now_s))
    assert sightings.silent_s("a", 9.0) == 0.0
    assert sightings.silent_s("b", 9.0) == 9.0
    assert sightings.silent_s("c", 9.0) == FOREVER


def test_who_comes_back_is_heard_anew() -> None:
    sightings = Sightings(gap_s=2.0)
    sightings.look({"a": "1"}, 0.0)
    sightings.look({}, 1.0)
    sightings.look({"a": "1"}, 2.0)
    assert sightings.silent_s("a", 3.0) == 1.0


@given(gaps=st.lists(st.one_of(st.floats(0, 2), st.floats(2.01, 1e6)), max_size=30))
def test_time_in_which_we_could_not_look_proves_nothing(gaps: list[float]) -> None:
    sightings = Sightings(gap_s=2.0)
    now_s, seen_s = 0.0, 0.0
    sightings.look({"a": "same"}, now_s)
    for gap_s in gaps:
        now_s += gap_s
        seen_s += gap_s if gap_s <= 2.0 else 0.0
        sightings.look({"a": "same"}, now_s)
    assert sightings.silent_s("a", now_s) == pytest.approx(seen_s, abs=1e-3)


@given(
    steps=st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=40),
    shift_s=st.floats(-3600, 3600, allow_nan=False),
)
def test_no_clock_but_our_own_counts(steps: list[tuple[float, bool]], shift_s: float) -> None:
    def silence(begin_s: float) -> float:
        sightings, now_s, turn = Sightings(gap_s=2.0), begin_s, 0
        sightings.look({"a": "0"}, now_s)
        for gap_s, changes in steps:
            now_s, turn = now_s + gap_s, turn + changes
            sightings.look({"a": str(turn)}, now_s)
        return sightings.silent_s("a", now_s)

    assert silence(1e4 + shift_s) == pytest.approx(silence(1e4), abs=1e-6)
