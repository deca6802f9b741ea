"""What a new supervisor takes from the journal of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.core.events import Event, Kind, Moment
from elastictrain.core.past import RECALLED, Past, recall
from elastictrain.core.policy import Budget, Failure, Halt, Restart, decide

BUDGET = Budget(max_failures=10, window_s=3600, same_step_failures=3, backoff_s=1.0, max_backoff_s=60.0)
HOUR_S = 3600.0
NOW_S = 50_000.0
"""Of the new supervisor's monotonic clock."""


@dataclass
class Machine:
    """A machine whose clocks are told: what passes, and what the wall clock shows."""

    wall_s: float = 1_700_000_000.0
    wrong_s: float = 0.0
    boot_s: float = 100.0
    boot: int = 0
    events: list[Event] = field(default_factory=list)

    def now(self) -> Moment:
        return Moment(self.wall_s + self.wrong_s, self.boot_s, f"boot-{self.boot}")

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.boot_s += seconds

    def reboots(self, off_s: float = 60.0, up_s: float = 20.0) -> None:
        self.wall_s += off_s + up_s
        self.boot, self.boot_s = self.boot + 1, up_s

    def says(self, kind: str, /, **fields: Any) -> None:
        self.events.append(Event(len(self.events) + 1, self.now(), kind, fields))

    def lives(self, incarnation: int, *, reached: int, dies: bool, lived_s: float = 30.0) -> None:
        """A worker group that begins with step 0 and fails at a step, or whose supervisor does."""
        self.says("supervisor_started", pid=1)
        self.says("incarnation_started", incarnation=incarnation)
        self.says("ranks_training", incarnation=incarnation, global_step=1)
        self.passes(lived_s)
        self.says("progress", incarnation=incarnation, step=reached // 10 * 10, steps_per_s=0.1)
        if not dies:
            self.says(
                "incarnation_ended", incarnation=incarnation, kind="signal", cause="rank 1 was ended by SIGKILL",
                global_step=reached, failed_step=reached, began_step=True, lived_s=lived_s,
            )  # fmt: skip

    def past(self) -> Past:
        return recall(self.events, now=self.now(), now_s=NOW_S, report_steps=10)

    def decision(self) -> Restart | Halt:
        return decide(self.past().counted(NOW_S), BUDGET, now_s=NOW_S, jitter=0.0)


def test_a_job_without_a_journal_has_no_past() -> None:
    assert recall([], now=Moment(0.0), now_s=NOW_S, report_steps=10) == Past()


def test_failures_of_an_earlier_supervisor_count() -> None:
    machine = Machine()
    for number in (1, 2, 3):
        machine.lives(number, reached=57, dies=False)
        machine.passes(60)
    past = machine.past()
    assert [f.reached_step for f in past.failures] == [57, 57, 57]
    assert [f.progressed for f in past.failures] == [True, False, False]
    assert [NOW_S - f.at_s for f in past.failures] == pytest.approx([240, 150, 60])
    assert (past.left, past.uptime_s, past.num_failures) == (None, 90.0, 3)
    decision = machine.decision()
    assert isinstance(decision, Halt)
    assert "step 58 fails: 3 times in a row. The last time: rank 1 was ended by SIGKILL" in decision.reason


def test_the_deaths_of_supervisors_count() -> None:
    machine = Machine()
    for number in (1, 2, 3):
        assert not isinstance(machine.decision() if number > 1 else None, Halt)
        machine.lives(number, reached=57, dies=True)
        machine.passes(60)
    past = machine.past()
    assert len(past.failures) == 2
    assert past.left is not None
    assert (past.left.incarnation, past.left.step) == (3, 50)
    assert (past.uptime_s, past.num_failures) == (90.0, 3)
    decision = machine.decision()
    assert isinstance(decision, Halt)
    assert "the supervisor ended without a word in incarnation 3" in decision.reason
    assert "one of the steps 51 to 62 fails" in decision.reason, "10 between reports, and 10 s at 0.1 a second"


def test_a_machine_that_was_switched_off_once_is_no_reason_to_give_up() -> None:
    strict = replace(BUDGET, max_failures=0, same_step_failures=1)
    machine = Machine()
    machine.lives(1, reached=57, dies=True)
    for halts in (False, True):
        decision = decide(machine.past().counted(NOW_S), strict, now_s=NOW_S, jitter=0.0)
        assert isinstance(decision, Halt) == halts
        machine.lives(2, reached=57, dies=True)


def test_what_the_next_supervisor_found_out_is_believed() -> None:
    machine = Machine()
    machine.lives(1, reached=57, dies=True)
    left = machine.past().left
    assert left is not None
    exact = replace(left, step=57, uncertain_steps=0)
    machine.passes(5)
    machine.says("supervisor_started", pid=2, **exact.as_fields)
    (failure,) = machine.past().failures
    assert (failure.reached_step, failure.uncertain_steps, failure.began_step) == (57, 0, True)


@pytest.mark.parametrize("kind", ["halted", "stopped", "drained", "completed"])
def test_who_starts_a_job_again_that_had_come_to_rest_begins_anew(kind: str) -> None:
    machine = Machine()
    for number in (1, 2, 3):
        machine.lives(number, reached=57, dies=False)
    machine.says(kind)
    assert machine.past().counted(NOW_S) == ()
    assert machine.past().num_failures == 3, "the time between failures is what it is"


def test_a_supervisor_that_died_between_two_groups_has_not_failed_with_one() -> None:
    machine = Machine()
    machine.lives(1, reached=57, dies=False)
    machine.says("supervisor_started")
    assert machine.past().left is None
    assert len(machine.past().failures) == 1


def test_a_group_that_was_restarted_on_request_has_not_failed() -> None:
    machine = Machine()
    machine.lives(1, reached=57, dies=True)
    machine.says("incarnation_ended", incarnation=1, kind="", cause="asked", global_step=57, lived_s=31.0)
    assert machine.past().counted(NOW_S) == ()
    assert (machine.past().uptime_s, machine.past().num_failures) == (31.0, 0)


def test_progress_between_deaths_goes_on_for_ever() -> None:
    machine = Machine()
    for number in range(1, 30):
        machine.lives(number, reached=100 * number, dies=True)
        machine.passes(1)
        assert isinstance(machine.decision(), Restart)


def test_deaths_of_long_ago_are_forgotten() -> None:
    """Without progress, at ever other steps: eleven in an hour are too many, eleven in two days are not."""
    for between_s, gives_up in ((60, True), (2 * 3600, False)):
        machine = Machine()
        for number in range(1, 13):
            machine.lives(number, reached=3000 - 100 * number, dies=True)
            machine.passes(between_s)
        assert isinstance(machine.decision(), Halt) == gives_up


def test_across_reboots_as_well() -> None:
    for off_s, gives_up in ((60.0, True), (2 * 24 * 3600.0, False)):
        machine = Machine()
        for number in range(1, 13):
            machine.lives(number, reached=3000 - 100 * number, dies=True)
            machine.reboots(off_s)
        assert isinstance(machine.decision(), Halt) == gives_up


def test_a_clock_that_is_wrong_at_boot_does_not_age_failures() -> None:
    """A machine without a battery begins in 1970, and is set right later, or never."""
    machine = Machine()
    for number in range(1, 13):
        machine.wrong_s = -machine.wall_s
        machine.says("supervisor_started")
        machine.wrong_s = 0.0 if number % 2 else -machine.wall_s
        machine.lives(number, reached=3000 - 100 * number, dies=True)
        machine.reboots()
    assert isinstance(machine.decision(), Halt)


jumps = st.lists(st.sampled_from([-HOUR_S, 0.0, HOUR_S]), min_size=12, max_size=12)


@given(jumps, st.lists(st.booleans(), min_size=12, max_size=12), st.integers(0, 40))
def test_a_poisoned_step_is_given_up_whatever_the_clock_does(
    wrong_s: list[float], reboots: list[bool], lost_steps: int
) -> None:
    """It kills the supervisor, or the machine, every time, and the last reports may be lost: halted by the budget."""
    machine = Machine()
    for number in range(1, 13):
        machine.wrong_s = wrong_s[number - 1]
        machine.lives(number, reached=957 - (lost_steps if number % 2 else 0), dies=True)
        if reboots[number - 1]:
            machine.reboots()
        else:
            machine.passes(2.5)
        if isinstance(machine.decision(), Halt):
            assert number >= BUDGET.same_step_failures
            return
    raise AssertionError("never halted")


@given(
    st.lists(st.tuples(st.floats(0, 5000), st.one_of(st.none(), st.floats(0, 20_000))), min_size=1, max_size=12),
    st.lists(st.floats(-HOUR_S, HOUR_S), min_size=12, max_size=12),
)
def test_no_failure_looks_older_than_it_is(lives: list[tuple[float, float | None]], wrong_s: list[float]) -> None:
    machine, ended_s = Machine(), []
    for number, ((pause_s, off_s), wrong) in enumerate(zip(lives, wrong_s, strict=False), 1):
        machine.wrong_s = wrong
        machine.lives(number, reached=57, dies=False)
        ended_s.append(machine.wall_s)
        machine.passes(pause_s)
        if off_s is not None:
            machine.reboots(off_s)
    ages_s = [NOW_S - failure.at_s for failure in machine.past().failures]
    true_s = [machine.wall_s - at_s for at_s in ended_s]
    for age_s, real_s in zip(ages_s, true_s, strict=True):
        assert 0 <= age_s <= real_s + 1e-3
    if all(off_s is None for _, off_s in lives):
        assert ages_s == pytest.approx(true_s, abs=1e-3), "within one boot they are exact"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), jumps)
def test_a_supervisor_that_is_replaced_decides_as_one_that_lived_on(steps: Sequence[int], wrong_s: list[float]) -> None:
    machine, lived_on = Machine(), []
    for number, step in enumerate(steps):
        machine.wrong_s = wrong_s[number % len(wrong_s)]
        machine.lives(number + 1, reached=step, dies=False)
        furthest = max((failure.reached_step for failure in lived_on), default=-1)
        cause = machine.past().failures[-1].cause
        lived_on.append(Failure(NOW_S, step, True, step > furthest, cause))
        lived_on = [
            replace(failure, at_s=failure.at_s - (30.0 if i < number else 0)) for i, failure in enumerate(lived_on)
        ]
        assert machine.decision() == decide(lived_on, BUDGET, now_s=NOW_S, jitter=0.0)


values = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.just([1]))
keys = st.sampled_from(
    ["incarnation", "global_step", "step", "failed_step", "began_step", "lived_s", "kind", "steps_per_s", "left_step",
     "left_incarnation", "left_uncertain_steps", "samples", "cause"]
)  # fmt: skip
anything = st.builds(
    Event,
    id=st.just(0),
    moment=st.builds(Moment, st.floats(-1e10, 1e10), st.floats(-1e6, 1e6), st.sampled_from(["", "a", "b"])),
    kind=st.one_of(st.sampled_from(sorted(RECALLED)), st.sampled_from(list(Kind))),
    fields=st.dictionaries(keys, values, max_size=6),
)


@given(st.lists(anything, max_size=30), st.floats(-1e10, 1e10))
def test_whatever_a_journal_holds(events: list[Event], time_s: float) -> None:
    past = recall(events, now=Moment(time_s, 5.0, "b"), now_s=NOW_S, report_steps=10)
    assert all(failure.at_s <= NOW_S for failure in past.failures)
    assert past.uptime_s >= 0
    if counted := past.counted(NOW_S):
        decide(counted, BUDGET, now_s=NOW_S, jitter=0.5)
