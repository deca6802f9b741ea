"""`Session`: what a training loop needs to be exact and to be watched, without taking the loop over.

The built-in loop is its first customer and has no back door: your own loop can do all it does.

    with process_group() as place:
        session = Session(place, seed=0)
        plan = WindowPlan(length=len(dataset), global_batch_size=64, micro_batch_size=8)
        while (step := session.begin_step(plan)) is not None and session.global_step < max_steps:
            for microbatch in step.microbatches:            # this rank's share of the window
                session.enter(Phase.DATA)
                batch = read(microbatch.start, microbatch.stop)
                session.begin_microbatch(microbatch)        # phase FORWARD, generators seeded
                loss = ...
                session.enter(Phase.BACKWARD)
                loss.backward()
            session.enter(Phase.OPTIMIZER)
            optimizer.step()
            session.commit(applied=True)

It keeps: the phase, checked against the table in `core.phases`, with the time spent in each; the counters, which
move in `commit` alone; the plan of microbatches; the seeds; the flag by which all ranks stop after the same step.
Within an incarnation it writes every change of phase into the rank's heartbeat, by which the supervisor finds a hang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from elastictrain.core.counters import Counters
from elastictrain.core.phases import IN_UPDATE, INTERRUPTIBLE, TRANSITIONS, Phase, check_transition
from elastictrain.core.seeds import Stream, derive
from elastictrain.core.window import Microbatch, Window, WindowPlan
from elastictrain.errors import UsageError
from elastictrain.heartbeat import HeartbeatWriter, my_heartbeat
from elastictrain.protocol import StopBoard
from elastictrain.training.device import Place
from elastictrain.training.randomness import Generators
from elastictrain.training.vote import StopVote

Applied = bool | Callable[[], bool]
"""Whether an update was applied; a callable where only the device knows yet, asked once, as late as possible."""


class LeftBehind(BaseException):
    """What this rank waits for will not come any more: the others, or its agent, are gone.

    Not an Exception, so that code which handles errors of its own lets it through.
    """


@dataclass(frozen=True, slots=True)
class Step:
    """One step as this rank sees it.

    Args:
        index: windows consumed before this one; the step that seeds are made from.
        window: all samples of the step, over all ranks.
        microbatches: this rank's share; empty where a short window has fewer microbatches than there are ranks.
    """

    index: int
    window: Window
    microbatches: tuple[Microbatch, ...]


class Session:
    """One rank's part in a run. See the module's docstring for its use, `docs/session.md` for the whole contract.

    Args:
        place: rank, world size, device.
        seed: the run's seed.
        counters: where the run stands; the default is its beginning.
        board: the stop board shared by this node's ranks; default: that of the incarnation, where there is one.
        heartbeat: this rank's record; default: that of the incarnation, where there is one.
        group_timeout_s: after which a message of the session's own to ranks of other nodes fails.
    """

    def __init__(
        self,
        place: Place,
        *,
        seed: int = 0,
        counters: Counters | None = None,
        board: StopBoard | None = None,
        heartbeat: HeartbeatWriter | None = None,
        group_timeout_s: float = 600.0,
    ) -> None:
        self.place = place
        self.seed = seed
        self.stop_reason: str | None = None
        self._stop_requested = False
        self.generators = Generators(place.device)
        self._board = board if board is not None else StopBoard.from_environment()
        self._heartbeat = heartbeat if heartbeat is not None else my_heartbeat()
        has_peers = place.world_size > place.local_world_size
        self._vote = StopVote(place, timeout_s=group_timeout_s) if has_peers else None
        self._last_step: int | None = None
        self._is_stopped_elsewhere = False
        self._snapshots_seen = self._board.snapshots_asked
        self._microbatch = 0
        self._counters = counters if counters is not None else Counters()
        self._pending: tuple[Callable[[], bool], int] | None = None
        self._settling = False
        self._leave_reason: str | None = None
        self._on_settled: list[Callable[[bool, Counters], None]] = []
        self._step: Step | None = None
        self._phase = Phase.INIT
        self._since_s = perf_counter()
        self._phase_s = [0.0] * len(Phase)
        self.beat()

    def resume(self, counters: Counters) -> None:
        """Goes on from a snapshot's counters; before the first step only, and once the state is that of the snapshot:
        from now on it can be kept."""
        if self._phase is not Phase.INIT:
            raise UsageError("resume after the first step", "Resume a session before its first begin_step.")
        self._counters = counters
        self._move_to(Phase.INIT)  # the heartbeat says that there is something to keep

    # ---- phases

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def in_update(self) -> bool:
        """True between the reduction and the commit, and while the outcome of an update is being settled, also if that
        failed half-way: the state belongs to no step and cannot be kept."""
        return self._settling or self._phase in IN_UPDATE

    def enter(self, phase: Phase) -> None:
        """Says what the loop does from now on.

        Raises:
            IllegalTransitionError: `phase` cannot follow the present one, which then stays.
        """
        if phase not in TRANSITIONS[self._phase]:
            check_transition(self._phase, phase)
        if phase is Phase.OPTIMIZER and self._vote is not None:
            self._end_vote(self._vote)
        self._move_to(phase)
        if self._leave_reason is not None:
            self._leave_here()

    def _end_vote(self, vote: StopVote) -> None:
        """The last moment of a step before its update: all ranks learn whether it is the last."""
        if vote.end():
            self._last_step = self.global_step + 1
            self._is_stopped_elsewhere = not self._board.asked
            if self.stop_reason is None:
                self.stop_reason = "asked to stop on another node"

    def _move_to(self, phase: Phase) -> None:
        now_s = perf_counter()
        self._phase_s[self._phase] += now_s - self._since_s
        self._phase = phase
        self._since_s = now_s
        if self._heartbeat is not None:
            counters = self._counters
            self._heartbeat.enter(
                phase,
                counters.global_step + (self._pending is not None),
                self._microbatch,
                counters.applied,
                counters.skipped,
            )

    def beat(self, number: int = 0) -> None:
        """Says that the loop gets on within its phase: for what may take long, such as an evaluation.

        Args:
            number: how far, for show.
        """
        if self._heartbeat is not None:
            self._heartbeat.beat(number)
        if self._leave_reason is not None:
            self._leave_here()

    def tell(self, loss: float, device_bytes: int = 0) -> None:
        """Shows the last known loss, and the memory used on the device, in the heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.tell_loss(loss)
            self._heartbeat.device_bytes = device_bytes

    def take_phase_times(self) -> list[float]:
        """Seconds spent in each phase since the last call, indexed by `Phase`; the present one up to now."""
        now_s = perf_counter()
        self._phase_s[self._phase] += now_s - self._since_s
        self._since_s = now_s
        taken, self._phase_s = self._phase_s, [0.0] * len(Phase)
        return taken

    # ---- steps

    @property
    def global_step(self) -> int:
        """Windows consumed, an update whose outcome is not known yet included. Never waits for the device."""
        return self._counters.global_step + (self._pending is not None)

    @property
    def sample_position(self) -> int:
        """Where the next window begins. Never waits for the device."""
        return self._pending[1] if self._pending is not None else self._counters.sample_position

    @property
    def counters(self) -> Counters:
        """Where the run stands; waits for the outcome of the last update if it must."""
        self.settle()
        return self._counters

    def begin_step(self, plan: WindowPlan) -> Step | None:
        """The next step, or None when all ranks stop here.

        Enters `READY` if the session is not in it yet.
        """
        if self._heartbeat is not None and not self._heartbeat.has_begun:
            self._heartbeat.begin_with(self.global_step)
        if self._phase is not Phase.READY:
            self.enter(Phase.READY)
        if self.stop_reason is None and self._board.asked:
            self.stop_reason = "asked to stop"
        if self._vote is None and self._board.asked and self.place.is_rank_zero and self._board.last_step is None:
            # A lone rank can stop at once; others may have begun this step already, so all of them finish it.
            self._board.stop_after(self.global_step + (1 if self.place.world_size > 1 else 0))
        if self.must_stop:
            return None
        if self._vote is not None:
            self._vote.begin(self._board.asked)
        window = plan.window_at(self.sample_position)
        self._step = Step(self.global_step, window, window.share(self.place.rank, self.place.world_size))
        self._microbatch = 0
        return self._step

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        """Enters `FORWARD` with the generators seeded for this microbatch of the present step."""
        if self._step is None:
            raise UsageError("begin_microbatch outside a step", "Call begin_step first.")
        self._microbatch = microbatch.index
        self.enter(Phase.FORWARD)
        self.generators.seed(derive(self.seed, Stream.MICROBATCH, self._step.index, microbatch.index))

    def commit(self, applied: Applied) -> None:
        """The step is over: its window is consumed. The one place where the counters move.

        Args:
            applied: whether the update changed the weights. A callable is asked later, when somebody needs to
                know: on a GPU that keeps the processor from waiting for the device in every step.
        """
        if self._step is None:
            raise UsageError("commit without a step", "Call begin_step first.")
        self.settle()
        self.enter(Phase.COMMIT)
        stop = self._step.window.stop
        self._step = None
        self._pending = (applied if callable(applied) else lambda: applied, stop)
        if not callable(applied):
            try:
                self.settle()
            except BaseException:
                if not self._settling:
                    self.enter(Phase.READY)
                raise
        self.enter(Phase.READY)

    def settle(self) -> None:
        """Learns the outcome of the last update, if it is still open, and runs what hangs on it."""
        if self._pending is None:
            return
        applied, stop = self._pending
        self._settling = True
        outcome = applied()
        self._pending = None
        self._counters = self._counters.commit(applied=outcome, sample_position=stop)
        # A skipped update changes nothing: a callback that halts the run for it leaves a state that can be kept.
        self._settling = bool(outcome)
        for callback in self._on_settled:
            callback(outcome, self._counters)
        self._settling = False

    def on_settled(self, callback: Callable[[bool, Counters], None]) -> None:
        """Has `callback(applied, counters)` called once per step, when its outcome is known and before the next
        update: for what may only follow an applied update, such as the scheduler."""
        self._on_settled.append(callback)

    def enter_exit(self) -> None:
        """The loop is over; also settles the last update. Idempotent."""
        self.settle()
        if self._phase is not Phase.EXIT:
            self.enter(Phase.EXIT)

    # ---- giving up

    def leave(self, reason: str) -> None:
        """Ends this rank's part by `LeftBehind`, as soon as its state is consistent: at once, out of the signal
        handler that this is made for, or at the next change of phase or beat. Code that swallows it meets it again.
        """
        self._leave_reason = reason
        if self._phase in INTERRUPTIBLE:
            self._leave_here()

    def _leave_here(self) -> None:
        # At the end there is nothing left to be interrupted: the rank is leaving.
        if not self.in_update and self._phase is not Phase.EXIT:
            raise LeftBehind(self._leave_reason)

    def abandon_step(self) -> bool:
        """Gives up the step in flight, for good: the session stands at its last commit, in phase `SNAPSHOT`.

        Returns:
            whether it does: before a run's first step and after the last there is nothing to keep, and in an update the
            state belongs to no step.
        """
        self._leave_reason = None
        is_blank = self._phase is Phase.INIT and self.global_step == 0
        if self.in_update or is_blank or self._phase is Phase.EXIT:
            return False
        self._step = None
        self._move_to(Phase.SNAPSHOT)
        return True

    # ---- stopping

    def request_stop(self, reason: str) -> None:
        """Asks all ranks to stop after a step they agree on; asked again, not to wait for storage either. Safe in a
        signal handler."""
        if self._stop_requested:
            self._board.ask_to_hurry()
        self._stop_requested = True
        if self.stop_reason is None:
            self.stop_reason = reason
        self._board.ask()

    def take_snapshot_request(self) -> bool:
        """True once after somebody asked for a snapshot; only rank zero needs to look."""
        asked = self._board.snapshots_asked
        is_new, self._snapshots_seen = asked != self._snapshots_seen, asked
        return is_new

    @property
    def stop_asked(self) -> bool:
        """True once anybody on this node asked to stop."""
        return self.stop_reason is not None or self._board.asked

    @property
    def hurry(self) -> bool:
        """True when the stop was asked for a second time: what is not durable by now stays in the memory tier."""
        return self._board.hurry

    @property
    def passes_on(self) -> bool:
        """True when the next worker group follows at once: it finds the last snapshot in memory. Not where this rank
        was told to stop itself, as Slurm tells it: then it is not known whether one follows."""
        return self._board.is_passing_on and not self._stop_requested

    @property
    def awaits_orders(self) -> bool:
        """True while another node has had all stop, and nobody has said on this one what for."""
        return self._is_stopped_elsewhere and not self._board.asked and not self.passes_on

    @property
    def must_stop(self) -> bool:
        """True when the step after which all ranks stop has been committed."""
        last_step = self._last_step if self._vote is not None else self._board.last_step
        return last_step is not None and self.global_step >= last_step
