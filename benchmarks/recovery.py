"""Measures how long a job stands still when a rank is killed or stopped, or the agent is killed.

From the signal to the next optimizer step on **both** ranks, ours against plain torchrun with a good script (atomic
checkpoints, `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`), and against `ft_launcher` and `dlrover-run` where their
environments are there (`make bench-peers`). One round is one job of each, one after the other; in each job the fault
comes several times. Leave the machine alone meanwhile.

    .venv/bin/python benchmarks/recovery.py [--faults kill stop agent] [--rounds 3] [--repeats 3] [--json FILE]
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
from collections import defaultdict
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from recovery_jobs import Job, OurJob, ScriptJob, Seen, end, launchers, wait_for

LIMIT_S = 5.0
"""After which a rank that stands still is hung: our `supervisor.step_timeout_s`, the timeout of the script's
collectives."""
START_S = 120.0
RECOVER_S = 120.0
SETTLE_S = 4.0
"""Between two faults: what the launcher learns from the first group is imported by then."""
STEPS = 10**7
EVERY = 200
NAMES = ("elastictrain", "elastictrain, cold")


def start(name: str, folder: Path) -> Job:
    if name in NAMES:
        return OurJob(folder, STEPS, fast=name == "elastictrain", limit_s=LIMIT_S)
    return ScriptJob(folder, launchers()[name], STEPS, every=EVERY, limit_s=LIMIT_S)


def strike(fault: str, job: Job, pid: int) -> None:
    match fault:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "stop":
            os.kill(pid, signal.SIGSTOP)
        case "agent":
            agent = psutil.Process(pid).parent()
            assert agent is not None
            agent.kill()


def measure(name: str, fault: str, repeats: int, folder: Path) -> tuple[list[float], list[int]]:
    """Seconds of standing still, and steps done again, for each time."""
    job = start(name, folder)
    seconds, again = [], []
    try:
        wait_for(job, lambda seen: all(one.step > one.first_step + 50 for one in seen), START_S)
        for _ in range(repeats):
            time.sleep(SETTLE_S)
            before = wait_for(job, lambda seen: all(one.step > one.first_step + 50 for one in seen), START_S)
            pids = {one.pid for one in before}
            began_s = time.monotonic()
            strike(fault, job, before[1].pid)
            reached = max(one.step for one in wait_for(job, lambda _seen: True, 1.0))
            after = wait_for(job, partial(_are_new, pids), RECOVER_S)
            seconds.append(time.monotonic() - began_s)
            again.append(max(0, reached - after[0].first_step))
    except (TimeoutError, RuntimeError) as error:
        print(f"    {name}: {error}", file=sys.stderr)
    finally:
        end(job)
    return seconds, again


def _are_new(pids: set[int], seen: list[Seen]) -> bool:
    return all(one.pid not in pids and one.step > one.first_step for one in seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", nargs="+", default=["kill", "stop", "agent"], choices=["kill", "stop", "agent"])
    parser.add_argument("--contenders", nargs="+", default=[*NAMES, *launchers()])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {}
    for fault in chosen.faults:
        seconds: dict[str, list[float]] = defaultdict(list)
        again: dict[str, list[int]] = defaultdict(list)
        names = [n for n in chosen.contenders if fault != "agent" or n in NAMES]  # nobody restarts theirs
        with tempfile.TemporaryDirectory(prefix="elastictrain-benchmark-") as folder:
            for number in range(chosen.rounds):
                for name in names:
                    print(f"{fault}: round {number + 1}, {name}", file=sys.stderr)
                    found, redone = measure(name, fault, chosen.repeats, Path(folder) / f"{fault}-{number}-{name}")
                    seconds[name] += found
                    again[name] += redone
        reference = statistics.median(seconds["torchrun"]) if seconds.get("torchrun") else None
        print(f"\n{fault:<20} {'median s':>9} {'best':>7} {'worst':>7} {'torchrun / it':>14} {'steps again':>12}")
        for name in names:
            if not seconds[name]:
                print(f"  {name:<18} {'-':>9}")
                continue
            middle = statistics.median(seconds[name])
            ratio = f"{reference / middle:>14.1f}" if reference is not None else f"{'-':>14}"
            print(
                f"  {name:<18} {middle:>9.3f} {min(seconds[name]):>7.3f} {max(seconds[name]):>7.3f} {ratio}"
                f" {statistics.median(again[name]):>12g}"
            )
        figures[fault] = dict(seconds)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
