"""The supervisor: starts worker groups one after the other, until the job is done, stopped, or leads nowhere.

What it does next is decided in `core`: which state follows (`lifecycle`), whether to go on (`policy`), who hangs
(`liveness`). This module carries the decisions out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastictrain import __version__
from elastictrain.config.schema import JobConfig
from elastictrain.core import lifecycle
from elastictrain.core.lifecycle import State, Trigger
from elastictrain.core.liveness import StepTimes
from elastictrain.core.membership import Standing
from elastictrain.core.past import Past
from elastictrain.core.policy import Cause, CauseKind, Halt, classify
from elastictrain.core.status import RankView, SupervisorView
from elastictrain.errors import BusyError, ElasticTrainError, HaltError, IllegalTransitionError, StorageError
from elastictrain.procs import adopt_orphans
from elastictrain.supervisor.chronicle import Chronicle
from elastictrain.supervisor.events import EventSink, NullSink
from elastictrain.supervisor.failures import Failures
from elastictrain.supervisor.incarnation import Incarnation, clear_away
from elastictrain.supervisor.launcher import Launcher
from elastictrain.supervisor.life import Life, LifeEnd
from elastictrain.supervisor.output import Event, Line
from elastictrain.supervisor.remembered import Said
from elastictrain.supervisor.settings import budget_of
from elastictrain.supervisor.settling import Settling
from elastictrain.supervisor.team import Alone, Assignment, Team

_T = TypeVar("_T")

ASK_INTERVAL_S = 0.05
TELL_ALL_S = 2.0
"""How long to try to tell the other nodes of a stop; each can be told by itself as well."""
ASSEMBLY_LOOK_S = 0.5
"""How often what is being waited for is put into words anew."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the supervisor ended.

    Args:
        state: COMPLETED, STOPPED or HALTED.
        reason: in words.
        outcome: what rank zero wrote last; None if it did not.
        error: what to tell the caller, with its exit code, where the job was given up.
    """

    state: State
    reason: str
    outcome: dict[str, Any] | None
    error: ElasticTrainError | None = None


class Supervisor:
    """Keeps a job running. Implements `commands.Commands`; all methods belong to the event loop that `run` runs in.

    Args:
        config: of the job.
        prepare: lays out the next incarnation, as the nodes have agreed; called in a thread, for it may wait for
            storage.
        state_dir: of the job.
        team: the nodes; default: this one alone.
        sink: keeps events.
        show: gets every line of the ranks, and what the supervisor has to say.
        stay_up: after a halt, wait for `resume` or `stop` rather than end. A job that was halted before its ranks ever
            trained ends all the same: its service has failed to start, and somebody waits to hear that.
        past: what an earlier supervisor's journal says. Failures count on, its own death among them.
    """

    def __init__(
        self,
        config: JobConfig,
        prepare: Callable[[Assignment], Incarnation],
        *,
        state_dir: Path,
        team: Team | None = None,
        sink: EventSink | None = None,
        show: Callable[[Line], None] = lambda _line: None,
        stay_up: bool = False,
        past: Past | None = None,
    ) -> None:
        self._config = config
        self._prepare = prepare
        self._team: Team = team if team is not None else Alone()
        self._state_dir = state_dir
        self._chronicle = Chronicle(sink if sink is not None else NullSink(), show)
        self._emit = self._chronicle.emit
        self._show = show
        self._stay_up = stay_up
        self._state = State.STARTING
        self._reason = "the first worker group is being started"
        self._life: Life | None = None
        self._world_size: int | None = None
        self._times = StepTimes()
        self._past = past if past is not None else Past()
        self._outcome: dict[str, Any] | None = None
        self._error: ElasticTrainError | None = None
        self._restart_reason: str | None = None
        self._early_regroup = ""
        self._early_abandon = ""
        """Why the other nodes have asked for it while the worker group was being laid out; "" if they have not."""
        self._delay_s = 0.0
        self._changed = asyncio.Event()
        self._num_signals = 0
        self._is_asked_to_stop = False
        """Here, not on another node."""
        self._furthest: int | None = None
        self._said = Said(config, self._past.data)
        earlier = self._past.counted(time.monotonic())
        self._failures = Failures(earlier, budget_of(config), self._said.samples_in_step)
        self._snapshot_wanted = False
        self._settling = Settling(config, self._emit)
        self._is_complete_elsewhere = False
        self._launcher = Launcher(
            state_dir, fork=config.elastic.fast_restart, grace_s=config.supervisor.teardown_timeout_s
        )
        self._has_trained = False

    # ---- from start to end

    async def run(self) -> Ending:
        """Runs the job to its end, as far as it goes.

        Raises:
            ElasticTrainError: not even the first worker group could be laid out.
        """
        adopt_orphans()
        self._catch_signals()
        await clear_away(self._state_dir, grace_s=self._config.supervisor.teardown_timeout_s)
        left = self._past.left
        self._emit("supervisor_started", pid=os.getpid(), version=__version__, **(left.as_fields if left else {}))
        if (halt := self._failures.halt()) is not None:
            self._halt(halt)
            return Ending(self._state, self._reason, None, self._error)
        self._launcher.open()
        try:
            await self._team.open(self)
            while self._state not in lifecycle.FINAL:
                if self._state in (State.HALTED, State.DRAINED):
                    is_first_left = self._team.is_first_left()
                    self._team.stand(Standing.AWAY, self._reason)
                    if is_first_left:
                        await self._settling.settle(self._is_ending)
                    if self._has_given_up:
                        break
                    await self._launcher.close()  # it may take long, and what is imported takes memory
                    if self._state in (State.HALTED, State.DRAINED):
                        await self._wait_for_change(None)
                else:
                    await self._live_once()
        finally:
            await self._team.close()
            await self._launcher.close()
        return Ending(self._state, self._reason, self._outcome, self._error)

    @property
    def _has_given_up(self) -> bool:
        return self._state is State.HALTED and not (self._stay_up and self._has_trained)

    async def _live_once(self) -> None:
        """One worker group, and what follows from its end."""
        assignment = await self._assemble()
        if assignment is None:  # told to stop meanwhile
            await self._ended_on_request(None)
            return
        try:
            incarnation = await asyncio.to_thread(self._prepare, assignment)
        except (ElasticTrainError, OSError) as problem:
            error = problem if isinstance(problem, ElasticTrainError) else _unwritable(self._state_dir, problem)
            if assignment.listener is not None:
                assignment.listener.close()
            if self._chronicle.incarnation == 0:
                raise error from problem
            self._failed(_cannot_prepare(error), None)
            await self._pause()
            return
        if self._state not in lifecycle.RUNNING:  # told to stop meanwhile
            incarnation.close()
            await self._ended_on_request(None)
            return
        if self._early_abandon:
            incarnation.close()
            self._move(Trigger.RESTART_ASKED, self._early_abandon)
            self._emit("worker_group_abandoned", incarnation=incarnation.number, reason=self._early_abandon)
            self._emit("restart_planned", delay_s=0.0, reason=self._early_abandon)
            return
        self._world_size = incarnation.group.world_size
        self._chronicle.incarnation, self._chronicle.attempt = incarnation.number, incarnation.group.attempt
        self._life = Life(
            incarnation,
            self._config,
            self._times,
            launcher=self._launcher,
            state_dir=self._state_dir,
            on_line=self._on_line,
            on_look=self._on_look,
            emit=self._emit,
            spared=self._own_children,
        )
        if self._early_regroup:
            self.regroup(self._early_regroup)
        try:
            end = await self._life.run()
        finally:
            self._life = None
        self._settling.is_left_by(incarnation.run_dir)
        await self._after_life(end, incarnation)

    def _own_children(self) -> frozenset[int]:
        launcher = self._launcher.pid
        return self._team.pids | (frozenset() if launcher is None else {launcher})

    async def _assemble(self) -> Assignment | None:
        """Waits for the nodes that it takes; None if told to stop meanwhile."""
        self._early_regroup = self._early_abandon = ""  # what came since its end was meant for the last worker group
        if self._team.is_alone:
            return await self._team.assemble()
        self._team.stand(Standing.WARMING, "its processes are being started")
        assembled = await self._unless_ending(self._until_assembled(), self._say_what_is_waited_for)
        if assembled is not None:
            self._reason = "the ranks are being started"
        return assembled

    def _say_what_is_waited_for(self) -> None:
        if self._team.waits_for:
            self._reason = self._team.waits_for

    async def _until_assembled(self) -> Assignment:
        await self._launcher.ready()
        return await self._team.assemble()

    async def _after_life(self, end: LifeEnd, incarnation: Incarnation) -> None:
        outcome = end.outcome
        has_peers = incarnation.group.num_nodes > 1
        if outcome is not None:
            self._outcome = outcome
        is_done = outcome is not None and outcome["complete"]
        if is_done and await self._finish():
            self._settling.is_left_by(None)
            self._move(Trigger.GROUP_COMPLETED, "all steps are done")
            self._chronicle.ended(end, "complete", None)
            self._emit("completed", global_step=end.reached_step)
        elif self._state in lifecycle.ENDING:
            self._chronicle.ended(end, self._reason, None)
            await self._ended_on_request(outcome)
        elif is_done:
            self._chronicle.ended(end, "the last state could not be kept on another node", None)
            self._move(Trigger.GROUP_FAILED, "the last state could not be kept on another node: once more")
        elif self._restart_reason is not None:
            reason, self._restart_reason = self._restart_reason, None
            self._chronicle.ended(end, reason, None)
            self._emit("restart_planned", delay_s=0.0, reason=reason)
        elif has_peers and (all(e.secondary for e in end.ends) or await self._agent_lost_the_others(end)):
            self._ended_elsewhere(end)
        elif outcome is not None and not any(not rank_end.secondary for rank_end in end.ends):
            # Whoever started us has told the ranks themselves, as Slurm does.
            self._chronicle.ended(end, outcome["reason"], None)
            self._move(Trigger.GROUP_ENDED, outcome["reason"])
            self._emit("stopped", reason=outcome["reason"])
        else:
            cause = classify(end.ends)
            for rank_end in end.ends:
                if rank_end.rank is not None:
                    self._chronicle.rank_failed(rank_end, cause)
            self._chronicle.ended(end, cause.what, cause)
            self._failed(cause, end, [report.as_error() for report in incarnation.reports()])
            await self._pause()

    def _ended_elsewhere(self, end: LifeEnd) -> None:
        """Each node counts its own failures, and whoever asked for this end, or failed, is another one."""
        if (halt := self._failures.add_elsewhere(end)) is not None:
            self._chronicle.ended(end, halt.reason, None)
            self._halt(halt)
            return
        reason = end.outcome["reason"] if end.outcome is not None else "ranks on another node ended"
        self._chronicle.ended(end, reason, None)
        self._move(Trigger.GROUP_FAILED, reason)
        self._emit("restart_planned", delay_s=0.0, reason=reason)

    async def _agent_lost_the_others(self, end: LifeEnd) -> bool:
        """Whether the agent ended by itself, with no rank to blame, because its worker group's store or another node is
        gone: agents meet through that store before there are any ranks."""
        alone = all(rank_end.rank is None and (rank_end.exit_code or 0) > 0 for rank_end in end.ends)
        return alone and await self._team.others_ended()

    async def _finish(self) -> bool:
        """All ranks here are done: waits until the job is, or somebody wants no more waiting."""
        is_done = await self._unless_ending(self._team.finish())
        return is_done if is_done is not None else True

    async def _unless_ending(
        self, waiting: Coroutine[Any, Any, _T], look: Callable[[], None] = lambda: None
    ) -> _T | None:
        """What is waited for; None if told to stop, or to drain, meanwhile.

        Args:
            waiting: for other nodes; given up then.
            look: called now and then.
        """
        task = asyncio.create_task(waiting)
        try:
            while not task.done() and self._state in lifecycle.RUNNING:
                changed = asyncio.create_task(self._wait_for_change(ASSEMBLY_LOOK_S))
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not task.done() and self._state in lifecycle.RUNNING:
                    look()
            return task.result() if task.done() else None
        finally:
            task.cancel()

    async def _ended_on_request(self, outcome: dict[str, Any] | None) -> None:
        settled = None
        if not self._is_complete_elsewhere and self._team.is_first_left():
            settled = await self._settling.settle(self._is_ending)
        if self._is_complete_elsewhere:
            self._completed_elsewhere()
            return
        reason = outcome["reason"] if outcome is not None else self._reason
        if settled is not None:
            reason = f"{self._reason}, {settled}"
        self._move(Trigger.GROUP_ENDED, reason)
        self._emit("drained" if self._state is State.DRAINED else "stopped", reason=reason)

    def _is_ending(self) -> bool:
        """No worker group follows, and what the last one has left is not done yet on other nodes."""
        return self._state not in lifecycle.RUNNING and not self._is_complete_elsewhere

    def _completed_elsewhere(self) -> None:
        self._error = None
        self._move(Trigger.GROUP_COMPLETED, "all steps are done, on other nodes")
        self._emit("completed", reason=self._reason)

    # ---- failures

    def _failed(self, cause: Cause, end: LifeEnd | None, reports: list[ElasticTrainError] | None = None) -> None:
        """Takes note of a failure and decides what follows."""
        reached = end.failed_step if end is not None else self._furthest or 0
        decision = self._failures.add(cause, reached, began_step=end is not None and end.began_step)
        if isinstance(decision, Halt):
            self._halt(decision, reports[0] if not cause.can_retry and reports else None)
            return
        self._move(Trigger.GROUP_FAILED, decision.reason)
        self._delay_s = decision.delay_s
        self._emit("restart_planned", delay_s=round(decision.delay_s, 3), reason=decision.reason)

    def _halt(self, decision: Halt, error: ElasticTrainError | None = None) -> None:
        self._move(Trigger.GIVEN_UP, decision.reason)
        self._error = error if error is not None else HaltError(decision.reason, decision.hint)
        self._error.exit_code = decision.exit_code
        self._emit("halted", reason=decision.reason, hint=decision.hint)

    async def _pause(self) -> None:
        """Waits before the next worker group, unless told otherwise."""
        if self._state is State.RECOVERING and self._delay_s > 0:
            self._team.stand(Standing.WARMING, f"{self._reason}; it pauses")
            await self._wait_for_change(self._delay_s)
        if self._state in lifecycle.ENDING:
            await self._ended_on_request(None)

    # ---- states and events

    def _move(self, trigger: Trigger, reason: str) -> None:
        self._state = lifecycle.after(self._state, trigger)
        self._reason = reason
        self._changed.set()

    async def _wait_for_change(self, timeout_s: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _on_line(self, line: Line) -> None:
        """A line of a rank: shown, and, where it is an event, taken note of."""
        self._show(line)
        if not isinstance(line, Event):
            return
        self._said.hear(line)
        if line.name in ("snapshot_left_out", "snapshot_failed") and self._snapshot_wanted and self._life is not None:
            self._life.incarnation.board.ask_for_snapshot()
        self._chronicle.hear(line)

    def _on_look(self, life: Life) -> None:
        """The ranks' records were read."""
        reached = life.reached_step
        if life.all_train and self._state in (State.STARTING, State.RECOVERING) and self._restart_reason is None:
            self._has_trained = True
            self._move(Trigger.RANKS_TRAINED, "all ranks train")
            self._emit("ranks_training", incarnation=self._chronicle.incarnation, global_step=reached)
        if reached is not None:
            self._furthest = max(reached, self._furthest or 0)

    # ---- signals

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup means it
            loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        """The first asks to stop, the second not to wait for storage, a third Ctrl-C ends the ranks at once."""
        self._num_signals += 1
        self._stop(f"asked to stop by {signal.Signals(signum).name}")
        if signum == signal.SIGINT and self._num_signals >= 3 and self._life is not None:
            self._life.kill()

    # ---- what the other nodes ask for: `team.Orders`

    def regroup(self, reason: str) -> None:
        if self._life is None:
            self._early_regroup = reason
            return
        if self._state not in lifecycle.RUNNING or self._restart_reason is not None:
            return
        self._restart_reason = reason
        self._move(Trigger.RESTART_ASKED, reason)
        self._life.pass_on()

    def abandon(self, reason: str) -> None:
        if self._life is None:
            self._early_abandon = reason
            return
        if self._state in lifecycle.RUNNING:
            self._restart_reason = reason
            self._move(Trigger.RESTART_ASKED, reason)
        self._emit("worker_group_abandoned", incarnation=self._chronicle.incarnation, reason=reason)
        self._life.abandon()

    def stop_with_all(self, reason: str) -> None:
        if self._state is not State.STOPPING:
            self._stop(f"{reason}, on all nodes", is_asked_here=False)

    def complete_with_all(self) -> None:
        self._is_complete_elsewhere = True
        if self._state in (State.DRAINED, State.HALTED):
            self._completed_elsewhere()
        elif self._state not in lifecycle.ENDING:
            self._stop("the job is complete, on all nodes", is_asked_here=False)

    def waits_since_s(self) -> tuple[float, float]:
        return self._life.waits_since_s(time.monotonic()) if self._life is not None else (0.0, 0.0)

    def rank_views(self) -> Sequence[RankView]:
        return self._said.rank_views(self._life, time.monotonic()) if self._life is not None else ()

    def news(self) -> dict[str, dict[str, Any]]:
        return self._chronicle.news

    # ---- commands

    def _stop(self, reason: str, *, is_asked_here: bool = True) -> None:
        """Whoever asks for it here a second time wants no more waiting. What was heard from another node is no first
        time: somebody who stops the job on all nodes, one after the other, has said so once on each."""
        hurry = is_asked_here and self._is_asked_to_stop
        self._is_asked_to_stop |= is_asked_here
        self._settling.asked_to_end()
        if hurry:
            self._settling.hurry()
        if self._state in lifecycle.FINAL or self._has_given_up:
            return  # it ends anyway
        self._team.stand(Standing.LEAVING if self._life is not None else Standing.AWAY, reason)
        self._restart_reason = None
        already = self._state is State.STOPPING
        self._move(Trigger.STOP_ASKED, self._reason if already else reason)
        if self._state is State.STOPPED:
            self._error = None
            self._emit("stopped", reason=reason)
        if self._life is not None:
            self._life.ask_to_stop(hurry=hurry and already)

    async def stop(self, reason: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_ALL_S):
                await self._team.stop_all(reason)
        self._stop(reason)

    async def checkpoint(self, timeout_s: float) -> int:
        life = self._life
        if life is None or self._state is not State.TRAINING or life.reached_step is None:
            raise BusyError(f"no snapshot can be taken: the job is {self._state}", "Try again once it trains.")
        wanted = life.reached_step
        deadline_s = time.monotonic() + timeout_s
        self._snapshot_wanted = True
        life.incarnation.board.ask_for_snapshot()
        try:
            # The ranks' records are looked at now and then: who asks what step we are at hears no less than this.
            while self._said.durable_step < wanted or (life.reached_step or 0) < self._said.durable_step:
                if self._life is not life:
                    raise StorageError(
                        f"the worker group ended before a snapshot of step {wanted} or later was durable",
                        "Ask again once it trains; `elastictrain status` says why it ended, and what was kept.",
                    )
                if time.monotonic() > deadline_s:
                    raise StorageError(
                        f"no snapshot of step {wanted} or later was durable within {timeout_s:g} s",
                        "The job goes on; look at the store, and at `elastictrain status`.",
                    )
                await asyncio.sleep(ASK_INTERVAL_S)
        finally:
            self._snapshot_wanted = False
        return self._said.durable_step

    async def drain(self) -> None:
        before = self._state
        self._settling.asked_to_end()
        self._restart_reason = None
        self._move(Trigger.DRAIN_ASKED, "asked to drain")
        self._team.stand(Standing.LEAVING if self._life is not None else Standing.AWAY, "asked to drain")
        if self._life is not None and before is not State.DRAINING:
            self._life.ask_to_stop()
        while self._state is State.DRAINING:
            await self._wait_for_change(ASK_INTERVAL_S)

    async def resume(self) -> None:
        if self._state not in (State.HALTED, State.DRAINED):
            raise IllegalTransitionError(
                f"there is nothing to resume: the job is {self._state}", "Only a job that is halted or drained can be."
            )
        self._move(Trigger.RESUME_ASKED, "asked to resume")
        self._failures.forget()
        self._settling.goes_on()
        self._error = None

    async def restart(self, reason: str) -> None:
        if self._life is None and self._state is State.RECOVERING:
            # The next worker group is on its way; where it pauses, no longer.
            self._move(Trigger.RESTART_ASKED, reason)
            self._emit("restart_planned", delay_s=0.0, reason=reason)
            return
        if self._life is None or self._state not in lifecycle.RUNNING:
            waits = self._state in (State.HALTED, State.DRAINED)
            raise IllegalTransitionError(
                f"there is no worker group to restart: the job is {self._state}",
                "Use `elastictrain resume`." if waits else "",
            )
        self._restart_reason = reason
        self._move(Trigger.RESTART_ASKED, reason)
        self._life.ask_to_stop()

    # ---- what is shown

    @property
    def state(self) -> State:
        return self._state

    @property
    def has_trained(self) -> bool:
        """All ranks of a worker group of this supervisor have done a step."""
        return self._has_trained

    def view(self, now_s: float) -> SupervisorView:
        """The present moment.

        Args:
            now_s: of `time.monotonic`.
        """
        life = self._life
        ranks = self._said.rank_views(life, now_s) if life is not None else ()
        ranks = tuple(sorted((*ranks, *self._team.other_ranks), key=lambda rank: rank.rank))
        reached = life.reached_step if life is not None else None
        return SupervisorView(
            state=self._state,
            reason=self._reason,
            global_step=reached if reached is not None else self._furthest,
            max_steps=self._said.max_steps,
            incarnation=self._chronicle.incarnation or None,
            attempt=self._chronicle.attempt,
            world_size=self._world_size if self._world_size is not None else self._said.world_size,
            ranks=ranks,
            nodes=self._team.nodes,
            cgroup=life.cgroup if life is not None else None,
        )


def _unwritable(state_dir: Path, error: OSError) -> StorageError:
    """A disk that is full may be emptied: worth another try."""
    return StorageError(f"{error.filename or state_dir} cannot be written: {error.strerror or error}")


def _cannot_prepare(error: ElasticTrainError) -> Cause:
    """The next worker group could not be laid out: storage may come back, a mistake will not go away."""
    can_retry = isinstance(error, StorageError | BusyError)
    kind = CauseKind.STORAGE if can_retry else CauseKind.MISTAKE
    return Cause(kind, error.what, error.hint, can_retry=can_retry, exit_code=error.exit_code)
