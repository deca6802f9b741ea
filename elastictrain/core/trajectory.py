"""What a run did, step by step and over all its worker groups, and which of it survived.

A group that restores step r throws away whatever groups before it did beyond r. What is left, from the first step to
the last, is the surviving trajectory: in it every window must follow on the one before, and every sample position of
a window must have been consumed by exactly one rank, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank of one worker group did.

    Args:
        incarnation: of the group.
        rank: in the group.
        began_step: the step that was restored; None if the rank did not get there.
        began_position: sample position likewise.
        spans: sample positions consumed in each step, by the step's number.
        windows: the window of each step.
        committed: when each step was committed, in seconds of one clock of the host.
    """

    incarnation: int
    rank: int
    began_step: int | None = None
    began_position: int = 0
    began_s: float = 0.0
    spans: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    windows: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    committed: Mapping[int, float] = field(default_factory=dict)


def read_trace(incarnation: int, rank: int, lines: Iterable[Mapping[str, Any]]) -> RankTrace:
    """A rank's trace from its lines, as `training.injection` writes them."""
    began_step, began_position, began_s = None, 0, 0.0
    spans: dict[int, tuple[tuple[int, int], ...]] = {}
    windows: dict[int, tuple[int, int]] = {}
    committed: dict[int, float] = {}
    for line in lines:
        match line["kind"]:
            case "began":
                began_step, began_position, began_s = line["step"], line["position"], line["at_s"]
            case "consumed":
                spans[line["step"]] = tuple((start, stop) for start, stop in line["spans"])
                windows[line["step"]] = (line["window"][0], line["window"][1])
            case "committed":
                committed[line["step"]] = line["at_s"]
    return RankTrace(incarnation, rank, began_step, began_position, began_s, spans, windows, committed)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What survived, and what did not.

    Args:
        last_step: the last committed step that survived.
        steps_lost: committed steps that were done again, over all restarts.
        samples_repeated: sample positions that survived more than once.
        samples_skipped: sample positions of the surviving windows, and between them, that nobody consumed.
        windows: the window of each surviving step, by its number.
        useful_s: time spent on the steps that survived.
        wall_s: from the beginning of the first step to the end of the last.
    """

    last_step: int
    steps_lost: int
    samples_repeated: int
    samples_skipped: int
    windows: Mapping[int, tuple[int, int]]
    useful_s: float
    wall_s: float

    @property
    def goodput(self) -> float:
        """Share of the time that was spent on steps that survived."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0


def survey(traces: Sequence[RankTrace], *, drops_tail_of: int | None = None) -> Trajectory:
    """Puts the traces of all ranks and groups together.

    Args:
        traces: of all that got as far as their first step, in any order.
        drops_tail_of: samples per epoch, where `data.epoch_tail = "drop"` leaves samples out between two windows; what
            lies between a window and the next epoch's beginning is no gap then.
    """
    groups = [group for group in _by_group(traces) if any(t.began_step is not None for t in group)]
    survived: dict[int, list[tuple[int, int]]] = {}
    windows: dict[int, tuple[int, int]] = {}
    durations: dict[int, float | None] = {}
    lost = 0
    starts = [next(t.began_step for t in group if t.began_step is not None) for group in groups]
    for number, group in enumerate(groups):
        committed = {step for t in group for step in t.committed}
        reached = max(committed, default=starts[number])
        kept_to = min(starts[number + 1 :], default=max((s for t in group for s in t.spans), default=reached))
        if number + 1 < len(groups):
            lost += max(0, reached - starts[number + 1])
        else:
            kept_to = reached
        for trace in group:
            for step, spans in trace.spans.items():
                if step <= kept_to:
                    survived.setdefault(step, []).extend(spans)
                    windows[step] = trace.windows[step]
        durations |= {step: s for step, s in _durations(group).items() if step <= kept_to}
    repeated, skipped = _account(survived, windows, drops_tail_of)
    known = [s for s in durations.values() if s is not None]
    typical_s = median(known) if known else 0.0
    began_s = min((t.began_s for group in groups for t in group if t.began_step is not None), default=0.0)
    ended_s = max((at_s for group in groups for t in group for at_s in t.committed.values()), default=began_s)
    return Trajectory(
        last_step=max(windows, default=0),
        steps_lost=lost,
        samples_repeated=repeated,
        samples_skipped=skipped,
        windows=dict(sorted(windows.items())),
        useful_s=sum(s if s is not None else typical_s for s in durations.values()),
        wall_s=ended_s - began_s,
    )


def _by_group(traces: Sequence[RankTrace]) -> list[list[RankTrace]]:
    groups: dict[int, list[RankTrace]] = {}
    for trace in traces:
        groups.setdefault(trace.incarnation, []).append(trace)
    return [groups[number] for number in sorted(groups)]


def _durations(group: Sequence[RankTrace]) -> dict[int, float | None]:
    """Seconds of each step of a group, on the rank that was first to commit it; None for the group's first step, which
    holds what is done once."""
    at_s: dict[int, float] = {}
    for trace in group:
        for step, moment_s in trace.committed.items():
            at_s[step] = min(moment_s, at_s.get(step, moment_s))
    return {step: at_s[step] - at_s[step - 1] if step - 1 in at_s else None for step in at_s}


def _account(
    survived: Mapping[int, Sequence[tuple[int, int]]], windows: Mapping[int, tuple[int, int]], length: int | None
) -> tuple[int, int]:
    """(repeated, skipped) sample positions of the surviving steps."""
    repeated = skipped = 0
    for step, spans in survived.items():
        place, stop = windows[step]
        for start, end in sorted(spans):
            repeated += max(0, min(place, end) - start)
            skipped += max(0, start - place)
            place = max(place, end)
        skipped += max(0, stop - place)
    ordered = [windows[step] for step in sorted(windows)]
    for (_, before), (after, _) in pairwise([(0, 0), *ordered]):
        repeated += max(0, before - after)
        is_dropped_tail = length is not None and after % length == 0 and 0 <= after - before < length
        skipped += 0 if is_dropped_tail else max(0, after - before)
    return repeated, skipped
