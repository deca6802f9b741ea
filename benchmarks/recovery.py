"""Measures how long a job stands still when a rank is killed or stopped, or the agent is killed.

From the signal to the next optimizer step on **both** ranks, ours against plain torchrun with a good script (atomic
checkpoints, `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`), and against `ft_launcher` and `dlrover-run` where their
environments are there (`make bench-peers`). One round is one job of each, one after the other; in each job the fault
comes several times. Leave the machine alone meanwhile.

    .venv/bin/python benchmarks/recovery.py [--faults kill stop agent] [--rounds 3] [--repeats 3] [--json FILE]

Goals, for medians of ours: 0.5 s after a kill, and five times faster than torchrun; the limit and 0.5 s more after a
stop; 1.5 s after the agent's death; and every time it recovers.
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
from goals import Goal, judge, not_judged
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
OURS = NAMES[0]
GOALS_S = {"kill": 0.5, "stop": LIMIT_S + 0.5, "agent": 1.5}
TIMES_FASTER = 5.0
"""Than torchrun, after a kill."""


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
    """Seconds of standing still, and steps done again, for each time that the job recovered: where these are fewer than
    `repeats`, it did not, and was not asked again."""
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
    figures: dict[str, dict[str, dict[str, object]]] = {}
    goals: list[Goal] = []
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
        heads = f"{'median s':>9} {'best':>7} {'worst':>7} {'torchrun / it':>14} {'steps again':>12} {'recovered':>10}"
        print(f"\n{fault:<20} {heads}")
        planned = chosen.rounds * chosen.repeats
        for name in names:
            recovered = f"{f'{len(seconds[name])} of {planned}':>10}"
            if not seconds[name]:
                print(f"  {name:<18} {'-':>9} {'-':>7} {'-':>7} {'-':>14} {'-':>12} {recovered}")
                continue
            middle = statistics.median(seconds[name])
            ratio = f"{reference / middle:>14.1f}" if reference is not None else f"{'-':>14}"
            print(
                f"  {name:<18} {middle:>9.3f} {min(seconds[name]):>7.3f} {max(seconds[name]):>7.3f} {ratio}"
                f" {statistics.median(again[name]):>12g} {recovered}"
            )
        figures[fault] = {
            name: {"seconds": seconds[name], "not_recovered": planned - len(seconds[name])} for name in names
        }
        if OURS in names:
            goals += goals_of(fault, seconds[OURS], reference, planned)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    print()
    return judge(goals) if goals else not_judged(f"{OURS} was not measured")


def goals_of(fault: str, seconds: list[float], reference_s: float | None, planned: int) -> list[Goal]:
    """What we are held to after one fault.

    Args:
        fault: which.
        seconds: of standing still, each time that we recovered.
        reference_s: torchrun's median; None if it was not measured.
        planned: how many times we should have.
    """
    middle_s = statistics.median(seconds) if seconds else None
    goals = [
        Goal(f"{fault}: times not recovered", planned - len(seconds), 0),
        Goal(f"{fault}: median", middle_s, GOALS_S[fault], "s"),
    ]
    if fault == "kill" and reference_s is not None:
        faster = reference_s / middle_s if middle_s else None
        goals.append(Goal("kill: times faster than torchrun", faster, TIMES_FASTER, at_least=True))
    return goals


if __name__ == "__main__":
    sys.exit(main())
