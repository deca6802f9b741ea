"""Windows, microbatches and shares: every sample once per epoch, whatever the world size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.core.batch import BatchPlan, resolve_batch
from elastictrain.core.order import samples
from elastictrain.core.window import EpochTail, Window, WindowPlan, split
from elastictrain.errors import ConfigError

MICRO = st.integers(1, 8)


@st.composite
def plans(draw: st.DrawFn, tail: EpochTail | None = None) -> WindowPlan:
    micro = draw(MICRO)
    return WindowPlan(
        length=draw(st.integers(1, 300)),
        global_batch_size=micro * draw(st.integers(1, 8)),
        micro_batch_size=micro,
        epoch_tail=draw(st.sampled_from(EpochTail)) if tail is None else tail,
    )


def windows(plan: WindowPlan, num_steps: int) -> list[Window]:
    found, position = [], 0
    for _ in range(num_steps):
        window = plan.window_at(position)
        found.append(window)
        position = window.stop
    return found


@given(plan=plans(EpochTail.CONTINUE), num_steps=st.integers(1, 30))
def test_continue_leaves_no_gap_and_every_step_is_full(plan: WindowPlan, num_steps: int) -> None:
    position = 0
    for window in windows(plan, num_steps):
        assert window.start == position
        assert window.num_samples == plan.global_batch_size
        position = window.stop


@given(plan=plans(EpochTail.PARTIAL), num_epochs=st.integers(1, 3))
def test_partial_ends_a_window_with_each_epoch(plan: WindowPlan, num_epochs: int) -> None:
    found = windows(plan, plan.steps_in(num_epochs))
    assert found[-1].stop == num_epochs * plan.length
    read = [p for window in found for p in range(window.start, window.stop)]
    assert read == list(range(num_epochs * plan.length)), "each sample of each epoch exactly once"
    assert all(window.start // plan.length == (window.stop - 1) // plan.length for window in found)


@given(plan=plans(EpochTail.DROP).filter(lambda p: p.length >= p.global_batch_size), num_epochs=st.integers(1, 3))
def test_drop_leaves_out_only_what_fills_no_window(plan: WindowPlan, num_epochs: int) -> None:
    found = windows(plan, plan.steps_in(num_epochs))
    for window in found:
        assert window.num_samples == plan.global_batch_size
        assert window.start // plan.length == (window.stop - 1) // plan.length, "a window crosses the epoch's end"
    per_epoch = plan.length // plan.global_batch_size
    assert [w.start for w in found] == [
        epoch * plan.length + i * plan.global_batch_size for epoch in range(num_epochs) for i in range(per_epoch)
    ]


@given(plan=plans(), num_epochs=st.integers(1, 4))
def test_epochs_are_done_after_as_many_steps_as_announced(plan: WindowPlan, num_epochs: int) -> None:
    if plan.epoch_tail is EpochTail.DROP and plan.length < plan.global_batch_size:
        assert plan.steps_in(num_epochs) == 0
        return
    found = windows(plan, plan.steps_in(num_epochs))
    assert plan.epochs_done(found[-1].stop) >= num_epochs
    if len(found) > 1:
        assert plan.epochs_done(found[-2].stop) < num_epochs, "a step too many"


@given(plan=plans(), step=st.integers(0, 5), world_size=st.integers(1, 9))
def test_the_shares_of_a_window_are_the_window(plan: WindowPlan, step: int, world_size: int) -> None:
    window = windows(plan, step + 1)[-1]
    shares = [window.share(rank, world_size) for rank in range(world_size)]
    joined = [microbatch for share in shares for microbatch in share]
    assert joined == [window.microbatch(i) for i in range(window.num_microbatches)]
    assert [m.index for m in joined] == list(range(window.num_microbatches))
    assert sum(m.num_samples for m in joined) == window.num_samples
    assert all(1 <= m.num_samples <= plan.micro_batch_size for m in joined)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1, "one rank works while another waits for two microbatches"
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 60),
    global_batch=st.integers(1, 12),
    num_steps=st.integers(1, 8),
    tail=st.sampled_from([EpochTail.CONTINUE, EpochTail.PARTIAL]),
)
def test_a_steps_samples_do_not_depend_on_the_world_size(
    seed: int, length: int, global_batch: int, num_steps: int, tail: EpochTail
) -> None:
    plan = WindowPlan(length, global_batch, 1, tail)

    def read(world_size: int) -> list[list[int]]:
        steps = []
        for window in windows(plan, num_steps):
            ids: list[int] = []
            for rank in range(world_size):
                for m in window.share(rank, world_size):
                    ids += samples(seed, m.start, m.stop, length)[1].tolist()
            steps.append(ids)
        return steps

    assert read(1) == read(2) == read(3) == read(4)


def test_forty_samples_on_two_ranks_each_once() -> None:
    """A rank that read the whole epoch would give 80 ids; one without a shared order would repeat some."""
    plan = WindowPlan(length=40, global_batch_size=4, micro_batch_size=2, epoch_tail=EpochTail.PARTIAL)
    by_rank: list[list[int]] = [[], []]
    for window in windows(plan, plan.steps_in(1)):
        for rank in range(2):
            for m in window.share(rank, 2):
                by_rank[rank] += samples(11, m.start, m.stop, 40)[1].tolist()
    assert [len(ids) for ids in by_rank] == [20, 20]
    assert sorted(by_rank[0] + by_rank[1]) == list(range(40))
    assert not set(by_rank[0]) & set(by_rank[1])


@given(count=st.integers(0, 1000), num_parts=st.integers(1, 50))
def test_split_is_contiguous_and_even(count: int, num_parts: int) -> None:
    ranges = [split(count, part, num_parts) for part in range(num_parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert {last - first for first, last in ranges} <= {count // num_parts, count // num_parts + 1}


def resolve(
    micro: int = 4,
    global_batch: int | None = None,
    accumulation: int | None = None,
    world_size: int = 1,
    kept: int | None = None,
) -> BatchPlan:
    return resolve_batch(
        micro_batch_size=micro,
        global_batch_size=global_batch,
        accumulation_steps=accumulation,
        world_size=world_size,
        kept_global_batch_size=kept,
    )


def test_batch_sizes() -> None:
    assert resolve(global_batch=16).num_microbatches == 4
    assert resolve(global_batch=16, world_size=3).global_batch_size == 16
    assert resolve(accumulation=3, world_size=2).global_batch_size == 24
    assert resolve().global_batch_size == 4
    assert resolve(world_size=2).global_batch_size == 8


def test_accumulation_steps_fix_the_global_batch_once() -> None:
    assert resolve(accumulation=3, world_size=1, kept=24).global_batch_size == 24, "12 would be another training"
    assert resolve(global_batch=16, kept=24).global_batch_size == 16, "what the user wrote counts"


def test_a_global_batch_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size = 18 is not a multiple of train\.micro_batch_size = 4"):
        resolve(global_batch=18)
    with pytest.raises(ConfigError, match="16 or 20"):
        resolve(global_batch=18)
    with pytest.raises(ConfigError, match="4 or 8"):
        resolve(global_batch=3)


def test_a_global_batch_smaller_than_the_world() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(global_batch=8, world_size=3)
    message = str(caught.value)
    assert "2 microbatch(es), too few for 3 ranks" in message
    assert "raise train.global_batch_size to 12" in message
    assert "lower train.micro_batch_size to 2" in message
    assert "at most 2 rank(s)" in message
    with pytest.raises(ConfigError) as caught:
        resolve(micro=1, global_batch=2, world_size=3)
    assert "lower" not in str(caught.value), "no micro batch is small enough: do not offer one"


@given(micro=MICRO, global_batch=st.integers(1, 64), world_size=st.integers(1, 9))
def test_a_batch_plan_gives_each_rank_work_or_is_refused(micro: int, global_batch: int, world_size: int) -> None:
    try:
        plan = resolve(micro, global_batch, None, world_size)
    except ConfigError:
        return
    window = Window(0, plan.global_batch_size, plan.micro_batch_size)
    assert all(window.share(rank, world_size) for rank in range(world_size))
