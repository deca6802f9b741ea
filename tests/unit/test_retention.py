"""Retention deletes what is certainly superfluous, and nothing else, whatever there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastictrain.core.retention import Condition, Kept, superfluous

SNAPSHOTS = st.lists(
    st.builds(Kept, st.sampled_from(["a", "b"]), st.integers(0, 30), st.sampled_from(Condition)),
    max_size=20,
    unique_by=lambda s: (s.run_id, s.global_step),
)
PINS = st.sets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 30)), max_size=5)


@given(SNAPSHOTS, st.integers(1, 5), st.none() | st.integers(1, 7), PINS)
def test_the_rules_hold(snapshots, keep_last, keep_every, pins):
    doomed = superfluous(snapshots, keep_last=keep_last, keep_every=keep_every, pins=pins)
    kept = [s for s in snapshots if s not in doomed]
    for run_id in ("a", "b"):
        before = [s for s in snapshots if s.run_id == run_id]
        after = [s for s in kept if s.run_id == run_id]
        sound_before = sorted((s.global_step for s in before if s.condition is not Condition.DAMAGED), reverse=True)
        sound_after = sorted((s.global_step for s in after if s.condition is not Condition.DAMAGED), reverse=True)
        assert sound_after[:keep_last] == sound_before[:keep_last]
        newest_verified = max((s.global_step for s in before if s.condition is Condition.VERIFIED), default=None)
        for s in doomed:
            if s.run_id == run_id:
                assert newest_verified is not None
                assert s.global_step < newest_verified
        if newest_verified is not None:
            assert any(s.global_step == newest_verified and s.condition is Condition.VERIFIED for s in after)
    for s in doomed:
        assert (s.run_id, s.global_step) not in pins
        assert keep_every is None or s.global_step % keep_every or s.condition is Condition.DAMAGED
    # What is left is stable: nothing more would go.
    assert superfluous(kept, keep_last=keep_last, keep_every=keep_every, pins=pins) == []


def _steps(snapshots: list[Kept]) -> list[int]:
    return [s.global_step for s in snapshots]


def test_only_after_a_newer_one_is_verified():
    many = [Kept("a", step, Condition.COMMITTED) for step in range(1, 9)]
    assert superfluous(many, keep_last=2) == []
    verified = [*many[:-1], Kept("a", 8, Condition.VERIFIED)]
    assert _steps(superfluous(verified, keep_last=2)) == [1, 2, 3, 4, 5, 6]
    assert _steps(superfluous(verified, keep_last=2, keep_every=3, pins={("a", 1), ("b", 2)})) == [2, 4, 5]


def test_a_damaged_one_neither_counts_nor_stays():
    snapshots = [
        Kept("a", 1, Condition.COMMITTED),
        Kept("a", 2, Condition.DAMAGED),
        Kept("a", 3, Condition.VERIFIED),
        Kept("a", 4, Condition.DAMAGED),
    ]
    assert _steps(superfluous(snapshots, keep_last=2)) == [2]
