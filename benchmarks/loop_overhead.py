"""What our loop costs over a loop written by hand, and what the peers' cost: microseconds per optimizer step.

All contenders live side by side and take turns of a fraction of a second, in a new random order each round. Each
round gives one figure per contender, which is compared with the plain loop's figure *of the same round*; medians are
taken over rounds. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from goals import Goal, judge, not_judged
from peers import installed, python_of
from rank import Blocks
from torch.distributed import TCPStore
from workload import ACCUMULATION_STEPS, Workload

HERE = Path(__file__).resolve().parent
BASELINE = "plain"
OURS = "elastictrain"
GOAL = 1.01
"""For the step time of a step that is bound by computation: 1% of the throughput of a hand-written loop."""
BOUND_BY_COMPUTATION = "compute-bound"
REPORT_EVERY = 10
"""Our default for metrics.every_steps: blocks hold whole numbers of it, so that each has its share of reports."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One loop.

    Args:
        name: as printed.
        loop: module with `train(workload, tick)`.
        python: interpreter of its environment.
        overrides: sections over the job of our own loop.
    """

    name: str
    loop: str
    python: Path
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """A workload and how to measure it; steps are multiples of `REPORT_EVERY`."""

    workload: Workload
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's figures of one round, microseconds per optimizer step.

    Args:
        us: by the wall clock.
        cpu_us: processor time of all threads, mean over ranks.
    """

    us: float
    cpu_us: float


class ContenderError(Exception):
    """A contender did not start, or ended before its time."""


def known_contenders() -> dict[str, Contender]:
    ours = Path(sys.executable)
    contenders = [
        Contender(BASELINE, "plain_loop", ours),
        # The same again: what the comparison shows where there is nothing to show.
        Contender("plain again", "plain_loop", ours),
        Contender("elastictrain", "elastictrain_loop", ours),
        Contender("fabric", "fabric_loop", python_of("lightning")),
        Contender("accelerate", "accelerate_loop", python_of("accelerate")),
        Contender("trainer", "trainer_loop", python_of("lightning")),
    ]
    return {contender.name: contender for contender in contenders}


def known_settings(steps: int) -> dict[str, Setting]:
    """`steps` are measured per turn of the small workload; the long steps of the other get a fifth of them."""

    def whole(count: float) -> int:
        return max(1, round(count / REPORT_EVERY)) * REPORT_EVERY

    common = {"num_samples": 1 << 16, "num_steps": 0}
    return {
        "small": Setting(
            Workload("small", width=64, layers=2, micro_batch_size=8, precision="bf16", **common),
            Blocks(startup_steps=whole(steps) + 50, warm_steps=REPORT_EVERY, measured_steps=whole(steps)),
        ),
        "compute-bound": Setting(
            # fp32: a processor without bf16 instructions emulates them, and would spend its step on that.
            Workload("compute-bound", width=512, layers=4, micro_batch_size=64, precision="fp32", **common),
            Blocks(startup_steps=whole(steps / 5) + 20, warm_steps=REPORT_EVERY, measured_steps=whole(steps / 5)),
        ),
    }


# ---- processes


class Rank:
    """One process of a contender, which runs when it has the turn.

    Args:
        contender: who.
        setting: what.
        number: its rank.
        world_size: ranks of the contender.
        port: of the store where the ranks meet.
    """

    def __init__(self, contender: Contender, setting: Setting, number: int, world_size: int, port: int) -> None:
        self._contender = contender
        self._number = number
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        answers, answer_fd = os.pipe()
        command = [
            str(contender.python),
            str(HERE / "rank.py"),
            contender.loop,
            setting.workload.as_json(),
            json.dumps(asdict(setting.blocks)),
            json.dumps(contender.overrides),
            str(answer_fd),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[answer_fd],
                env=_environment(number, world_size, port),
            )
        finally:
            os.close(answer_fd)
        self._answers = os.fdopen(answers)

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def answer(self) -> Turn:
        """Waits for the end of a turn."""
        line = self._answers.readline()
        if not line:
            self._process.wait()
            raise ContenderError(self._explain())
        return Turn(*json.loads(line))

    def finish(self) -> None:
        if self._process.wait(timeout=60):
            raise ContenderError(self._explain())

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._answers.close()
        self._log.close()

    def _explain(self) -> str:
        self._log.seek(0)
        last = "\n".join(self._log.read().decode(errors="replace").splitlines()[-20:])
        return f"{self._contender.name}, rank {self._number}, ended with code {self._process.returncode}:\n{last}"


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """As torchrun sets it, one thread each; the store is the benchmark's, as it is the agent's with torchrun."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "GLOO_SOCKET_IFNAME": "lo",
    }


class Group:
    """All ranks of a contender."""

    def __init__(self, contender: Contender, setting: Setting, world_size: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
        self._ranks = [Rank(contender, setting, n, world_size, self._store.port) for n in range(world_size)]

    def turn(self) -> Turn:
        """One block of steps; a group is as slow as its slowest rank."""
        for rank in self._ranks:
            rank.go()
        return self.wait()

    def wait(self) -> Turn:
        turns = [rank.answer() for rank in self._ranks]
        return Turn(max(turn.us for turn in turns), sum(turn.cpu_us for turn in turns) / len(turns))

    def finish(self) -> None:
        for rank in self._ranks:
            rank.go()
        for rank in self._ranks:
            rank.finish()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@contextmanager
def all_started(contenders: Sequence[Contender], setting: Setting, world_size: int) -> Iterator[dict[str, Group]]:
    """Every contender, past its startup steps and waiting for a turn."""
    groups: dict[str, Group] = {}
    try:
        for contender in contenders:
            groups[contender.name] = Group(contender, setting, world_size)
            groups[contender.name].wait()
        yield groups
        for group in groups.values():
            group.finish()
    finally:
        for group in groups.values():
            group.close()


def measure(
    contenders: Sequence[Contender], setting: Setting, *, world_size: int, rounds: int, shuffle: random.Random
) -> dict[str, list[Turn]]:
    """What each contender took, one turn a round."""
    blocks = setting.blocks
    num_steps = blocks.startup_steps + rounds * blocks.steps_per_turn
    setting = replace(setting, workload=replace(setting.workload, num_steps=num_steps))
    figures: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    with all_started(contenders, setting, world_size) as groups:
        for number in range(rounds):
            _progress(f"{setting.workload.name}, {world_size} rank(s): round {number + 1} of {rounds}")
            for name in shuffle.sample(sorted(groups), len(groups)):
                figures[name].append(groups[name].turn())
    _progress("")
    return figures


# ---- figures


@dataclass(frozen=True, slots=True)
class Comparison:
    """A contender against the plain loop.

    Args:
        us_per_step: median microseconds per optimizer step.
        cpu_us_per_step: likewise, processor time of all threads, mean over ranks.
        us_over_plain: median, over rounds, of the difference to the plain loop's figure of the same round.
        ratio: likewise the quotient.
        ratio_low, ratio_high: 95 % confidence interval of that median.
        ratio_quartiles: the middle half of the rounds.
    """

    us_per_step: float
    cpu_us_per_step: float
    us_over_plain: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratio_quartiles: tuple[float, float]


def compare(mine: Sequence[Turn], plain: Sequence[Turn]) -> Comparison:
    ratios = sorted(a.us / b.us for a, b in zip(mine, plain, strict=True))
    low, high = median_interval(len(ratios))
    return Comparison(
        us_per_step=median(turn.us for turn in mine),
        cpu_us_per_step=median(turn.cpu_us for turn in mine),
        us_over_plain=median(a.us - b.us for a, b in zip(mine, plain, strict=True)),
        ratio=median(ratios),
        ratio_low=ratios[low],
        ratio_high=ratios[high],
        ratio_quartiles=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
    )


def median_interval(count: int, confidence: float = 0.95) -> tuple[int, int]:
    """Which of `count` sorted values bound their median: the binomial interval, free of assumptions about the noise.

    Source: Conover, *Practical Nonparametric Statistics*, section 3.2. With under six values it is their whole range,
    and less sure than asked for.
    """
    low, tail = 0, 0.5**count
    while low + 1 < (count + 1) // 2:
        wider = tail + math.comb(count, low + 1) * 0.5**count
        if 2 * wider > 1 - confidence:
            break
        low, tail = low + 1, wider
    return low, count - 1 - low


def print_table(setting: Setting, world_size: int, comparisons: dict[str, Comparison]) -> None:
    workload = setting.workload
    print(
        f"\n{workload.name}, {world_size} rank(s): {ACCUMULATION_STEPS} microbatches of {workload.micro_batch_size} "
        f"a rank, {workload.precision}"
    )
    heads = f"{'µs/step':>10}{'+µs':>10}{'ratio':>9}{'CPU µs':>10}"
    print(f"  {'':14}{heads}   {'95 % of the median':20}middle half of rounds")
    for name, c in comparisons.items():
        interval, quartiles = (f"{a:.3f} to {b:.3f}" for a, b in ((c.ratio_low, c.ratio_high), c.ratio_quartiles))
        values = f"{c.us_per_step:>10.0f}{c.us_over_plain:>+10.0f}{c.ratio:>9.3f}{c.cpu_us_per_step:>10.0f}"
        print(f"  {name:14}{values}   {interval:20}{quartiles}", flush=True)


def machine(contenders: Sequence[Contender]) -> dict[str, Any]:
    """What the figures were taken on."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    packages = ("torch", "numpy", "accelerate", "lightning")
    versions = {c.name: {k: v for k, v in installed(c.python, packages).items() if v} for c in contenders}
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
    }


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# ---- command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=100, help="steps measured per turn (small workload)")
    parser.add_argument("--quick", action="store_true", help="4 rounds of 20 steps: does it run?")
    parser.add_argument("--workloads", nargs="+", choices=known_settings(1), default=list(known_settings(1)))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--contenders", nargs="+", choices=known_contenders(), default=list(known_contenders()))
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="for all workloads, in place of their own")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="JSON",
        help='our loop once more, with sections merged over its job: \'{"data": {"seed_samples": false}}\'',
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 4, 20
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return arguments


def choose(arguments: argparse.Namespace) -> tuple[list[Contender], list[str]]:
    """Those asked for that can run, the baseline first, and the names of those that cannot."""
    known = known_contenders()
    wanted = [contender for name, contender in known.items() if name in {BASELINE, *arguments.contenders}]
    for text in arguments.variant:
        wanted.append(replace(known["elastictrain"], name=f"variant {len(wanted)}", overrides=json.loads(text)))
        print(f"{wanted[-1].name} is elastictrain with {text}")
    present = [contender for contender in wanted if contender.python.exists()]
    return present, [contender.name for contender in wanted if contender not in present]


def main() -> int:
    arguments = parse_arguments()
    contenders, missing = choose(arguments)
    if missing:
        print(f"Missing: {', '.join(missing)}. `make bench-peers` makes their environments.")
    about = machine(contenders)
    print(
        f"{about['processor']}, {about['cores']} cores, load {about['load_before'][0]:.2f}; torch {torch.__version__}"
    )
    shuffle = random.Random(arguments.seed)
    results = []
    goals = []
    for name, setting in known_settings(arguments.steps).items():
        if name not in arguments.workloads:
            continue
        if arguments.precision:
            setting = replace(setting, workload=replace(setting.workload, precision=arguments.precision))
        for world_size in arguments.ranks:
            try:
                figures = measure(contenders, setting, world_size=world_size, rounds=arguments.rounds, shuffle=shuffle)
            except ContenderError as error:
                print(error, file=sys.stderr)
                return 1
            comparisons = {who: compare(mine, figures[BASELINE]) for who, mine in figures.items()}
            print_table(setting, world_size, comparisons)
            if name == BOUND_BY_COMPUTATION and OURS in comparisons:
                goals.append(Goal(f"{name}, {world_size} rank(s): ours / plain", comparisons[OURS].ratio, GOAL))
            results.append(
                {
                    "workload": asdict(setting.workload),
                    "blocks": asdict(setting.blocks),
                    "world_size": world_size,
                    "turns": {who: [asdict(turn) for turn in turns] for who, turns in figures.items()},
                    "comparisons": {who: asdict(c) for who, c in comparisons.items()},
                }
            )
    if arguments.json:
        document = {
            "machine": about,
            "rounds": arguments.rounds,
            "seed": arguments.seed,
            "missing": missing,
            "overrides": {c.name: c.overrides for c in contenders if c.overrides},
            "results": results,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.quick or not goals:
        return not_judged("--quick" if arguments.quick else f"{OURS} on {BOUND_BY_COMPUTATION} was not measured")
    return judge(goals)


if __name__ == "__main__":
    sys.exit(main())
