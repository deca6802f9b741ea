"""The decisions of supervision: states, who hangs, whether to go on."""

from __future__ import annotations

import runpy
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from elastictrain.config.schema import JobConfig
from elastictrain.core import lifecycle
from elastictrain.core.lifecycle import State, Trigger
from elastictrain.core.liveness import (
    ELSEWHERE_MARGIN_S,
    Health,
    Limits,
    ProcessState,
    RankSeen,
    StepTimes,
    Verdict,
    has_left,
    judge,
    shortest_limit_s,
    step_limit_s,
)
from elastictrain.core.order import sample_list
from elastictrain.core.phases import Phase
from elastictrain.core.policy import (
    Budget,
    Cause,
    CauseKind,
    Failure,
    Halt,
    RankEnd,
    Restart,
    backoff_s,
    classify,
    decide,
    decide_elsewhere,
)
from elastictrain.core.window import EpochTail, WindowPlan
from elastictrain.errors import IllegalTransitionError
from elastictrain.supervisor.settings import limits_of, samples_in_step

DOCS = Path(__file__).resolve().parents[2] / "docs"

# ---- lifecycle


@pytest.mark.parametrize("name", ["lifecycle.md", "phases.md"])
def test_the_diagrams_are_current(name: str) -> None:
    pages = runpy.run_path(str(DOCS / "make_diagrams.py"))["PAGES"]
    assert (DOCS / name).read_text() == pages[name](), "python docs/make_diagrams.py"


def test_every_state_can_be_reached_and_left() -> None:
    reached, found = set(), {State.STARTING}
    while found - reached:
        state = (found - reached).pop()
        reached.add(state)
        found |= set(lifecycle.TRANSITIONS[state].values())
    assert reached == set(lifecycle.TRANSITIONS) == set(State) - {State.NOT_RUNNING}
    assert {State.COMPLETED, State.STOPPED} == lifecycle.FINAL


@given(st.lists(st.sampled_from(list(Trigger))))
def test_an_illegal_transition_raises_and_says_what_is_legal(triggers: list[Trigger]) -> None:
    state = State.STARTING
    for trigger in triggers:
        if trigger in lifecycle.TRANSITIONS[state]:
            state = lifecycle.after(state, trigger)
        else:
            with pytest.raises(IllegalTransitionError, match=str(state)):
                lifecycle.after(state, trigger)


def test_a_request_to_stop_is_always_heard() -> None:
    for state in set(lifecycle.TRANSITIONS) - lifecycle.FINAL:
        assert lifecycle.after(state, Trigger.STOP_ASKED) in (State.STOPPING, State.STOPPED)


# ---- liveness

LIMITS = Limits(
    startup_s=100,
    step_s=10,
    min_step_s=5,
    max_step_s=80,
    eval_s=50,
    snapshot_s=40,
    exit_s=20,
    collective_s=120,
    tick_s=2,
)
NOW_S = 10_000.0


def seen(rank: int, phase: Phase | None, age_s: float, **fields: object) -> RankSeen:
    """A rank that ticks, in its fifth step, since `age_s` in a phase."""
    base = RankSeen(rank, phase, NOW_S - age_s, NOW_S - 0.1, step=105, steps_done=5)
    return replace(base, **fields)  # type: ignore[arg-type]


def verdict_of(*ranks: RankSeen, world_size: int | None = None) -> Verdict:
    return judge(ranks, LIMITS, longest_step_s=None, now_s=NOW_S, world_size=world_size or len(ranks))


def culprits_of(*ranks: RankSeen, world_size: int | None = None) -> list[int]:
    return [verdict.rank for verdict in verdict_of(*ranks, world_size=world_size).culprits]


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.READY, Phase.OPTIMIZER])
def test_the_one_that_does_not_wait_is_to_blame(phase: Phase) -> None:
    step = 105 if phase is not Phase.OPTIMIZER else 104
    assert culprits_of(seen(0, Phase.REDUCE, 12), seen(1, phase, 11, step=step), seen(2, Phase.REDUCE, 12)) == [1]


def test_a_straggler_that_moves_is_not_to_blame() -> None:
    verdict = verdict_of(seen(0, Phase.REDUCE, 12), seen(1, Phase.FORWARD, 0.1))
    assert [v.health for v in verdict.ranks] == [Health.WAITING, Health.HEALTHY]
    assert verdict.is_over_limit


def test_a_rank_that_is_ahead_of_a_slow_one_waits_for_it() -> None:
    """On CUDA the host of a victim stands still in the optimizer, where nothing says that it waits."""
    assert culprits_of(seen(0, Phase.OPTIMIZER, 30), seen(1, Phase.EVAL, 30)) == []
    assert culprits_of(seen(0, Phase.OPTIMIZER, 60), seen(1, Phase.EVAL, 60)) == [1]
    assert culprits_of(seen(0, Phase.OPTIMIZER, 11), seen(1, Phase.FORWARD, 11)) == [1]


def test_a_stopped_process_is_to_blame_wherever_it_is() -> None:
    for phase in (Phase.REDUCE, Phase.FORWARD, Phase.DATA):
        stopped = seen(0, phase, 12, process=ProcessState.STOPPED)
        assert culprits_of(stopped, seen(1, Phase.REDUCE, 12)) == [0]
        assert culprits_of(replace(stopped, moved_s=NOW_S - 1), seen(1, Phase.REDUCE, 1)) == [], "within its limit"


def test_a_rank_that_holds_the_interpreter_lock_is_to_blame() -> None:
    locked = seen(1, Phase.FORWARD, 12, tick_s=NOW_S - 12)
    assert culprits_of(seen(0, Phase.FORWARD, 12, in_collective=True), locked) == [1]


def test_the_stack_overrules_the_phase() -> None:
    """Rank 0 waits in a collective of the user's loss."""
    assert culprits_of(seen(0, Phase.FORWARD, 12, in_collective=True), seen(1, Phase.DATA, 12)) == [1]


def test_who_left_out_a_collective() -> None:
    """All wait: the fewer, of equally many those ahead."""
    behind = seen(0, Phase.FORWARD, 12, in_collective=True)
    assert culprits_of(behind, seen(1, Phase.REDUCE, 12)) == [1]
    assert culprits_of(behind, seen(1, Phase.REDUCE, 12), seen(2, Phase.REDUCE, 12)) == [0]
    assert culprits_of(seen(0, Phase.REDUCE, 12), seen(1, Phase.REDUCE, 12)) == [0, 1]


# ---- two nodes, each with a supervisor that sees its own two ranks

CHANCE_S = LIMITS.eval_s + ELSEWHERE_MARGIN_S
"""Until then a rank elsewhere may be within its limits, or its supervisor at work."""


def at(ranks: Sequence[RankSeen], passed_s: float) -> Verdict:
    """What the supervisor of these ranks finds later, when nobody has moved; who ticks goes on ticking."""
    now_s = NOW_S + passed_s
    ticking = [replace(r, tick_s=now_s) if r.tick_s > NOW_S - 0.5 else r for r in ranks]
    return judge(ticking, LIMITS, longest_step_s=None, now_s=now_s, world_size=4)


def first_blamed(ranks: Sequence[RankSeen], until_s: float) -> tuple[float, Verdict] | None:
    """Plays the time on, with nobody moving, until a node's supervisor blames one of its own: how much later, how."""
    for half_seconds in range(int(until_s * 2)):
        verdict = at(ranks, half_seconds / 2)
        if verdict.culprits:
            return half_seconds / 2, verdict
    return None


@pytest.mark.parametrize(
    ("culprit", "says"),
    [
        (seen(3, Phase.FORWARD, 0), "stands still in forward"),
        (seen(3, Phase.DATA, 0), "stands still in data"),
        (seen(3, Phase.EVAL, 0), "stands still in eval"),
        (seen(3, Phase.SNAPSHOT, 0), "stands still in snapshot"),
        (seen(3, Phase.REDUCE, 0, process=ProcessState.STOPPED), "its process is stopped"),
        (seen(3, Phase.FORWARD, 0, tick_s=NOW_S - 1, step=104), "it holds the interpreter lock"),
    ],
    ids=["loss", "data", "evaluation", "snapshot", "stopped", "lock"],
)
def test_the_node_of_the_culprit_acts_first(culprit: RankSeen, says: str) -> None:
    victims, its_node = [seen(rank, Phase.REDUCE, 0) for rank in (0, 1)], [seen(2, Phase.REDUCE, 0), culprit]
    there = first_blamed(its_node, 200)
    assert there is not None
    found_s, verdict = there
    assert [v.rank for v in verdict.culprits] == [3]
    assert says in verdict.culprits[0].why
    assert not verdict.elsewhere
    here = first_blamed(victims, 200)
    assert here is not None
    assert here[0] >= found_s + ELSEWHERE_MARGIN_S, "those that wait were killed before the culprit could be"


def test_a_node_that_only_waits_says_so_and_leaves_it_to_the_timeout_of_the_collective() -> None:
    waiting = [seen(rank, Phase.REDUCE, 0) for rank in (0, 1)]
    verdict = at(waiting, 15)
    assert (verdict.everybody_waits, verdict.elsewhere, verdict.culprits) == (True, True, ())
    assert {v.why for v in verdict.ranks} == {"waits for a rank of another node"}
    blamed = first_blamed(waiting, 300)
    assert blamed is not None, "it must not wait for ever"
    after_s, verdict = blamed
    assert after_s > LIMITS.collective_s, "those that wait would have lost what they hold"
    assert [v.rank for v in verdict.culprits] == [0, 1]
    assert "a rank of another node, where nobody has acted" in verdict.culprits[0].why


def test_who_of_this_node_left_out_a_collective_is_named_also_with_others_elsewhere() -> None:
    """Not at once: a rank that is stopped elsewhere, in the middle of a ring, can hold up one of two neighbours."""
    apart = [seen(0, Phase.REDUCE, 0), seen(1, Phase.REDUCE, 0, step=106)]
    blamed = first_blamed(apart, 200)
    assert blamed is not None
    assert CHANCE_S < blamed[0] < CHANCE_S + 1
    assert [v.rank for v in blamed[1].culprits] == [1]
    assert "it left one out" in blamed[1].culprits[0].why


def test_a_host_that_is_ahead_of_its_device_may_wait_for_another_node() -> None:
    assert culprits_of(seen(0, Phase.OPTIMIZER, 30), seen(1, Phase.REDUCE, 30), world_size=4) == []
    assert verdict_of(seen(0, Phase.OPTIMIZER, 30), seen(1, Phase.OPTIMIZER, 30), world_size=4).elsewhere
    behind = seen(0, Phase.OPTIMIZER, 30, step=104)
    assert culprits_of(behind, seen(1, Phase.REDUCE, 30), world_size=4) == [0], "what it needs was there for rank 1"


def test_before_the_first_step_others_may_still_start() -> None:
    waiting = [seen(rank, Phase.INIT, 0, in_collective=True, steps_done=0) for rank in (0, 1)]
    assert at(waiting, LIMITS.startup_s + 5).elsewhere


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([Phase.REDUCE, Phase.FORWARD, Phase.EVAL, Phase.SNAPSHOT]), min_size=2, max_size=2),
    st.floats(0, 3),
)
def test_never_both_nodes_wait_for_each_other_for_ever(phases: list[Phase], late_s: float) -> None:
    """Whatever the ranks of the other node do, one of the two supervisors acts; who waits, no sooner than its peer."""
    victims = [seen(rank, Phase.REDUCE, 0) for rank in (0, 1)]
    others = [seen(rank, phase, -late_s) for rank, phase in zip((2, 3), phases, strict=True)]
    here, there = first_blamed(victims, 400), first_blamed(others, 400)
    assert here is not None
    assert there is not None
    if any(phase is not Phase.REDUCE for phase in phases):
        assert there[0] + ELSEWHERE_MARGIN_S - late_s <= here[0]


def test_limits_by_phase() -> None:
    for phase, limit in (
        (None, 100), (Phase.INIT, 100), (Phase.FORWARD, 10), (Phase.EVAL, 50), (Phase.SNAPSHOT, 40), (Phase.EXIT, 20),
    ):  # fmt: skip
        assert culprits_of(seen(0, phase, limit - 0.1)) == []
        assert culprits_of(seen(0, phase, limit + 0.1)) == [0]
    assert culprits_of(seen(0, Phase.FORWARD, 99, steps_done=0)) == [], "the first step may compile"


def test_a_rank_without_a_heartbeat_is_behind_those_that_wait_for_it() -> None:
    assert culprits_of(seen(0, Phase.INIT, 101, in_collective=True), seen(1, None, 101)) == [1]


@given(st.floats(0, 1e6), st.one_of(st.none(), st.floats(0, 1e5)))
def test_a_learnt_limit_has_a_floor_and_a_ceiling(startup_s: float, longest_s: float | None) -> None:
    learnt = replace(LIMITS, step_s=None, startup_s=startup_s)
    limit = step_limit_s(learnt, longest_s)
    assert limit == startup_s if longest_s is None else 5 <= limit <= 80


@given(
    st.lists(st.tuples(st.sampled_from(list(Phase)), st.floats(0, 120)), min_size=1, max_size=5),
    st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(list(Phase)), st.floats(0, 1))), min_size=5, max_size=5),
)
def test_between_two_looks_nobody_comes_over_its_limit(
    ranks: list[tuple[Phase, float]], moves: list[tuple[Phase, float] | None]
) -> None:
    """So records need not be read before that, whatever the ranks do meanwhile."""
    learnt = replace(LIMITS, step_s=None)
    found = [seen(rank, phase, age_s) for rank, (phase, age_s) in enumerate(ranks)]
    verdict = judge(found, learnt, longest_step_s=2.0, now_s=NOW_S, world_size=len(found))
    assert verdict.is_over_limit == (verdict.slack_s < 0)
    clear_s = min(verdict.slack_s, shortest_limit_s(learnt, 2.0))
    if clear_s < 0:
        return
    later = [
        rank if move is None else replace(rank, phase=move[0], moved_s=NOW_S + move[1] * clear_s)
        for rank, move in zip(found, moves, strict=False)
    ]
    at_s = NOW_S + clear_s * (1 - 1e-9)
    assert not judge(later, learnt, longest_step_s=2.0, now_s=at_s, world_size=len(found)).is_over_limit


def test_what_was_learnt_holds_for_the_next_group() -> None:
    times = StepTimes()
    times.observe([2.0, 3.0])
    times.observe([0.0])
    assert times.longest_s == 3.0


phases = st.one_of(st.none(), st.sampled_from(list(Phase)))
anybody = st.builds(
    RankSeen,
    rank=st.just(0),
    phase=phases,
    moved_s=st.floats(NOW_S - 300, NOW_S + 1),
    tick_s=st.floats(NOW_S - 300, NOW_S),
    step=st.integers(100, 102),
    steps_done=st.integers(0, 3),
    process=st.sampled_from(list(ProcessState)),
    in_collective=st.sampled_from([None, True, False]),
)


@given(st.lists(anybody, min_size=1, max_size=6), st.integers(0, 3))
def test_any_group(found: list[RankSeen], elsewhere: int) -> None:
    """Nobody within its limit is ever blamed; whoever is over it is hung, or waits; a hang is found in the end."""
    ranks = [replace(rank, rank=number) for number, rank in enumerate(found)]
    verdict = verdict_of(*ranks, world_size=len(ranks) + elsewhere)
    assert [v.rank for v in verdict.ranks] == [rank.rank for rank in ranks]
    for rank, v in zip(ranks, verdict.ranks, strict=True):
        assert (v.health in (Health.HUNG, Health.WAITING)) == (v.stood_still_s > v.limit_s and not has_left(rank))
        assert bool(v.why) == (v.health is not Health.HEALTHY)
    later = judge(ranks, LIMITS, longest_step_s=None, now_s=NOW_S + 1000, world_size=len(ranks) + elsewhere)
    assert later.culprits or all(map(has_left, ranks)), "nobody moves any more, and nobody is blamed"


def test_who_has_left_in_order_is_not_to_blame() -> None:
    left = seen(1, Phase.EXIT, 500, process=ProcessState.GONE)
    assert culprits_of(seen(0, Phase.SNAPSHOT, 1), left) == []
    assert culprits_of(seen(0, Phase.SNAPSHOT, 41), left) == [0]
    assert culprits_of(seen(0, Phase.SNAPSHOT, 1), seen(1, Phase.EXIT, 500)) == [], "it is rank zero's turn"
    assert culprits_of(seen(0, Phase.SNAPSHOT, 41), seen(1, Phase.EXIT, 500)) == [0]


@given(st.lists(anybody, min_size=1, max_size=6), st.floats(-3600, 3600))
def test_only_differences_of_time_count(found: list[RankSeen], shift_s: float) -> None:
    ranks = [replace(r, rank=i, moved_s=round(r.moved_s), tick_s=round(r.tick_s)) for i, r in enumerate(found)]
    shift = float(round(shift_s))
    shifted = [replace(r, moved_s=r.moved_s + shift, tick_s=r.tick_s + shift) for r in ranks]
    before = judge(ranks, LIMITS, longest_step_s=None, now_s=NOW_S, world_size=9)
    assert before == judge(shifted, LIMITS, longest_step_s=None, now_s=NOW_S + shift, world_size=9)


# ---- policy

BUDGET = Budget(max_failures=5, window_s=1000, same_step_failures=3, backoff_s=1.0, max_backoff_s=60.0)
CRASH = Cause(CauseKind.EXCEPTION, "rank 0, step 7: boom")


def failure(at_s: float = 0.0, step: int = 7, *, began: bool = True, progressed: bool = False) -> Failure:
    return Failure(at_s, step, began, progressed, CRASH)


def decided(*failures: Failure, now_s: float = 0.0, samples: str = "") -> Restart | Halt:
    return decide(failures, BUDGET, now_s=now_s, jitter=0.0, samples=samples)


def test_the_first_failure_costs_no_pause() -> None:
    assert decided(failure(progressed=True)) == Restart(0.0, CRASH.what)


def test_the_same_step_three_times_halts() -> None:
    first = failure(progressed=True)
    assert isinstance(decided(first, failure()), Restart)
    halted = decided(first, failure(), failure(), samples="samples 1, 2")
    assert isinstance(halted, Halt)
    assert halted.exit_code == 79
    assert "step 8 fails: 3 times in a row" in halted.reason
    assert "samples 1, 2" in halted.reason


def test_three_failures_before_the_first_step_are_not_the_same_step() -> None:
    assert isinstance(decided(*(failure(began=False) for _ in range(4))), Restart)


def test_too_many_failures_without_progress_halt() -> None:
    steps = [failure(at_s=i, step=7 - i % 2) for i in range(6)]
    assert isinstance(decided(*steps[:5], now_s=5), Restart)
    assert isinstance(decided(*steps, now_s=6), Halt)
    assert isinstance(decided(*steps, now_s=1003), Restart), "the first ones are long ago"


def test_a_mistake_is_not_tried_again() -> None:
    cause = Cause(CauseKind.MISTAKE, "wrong", "edit it", can_retry=False, exit_code=78)
    assert decided(replace(failure(progressed=True), cause=cause)) == Halt("wrong", "edit it", 78)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 500)), min_size=1, max_size=200))
def test_progress_goes_on_for_ever(lives: list[tuple[int, float]]) -> None:
    """However often it fails: a job that gets further each time is never halted, and never pauses."""
    failures: list[Failure] = []
    step, now_s = 0, 0.0
    for gained, lived_s in lives:
        step, now_s = step + gained + 1, now_s + lived_s
        failures.append(failure(now_s, step, progressed=True))
        assert decided(*failures, now_s=now_s) == Restart(0.0, CRASH.what)


@given(st.lists(st.integers(0, 9), min_size=20, max_size=60), st.floats(0, 0.999))
def test_no_progress_never_goes_on_for_ever(steps: list[int], jitter: float) -> None:
    """Failures follow each other at once: within `max_failures` and one, the job is halted."""
    failures: list[Failure] = []
    for number, step in enumerate(steps):
        failures.append(failure(0.0, step))
        decision = decide(failures, BUDGET, now_s=0.0, jitter=jitter)
        if isinstance(decision, Halt):
            assert number <= BUDGET.max_failures
            return
    raise AssertionError("never halted")


def test_other_nodes_are_blamed_for_as_long_as_one_of_them_can_have_failed_and_no_longer() -> None:
    own: list[Failure] = []
    while not own or not isinstance(decided(*own), Halt):
        own.append(failure(0.0, len(own) % 2))
        assert decide_elsewhere(len(own), CRASH, BUDGET) is None, "it halts itself, at the latest now"
    halt = decide_elsewhere(BUDGET.max_failures + 2, CRASH, BUDGET)
    assert halt is not None
    assert "7 worker groups in a row" in halt.reason
    assert CRASH.what in halt.reason


@given(st.integers(0, 100), st.floats(0, 0.999))
def test_backoff(num_before: int, jitter: float) -> None:
    pause_s = backoff_s(num_before, BUDGET, jitter)
    assert 0 <= pause_s <= BUDGET.max_backoff_s
    assert (pause_s == 0) == (num_before == 0)
    for fewer, more in pairwise(range(num_before + 1)):
        assert backoff_s(fewer, BUDGET, 0) <= backoff_s(more, BUDGET, 0)


@pytest.mark.parametrize(
    ("end", "kind", "says", "can_retry"),
    [
        (RankEnd(1, -9), CauseKind.SIGNAL, "rank 1 was ended by SIGKILL", True),
        (RankEnd(1, -9, oom_killed=True), CauseKind.OUT_OF_MEMORY, "want of memory", True),
        (RankEnd(1, -11), CauseKind.SIGNAL, "SIGSEGV", True),
        (RankEnd(1, -40), CauseKind.SIGNAL, "signal 40", True),
        (RankEnd(1, 3), CauseKind.EXIT_CODE, "exit code 3, without a report", True),
        (RankEnd(1, -9, killed_as_hung="it slept"), CauseKind.HANG, "rank 1 hung: it slept", True),
        (RankEnd(None, -9), CauseKind.SIGNAL, "the agent was ended by SIGKILL", True),
        (RankEnd(0, 70, "WorkerFailedError", "ValueError: x"), CauseKind.EXCEPTION, "ValueError: x", True),
        (
            RankEnd(0, 70, "WorkerFailedError", "OutOfMemoryError: CUDA out of memory. Tried"),
            CauseKind.DEVICE_OUT_OF_MEMORY,
            "the GPU's memory is full",
            True,
        ),
        (
            RankEnd(0, 70, "WorkerFailedError", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
            CauseKind.DEVICE,
            "defective",
            True,
        ),
        (RankEnd(0, 78, "TaskError", "importing it failed"), CauseKind.MISTAKE, "importing", False),
        (RankEnd(0, 65, "DataError", "sample 5: KeyError: 1"), CauseKind.MISTAKE, "sample 5", False),
        (RankEnd(0, 65, "DataError", "sample 5: OSError: [Errno 5]"), CauseKind.STORAGE, "sample 5", True),
        (RankEnd(0, 79, "HaltError", "11 skips"), CauseKind.HALT, "11 skips", False),
        (RankEnd(0, 74, "StorageError", "no store"), CauseKind.EXCEPTION, "no store", True),
    ],
)
def test_causes_in_words(end: RankEnd, kind: CauseKind, says: str, can_retry: bool) -> None:
    cause = classify([end])
    assert (cause.kind, cause.can_retry) == (kind, can_retry)
    assert says in cause.what


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("CUDA error: out of memory", CauseKind.DEVICE_OUT_OF_MEMORY, "memory is full"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", CauseKind.DEVICE_OUT_OF_MEMORY,
         "memory is full"),
        ("CUDA error: an illegal memory access was encountered", CauseKind.DEVICE, "not its own"),
        ("CUDA error: device-side assert triggered", CauseKind.DEVICE, "index out of range"),
        ("CUDA error: misaligned address", CauseKind.DEVICE, "in a wrong way"),
        ("CUDA error: no kernel image is available for execution on the device", CauseKind.DEVICE, "this kind of GPU"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", CauseKind.DEVICE, "to itself"),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", CauseKind.DEVICE, "a cuDNN call failed"),
        ("NCCL error in: ProcessGroupNCCL.cpp, unhandled system error", CauseKind.COLLECTIVE, "NCCL"),
        ("CUDA error: something that will be new one day", CauseKind.DEVICE, "a CUDA call failed"),
    ],
)  # fmt: skip
def test_errors_of_the_device_by_what_torch_says(what: str, kind: CauseKind, says: str) -> None:
    cause = classify([RankEnd(1, 70, "WorkerFailedError", f"RuntimeError: {what}")])
    assert (cause.kind, cause.can_retry, cause.rank) == (kind, True, 1)
    assert says in cause.what.rpartition(" (")[2]


def test_the_first_cause_comes_before_its_consequences() -> None:
    consequence = RankEnd(0, 70, "WorkerFailedError", "a collective failed", secondary=True)
    terminated = RankEnd(2, -signal.SIGTERM)
    for first in (RankEnd(1, -9), RankEnd(1, -9, killed_as_hung="hung"), RankEnd(1, 70, "TaskError", "x")):
        assert classify([consequence, terminated, first]).rank == 1
    assert classify([]).kind is CauseKind.AGENT


# ---- settings


def job(**sections: object) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "job",
            "task": "task:MyTask",
            "train": {"max_steps": 9, "global_batch_size": 4, "micro_batch_size": 2},
            **sections,
        }
    )


@given(st.floats(0.5, 1e5))
def test_every_limit_is_below_the_timeout_of_collectives(collective_s: float) -> None:
    config = job(elastic={"process_group_timeout_s": collective_s})
    limits = limits_of(config)
    for limit in (limits.startup_s, limits.min_step_s, limits.max_step_s, limits.eval_s, limits.snapshot_s):
        assert 0 < limit < collective_s
    assert config.elastic.join_timeout_s > collective_s


@given(st.floats(0.5, 1e5), st.floats(0.001, 0.999), st.floats(0.001, 1e5))
def test_a_learnt_limit_never_goes_under_what_was_asked_for(
    collective_s: float, share: float, longest_s: float
) -> None:
    asked_s = share * collective_s
    limits = limits_of(
        job(elastic={"process_group_timeout_s": collective_s}, supervisor={"min_step_timeout_s": asked_s})
    )
    assert asked_s <= step_limit_s(limits, longest_s) < collective_s


@pytest.mark.parametrize(
    "name",
    ["startup_timeout_s", "step_timeout_s", "min_step_timeout_s", "eval_timeout_s", "snapshot_timeout_s"],
)
def test_limits_in_the_wrong_order_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"supervisor.{name} = 60 is not below"):
        job(supervisor={name: 60}, elastic={"process_group_timeout_s": 60})


@given(st.integers(5, 40), st.sampled_from(list(EpochTail)), st.integers(0, 30), st.booleans())
def test_the_samples_of_a_step_are_those_that_it_trains_on(
    length: int, tail: EpochTail, step: int, shuffle: bool
) -> None:
    """As a loop that walks there finds them."""
    config = job(data={"epoch_tail": tail.value, "shuffle": shuffle}, seed=3)
    plan = WindowPlan(length, 4, 2, tail)
    position = 0
    for _ in range(step):
        position = plan.window_at(position).stop
    window = plan.window_at(position)
    expected = sample_list(3, window.start, window.stop, length, shuffle=shuffle)
    words = samples_in_step(config, step=step, length=length, global_batch_size=4)
    assert words == f"samples {', '.join(str(i) for _, i, _ in expected)} (epoch {expected[0][0]})"
