"""Looks closely at ranks that stand still for too long: takes evidence while they live, finds the culprit, writes it
all down as an incident.

Whom to blame is decided in `core.liveness`; ending the culprit is the business of whoever asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from elastictrain.core.liveness import ProcessState, RankSeen, Verdict, has_left
from elastictrain.heartbeat import Heartbeat
from elastictrain.supervisor.evidence import (
    Evidence,
    Stacks,
    is_in_collective,
    next_incident,
    take_loader_stacks,
    take_stacks,
)
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.output import RankOutput
from elastictrain.supervisor.watch import Watch, process_state


class Emit(Protocol):
    """Takes an event."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """What a close look has found.

    Args:
        verdict: who is to blame, if anybody on this node is; an incident is open then.
        heartbeats: as they were when it was reached.
        pids: processes of the ranks.
        left: ranks that have ended as they should.
    """

    verdict: Verdict
    heartbeats: dict[int, Heartbeat | None]
    pids: Mapping[int, int]
    left: frozenset[int]


class HangExaminer:
    """Examines the ranks of one incarnation.

    Args:
        incarnation: whose ranks they are.
        watch: reads their records.
        judge: gives the verdict on what was seen at a time, in seconds of `time.monotonic`.
        state_dir: where incidents are kept.
        outputs: of the ranks of this node, in their order.
        emit: takes events.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        watch: Watch,
        judge: Callable[[list[RankSeen], float], Verdict],
        *,
        state_dir: Path,
        outputs: Sequence[RankOutput],
        emit: Emit,
    ) -> None:
        self._incarnation = incarnation
        self._watch = watch
        self._judge = judge
        self._state_dir = state_dir
        self._outputs = outputs
        self._emit = emit
        self._waits_at_step: int | None = None

    async def examine(self, seen: Sequence[RankSeen], heartbeats: Mapping[int, Heartbeat | None]) -> Finding:
        """Takes evidence and finds the culprit.

        Args:
            seen: the ranks, of which one stands still for too long.
            heartbeats: by rank.
        """
        pids = self._pids(heartbeats)
        looked = [self._with_process(rank, pids) for rank in seen]
        main_threads = {rank: beat.main_thread for rank, beat in heartbeats.items() if beat is not None}
        askable = {r.rank: pids[r.rank] for r in looked if r.process is ProcessState.RUNNING and r.rank in pids}
        stacks = await take_stacks(self._incarnation.run_dir, askable, main_threads)
        # The ranks may have moved while they were asked.
        after = self._watch.heartbeats()
        looked = [self._with_process(rank, pids) for rank in self._watch.seen(after)]
        looked = [replace(r, in_collective=_in_collective(r, stacks)) for r in looked]
        verdict = self._judge(looked, time.monotonic())
        if verdict.elsewhere:
            self._tell_elsewhere(verdict, looked)
        if verdict.culprits:
            loaders = await take_loader_stacks(self._incarnation.run_dir, askable)
            self._open_incident(verdict, looked, stacks, loaders, pids)
        left = frozenset(rank.rank for rank in looked if has_left(rank))
        return Finding(verdict, after, pids, left)

    def _pids(self, heartbeats: Mapping[int, Heartbeat | None]) -> dict[int, int]:
        """Processes of the ranks; of those without a heartbeat, the agent's children that say which rank they are."""
        known = {rank: beat.pid for rank, beat in heartbeats.items() if beat is not None}
        if len(known) < len(heartbeats):
            known = {**self._incarnation.rank_pids(), **known}
        return known

    def _with_process(self, seen: RankSeen, pids: Mapping[int, int]) -> RankSeen:
        if seen.rank not in pids:
            return seen
        return replace(seen, process=process_state(pids[seen.rank], self._incarnation.agent_pid))

    def _tell_elsewhere(self, verdict: Verdict, looked: list[RankSeen]) -> None:
        """Says once, of every standstill, that this node can only wait."""
        step = max(rank.step for rank in looked)
        if step != self._waits_at_step:
            self._waits_at_step = step
            self._emit(
                "culprit_elsewhere",
                incarnation=self._incarnation.number,
                ranks=[waiting.rank for waiting in verdict.ranks],
                step=step,
                stood_still_s=round(min(waiting.stood_still_s for waiting in verdict.ranks), 3),
            )

    def _open_incident(
        self,
        verdict: Verdict,
        looked: list[RankSeen],
        stacks: Mapping[int, Stacks],
        loaders: Mapping[int, str],
        pids: Mapping[int, int],
    ) -> None:
        number = next_incident(self._state_dir)
        first = verdict.culprits[0]
        phases = {rank.rank: rank.phase.name.lower() if rank.phase is not None else "none" for rank in looked}
        fields: dict[str, Any] = {
            "incident": number,
            "kind": "hang",
            "incarnation": self._incarnation.number,
            "ranks": [culprit.rank for culprit in verdict.culprits],
            "phase": phases[first.rank],
            "stood_still_s": round(first.stood_still_s, 3),
            "limit_s": round(first.limit_s, 3),
            "why": first.why,
        }
        ranks = [
            {
                "rank": v.rank,
                "pid": pids.get(v.rank),
                "health": v.health.value,
                "why": v.why,
                "phase": phases[v.rank],
                "step": rank.step,
                "stood_still_s": round(v.stood_still_s, 3),
                "limit_s": round(v.limit_s, 3),
                "process": rank.process.value,
                "in_collective": rank.in_collective,
                "stack": [f"{f.file}:{f.line} {f.function}" for f in stacks[v.rank].main] if v.rank in stacks else [],
            }
            for v, rank in zip(verdict.ranks, looked, strict=True)
        ]
        evidence = Evidence(
            summary={**fields, "opened_at": time.time(), "everybody_waits": verdict.everybody_waits, "judged": ranks},
            stacks={rank: stacks.get(rank, Stacks("", ())) for rank in phases},
            loader_stacks=loaders,
            pids=pids,
            last_lines={
                rank: list(output.last_lines)
                for rank, output in enumerate(self._outputs, self._incarnation.group.first_rank)
            },
        )
        folder = evidence.write(self._state_dir, self._incarnation.run_dir, number)
        self._emit("incident_opened", **fields, folder=str(folder))


def _in_collective(seen: RankSeen, stacks: Mapping[int, Stacks]) -> bool | None:
    found = stacks.get(seen.rank)
    return is_in_collective(found.main, seen.phase) if found is not None else None
