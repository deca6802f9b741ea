"""Measures what a job gets done while its ranks are killed again and again, ours against plain torchrun.

Goodput is the time that the job's steps would have taken undisturbed, over the time that it took. Each contender runs
for the same time under the same schedule of kills, drawn from a seed: exponential pauses, a rank each time. The pace of
an undisturbed step is measured in the same job before the first kill. Leave the machine alone meanwhile.

    .venv/bin/python benchmarks/goodput.py [--for 180] [--mtbf 30] [--seed 0] [--json FILE]

A kill that falls into the time in which the job stands still from the one before finds nobody; a job that does not
recover has no more kills, and stands still to the end. Both are counted.

Goal for ours: 0.97 at one kill per 30 s, and it recovers every time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from goals import Goal, judge, not_judged
from recovery import EVERY, START_S, STEPS, start
from recovery_jobs import RANKS, Job, Seen, end, launchers, wait_for

NAMES = ("elastictrain", "torchrun")
GOAL = 0.97
GOAL_MTBF_S = 30.0
PACE_S = 10.0
"""How long the undisturbed pace is measured."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What one contender has got done.

    Args:
        goodput: useful time over wall time.
        kills: how many there were.
        not_placed: how many of the schedule found nobody to kill.
        not_recovered: kills after which the job did not go on.
        steps: useful ones.
        redone: steps that were done again.
        pace_s: seconds of an undisturbed step.
        wall_s: seconds that it took.
    """

    goodput: float
    kills: int
    not_placed: int
    not_recovered: int
    steps: int
    redone: int
    pace_s: float
    wall_s: float


def schedule(seed: int, mtbf_s: float, length_s: float) -> list[tuple[float, int]]:
    """When which rank is killed, in seconds from the beginning."""
    rng = random.Random(seed)
    found = []
    at_s = rng.expovariate(1 / mtbf_s)
    while at_s < length_s:
        found.append((at_s, rng.randrange(RANKS)))
        at_s += rng.expovariate(1 / mtbf_s)
    return found


def furthest(job: Job) -> int:
    return max(one.step for one in (job.seen(rank) for rank in range(RANKS)) if one is not None)


def sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def measure(job: Job, kills: list[tuple[float, int]], length_s: float) -> Goodput:
    """One contender's run, to the end of the schedule."""
    wait_for(job, _steady, START_S)
    begin, began_s = furthest(job), time.monotonic()
    time.sleep(PACE_S)
    pace_s = (time.monotonic() - began_s) / (furthest(job) - begin)
    begin, began_s = furthest(job), time.monotonic()
    redone, count, not_placed, not_recovered = 0, 0, 0, 0
    for at_s, rank in kills:
        sleep_until(began_s + at_s)
        victim = job.seen(rank)
        if not_recovered or victim is None or not _kill(victim.pid):
            not_placed += 1  # still down from the kill before
            continue
        count += 1
        reached = furthest(job)
        try:
            redone += max(0, reached - _first_step_after(job, victim))
        except (TimeoutError, RuntimeError) as error:
            print(f"    not recovered: {error}", file=sys.stderr)
            not_recovered += 1
    sleep_until(began_s + length_s)
    wall_s, steps = time.monotonic() - began_s, furthest(job) - begin
    return Goodput(steps * pace_s / wall_s, count, not_placed, not_recovered, steps, redone, pace_s, wall_s)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _steady(seen: list[Seen]) -> bool:
    return all(one.step > one.first_step + 100 for one in seen)


def _first_step_after(job: Job, victim: Seen) -> int:
    after = wait_for(job, lambda seen: all(o.pid != victim.pid and o.step > o.first_step for o in seen), START_S)
    return after[0].first_step


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--for", dest="length_s", type=float, default=180.0, help="seconds for each contender")
    parser.add_argument("--mtbf", dest="mtbf_s", type=float, default=30.0, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contenders", nargs="+", default=list(NAMES), choices=[*NAMES, *launchers()])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    kills = schedule(chosen.seed, chosen.mtbf_s, chosen.length_s)
    print(f"{len(kills)} kills in {chosen.length_s:g} s; the script checkpoints every {EVERY} steps of {STEPS}")
    print(
        f"  {'':<14} {'goodput':>8} {'kills':>6} {'not placed':>11} {'not recovered':>14} {'steps':>7} {'redone':>7} "
        f"{'ms a step':>10}"
    )
    figures: dict[str, Goodput] = {}
    with tempfile.TemporaryDirectory(prefix="elastictrain-benchmark-") as folder:
        for name in chosen.contenders:
            job = start(name, Path(folder) / name)
            try:
                found = measure(job, kills, chosen.length_s)
            finally:
                end(job)
            figures[name] = found
            print(
                f"  {name:<14} {found.goodput:>8.3f} {found.kills:>6} {found.not_placed:>11} {found.not_recovered:>14} "
                f"{found.steps:>7} {found.redone:>7} {found.pace_s * 1e3:>10.2f}"
            )
    if chosen.json:
        plain = {name: asdict(found) for name, found in figures.items()}
        chosen.json.write_text(json.dumps(plain, indent=2) + "\n")
    ours = figures.get(NAMES[0])
    if ours is None:
        return not_judged(f"{NAMES[0]} was not measured")
    if chosen.mtbf_s < GOAL_MTBF_S:
        return not_judged(f"they are for one kill per {GOAL_MTBF_S:g} s")
    return judge(
        [Goal("goodput", ours.goodput, GOAL, at_least=True), Goal("times not recovered", ours.not_recovered, 0)]
    )


if __name__ == "__main__":
    sys.exit(main())
