"""When the next snapshot is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.core.snapshot_interval import (
    FIRST_INTERVAL_S,
    LastSnapshot,
    SnapshotSchedule,
    interval_s,
    is_due,
    mean_time_between_failures_s,
)


def test_daly_by_hand():
    # C = 20 s, M = 1000 s: √(2·20·1000) = 200; C/2M = 0.01; 200·(1 + 0.1/3 + 0.01/9) − 20 = 186.888…
    assert interval_s(20, 1000, 0.5) == pytest.approx(200 * (1 + 0.1 / 3 + 0.01 / 9) - 20)
    assert interval_s(3000, 1000, 0.9) == 1000


@given(st.floats(1e-4, 1e3), st.floats(1, 1e7), st.floats(0.001, 0.5))
def test_the_overhead_stays_below_its_limit(cost_s, mtbf_s, max_overhead):
    interval = interval_s(cost_s, mtbf_s, max_overhead)
    assert cost_s / (cost_s + interval) <= max_overhead * (1 + 1e-9)


@given(st.floats(1e-3, 1), st.floats(1e4, 1e7))
def test_daly_is_near_the_minimum_of_the_expected_loss(cost_s, mtbf_s):
    def loss(interval: float) -> float:
        # Daly 2006, equation 20 without the restart time: wall time per unit of work.
        return mtbf_s * math.expm1((interval + cost_s) / mtbf_s) / interval

    best = interval_s(cost_s, mtbf_s, 0.999)
    assert all(loss(best) <= loss(best * factor) * (1 + 1e-9) for factor in (0.5, 0.8, 1.25, 2))


def test_free_snapshots_are_always_due():
    assert interval_s(0, 1000, 0.01) == 0


def test_mtbf_starts_at_the_prior_and_follows_what_is_seen():
    assert mean_time_between_failures_s(0, 0) == 3600
    assert mean_time_between_failures_s(36_000, 0) == 39_600
    assert mean_time_between_failures_s(36_000, 99) == 396


def test_every_steps_counts_multiples_and_misses_none():
    schedule = SnapshotSchedule(every_steps=10)
    due = [s for s in range(1, 41) if is_due(schedule, LastSnapshot((s - 1) // 10 * 10, 0), global_step=s, now_s=0)]
    assert due == [10, 20, 30, 40]
    # The slot was busy at step 10: taken at the next chance.
    assert is_due(schedule, LastSnapshot(9, 0), global_step=13, now_s=0)


def test_every_s_counts_from_the_end_of_the_last():
    schedule = SnapshotSchedule(every_s=30)
    assert not is_due(schedule, LastSnapshot(5, 100), global_step=6, now_s=129.9)
    assert is_due(schedule, LastSnapshot(5, 100), global_step=6, now_s=130)


def test_auto_learns_the_cost_and_then_follows_it():
    schedule = SnapshotSchedule(auto=True, max_overhead=0.01)
    assert not is_due(schedule, LastSnapshot(0, 0), global_step=3, now_s=FIRST_INTERVAL_S - 0.1)
    assert is_due(schedule, LastSnapshot(0, 0), global_step=3, now_s=FIRST_INTERVAL_S)
    # One second each, at most one percent: 99 s apart, though failures every 100 s would ask for more.
    last = LastSnapshot(3, 1000, cost_s=1.0)
    assert not is_due(schedule, last, global_step=9, now_s=1098.9, mtbf_s=100)
    assert is_due(schedule, last, global_step=9, now_s=1099, mtbf_s=100)


def test_never_two_of_one_step():
    schedule = SnapshotSchedule(every_steps=1, every_s=1e-9, auto=True)
    assert not is_due(schedule, LastSnapshot(7, 0, 0.0), global_step=7, now_s=1e9)
