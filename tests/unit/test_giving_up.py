"""`Session.leave` and `abandon_step`: a rank gives up where its state is consistent, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastictrain.core.counters import Counters
from elastictrain.core.phases import IN_UPDATE, INTERRUPTIBLE, Phase
from elastictrain.core.window import WindowPlan
from elastictrain.heartbeat import HeartbeatWriter, read_heartbeat
from elastictrain.training.device import Place
from elastictrain.training.session import LeftBehind, Session

PLAN = WindowPlan(100, 1, 1)
ONE_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER)


def session_in(phase: Phase) -> Session:
    """A session that has committed one step and is in `phase` of the second."""
    session = Session(Place())
    if phase is Phase.INIT:
        return session
    for _ in range(2):
        assert session.begin_step(PLAN) is not None
        if session.global_step == 1:
            break
        for passed in ONE_STEP:
            session.enter(passed)
        session.commit(True)
    if phase in ONE_STEP:
        for passed in ONE_STEP[: ONE_STEP.index(phase) + 1]:
            session.enter(passed)
    elif phase is not Phase.READY:
        session.enter(phase)
    assert session.phase is phase
    return session


@pytest.mark.parametrize("phase", sorted(INTERRUPTIBLE))
def test_it_leaves_at_once_where_that_is_safe(phase: Phase) -> None:
    with pytest.raises(LeftBehind, match="the agent ended"):
        session_in(phase).leave("the agent ended")


@pytest.mark.parametrize("phase", [Phase.EVAL, Phase.SNAPSHOT])
def test_it_leaves_where_it_says_that_it_gets_on(phase: Phase) -> None:
    session = session_in(phase)
    session.leave("gone")
    with pytest.raises(LeftBehind):
        session.beat()
    with pytest.raises(LeftBehind):
        session.enter(Phase.READY)


def test_an_update_is_finished_first() -> None:
    session = session_in(Phase.OPTIMIZER)
    session.leave("gone")
    session.beat()
    with pytest.raises(LeftBehind):
        session.commit(True)
    assert (session.global_step, session.phase, session.in_update) == (2, Phase.READY, False)


def test_what_is_swallowed_comes_again() -> None:
    session = session_in(Phase.DATA)
    with pytest.raises(LeftBehind):
        session.leave("gone")
    with pytest.raises(LeftBehind):
        session.enter(Phase.FORWARD)


def test_at_the_end_there_is_nothing_to_interrupt() -> None:
    session = session_in(Phase.EXIT)
    session.leave("gone")
    session.beat()


@pytest.mark.parametrize("phase", sorted(set(Phase) - {Phase.COMMIT}))
def test_a_step_can_be_abandoned_unless_it_is_in_update(phase: Phase) -> None:
    session = session_in(phase)
    can = phase not in IN_UPDATE | {Phase.INIT, Phase.EXIT}
    assert session.abandon_step() is can
    assert session.phase is (Phase.SNAPSHOT if can else phase)
    if phase is not Phase.INIT:
        assert session.global_step == 1


def test_what_was_restored_can_be_kept_before_the_first_step(tmp_path: Path) -> None:
    """Also the supervisor must know of it."""
    heartbeat = HeartbeatWriter(tmp_path, rank=0, local_rank=0, incarnation=1)
    session = Session(Place(), heartbeat=heartbeat)
    session.resume(Counters(global_step=5, applied=4, skipped=1, sample_position=5))
    beat = read_heartbeat(heartbeat.path)
    heartbeat.close()
    assert beat is not None
    assert (beat.phase, beat.step, beat.first_step) == (Phase.INIT, 5, -1)
    with pytest.raises(LeftBehind):
        session.leave("gone")
    assert session.abandon_step()
    assert (session.global_step, session.phase) == (5, Phase.SNAPSHOT)


def test_an_outcome_that_fails_to_settle_leaves_no_consistent_state() -> None:
    """The scheduler may have moved, the average not."""
    session = session_in(Phase.OPTIMIZER)

    def fail(_applied: bool, _counters: object) -> None:
        raise RuntimeError

    session.on_settled(fail)
    session.commit(lambda: True)
    assert not session.in_update
    with pytest.raises(RuntimeError):
        session.settle()
    assert session.in_update
    assert not session.abandon_step()
