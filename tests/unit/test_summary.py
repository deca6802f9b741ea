"""The fold of events into a status: what a job is doing and why, and where its time went."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.core.events import Event, Kind, Moment
from elastictrain.core.history import History
from elastictrain.core.lifecycle import State
from elastictrain.core.status import EXIT_CODES, RankView, Status, SupervisorView
from elastictrain.core.summary import MAX_RESTARTS, advance, describe, fold
from elastictrain.supervisor.schema import status_schema

BOOT = "boot-1"


class Story:
    """Events at given seconds after the start of one boot."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def at(self, second: float, name: str, /, **fields: Any) -> Story:
        self.events.append(Event(len(self.events) + 1, Moment(1000.0 + second, second, BOOT), name, fields))
        return self

    def status(self, second: float, view: SupervisorView | None = None, *, running: bool = True) -> Status:
        now = Moment(1000.0 + second, second, BOOT)
        history = fold(self.events)
        return describe(history, job="job", state_dir="/s", now=now, view=view, daemon_running=running)


def trained(until: float = 110, step: int = 100) -> Story:
    """Ten seconds of starting, then training at a step a second."""
    story = Story().at(0, Kind.SUPERVISOR_STARTED, pid=7, version="1")
    story.at(0, Kind.INCARNATION_STARTED, incarnation=1, world_size=2)
    story.at(10, Kind.RANKS_TRAINING, incarnation=1, global_step=0)
    return story.at(until, Kind.PROGRESS, step=step, max_steps=1000, loss=0.5, steps_per_s=1.0, incarnation=1)


def test_a_job_that_trains() -> None:
    s = trained().status(110)
    assert (s.state, s.global_step, s.max_steps, s.loss, s.incarnation, s.world_size) == (
        "training",
        100,
        1000,
        0.5,
        1,
        2,
    )
    assert s.eta_s == 900
    assert (s.useful_s, s.lost_s, s.wall_s) == (100, 0, 110)
    assert s.daemon.pid == 7


def test_a_failed_rank_is_the_reason_and_the_restart_says_what_it_cost() -> None:
    story = trained()
    story.at(112, Kind.RANK_FAILED, rank=1, cause="killed by SIGKILL", exit_code=-9, step=102)
    story.at(113, Kind.RANK_FAILED, rank=0, cause="a collective failed", secondary=True)
    s = story.status(114)
    assert (s.state, s.reason) == ("recovering", "rank 1 failed: killed by SIGKILL")
    story.at(
        114, Kind.INCARNATION_ENDED, incarnation=1, cause="rank 1 was killed by SIGKILL", global_step=102, kept_step=102
    )
    story.at(115, Kind.RESTART_PLANNED, delay_s=3.0, reason="rank 1 was killed by SIGKILL")
    assert "starts again in 3 s" in story.status(115).reason
    assert story.status(115).num_restarts == 1, "one that is going on counts"
    story.at(118, Kind.INCARNATION_STARTED, incarnation=2, world_size=2)
    story.at(120, Kind.RANKS_TRAINING, incarnation=2, global_step=102)
    s = story.status(130)
    assert s.state == "training"
    assert [asdict(r) for r in s.restarts] == [
        {
            "incarnation": 1,
            "time": "1970-01-01T00:18:34.000+00:00",
            "cause": "rank 1 was killed by SIGKILL",
            "rank": 1,
            "incident": None,
            "global_step": 102,
            "resumed_step": 102,
            "kept_step": 102,
            "steps_lost": 0,
            "lost_s": 8,
        }
    ]
    assert (s.useful_s, s.lost_s) == (112, 8)


def test_a_restart_resumes_where_its_ranks_began_not_where_they_were_first_seen() -> None:
    story = trained().at(110, Kind.INCARNATION_ENDED, incarnation=1, cause="node lost", global_step=100)
    story.at(112, Kind.INCARNATION_STARTED, incarnation=2, world_size=2)
    story.at(114, Kind.RESTORED, rank=0, global_step=98, from_tier="memory")
    s = story.at(116, Kind.RANKS_TRAINING, incarnation=2, global_step=103).status(116)
    assert (s.restarts[0].resumed_step, s.global_step, s.reason) == (98, 103, "training since step 98")
    # The next one has not said yet.
    story.at(117, Kind.INCARNATION_ENDED, incarnation=2, cause="node lost", global_step=104)
    story.at(118, Kind.INCARNATION_STARTED, incarnation=3, world_size=2)
    assert (
        story.at(119, Kind.RANKS_TRAINING, incarnation=3, global_step=100).status(119).restarts[1].resumed_step == 100
    )


def test_steps_that_are_done_again_are_lost() -> None:
    story = trained().at(110, Kind.INCARNATION_ENDED, incarnation=1, cause="node lost", global_step=100)
    s = story.at(112, Kind.RANKS_TRAINING, incarnation=2, global_step=60).status(112)
    assert (s.useful_s, s.lost_s, s.restarts[0].lost_s) == (60, 42, 42)


def test_standing_still_is_lost() -> None:
    story = trained().at(
        150, Kind.INCIDENT_OPENED, incident=3, kind="hang", ranks=[1], phase="forward", stood_still_s=35.0
    )
    s = story.status(150)
    assert (s.state, s.reason) == ("recovering", "hang: rank 1 stood still for 35.0 s in forward")
    assert (s.useful_s, s.lost_s, s.num_incidents) == (105, 35, 1)
    story.at(151, Kind.INCARNATION_ENDED, incarnation=1, cause="rank 1 hung", global_step=105)
    s = story.at(152, Kind.RANKS_TRAINING, incarnation=2, global_step=105).status(152)
    assert (s.restarts[0].incident, s.restarts[0].rank, s.restarts[0].lost_s) == ("3", 1, 37)


def test_a_hang_that_was_none() -> None:
    story = trained().at(150, Kind.INCIDENT_OPENED, incident=1, ranks=[1], stood_still_s=35.0)
    story.at(151, Kind.PROGRESS, step=106, incarnation=1)
    assert story.status(151).state == "training"


@pytest.mark.parametrize(
    ("kind", "state"), [(Kind.COMPLETED, "completed"), (Kind.STOPPED, "stopped"), (Kind.DRAINED, "drained")]
)
def test_an_orderly_end_is_no_restart_and_costs_nothing(kind: str, state: str) -> None:
    story = trained().at(110, Kind.INCARNATION_ENDED, incarnation=1, cause="ended", global_step=100).at(111, kind)
    s = story.status(5000, running=False)
    assert (s.state, s.num_restarts, s.lost_s, s.wall_s) == (state, 0, 0, 111)
    assert not s.daemon_running


def test_a_halt_keeps_its_reason_and_its_last_failure() -> None:
    story = trained().at(111, Kind.RANK_FAILED, rank=0, cause="ValueError: bad")
    story.at(111, Kind.INCARNATION_ENDED, incarnation=1, cause="rank 0: ValueError: bad", global_step=100)
    s = story.at(112, Kind.HALTED, reason="step 101 fails: ValueError: bad").status(500)
    assert (s.state, s.reason, s.num_restarts) == ("halted", "step 101 fails: ValueError: bad", 1)
    assert s.wall_s == 112, "waiting for people is not the job's time"


def test_a_supervisor_that_is_gone() -> None:
    s = trained().status(200, running=False)
    assert (s.state, s.daemon_running) == ("not_running", False)
    assert "its last word was training" in s.reason
    assert (s.useful_s, s.lost_s) == (100, 90)


def test_a_supervisor_that_was_gone_and_came_back() -> None:
    story = trained().at(150, Kind.SUPERVISOR_STARTED, pid=8)
    s = story.status(150)
    assert (s.state, s.num_restarts, s.daemon.pid) == ("recovering", 1, 8)
    story.at(151, Kind.INCARNATION_STARTED, incarnation=2, world_size=2)
    s = story.at(160, Kind.RANKS_TRAINING, incarnation=2, global_step=100).status(160)
    assert (s.state, s.lost_s, s.restarts[0].lost_s, s.num_restarts) == ("training", 50, 50, 1)


def test_what_the_supervisor_says_comes_first() -> None:
    rank = RankView(rank=0, pid=3, phase="reduce", step=120)
    view = SupervisorView(state=State.DRAINING, reason="maintenance", global_step=120, ranks=(rank,))
    s = trained().status(111, view)
    assert (s.state, s.reason, s.global_step, s.ranks, s.daemon.answers) == (
        "draining",
        "maintenance",
        120,
        [rank],
        True,
    )


def test_a_late_word_of_an_earlier_incarnation_changes_nothing() -> None:
    story = trained().at(111, Kind.INCARNATION_ENDED, incarnation=1, cause="x", global_step=100)
    story.at(112, Kind.INCARNATION_STARTED, incarnation=2, world_size=1)
    story.at(112.5, Kind.PROGRESS, step=99, incarnation=1)
    assert (story.status(113).global_step, story.status(113).state) == (100, "recovering")


def test_a_crash_loop_does_not_grow_without_end() -> None:
    story = trained()
    for i in range(300):
        story.at(200 + i, Kind.INCARNATION_ENDED, incarnation=i + 2, cause="x", global_step=100)
    s = story.status(600)
    assert (s.num_restarts, len(s.restarts)) == (300, MAX_RESTARTS)


def test_numbers_that_json_does_not_know() -> None:
    s = trained().at(111, Kind.PROGRESS, step=101, loss="NaN", steps_per_s=float("inf"), incarnation=1).status(111)
    assert (s.loss, s.steps_per_s, s.eta_s) == ("NaN", "Infinity", None)
    json.dumps(asdict(s), allow_nan=False)


def test_snapshots_and_evaluation() -> None:
    story = trained().at(111, Kind.SNAPSHOT_TAKEN, at_step=100).at(113, Kind.SNAPSHOT_DURABLE, global_step=100)
    story.at(114, Kind.EVALUATED, step=100, rank=0, **{"eval/accuracy": 0.9})
    s = story.status(115)
    assert s.snapshots.memory is not None
    assert s.snapshots.durable is not None
    assert (s.snapshots.memory.step, s.snapshots.memory.age_s, s.snapshots.durable.age_s) == (100, 4, 2)
    assert s.evaluation is not None
    assert (s.evaluation.step, s.evaluation.values) == (100, {"eval/accuracy": 0.9})


def test_a_job_that_never_started() -> None:
    s = describe(History(), job="job", state_dir="/s", now=Moment(0))
    assert (s.state, s.goodput, s.last_event_age_s) == ("not_running", None, None)


def test_every_state_has_an_exit_code() -> None:
    assert set(EXIT_CODES) == set(State)


# ---- whatever the events are

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
json_values = scalars | st.lists(scalars, max_size=2)
sane = {
    "incarnation": st.integers(1, 4),
    "global_step": st.integers(0, 100),
    "step": st.integers(0, 100),
    "rank": st.integers(0, 3),
    "ranks": st.lists(st.integers(0, 3), max_size=2),
    "stood_still_s": st.floats(0, 100),
    "max_steps": st.just(100),
    "steps_per_s": st.floats(0, 100),
    "cause": st.just("x"),
    "secondary": st.booleans(),
}
fields = st.fixed_dictionaries({}, optional={key: strategy | json_values for key, strategy in sane.items()})


@st.composite
def stories(draw: st.DrawFn) -> list[Event]:
    at_s = 0.0
    events = []
    for number in range(draw(st.integers(0, 15))):
        at_s += draw(st.floats(0, 100))
        kind = draw(st.sampled_from([*Kind, "something_else"]))
        events.append(Event(number, Moment(1e9 + at_s, at_s, BOOT), kind, draw(fields)))
    return events


@given(stories(), st.floats(0, 1000), st.booleans())
def test_every_second_is_in_one_account(events: list[Event], later_s: float, running: bool) -> None:
    now = Moment(0.0, (events[-1].moment.boot_s if events else 0.0) + later_s, BOOT)
    s = describe(fold(events), job="job", state_dir="/s", now=now, daemon_running=running)
    assert s.useful_s >= 0
    assert s.lost_s >= 0
    assert s.useful_s + s.lost_s <= s.wall_s * (1 + 1e-9) + 1e-6
    if events:
        whole_s = now.boot_s - events[0].moment.boot_s
        assert s.wall_s <= whole_s * (1 + 1e-9) + 1e-6
    assert s.goodput is None or 0 <= s.goodput <= 1 + 1e-9
    assert all(r.lost_s >= 0 for r in s.restarts)
    assert sum(r.lost_s for r in s.restarts) <= s.lost_s * (1 + 1e-9) + 1e-6 or s.num_restarts > len(s.restarts)


@given(stories())
def test_accounts_only_share_out_the_time(events: list[Event]) -> None:
    history = History()
    for before, event in zip([None, *events], events, strict=False):
        passed_s = event.moment.since(before.moment) if before is not None else 0.0
        total_s = history.accounts.total_s
        history = advance(history, event)
        assert history.accounts.total_s == pytest.approx(total_s + passed_s, abs=1e-6)


@given(stories(), st.lists(st.floats(-3600, 3600), max_size=15))
def test_a_jump_of_the_clock_changes_nothing(events: list[Event], jumps: list[float]) -> None:
    jumped = [
        Event(e.id, Moment(e.moment.time_s + jump, e.moment.boot_s, BOOT), e.kind, e.fields)
        for e, jump in zip(events, [*jumps, *[0.0] * len(events)], strict=False)
    ]
    now = Moment(0.0, 1e5, BOOT)

    def without_dates(s: Status) -> dict[str, Any]:
        plain = asdict(s)
        for restart in plain["restarts"]:
            del restart["time"]
        if plain["snapshots"]["store_error"] is not None:
            del plain["snapshots"]["store_error"]["since"]
        return plain

    told = describe(fold(events), job="job", state_dir="/s", now=now)
    assert without_dates(told) == without_dates(describe(fold(jumped), job="job", state_dir="/s", now=now))


def test_a_store_that_fails_is_told_until_it_works_again() -> None:
    """Its last words, and since when; a supervisor that is started anew knows it from the journal."""
    story = trained(110)
    assert story.status(110).snapshots.store_error is None
    story.at(120, Kind.PERSISTER_RETRYING, at_step=90, error="no route", num_failures=1, pause_s=0.5)
    story.at(130, Kind.PERSISTER_STALLED, seconds=60.0)
    story.at(140, Kind.PERSISTER_RETRYING, at_step=95, error="no space", num_failures=9, pause_s=30.0)
    story.at(150, Kind.SNAPSHOT_TAKEN, at_step=130)
    found = story.status(160).snapshots.store_error
    assert found is not None
    assert (found.error, found.lasts_s, found.since) == ("no space", 40, "1970-01-01T00:18:40.000+00:00")
    story.at(170, Kind.RESTORED, global_step=130, from_tier="memory")
    assert story.status(170).snapshots.store_error is not None
    story.at(180, Kind.SNAPSHOT_DURABLE, at_step=130)
    assert story.status(180).snapshots.store_error is None
    story.at(190, Kind.STORE_RETRYING, error="no route", pause_s=0.2)
    assert story.status(191).snapshots.store_error is not None
    story.at(200, Kind.RESTORED, global_step=130, from_tier="durable")
    assert story.status(200).snapshots.store_error is None
    story.at(210, Kind.PERSISTER_STALLED, seconds=60.0)
    found = story.status(210).snapshots.store_error
    assert found is not None
    assert found.error == "the store moved nothing for 60 s"


@settings(max_examples=50)
@given(stories(), st.booleans())
def test_it_always_fits_the_schema(events: list[Event], running: bool) -> None:
    s = describe(fold(events), job="job", state_dir="/s", now=Moment(2e9, 1e6, BOOT), daemon_running=running)
    VALIDATOR.validate(json.loads(json.dumps(asdict(s), allow_nan=False)))
    assert s.state in EXIT_CODES


@given(stories(), st.integers(0, 15))
def test_folding_in_parts_is_folding_at_once(events: list[Event], cut: int) -> None:
    assert fold(events[cut:], fold(events[:cut])) == fold(events)


VALIDATOR = jsonschema.Draft202012Validator(status_schema())
