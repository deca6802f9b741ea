"""What supervision costs, and how soon it notices.

    python benchmarks/supervision.py [--ranks 8 64 512] [--seconds 10] [--json FILE]

1. A heartbeat write: nanoseconds per `HeartbeatWriter.enter`, as the loop calls it at every change of phase.
2. The supervisor's watch over simulated ranks: share of a core, and memory, of a process of its own for each number of
   ranks. Another process plays all ranks; it moves each of their records a few times a second, and the watch reads and
   judges them as for a real group. Journal, control interface and the ranks' output are not part of it.
3. Detection: how much later than its limit a rank that stands still is found, over `--hangs` hangs. Taking the stacks
   of all ranks, before anybody is blamed, comes on top: 0.4 s at most.

Goals: about 1 µs, under 1% of a core with 512 ranks, under 0.5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from goals import Goal, judge

from elastictrain.config.schema import JobConfig
from elastictrain.core.liveness import StepTimes
from elastictrain.core.phases import Phase
from elastictrain.heartbeat import HeartbeatWriter
from elastictrain.protocol import BOARD_FILE, StopBoard
from elastictrain.supervisor.incarnation import Incarnation
from elastictrain.supervisor.launcher import Launcher
from elastictrain.supervisor.life import Life

LIMIT_S = 2.0
WRITE_GOAL_NS = 1500
"""About a microsecond."""
WATCH_GOAL_PERCENT = 1.0
GOAL_RANKS = 512
FOUND_GOAL_S = 0.5
STEP_PHASES = (Phase.READY, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER, Phase.COMMIT)


def write_cost(folder: Path, num_writes: int = 200_000) -> dict[str, float]:
    """Nanoseconds per write; the median of ten stretches."""
    writer = HeartbeatWriter(folder, 0, 0, 1)
    writer.begin_with(0)
    stretches = []
    for _ in range(10):
        began_ns = time.perf_counter_ns()
        for i in range(num_writes // 10):
            writer.enter(Phase.FORWARD, i, 3, i, 0)
        stretches.append((time.perf_counter_ns() - began_ns) / (num_writes // 10))
    writer.close()
    return {"enter_ns": round(statistics.median(stretches)), "enter_ns_worst": round(max(stretches))}


def _play(folder: str, num_ranks: int, stop: Event, hang: Event) -> None:
    """All ranks in one process, without their ticking threads: 512 of those would be the benchmark."""
    writers = []
    for rank in range(num_ranks):
        writer = HeartbeatWriter(Path(folder), rank, rank, 1)
        writer.close()
        writer.begin_with(0)
        writers.append(writer)
    step = 0
    while not stop.is_set():
        for rank, writer in enumerate(writers):
            if rank == 1 and hang.is_set():
                continue
            for phase in STEP_PHASES:
                writer.enter(phase, step, 0)
        step += 1
        time.sleep(0.2)


class Played(Incarnation):
    """Its ranks are children of this process."""

    @property
    def agent_pid(self) -> int:
        return os.getpid()


def _life(folder: Path, num_ranks: int) -> Life:
    """A watch over records that are there already; nothing is started."""
    StopBoard.create(folder / BOARD_FILE)
    config = JobConfig.model_validate(
        {
            "name": "bench",
            "task": "bench:Task",
            "train": {"max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
            "supervisor": {"step_timeout_s": LIMIT_S},
        }
    )
    return Life(
        Played(folder, 1, num_ranks),
        config,
        StepTimes(),
        launcher=Launcher(folder, fork=False, grace_s=1.0),
        state_dir=folder,
        on_line=lambda _line: None,
        on_look=lambda _life: None,
        emit=lambda _kind, **_fields: None,
        spared=frozenset,
    )


async def _watch(life: Life, seconds: float) -> tuple[float, float]:
    """Looks as `Life.run` does, for a while; returns (processor seconds, wall seconds)."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() - began_s < seconds:
        await asyncio.sleep(life._pause_s(time.monotonic()))
        await life._look(time.monotonic())
    return time.process_time() - began_cpu_s, time.monotonic() - began_s


async def _detect(life: Life, hang: Event) -> float:
    """Seconds between the moment a hung rank is over its limit and the moment the watch says so."""
    found: list[float] = []

    async def examine(_seen: Any) -> None:
        found.append(time.monotonic())

    life._examine = examine  # type: ignore[method-assign]
    await _watch(life, random.uniform(0.3, 1.0))
    hang.set()
    while not found:
        await asyncio.sleep(life._pause_s(time.monotonic()))
        await life._look(time.monotonic())
    beat = life.heartbeats[1]
    assert beat is not None
    return found[0] - beat.moved_ns / 1e9 - LIMIT_S


def supervise(num_ranks: int, seconds: float, num_hangs: int) -> dict[str, Any]:
    """Cost and delay with so many ranks."""
    context = multiprocessing.get_context("spawn")
    delays = []
    with tempfile.TemporaryDirectory() as root:
        stop, hang = context.Event(), context.Event()
        player = context.Process(target=_play, args=(root, num_ranks, stop, hang))
        player.start()
        life = _life(Path(root), num_ranks)
        while len([b for b in life._watch.heartbeats().values() if b is not None and b.step > 2]) < num_ranks:
            time.sleep(0.1)
        cpu_s, wall_s = asyncio.run(_watch(life, seconds))
        for _ in range(num_hangs):
            delays.append(asyncio.run(_detect(_life(Path(root), num_ranks), hang)))
            hang.clear()
            time.sleep(0.5)
        stop.set()
        player.join()
    return {
        "ranks": num_ranks,
        "core_percent": round(100 * cpu_s / wall_s, 3),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "detection_s_median": round(statistics.median(delays), 3) if delays else None,
        "detection_s_worst": round(max(delays), 3) if delays else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write = write_cost(Path(folder))
    print(f"a heartbeat write: {write['enter_ns']} ns (slowest stretch {write['enter_ns_worst']} ns)")
    rows = []
    for num_ranks in args.ranks:
        # A process of its own, so that memory is that of this many ranks.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            row = alone.submit(supervise, num_ranks, args.seconds, args.hangs).result()
        rows.append(row)
        print(
            f"{num_ranks:4d} ranks: {row['core_percent']:.2f}% of a core, {row['memory_mib']} MiB, found "
            f"{row['detection_s_median']} s after the limit (worst {row['detection_s_worst']} s)"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"write": write, "watch": rows}, indent=2) + "\n")
    goals = [Goal("a heartbeat write", write["enter_ns"], WRITE_GOAL_NS, "ns")]
    for row in rows:
        if row["ranks"] <= GOAL_RANKS:
            goals.append(
                Goal(f"{row['ranks']} ranks: the watch", row["core_percent"], WATCH_GOAL_PERCENT, "% of a core")
            )
        if row["detection_s_worst"] is not None:
            goals.append(
                Goal(f"{row['ranks']} ranks: found after the limit", row["detection_s_worst"], FOUND_GOAL_S, "s")
            )
    return judge(goals)


if __name__ == "__main__":
    sys.exit(main())
