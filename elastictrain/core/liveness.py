"""Which ranks are alive, which stand still, and whose fault it is.

The ranks of a job do the same steps in lockstep, so when one stands still the others wait for it in a collective, and
all of them look stuck. The culprit is told from its victims by where it stands:

1. A rank is over its limit when it has not moved for longer than its phase may take.
2. One that is over its limit, but waits in a collective, waits for somebody. So does one that has got further than
   another rank which is still within its own limit: it is the other's turn.
3. What is left, furthest behind, is the culprit; so is, wherever it stands, a rank whose process is stopped, or whose
   Python code cannot run (its tick stands still).
4. If every rank waits in a collective, they wait for each other, in different ones: the fewer ranks are wrong, of
   equally many those that are ahead, for they left a collective out.

With ranks on other nodes the culprit may be theirs, and only their own supervisor sees it. So where every rank of this
node waits, nobody is blamed before a rank elsewhere would have been over its limit, whatever it did there (it may have
evaluated), and its supervisor has had time to act. After that, ranks of this node that wait in different places are
still judged by each other (4). If they all wait at one place, the culprit is elsewhere: to kill those that wait would
lose what they hold. Their collective fails by its own timeout, and they keep their state; only if it does not are they
ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastictrain.core.phases import Phase


class ProcessState(StrEnum):
    """What the operating system says about a rank's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """By SIGSTOP, or a debugger."""
    GONE = "gone"
    """No such process, or one that only waits to be collected."""


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank as its supervisor sees it.

    Args:
        rank: which.
        phase: what it does; None before its first heartbeat.
        moved_s: when it last moved; before the first heartbeat, when it was started.
        tick_s: when its Python code last ran.
        step: windows consumed.
        steps_done: steps that this process has committed.
        process: as the operating system sees it.
        in_collective: whether its stack is inside a collective; None if nobody has looked.
    """

    rank: int
    phase: Phase | None
    moved_s: float
    tick_s: float
    step: int = 0
    steps_done: int = 0
    process: ProcessState = ProcessState.RUNNING
    in_collective: bool | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may stand still.

    Args:
        startup_s: before its first step is done: imports, compilation, restoring.
        step_s: in a phase of a step; None learns it from the job.
        min_step_s: what is learnt never goes under this.
        max_step_s: nor over this: the process group's own timeout must not come first.
        eval_s: in an evaluation, between two batches.
        snapshot_s: in a snapshot.
        exit_s: after the last step.
        collective_s: in a collective, until that fails by itself: the process group's timeout.
        tick_s: for the tick.
    """

    startup_s: float
    step_s: float | None
    min_step_s: float
    max_step_s: float
    eval_s: float
    snapshot_s: float
    exit_s: float
    collective_s: float
    tick_s: float = 2.0


ELSEWHERE_MARGIN_S = 10.0
"""What a supervisor on another node may take to notice, keep evidence and kill; and the ranks, to hear of it."""
LEARNT_FACTOR = 10.0
"""A phase may take this many times the longest step seen lately. Steps vary by small factors; one that takes ten times
the longest is either stuck or so slow that its reason is worth a look."""


@dataclass(slots=True)
class StepTimes:
    """Learns how long a step takes. What a worker group has taught holds for the next one, until that knows better."""

    longest_s: float | None = None
    """The longest of the last steps; None before any."""

    def observe(self, longest_steps_s: Iterable[float]) -> None:
        """Takes note of what the ranks have measured; one that has not done a second step says 0."""
        longest_s = max(longest_steps_s, default=0.0)
        if longest_s > 0:
            self.longest_s = longest_s


def step_limit_s(limits: Limits, longest_s: float | None) -> float:
    """How long a phase of a step may take."""
    if limits.step_s is not None:
        return limits.step_s
    if longest_s is None:
        return limits.startup_s
    return min(max(LEARNT_FACTOR * longest_s, limits.min_step_s), limits.max_step_s)


def limit_s(seen: RankSeen, limits: Limits, longest_step_s: float | None) -> float:
    """How long this rank may stand still where it is."""
    match seen.phase:
        case None | Phase.INIT:
            return limits.startup_s
        case Phase.EVAL:
            return limits.eval_s
        case Phase.SNAPSHOT:
            return limits.snapshot_s
        case Phase.EXIT:
            return limits.exit_s
        case _:
            return limits.startup_s if seen.steps_done < 1 else step_limit_s(limits, longest_step_s)


def shortest_limit_s(limits: Limits, longest_step_s: float | None) -> float:
    """A rank that has moved within this time is within its limit, wherever it is."""
    step_s = step_limit_s(limits, longest_step_s)
    return min(step_s, limits.startup_s, limits.eval_s, limits.snapshot_s, limits.exit_s)


def longest_limit_s(limits: Limits, longest_step_s: float | None, *, starting: bool) -> float:
    """How long a rank may stand still that nobody here sees, while those here wait for it.

    Args:
        limits: they are the same on every node.
        longest_step_s: what was learnt here, from steps that all ranks do together.
        starting: those here have not done a step yet, so it may not have either.
    """
    step_s = step_limit_s(limits, longest_step_s)
    return max(step_s, limits.eval_s, limits.snapshot_s, limits.startup_s if starting else 0.0)


class Health(StrEnum):
    """How a rank is."""

    HEALTHY = "healthy"
    SLOW = "slow"
    """Over half of its limit."""
    WAITING = "waiting"
    """Over its limit, for somebody else."""
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """How a rank is, and why.

    Args:
        rank: which.
        health: how it is.
        stood_still_s: since when it has not moved.
        limit_s: how long it may.
        why: in words; empty for a healthy one.
    """

    rank: int
    health: Health
    stood_still_s: float
    limit_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `judge` found.

    Args:
        ranks: one verdict each.
        everybody_waits: no rank can be told from the others: all wait in collectives.
        elsewhere: whom they wait for is not on this node.
    """

    ranks: tuple[RankVerdict, ...]
    everybody_waits: bool = False
    elsewhere: bool = False

    @property
    def culprits(self) -> tuple[RankVerdict, ...]:
        return tuple(verdict for verdict in self.ranks if verdict.health is Health.HUNG)

    @property
    def slack_s(self) -> float:
        """How long nobody comes over its limit by standing still; negative where somebody is over it. Who moves in the
        meantime has at least `shortest_limit_s` from then on."""
        return min(verdict.limit_s - verdict.stood_still_s for verdict in self.ranks)

    @property
    def is_over_limit(self) -> bool:
        """Somebody stands still for too long: a reason to look closer."""
        return any(verdict.health in (Health.HUNG, Health.WAITING) for verdict in self.ranks)


_PLACE = {
    Phase.INIT: -1,
    Phase.READY: 0,
    Phase.EVAL: 0,
    Phase.SNAPSHOT: 0,
    Phase.DATA: 1,
    Phase.FORWARD: 1,
    Phase.BACKWARD: 1,
    Phase.REDUCE: 2,
    Phase.OPTIMIZER: 3,
    Phase.COMMIT: 4,
    Phase.EXIT: 5,
}
"""Where in a step a phase is. What repeats within a step (data, forward, backward) is one place: ranks have different
numbers of microbatches."""

_Position = tuple[int, int]


def _position(seen: RankSeen) -> _Position:
    if seen.phase is None:
        return (-1, -2)
    if seen.phase is Phase.INIT:
        return (-1, -1)
    return (seen.step, _PLACE[seen.phase])


def judge(
    ranks: Sequence[RankSeen],
    limits: Limits,
    *,
    longest_step_s: float | None,
    now_s: float,
    world_size: int,
) -> Verdict:
    """Says how the ranks of this node are, and who is to blame where one stands still.

    Args:
        ranks: all ranks of this node.
        limits: how long they may stand still.
        longest_step_s: what was learnt (`StepTimes`).
        now_s: on the clock that `moved_s` and `tick_s` are of.
        world_size: ranks of the job; more than `ranks` where there are other nodes.
    """
    age_s = {seen.rank: max(0.0, now_s - seen.moved_s) for seen in ranks}
    limit = {seen.rank: limit_s(seen, limits, longest_step_s) for seen in ranks}
    # Who has come to its end and is gone has left in order, while rank zero, say, still waits for storage.
    present = [seen for seen in ranks if not has_left(seen)]
    over = [seen for seen in present if age_s[seen.rank] > limit[seen.rank]]
    guilty: dict[int, str] = {}
    everybody_waits = elsewhere = False
    all_here = len(ranks) >= world_size
    if over:
        guilty = _plainly_stuck(over, limits, now_s)
        if not guilty:
            front = max(_position(seen) for seen in present)
            # What one that is ahead needs is not on this node.
            far = [] if all_here else [seen for seen in over if _may_wait(seen) and _position(seen) == front]
            waiting = [seen for seen in over if _waits(seen) or seen in far]
            stuck = [seen for seen in over if seen not in waiting]
            within = [seen for seen in present if age_s[seen.rank] <= limit[seen.rank]]
            if stuck:
                guilty = _furthest_behind(stuck, within)
            elif len(waiting) == len(present):
                everybody_waits = True
                since_s = min(age_s[seen.rank] for seen in present)
                starting = any(seen.steps_done < 1 for seen in present)
                chance_s = longest_limit_s(limits, longest_step_s, starting=starting) + ELSEWHERE_MARGIN_S
                elsewhere = not all_here and (since_s <= chance_s or len({_position(seen) for seen in present}) == 1)
                if not elsewhere or since_s > limits.collective_s + ELSEWHERE_MARGIN_S:
                    guilty = _disagreeing(present, all_here=all_here)
    verdicts = []
    for seen in ranks:
        age, bound = age_s[seen.rank], limit[seen.rank]
        if seen.rank in guilty:
            health, why = Health.HUNG, guilty[seen.rank]
        elif has_left(seen):
            health, why = Health.HEALTHY, ""
        elif age > bound:
            health, why = Health.WAITING, "waits for a rank of another node" if elsewhere else "waits for another rank"
        elif age > bound / 2:
            health, why = Health.SLOW, "takes long"
        else:
            health, why = Health.HEALTHY, ""
        verdicts.append(RankVerdict(seen.rank, health, age, bound, why))
    return Verdict(tuple(verdicts), everybody_waits, elsewhere)


def has_left(seen: RankSeen) -> bool:
    """Whether a rank has ended in order."""
    return seen.process is ProcessState.GONE and seen.phase is Phase.EXIT


def _waits(seen: RankSeen) -> bool:
    """Whether it is somebody else's turn. The stack knows; without it, only `REDUCE` is sure to be a collective."""
    return seen.in_collective if seen.in_collective is not None else seen.phase is Phase.REDUCE


def _may_wait(seen: RankSeen) -> bool:
    """Whether it may wait for another rank, where nothing says so: on CUDA the host is ahead of its collective, and
    stands still where it next needs the result."""
    return seen.phase in (Phase.OPTIMIZER, Phase.COMMIT)


def _plainly_stuck(over: Sequence[RankSeen], limits: Limits, now_s: float) -> dict[int, str]:
    """Ranks that cannot move, wherever they are."""
    found = {}
    for seen in over:
        if seen.process is ProcessState.STOPPED:
            found[seen.rank] = "its process is stopped"
        elif seen.process is ProcessState.GONE:
            found[seen.rank] = "its process is gone"
        elif seen.phase is not None and now_s - seen.tick_s > limits.tick_s and not seen.in_collective:
            found[seen.rank] = "it holds the interpreter lock: no Python code can run in it"
    return found


def _furthest_behind(stuck: Sequence[RankSeen], within: Sequence[RankSeen]) -> dict[int, str]:
    """The last of those that stand still and do not wait, unless one that still moves is behind them."""
    last = min(_position(seen) for seen in stuck)
    if any(_position(seen) < last for seen in within):
        return {}
    return {
        seen.rank: "it has sent no heartbeat" if seen.phase is None else f"it stands still in {seen.phase.name.lower()}"
        for seen in stuck
        if _position(seen) == last
    }


def _disagreeing(ranks: Sequence[RankSeen], *, all_here: bool) -> dict[int, str]:
    """All wait: the fewer ranks at one place, of equally many those ahead, left a collective out."""
    groups: dict[_Position, list[int]] = {}
    for seen in ranks:
        groups.setdefault(_position(seen), []).append(seen.rank)
    if len(groups) == 1:
        why = (
            "every rank waits in a collective, at the same place: their collectives do not match"
            if all_here
            else "every rank of this node waits in a collective for a rank of another node, where nobody has acted, "
            "and the collective has not failed in time either"
        )
        return {seen.rank: why for seen in ranks}
    fewest = min(len(members) for members in groups.values())
    position = max(place for place, members in groups.items() if len(members) == fewest)
    return dict.fromkeys(
        groups[position],
        "it waits in another collective than the other ranks: it left one out, or they have one too many",
    )
