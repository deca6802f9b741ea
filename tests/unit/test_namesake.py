"""Another supervisor with this node's name is told from what an earlier life of this one has left."""

from __future__ import annotations

import pytest

from elastictrain.core.membership import Lineage, Node, Standing
from elastictrain.supervisor.namesake import NUM_TURNS, Namesake
from elastictrain.supervisor.shared_keys import Record

TIMEOUT_S = 3.0


def about(address: str, standing: Standing = Standing.READY, number: int = 0) -> Node:
    return Node("localhost-abc", "localhost", address, 1, standing, number, 4000, Lineage("run", None))


ME = about("10.0.0.1")


def make_namesake() -> Namesake:
    return Namesake("life-m", ME.address, TIMEOUT_S)


def test_what_an_earlier_life_has_left_does_not_go_on() -> None:
    """Two records at most: the last one, and one whose request was still on its way when its supervisor was killed."""
    namesake = make_namesake()
    for turn, at_s in ((7, 0.0), (8, 0.5)):
        namesake.look(Record("before", turn, about("10.0.0.9", number=9)), at_s)
        assert namesake.may_live
        assert namesake.refusal(ME) is None
    namesake.look(Record("life-m", 3, ME), 0.5 + TIMEOUT_S / 2)
    assert namesake.may_live
    namesake.look(Record("life-m", 4, ME), 0.5 + TIMEOUT_S)
    assert not namesake.may_live


def test_nobody_waits_for_what_was_written_at_the_same_address() -> None:
    namesake = make_namesake()
    namesake.look(Record("before", 7, ME), 0.0)
    assert not namesake.may_live
    for turn in range(8, 8 + NUM_TURNS):
        namesake.look(Record("before", turn, ME), 0.1 * turn)
    assert namesake.may_live, "unless it goes on all the same"


@pytest.mark.parametrize(
    ("mine", "other", "life", "goes"),
    [
        (about("10.0.0.1"), about("10.0.0.2", Standing.RUNNING, 3), "a", True),
        (about("10.0.0.1", Standing.RUNNING, 3), about("10.0.0.2", number=9), "z", False),
        (about("10.0.0.1", number=2), about("10.0.0.2", number=1), "z", False),
        (about("10.0.0.1", number=1), about("10.0.0.2", number=2), "a", True),
        (about("10.0.0.1"), about("10.0.0.2"), "z", True),
        (about("10.0.0.1"), about("10.0.0.2"), "a", False),
    ],
)
def test_one_of_the_two_has_to_go_and_the_other_stays(mine: Node, other: Node, life: str, goes: bool) -> None:
    here, there = make_namesake(), Namesake(life, other.address, TIMEOUT_S)
    for turn in range(NUM_TURNS):
        assert here.refusal(mine) is None
        here.look(Record(life, turn, other), 0.1 * turn)
        there.look(Record("life-m", turn, mine), 0.1 * turn)
    assert (here.refusal(mine) is not None, there.refusal(other) is not None) == (goes, not goes)
    said = here.refusal(mine) or there.refusal(other)
    assert said is not None
    assert said.exit_code == 78
    assert "localhost-abc" in said.what
    assert f"localhost at {other.address if goes else mine.address}" in said.what
