"""What survives of a run over its worker groups: played through with every kind of restart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastictrain.core.trajectory import RankTrace, read_trace, survey
from elastictrain.core.window import EpochTail, WindowPlan

STEPS = 12


def group(
    number: int, plan: WindowPlan, world_size: int, began: int, reached: int, in_flight: int = 0
) -> list[RankTrace]:
    """A worker group that went from step `began` to `reached`, and had consumed the window of one more by then."""
    traces = [RankTrace(number, rank, began_step=began) for rank in range(world_size)]
    position = 0
    for step in range(1, reached + in_flight + 1):
        window = plan.window_at(position)
        position = window.stop
        if step <= began:
            continue
        for rank, trace in enumerate(traces):
            share = tuple((m.start, m.stop) for m in window.share(rank, world_size))
            traces[rank] = replace(
                trace,
                began_s=float(100 * number),
                spans={**trace.spans, step: share},
                windows={**trace.windows, step: (window.start, window.stop)},
                committed={**trace.committed, step: 100.0 * number + step} if step <= reached else trace.committed,
            )
    return traces


plans = st.builds(
    WindowPlan,
    length=st.integers(6, 40),
    global_batch_size=st.just(6),
    micro_batch_size=st.sampled_from([1, 2, 3]),
    epoch_tail=st.sampled_from(list(EpochTail)),
)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(restored, reached, in flight) of the groups of a run; the last reaches the end."""
    found = []
    furthest = 0
    for _ in range(draw(st.integers(0, 4))):
        began = draw(st.integers(0, furthest)) if found else 0
        reached = draw(st.integers(began, STEPS - 1))
        found.append((began, reached, draw(st.integers(0, 1))))
        furthest = max(0, reached)
    found.append((draw(st.integers(0, furthest)) if found else 0, STEPS, 0))
    return found


def dropped(plan: WindowPlan) -> int | None:
    return plan.length if plan.epoch_tail is EpochTail.DROP else None


@given(plans, lives(), st.integers(1, 3))
def test_a_sound_run_consumes_every_sample_once(plan, found, world_size):
    traces = [t for n, life in enumerate(found, start=1) for t in group(n, plan, world_size, *life)]
    survived = survey(traces, drops_tail_of=dropped(plan))
    assert (survived.samples_repeated, survived.samples_skipped) == (0, 0)
    assert survived.last_step == STEPS
    assert sorted(survived.windows) == list(range(1, STEPS + 1))
    assert survived.steps_lost == sum(before[1] - after[0] for before, after in pairwise(found))


@given(plans, st.integers(1, STEPS), st.integers(1, 3))
def test_a_share_that_nobody_consumed_is_counted(plan, step, world_size):
    traces = group(1, plan, world_size, 0, STEPS)
    spans = traces[-1].spans
    missing = sum(stop - start for start, stop in spans[step])
    traces[-1] = replace(traces[-1], spans={**spans, step: ()})
    survived = survey(traces, drops_tail_of=dropped(plan))
    assert (survived.samples_repeated, survived.samples_skipped) == (0, missing)


@given(plans, st.integers(1, STEPS))
def test_a_share_that_two_ranks_consumed_is_counted(plan, step):
    traces = group(1, plan, 2, 0, STEPS)
    twice = traces[0].spans[step]
    traces[1] = replace(traces[1], spans={**traces[1].spans, step: twice + traces[1].spans[step]})
    survived = survey(traces, drops_tail_of=dropped(plan))
    assert survived.samples_repeated == sum(stop - start for start, stop in twice)


def test_a_restart_at_another_position_is_counted():
    plan = WindowPlan(100, 4, 2)
    first = group(1, plan, 1, 0, 5)
    late, early = WindowPlan(100, 4, 2), WindowPlan(100, 4, 2)
    shifted = [
        replace(
            trace,
            spans={s: tuple((a + 4, b + 4) for a, b in spans) for s, spans in trace.spans.items()},
            windows={s: (a + 4, b + 4) for s, (a, b) in trace.windows.items()},
        )
        for trace in group(2, late, 1, 5, STEPS)
    ]
    assert survey([*first, *shifted]).samples_skipped == 4
    behind = [
        replace(
            trace,
            spans={s: tuple((a - 4, b - 4) for a, b in spans) for s, spans in trace.spans.items()},
            windows={s: (a - 4, b - 4) for s, (a, b) in trace.windows.items()},
        )
        for trace in group(2, early, 1, 5, STEPS)
    ]
    assert survey([*first, *behind]).samples_repeated == 4


def test_goodput_leaves_out_what_was_done_again_and_the_pause():
    plan = WindowPlan(100, 4, 2)
    # One second a step; the second group begins at 200 s and does steps 4 and 5 again.
    survived = survey([*group(1, plan, 2, 0, 5), *group(2, plan, 2, 3, STEPS)])
    assert survived.useful_s == STEPS
    assert survived.wall_s == 200 + STEPS - 100
    assert survived.goodput == STEPS / (100 + STEPS)


def test_reads_the_lines_of_a_rank_that_died_before_its_first_step():
    assert read_trace(3, 1, []).began_step is None
    lines = [
        {"kind": "began", "step": 4, "position": 16, "at_s": 1.0},
        {"kind": "consumed", "step": 5, "window": [16, 20], "spans": [[16, 18]], "at_s": 2.0},
        {"kind": "committed", "step": 5, "at_s": 3.0},
    ]
    trace = read_trace(3, 1, lines)
    assert (trace.began_step, trace.spans[5], trace.windows[5], trace.committed[5]) == (4, ((16, 18),), (16, 20), 3.0)
