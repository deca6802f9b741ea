"""A rank under plain torchrun: sums over all ranks, step after step, until the file `stop` is in its folder.

It says in a file of its own, named by restart count, rank and pid, how many steps it took in a world of what size.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}-{os.getpid()}"
    step, stop = 0, False
    while not stop:
        total = torch.tensor([1.0, float((folder / "stop").exists())])
        dist.all_reduce(total)
        assert total[0] == world
        step, stop = step + 1, bool(total[1])
        part = folder / f".{name}"
        part.write_text(f"{step} {world}")
        part.rename(folder / f"{name}.rank")
        time.sleep(0.01)  # a step takes a while
    (folder / f"{name}.done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
