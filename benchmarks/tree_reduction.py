"""What `elastic.reduction = "tree"` costs against the default: step time of the same job on the same ranks.

    python benchmarks/tree_reduction.py [--rounds 40] [--steps 100] [--ranks 2] [--micro-batch-size 64 256] [--quick]

Both live side by side and take turns, as in `loop_overhead.py`; each turn of the tree is compared with the default's of
the same round. The control is the default a second time: what it shows beside 1 is noise. The third is the default
with deterministic kernels, which the tree switches on.

Goal: at most 1.05 where the step is bound by computation. The workload of that name computes 64 samples for each
parameter and microbatch; a language model of any use computes thousands of tokens. So it is measured with more, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from goals import Goal, judge, not_judged
from loop_overhead import Contender, ContenderError, compare, known_settings, machine, measure, print_table

DEFAULT = "default"
GOAL = 1.05
BOUND_BY_COMPUTATION = "compute-bound"
CONTENDERS = [
    Contender(name, "elastictrain_loop", Path(sys.executable), overrides)
    for name, overrides in (
        (DEFAULT, {}),
        ("control", {}),
        ("deterministic", {"train": {"deterministic": True}}),
        ("tree", {"elastic": {"reduction": "tree"}}),
    )
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each")
    parser.add_argument("--steps", type=int, default=100, help="steps measured per turn of the small workload")
    parser.add_argument("--quick", action="store_true", help="4 rounds of 20 steps: does it run?")
    parser.add_argument("--workloads", nargs="+", choices=known_settings(1), default=[BOUND_BY_COMPUTATION])
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        nargs="+",
        default=[64, 256],
        metavar="N",
        help="samples per microbatch: how much is computed for each byte that is reduced",
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 4, 20
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    about = machine(CONTENDERS)
    print(f"{about['cores']} cores, load {about['load_before'][0]:.2f}; torch {torch.__version__}")
    results = []
    goals = []
    for name in arguments.workloads:
        known = known_settings(arguments.steps)[name]
        for world_size, size in itertools.product(arguments.ranks, arguments.micro_batch_size):
            setting = replace(known, workload=replace(known.workload, micro_batch_size=size))
            try:
                figures = measure(
                    CONTENDERS, setting, world_size=world_size, rounds=arguments.rounds, shuffle=random.Random(0)
                )
            except ContenderError as error:
                print(error, file=sys.stderr)
                return 1
            comparisons = {who: compare(turns, figures[DEFAULT]) for who, turns in figures.items()}
            print_table(setting, world_size, comparisons)
            # Of the sizes measured, the one in which most is computed for each byte that is reduced.
            if name == BOUND_BY_COMPUTATION and size == max(arguments.micro_batch_size):
                what = f"{world_size} rank(s), {size} samples a microbatch: tree / default"
                goals.append(Goal(what, comparisons["tree"].ratio, GOAL))
            results.append(
                {
                    "workload": asdict(setting.workload),
                    "world_size": world_size,
                    "turns": {who: [asdict(turn) for turn in turns] for who, turns in figures.items()},
                    "comparisons": {who: asdict(c) for who, c in comparisons.items()},
                }
            )
    if arguments.json:
        document = {"machine": about, "rounds": arguments.rounds, "results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.quick or not goals:
        return not_judged("--quick" if arguments.quick else f"{BOUND_BY_COMPUTATION} was not measured")
    return judge(goals)


if __name__ == "__main__":
    sys.exit(main())
