"""Measures how long anything of a job is left once its supervisor, launcher or agent has been killed.

From the `kill -9` until the last process of the worker group that it hit is gone: ranks, loader processes, agent and,
with the supervisor, the launcher. The persister is not counted: it has a snapshot to bring to its store, and ends then.
Each is measured once more with one rank stopped by SIGSTOP, which can do nothing about its own end.

Goal: 2 s in the median, or the grace where a rank is still writing a snapshot. Beyond that it ends with 1.

    .venv/bin/python benchmarks/leftovers.py [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from goals import Goal, judge
from recovery_jobs import OurJob, end, wait_for

from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.config.schema import CheckpointConfig

VICTIMS = ("supervisor", "launcher", "agent")
START_S = 120.0
GONE_S = 120.0
GOAL_S = 2.0
POLL_S = 0.005


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def measure(victim: str, folder: Path, *, stopped: bool) -> float:
    """Seconds from the kill until all are gone."""
    job = OurJob(folder, 10**7, fast=True, limit_s=5.0)
    group: list[psutil.Process] = []
    try:
        ranks = wait_for(job, lambda ranks: all(rank.step >= 20 for rank in ranks), START_S)
        agent = psutil.Process(ranks[0].pid).parent()
        assert agent is not None
        launcher = agent.parent()
        assert launcher is not None
        group = [agent, *agent.children(recursive=True)]
        group = [p for p in group if "elastictrain.checkpoint.persister" not in p.cmdline()]
        hit = {"agent": agent, "launcher": launcher, "supervisor": psutil.Process(job.process.pid)}[victim]
        if victim == "supervisor":
            group.append(launcher)
        if stopped:
            os.kill(ranks[1].pid, signal.SIGSTOP)
        began_s = time.monotonic()
        hit.kill()
        while any(map(is_there, group)):
            if time.monotonic() - began_s > GONE_S:
                raise SystemExit(f"{victim}: somebody is still there after {GONE_S:.0f} s")
            time.sleep(POLL_S)
        return time.monotonic() - began_s
    finally:
        end(job)
        for process in group:
            if is_there(process):
                process.kill()
        MemoryTier.for_job(Path(CheckpointConfig().memory_path), job="recovery", state_dir=job.state).clean(
            timeout_s=5.0
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="elastictrain-leftovers-") as scratch:
        for number in range(args.rounds):
            for victim in VICTIMS:
                for stopped in (False, True):
                    name = f"{victim}, a rank stopped" if stopped else victim
                    folder = Path(scratch) / f"{number}-{victim}-{stopped}"
                    figures.setdefault(name, []).append(measure(victim, folder, stopped=stopped))
    print(f"{'kill -9 of':32}{'median s':>10}{'worst s':>10}")
    for name, seconds in figures.items():
        print(f"{name:32}{statistics.median(seconds):10.2f}{max(seconds):10.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2))
    return judge(
        [Goal(f"{name}: median", statistics.median(seconds), GOAL_S, "s") for name, seconds in figures.items()]
    )


if __name__ == "__main__":
    sys.exit(main())
