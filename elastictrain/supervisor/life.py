"""Follows one incarnation from its start to its end: watches, blames, kills the culprit, sees to it that all end.

It decides nothing about what comes after; that is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastictrain.cgroups import group_of
from elastictrain.config.schema import JobConfig
from elastictrain.core.liveness import (
    Limits,
    ProcessState,
    RankSeen,
    RankVerdict,
    StepTimes,
    Verdict,
    judge,
    limit_s,
    shortest_limit_s,
)
from elastictrain.core.phases import Phase
from elastictrain.core.policy import RankEnd
from elastictrain.heartbeat import Heartbeat
from elastictrain.procs import reap_orphans, send_signal
from elastictrain.supervisor.hang import Emit, HangExaminer
from elastictrain.supervisor.incarnation import Incarnation, see_off
from elastictrain.supervisor.launcher import Launcher
from elastictrain.supervisor.output import Line, RankOutput
from elastictrain.supervisor.settings import STOP_GRACE_S, limits_of, stop_timeout_s
from elastictrain.supervisor.watch import NS_PER_S, Watch, has_left_early, process_state

POLL_S = 0.2
"""Between two looks at the ranks."""
DUE_MARGIN_S = 0.002
"""How much after the end of a rank's limit it is looked at."""
READ_COST_S = 0.002
"""With many ranks, records are read at most once in this much time per rank: 512 ranks, once a second; sooner only when
a rank may be over its limit."""
LEAVE_CHECK_S = 0.5
"""How often to look whether a rank has left, while one stands still."""
LOOK_AGAIN_S = 5.0
"""How long to wait before looking again at ranks that stand still where no culprit was found."""
START_GRACE_S = 2.0
"""A group that is told to stop before its first step gets this much to end by itself: a rank of it may never come."""


MEETING = frozenset(Phase) - {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMIT}
"""Phases in which a rank may wait for another."""


@dataclass(frozen=True, slots=True)
class LifeEnd:
    """How an incarnation ended.

    Args:
        number: of the incarnation.
        outcome: what rank zero wrote; None if it did not get there.
        ends: ranks that ended badly.
        reached_step: furthest step that was committed.
        failed_step: where the rank stood that failed first. Another may have come one step further, or not: that is
            chance, and must not make two failures of the same step look like two.
        began_step: the rank that failed first had begun a step, or all where there is none: one that died in its start
            says nothing about the step.
        lived_s: from start to end.
        kept_step: of the newest snapshot that its ranks left behind when they failed; None where none could.
    """

    number: int
    outcome: dict[str, Any] | None
    ends: tuple[RankEnd, ...]
    reached_step: int
    failed_step: int
    began_step: bool
    lived_s: float
    kept_step: int | None = None


class Life:
    """One incarnation under watch.

    Args:
        incarnation: prepared, not started.
        config: of the job.
        times: what earlier lives have taught about the time a step takes.
        launcher: starts the agent.
        state_dir: where incidents are kept.
        on_line: gets every line that the ranks print.
        on_look: called whenever the ranks' records were read.
        emit: takes events.
        spared: children of this process that whoever collects orphans must not collect.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        config: JobConfig,
        times: StepTimes,
        *,
        launcher: Launcher,
        state_dir: Path,
        on_line: Callable[[Line], None],
        on_look: Callable[[Life], None],
        emit: Emit,
        spared: Callable[[], frozenset[int]],
    ) -> None:
        self.incarnation = incarnation
        self.started_s = time.monotonic()
        self._config = config
        self._limits: Limits = limits_of(config)
        self._times = times
        self._launcher = launcher
        self._on_look = on_look
        self._emit = emit
        self._spared = spared
        first_rank = incarnation.group.first_rank
        self._watch = Watch(incarnation.run_dir, incarnation.num_ranks, self.started_s, first_rank)
        self._outputs = [RankOutput(incarnation.run_dir, i, on_line) for i in range(incarnation.num_ranks)]
        self._examiner = HangExaminer(
            incarnation, self._watch, self._judge, state_dir=state_dir, outputs=self._outputs, emit=emit
        )
        self._woken = asyncio.Event()
        self._read_at_s = float("-inf")
        self._judged_s = float("-inf")
        self._due_s = float("-inf")
        """Until then, whoever has not moved since `_judged_s` is within its limit."""
        self._look_again_s = float("-inf")
        self._leave_checked_s = float("-inf")
        self._failing_since_s: float | None = None
        self._stop_asked_s: float | None = None
        self._group_killed = False
        self._killed: dict[int, str] = {}
        self._torn_down: set[int] = set()
        self._left: set[int] = set()
        self.heartbeats: dict[int, Heartbeat | None] = {}

    # ---- what the ranks say

    @property
    def reached_step(self) -> int | None:
        """The furthest step that a rank has committed, or begun with; None before any has begun."""
        steps = [beat.step for beat in self.heartbeats.values() if beat is not None and beat.first_step >= 0]
        return max(steps, default=None)

    def _something_to_keep(self) -> bool:
        """Whether a rank holds a state by now: one that it was restored with, or has begun a step from."""
        beats = self._watch.heartbeats().values()  # not those of the last look: it may have been restored since
        return any(beat is not None and (beat.first_step >= 0 or beat.step > 0) for beat in beats)

    @property
    def all_train(self) -> bool:
        """Every rank of this node has done a step."""
        beats = self.heartbeats.values()
        return bool(beats) and all(beat is not None and beat.steps_done >= 1 for beat in beats)

    @property
    def cgroup(self) -> str | None:
        """The control group of its processes, if they are in one."""
        group = group_of(self.incarnation.run_dir)
        return str(group) if group is not None else None

    def cpu_percent(self, pid: int) -> float:
        return self._watch.cpu_percent(pid)

    # ---- from start to end

    async def run(self) -> LifeEnd:
        """Starts the group and follows it to its end."""
        for output in self._outputs:
            output.open()
        self.incarnation.start(self._launcher, self._woken.set)
        is_told = False
        try:
            while not self.incarnation.has_ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(time.monotonic())):
                        await self._woken.wait()
                self._woken.clear()
                if not is_told and self.incarnation.agent_pid is not None:
                    is_told = True
                    self._emit(
                        "incarnation_started",
                        incarnation=self.incarnation.number,
                        attempt=self.incarnation.group.attempt,
                        world_size=self.incarnation.group.world_size,
                        hosts=list(self.incarnation.group.hosts),
                        agent_pid=self.incarnation.agent_pid,
                    )
                if not self.incarnation.has_ended:
                    await self._look(time.monotonic())
            await self._let_leave()
            return self._end()
        finally:
            self.incarnation.close()
            for output in self._outputs:
                output.close()
            self._watch.close()
            reap_orphans(self._spared())

    async def _let_leave(self) -> None:
        """Where the agent was lost, its ranks keep their state and go; nobody stays."""
        if self.incarnation.lost_agent and not self._group_killed:
            await see_off(self.incarnation.run_dir, self._config.supervisor.teardown_timeout_s)

    def _end(self) -> LifeEnd:
        self._kill_group()
        for output in self._outputs:
            output.close()  # the last words come before the verdict
        self.heartbeats = self._watch.heartbeats()
        self._on_look(self)
        steps = {rank: beat.step for rank, beat in self.heartbeats.items() if beat is not None}
        ends = self.incarnation.bad_ends(self._killed, self._torn_down, steps)
        reached = self.reached_step
        outcome = self.incarnation.outcome
        if reached is None and outcome is not None:
            reached = outcome["summary"].get("step")  # restored at its last step: there was none to begin
        if reached is None:
            reached = max((end.step for end in ends), default=0)
        first = next((end for end in ends if end.rank is not None and not end.secondary), None)
        looked_at = self.heartbeats.values() if first is None else [self.heartbeats.get(first.rank or 0)]
        return LifeEnd(
            number=self.incarnation.number,
            outcome=outcome,
            ends=tuple(ends),
            reached_step=reached,
            failed_step=first.step if first is not None else reached,
            began_step=all(beat is not None and beat.first_step >= 0 for beat in looked_at),
            lived_s=time.monotonic() - self.started_s,
            kept_step=max((r.kept_step for r in self.incarnation.reports() if r.kept_step is not None), default=None),
        )

    # ---- stopping

    def ask_to_stop(self, *, hurry: bool = False) -> None:
        """Has the ranks finish their step, keep their state and end; durably, also where they were to pass it on.

        Args:
            hurry: not wait for storage.
        """
        board = self.incarnation.board
        board.pass_on_no_more()
        if hurry:
            board.ask_to_hurry()
        self._ask_to_end()

    def pass_on(self) -> None:
        """Has the ranks finish their step, keep their state in memory and end: another worker group follows."""
        self.incarnation.board.pass_on()
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        if self._stop_asked_s is None:
            self.incarnation.board.ask()
            self._stop_asked_s = time.monotonic()

    def abandon(self) -> None:
        """Has the ranks keep their last committed step and go, though they wait for others: those will not come."""
        if self._something_to_keep():
            self.incarnation.lose_agent()
        else:
            self._kill_group()

    def waits_since_s(self, now_s: float) -> tuple[float, float]:
        """For how long every rank has stood still where it may wait for a rank of another node, 0 if one moves; and
        how long it may."""
        seen = self._watch.seen(self.heartbeats)
        if not seen:
            return now_s - self.started_s, self._limits.startup_s
        if any(rank.phase is not None and rank.phase not in MEETING for rank in seen):
            return 0.0, 0.0
        limit = max(limit_s(rank, self._limits, self._times.longest_s) for rank in seen)
        return min(now_s - rank.moved_s for rank in seen), limit

    def kill(self) -> None:
        """Ends all ranks at once."""
        self._kill_group()

    def _kill_group(self) -> None:
        self._group_killed = True
        self.incarnation.kill()

    def _enforce_stop(self, now_s: float) -> None:
        """A stop that was asked for happens in time, whatever the ranks do."""
        if self._stop_asked_s is None:
            return
        passed_s = now_s - self._stop_asked_s
        timeout_s = stop_timeout_s(self._config)
        hurry_s = min(self._config.checkpoint.preempt_deadline_s, max(timeout_s - STOP_GRACE_S, timeout_s / 2))
        if passed_s > hurry_s:
            self.incarnation.board.ask_to_hurry()
        if passed_s > timeout_s:
            self._kill_group()
        elif self.reached_step is None and passed_s > START_GRACE_S:
            self.abandon()  # what they were given may be in no memory tier any more

    # ---- watching

    def _pause_s(self, now_s: float) -> float:
        """Until the next look: one that finds a rank over its limit comes just when it is."""
        until_due_s = self._clear_until_s - now_s + DUE_MARGIN_S
        return until_due_s if 0 < until_due_s < POLL_S else POLL_S

    @property
    def _clear_until_s(self) -> float:
        """Until then nobody can be over its limit: who has moved since it was judged has at least the shortest."""
        return min(self._due_s, self._judged_s + shortest_limit_s(self._limits, self._times.longest_s))

    async def _look(self, now_s: float) -> None:
        self._enforce_stop(now_s)
        is_due = now_s >= self._clear_until_s or self._failing_since_s is not None
        if not is_due and now_s - self._read_at_s < READ_COST_S * self.incarnation.num_ranks:
            return
        self._read_at_s = now_s
        self.heartbeats = self._watch.heartbeats()
        self._times.observe(b.longest_step_ns / NS_PER_S for b in self.heartbeats.values() if b is not None)
        self._on_look(self)
        if self._failing_since_s is None and self._somebody_left(now_s):
            self._failing_since_s = now_s
        if not is_due and self._failing_since_s is None:
            return
        seen = [rank for rank in self._watch.seen(self.heartbeats) if rank.rank not in self._left]
        if self._failing_since_s is not None:
            self._tear_down(seen, now_s)
            return
        if seen and now_s >= self._look_again_s:
            verdict = self._judge(seen, now_s)
            self._judged_s = now_s
            self._due_s = now_s + verdict.slack_s
            if verdict.is_over_limit:
                await self._examine(seen)

    def _judge(self, seen: list[RankSeen], now_s: float) -> Verdict:
        return judge(
            seen,
            self._limits,
            longest_step_s=self._times.longest_s,
            now_s=now_s,
            world_size=self.incarnation.group.world_size,
        )

    def _somebody_left(self, now_s: float) -> bool:
        """Whether a rank is gone before its end, or all are: what is left has `teardown_timeout_s` from now on."""
        moved_s = [
            beat.moved_ns / NS_PER_S if beat is not None else self.started_s
            for rank, beat in self.heartbeats.items()
            if rank not in self._left
        ]
        oldest_s = min(moved_s, default=float("-inf"))
        if now_s - self._leave_checked_s < LEAVE_CHECK_S or now_s - oldest_s < LEAVE_CHECK_S:
            return False
        self._leave_checked_s = now_s
        states = [
            (beat, process_state(beat.pid, self.incarnation.agent_pid)) if beat is not None else None
            for beat in self.heartbeats.values()
        ]
        if any(found is not None and has_left_early(*found) for found in states):
            return True
        return all(found is not None and found[1] is ProcessState.GONE for found in states)

    def _tear_down(self, seen: list[RankSeen], now_s: float) -> None:
        """Ends the ranks that do not end by themselves once one has failed; one that writes a snapshot may finish."""
        assert self._failing_since_s is not None
        timeout_s = self._config.supervisor.teardown_timeout_s
        passed_s = now_s - self._failing_since_s
        if passed_s < timeout_s:
            return
        saving = False
        for rank in seen:
            beat = self.heartbeats[rank.rank]
            within = now_s - rank.moved_s < limit_s(rank, self._limits, self._times.longest_s)
            if rank.phase is Phase.SNAPSHOT and within:
                saving = True
            elif beat is not None and self.incarnation.is_rank(beat.pid):
                self._torn_down.add(rank.rank)
                self._end_process(beat.pid)
        if not saving and passed_s > 2 * timeout_s:
            self._kill_group()

    # ---- a hang

    async def _examine(self, seen: list[RankSeen]) -> None:
        """Somebody stands still for too long: finds the culprit, and ends it."""
        found = await self._examiner.examine(seen, self.heartbeats)
        self.heartbeats = found.heartbeats
        self._left |= found.left
        now_s = time.monotonic()
        if not found.verdict.culprits:
            self._look_again_s = now_s + min(LOOK_AGAIN_S, min(v.limit_s for v in found.verdict.ranks) / 4)
            return
        for culprit in found.verdict.culprits:
            self._kill_culprit(culprit, found.pids)
        self._failing_since_s = now_s

    def _kill_culprit(self, culprit: RankVerdict, pids: Mapping[int, int]) -> None:
        """Ends the one that others wait for; their collectives fail then, and they end by themselves."""
        beat = self.heartbeats.get(culprit.rank)
        place = f"step {beat.step}, {beat.phase.name.lower()}" if beat is not None else "before its first heartbeat"
        self._killed[culprit.rank] = f"{culprit.why} ({place}, for {culprit.stood_still_s:.1f} s)"
        pid = pids.get(culprit.rank)
        if pid is None:
            # There is no such process: the agent itself has not got so far.
            self._kill_group()
        elif self.incarnation.is_rank(pid):
            self._end_process(pid)
        self._emit("rank_killed", rank=culprit.rank, pid=pid, incarnation=self.incarnation.number)

    def _end_process(self, pid: int) -> None:
        # It ends a process that is stopped as well: one that was woken first might do a step before it comes.
        send_signal(pid, signal.SIGKILL)
