"""What `recovery.py` and `goodput.py` train under torchrun and its relatives: a good script of a user's own.

It checkpoints every EVERY steps, atomically and durably (temporary file, fsync, rename), loads the newest at its start,
and gives its collectives a timeout. It says how far it is in a small file of each rank, as our heartbeats do.

    torchrun ... benchmarks/recovery_script.py FOLDER STEPS EVERY TIMEOUT_S
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent))
from recovery_progress import ProgressWriter
from recovery_task import MICRO_BATCH_SIZE, Mlp, dataset


def save(path: Path, state: dict[str, object]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[4])))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    path = folder / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    data = dataset()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=MICRO_BATCH_SIZE, sampler=sampler, drop_last=True)
    per_epoch = len(loader)
    progress = ProgressWriter(folder, rank, step)
    while step < steps:
        sampler.set_epoch(step // per_epoch)
        skip = step % per_epoch
        for index, (inputs, targets) in enumerate(loader):
            if index < skip:
                continue
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            progress.tell(step)
            if step % every == 0 and rank == 0:
                save(path, {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
            if step >= steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
