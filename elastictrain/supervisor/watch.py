"""Looks at the ranks of an incarnation: their heartbeats, and what the operating system says about their processes."""

from __future__ import annotations

import time
from pathlib import Path

from elastictrain.core.liveness import ProcessState, RankSeen
from elastictrain.core.phases import Phase
from elastictrain.heartbeat import Heartbeat, HeartbeatReader, heartbeat_paths
from elastictrain.procs import read_living, read_stat

NS_PER_S = 1e9
CPU_SAMPLE_S = 0.5
"""Processor time is counted in ticks of 10 ms: over a shorter time the percentage would be noise."""


class Watch:
    """The ranks of one incarnation on this node.

    Args:
        run_dir: folder of the incarnation.
        num_ranks: how many there will be.
        started_s: when the incarnation was started, of `time.monotonic`.
        first_rank: global rank of the first one.
    """

    def __init__(self, run_dir: Path, num_ranks: int, started_s: float, first_rank: int = 0) -> None:
        self._run_dir = run_dir
        self._first_rank = first_rank
        self._num_ranks = num_ranks
        self._started_s = started_s
        self._readers: dict[int, HeartbeatReader] = {}
        self._cpu: dict[int, tuple[float, float, float]] = {}

    def heartbeats(self) -> dict[int, Heartbeat | None]:
        """The records of all ranks, None for those that have none yet."""
        if len(self._readers) < self._num_ranks:
            for rank, path in heartbeat_paths(self._run_dir).items():
                if rank not in self._readers:
                    self._readers[rank] = HeartbeatReader(path)
        found = {rank: reader.read() for rank, reader in self._readers.items()}
        first = self._first_rank
        missing = iter(rank for rank in range(first, first + self._num_ranks) if rank not in found)
        while len(found) < self._num_ranks:
            found[next(missing)] = None
        return dict(sorted(found.items()))

    def seen(self, heartbeats: dict[int, Heartbeat | None]) -> list[RankSeen]:
        """As `core.liveness` wants them; processes are taken to run (`with_process` looks)."""
        return [
            RankSeen(
                rank=rank,
                phase=beat.phase,
                moved_s=beat.moved_ns / NS_PER_S,
                tick_s=beat.tick_ns / NS_PER_S,
                step=beat.step,
                steps_done=beat.steps_done,
            )
            if beat is not None
            else RankSeen(rank=rank, phase=None, moved_s=self._started_s, tick_s=self._started_s)
            for rank, beat in heartbeats.items()
        ]

    def cpu_percent(self, pid: int) -> float:
        """Of one core, since it was last measured; 0 at first."""
        stat, now_s = read_stat(pid), time.monotonic()
        if stat is None:
            return 0.0
        before = self._cpu.get(pid)
        if before is None:
            self._cpu[pid] = (stat.cpu_s, now_s, 0.0)
            return 0.0
        cpu_s, at_s, percent = before
        if now_s - at_s >= CPU_SAMPLE_S:
            percent = 100.0 * max(0.0, stat.cpu_s - cpu_s) / (now_s - at_s)
            self._cpu[pid] = (stat.cpu_s, now_s, percent)
        return round(percent, 1)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def process_state(pid: int, parent_pid: int | None) -> ProcessState:
    """What has become of a rank's process.

    Args:
        pid: of the rank.
        parent_pid: of its agent: the child of another is another process that got the same pid.
    """
    stat = read_living(pid)
    if stat is None or stat.parent_pid != parent_pid:
        return ProcessState.GONE
    return ProcessState.STOPPED if stat.state in ("T", "t") else ProcessState.RUNNING


def has_left_early(beat: Heartbeat, state: ProcessState) -> bool:
    """Whether a rank is gone that had not come to its end."""
    return state is ProcessState.GONE and beat.phase is not Phase.EXIT
