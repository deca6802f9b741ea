"""Counters, phases, skips, advice: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.core.advice import (
    TimeShares,
    batchnorm_advice,
    bound_advice,
    mean_of_means_advice,
    schedule_advice,
)
from elastictrain.core.counters import Counters
from elastictrain.core.phases import IN_UPDATE, TRANSITIONS, Phase, check_transition
from elastictrain.core.skips import HISTORY_LENGTH, SkippedUpdate, SkipWatch
from elastictrain.errors import IllegalTransitionError

# ---- counters


@given(outcomes=st.lists(st.booleans(), max_size=50))
def test_applied_and_skipped_make_the_global_step(outcomes: list[bool]) -> None:
    counters = Counters()
    for number, applied in enumerate(outcomes, start=1):
        counters = counters.commit(applied=applied, sample_position=number * 3)
        assert counters.applied + counters.skipped == counters.global_step == number
    assert counters.applied == sum(outcomes)
    trailing = next((i for i, applied in enumerate(reversed(outcomes)) if applied), len(outcomes))
    assert counters.consecutive_skips == trailing


def test_counters_that_contradict_themselves() -> None:
    with pytest.raises(ValueError, match="global step 3"):
        Counters(global_step=3, applied=1, skipped=1)
    counters = Counters().commit(applied=True, sample_position=4)
    with pytest.raises(ValueError, match="cannot end at 4"):
        counters.commit(applied=True, sample_position=4)
    assert counters.global_step == 1


# ---- phases


@pytest.mark.parametrize("current", Phase)
@pytest.mark.parametrize("target", Phase)
def test_the_table_says_which_phase_may_follow(current: Phase, target: Phase) -> None:
    if target in TRANSITIONS[current]:
        check_transition(current, target)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{target.name.lower()} cannot follow {current.name.lower()}"):
            check_transition(current, target)


def test_the_table_is_whole() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert not TRANSITIONS[Phase.EXIT], "nothing follows the exit"
    assert all(Phase.EXIT in TRANSITIONS[phase] for phase in Phase if phase is not Phase.EXIT)
    reached, frontier = {Phase.INIT}, [Phase.INIT]
    while frontier:
        fresh = TRANSITIONS[frontier.pop()] - reached
        reached |= fresh
        frontier += fresh
    assert reached == set(Phase)


def test_a_snapshot_never_follows_a_phase_in_update() -> None:
    assert not any(Phase.SNAPSHOT in TRANSITIONS[phase] for phase in IN_UPDATE)


def test_phase_numbers_never_change() -> None:
    """They are written into heartbeat records that another version may read."""
    assert [(p.name, p.value) for p in Phase] == [
        ("INIT", 0),
        ("READY", 1),
        ("DATA", 2),
        ("FORWARD", 3),
        ("BACKWARD", 4),
        ("REDUCE", 5),
        ("OPTIMIZER", 6),
        ("COMMIT", 7),
        ("EVAL", 8),
        ("SNAPSHOT", 9),
        ("EXIT", 10),
    ]


# ---- skips


def skip_in_a_row(watch: SkipWatch, count: int, counters: Counters | None = None) -> str | None:
    counters = counters or Counters()
    diagnosis = None
    scale = 1024.0
    for _ in range(count):
        counters = counters.commit(applied=False, sample_position=counters.sample_position + 1)
        diagnosis = watch.observe(SkippedUpdate(counters.global_step, scale, float("inf")), counters)
        scale /= 2
    return diagnosis


def test_one_skip_more_than_is_borne_halts() -> None:
    assert skip_in_a_row(SkipWatch(3), 3) is None
    diagnosis = skip_in_a_row(SkipWatch(3), 4)
    assert diagnosis is not None
    assert "4 updates in a row were skipped, up to step 4" in diagnosis
    assert "1024 → 512 → 256 → 128" in diagnosis


def test_an_applied_update_in_between_starts_the_count_anew() -> None:
    watch = SkipWatch(2)
    counters = Counters()
    for applied in [False, False, True, False, False]:
        counters = counters.commit(applied=applied, sample_position=counters.sample_position + 1)
        if not applied:
            assert watch.observe(SkippedUpdate(counters.global_step, None, None), counters) is None


def test_no_skip_is_borne_where_zero_is_asked_for() -> None:
    diagnosis = skip_in_a_row(SkipWatch(0), 1)
    assert diagnosis is not None
    assert "max_consecutive_skips = 0" in diagnosis


def test_without_a_scaler_there_is_no_scale_history() -> None:
    counters = Counters().commit(applied=False, sample_position=1)
    diagnosis = SkipWatch(0).observe(SkippedUpdate(1, None, float("nan")), counters)
    assert diagnosis is not None
    assert "scale" not in diagnosis.lower()
    assert "NaN" in SkipWatch.advice("fp32")
    assert "bf16" in SkipWatch.advice("fp16")


def test_the_history_is_bounded() -> None:
    watch = SkipWatch(10_000)
    skip_in_a_row(watch, 3 * HISTORY_LENGTH)
    assert len(watch.history) == HISTORY_LENGTH


# ---- advice


def test_batchnorm_with_small_microbatches() -> None:
    advice = batchnorm_advice(["norm1", "norm2"], micro_batch_size=2, world_size=2, synchronised=False)
    assert advice is not None
    assert "norm1, norm2" in advice.what
    assert "2 samples" in advice.what
    assert "sync_batchnorm" in advice.hint
    alone = batchnorm_advice(["norm"], micro_batch_size=2, world_size=1, synchronised=False)
    assert alone is not None
    assert "sync_batchnorm" not in alone.hint, "on one rank there is nothing to synchronise"
    many = batchnorm_advice(list("abcde"), micro_batch_size=2, world_size=1, synchronised=False)
    assert many is not None
    assert "a, b, c, …" in many.what


@pytest.mark.parametrize(
    ("layers", "micro", "synchronised"), [([], 2, False), (["norm"], 16, False), (["norm"], 2, True)]
)
def test_batchnorm_with_nothing_to_say(layers: list[str], micro: int, synchronised: bool) -> None:
    assert batchnorm_advice(layers, micro_batch_size=micro, world_size=2, synchronised=synchronised) is None


def test_a_schedule_counted_in_microbatches() -> None:
    advice = schedule_advice({"CosineAnnealingLR.T_max": 800}, max_steps=100, microbatches_per_step=8, world_size=2)
    assert advice is not None
    assert "T_max = 800 is 8 times" in advice.what
    per_rank = schedule_advice({"CosineAnnealingLR.T_max": 400}, max_steps=100, microbatches_per_step=8, world_size=2)
    assert per_rank is not None
    assert "4 times" in per_rank.what


@pytest.mark.parametrize("horizon", [100, 50, 123, 1])
def test_a_schedule_counted_in_steps_is_not_remarked_on(horizon: int) -> None:
    assert schedule_advice({"T_max": horizon}, max_steps=100, microbatches_per_step=8, world_size=2) is None


def test_one_microbatch_per_step_cannot_be_miscounted() -> None:
    assert schedule_advice({"T_max": 100}, max_steps=100, microbatches_per_step=1, world_size=1) is None


def test_a_mean_of_means() -> None:
    advice = mean_of_means_advice([7, 3, 9], found_by="targets of -100 are ignored")
    assert advice is not None
    assert "between 3 and 9" in advice.what
    assert "Task.weight" in advice.hint
    assert mean_of_means_advice([5, 5, 5], found_by="mask") is None
    assert mean_of_means_advice([5], found_by="mask") is None
    assert mean_of_means_advice([], found_by="mask") is None


def shares(data: float, reduce: float) -> TimeShares:
    return TimeShares(data=data, compute=1 - data - reduce, reduce=reduce, other=0)


def test_what_a_run_waits_for() -> None:
    loader = bound_advice(shares(0.5, 0.1), num_steps=100, num_workers=0, world_size=2)
    assert loader is not None
    assert loader.key == "loader_bound"
    assert "set data.num_workers to 1" in loader.hint
    more = bound_advice(shares(0.5, 0.1), num_steps=100, num_workers=2, world_size=2)
    assert more is not None
    assert "now 2" in more.hint
    communication = bound_advice(shares(0.1, 0.5), num_steps=100, num_workers=0, world_size=2)
    assert communication is not None
    assert communication.key == "communication_bound"
    worse = bound_advice(shares(0.3, 0.5), num_steps=100, num_workers=0, world_size=2)
    assert worse is not None
    assert worse.key == "communication_bound", "the greater share is the one to say"


@pytest.mark.parametrize(
    ("data", "reduce", "num_steps", "world_size"), [(0.1, 0.1, 100, 2), (0.9, 0.0, 3, 1), (0.0, 0.9, 100, 1)]
)
def test_a_run_with_nothing_to_say(data: float, reduce: float, num_steps: int, world_size: int) -> None:
    assert bound_advice(shares(data, reduce), num_steps=num_steps, num_workers=0, world_size=world_size) is None
