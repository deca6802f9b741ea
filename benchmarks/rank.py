"""One rank of one contender: `loop_overhead.py` starts it, and gives it its turns.

It trains without a pause to the end of a block of steps, says how long the block took, and waits to be told to go on.
So all contenders live side by side, one runs at a time, and a slow spell of the machine hits whoever has the turn:
with turns of a fraction of a second, everybody alike.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time

import torch
from workload import Workload


@dataclass(frozen=True, slots=True)
class Blocks:
    """How steps are divided.

    Args:
        startup_steps: before the first turn; not measured.
        warm_steps: at the beginning of each turn, while caches fill again; not measured.
        measured_steps: the rest of each turn.
    """

    startup_steps: int
    warm_steps: int
    measured_steps: int

    @property
    def steps_per_turn(self) -> int:
        return self.warm_steps + self.measured_steps


class Turns:
    """Called once per optimizer step; measures, and waits for the next turn at the end of each.

    The whole block is timed, not each step: what a loop does every ten steps counts as well.
    """

    def __init__(self, blocks: Blocks, answer_fd: int) -> None:
        self._blocks = blocks
        self._answer_fd = answer_fd
        self._steps_left = blocks.startup_steps
        self._began_s, self._began_cpu_s = perf_counter(), process_time()

    def tick(self) -> None:
        self._steps_left -= 1
        if self._steps_left == self._blocks.measured_steps:
            self._began_s, self._began_cpu_s = perf_counter(), process_time()
        elif self._steps_left == 0:
            block_s, cpu_s = perf_counter() - self._began_s, process_time() - self._began_cpu_s
            us_per_step = [seconds * 1e6 / self._blocks.measured_steps for seconds in (block_s, cpu_s)]
            os.write(self._answer_fd, json.dumps(us_per_step).encode() + b"\n")
            if not os.read(0, 1):
                sys.exit("the benchmark is gone")
            self._steps_left = self._blocks.steps_per_turn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", help="module with train(workload, tick)")
    parser.add_argument("workload", help="JSON")
    parser.add_argument("blocks", help="JSON")
    parser.add_argument("overrides", help="JSON, for elastictrain_loop only")
    parser.add_argument("answer_fd", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train = importlib.import_module(arguments.loop).train
    if overrides := json.loads(arguments.overrides):
        train = partial(train, overrides=overrides)
    turns = Turns(Blocks(**json.loads(arguments.blocks)), arguments.answer_fd)
    train(Workload.from_json(arguments.workload), turns.tick)


if __name__ == "__main__":
    main()
