"""What a snapshot at failure costs: the time from an exception to the rank's end, and what each step pays for it.

    python benchmarks/parting.py [--values 100] [--rounds 7] [--json FILE] [--quick]

One state, 100 million fp32 values by default (400 MB): a model and Adam's two moments. Ratios are to one memcpy of
those bytes in the same round.

- **rank zero**: it takes regular snapshots, so its mappings are there.
- **stand-in**: another rank, which has never written before, in a folder that regular snapshots have filled.
- **stand-in, empty tier**: the kernel must give every page first.
- **found kept**: the next rank after one of these.
- **per step**: keeping what forward passes move, for as many BatchNorm layers as ResNet-50 has (53, of 64 to 2,048
  channels), against copying the same bytes once; and for a model without any buffers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from snapshot_run import RUN_ID, Run, StackTask, as_ranks_do, snapshotter_for
from torch import nn

from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.core.phases import Phase
from elastictrain.logs import make_logger
from elastictrain.training.parting import Parting
from elastictrain.training.shadow import Shadow
from elastictrain.training.snapshot import Snapshotter
from elastictrain.training.snapshot_writer import Origin
from elastictrain.training.task import BoundTask

KEEPS_PER_ROUND = 200


def memcpy_s(size_bytes: int, source: torch.Tensor, target: torch.Tensor) -> float:
    began_s = time.perf_counter()
    ctypes.memmove(target.data_ptr(), source.data_ptr(), size_bytes)
    return time.perf_counter() - began_s


def parting_s(run: Run, root: Path, snapshotter: Snapshotter | None) -> float:
    """From the exception in a forward pass until there is nothing left to do but to exit."""
    tier = MemoryTier(root / "tier", base=root)
    parting = Parting(
        run.session,
        run.state,
        Shadow(run.trainee.replica.module, run.task, run.place.device),
        snapshotter._writer._tiers if snapshotter is not None else [tier],
        first_step=-1,
        is_durable=False,
        origin=Origin("bench", RUN_ID, {}),
        patience_s=5.0,
        log=make_logger(Path(os.devnull).open("w")),  # noqa: SIM115 - lives as long as the process
    )
    if snapshotter is not None:
        parting.stand_beside(snapshotter)
    try:
        raise RuntimeError("a failure")
    except RuntimeError:
        began_s = time.perf_counter()
        parted = parting.keep()
        took_s = time.perf_counter() - began_s
    assert parted is not None
    tier.close()
    if run.session.phase is Phase.SNAPSHOT:
        run.session.enter(Phase.READY)
    return took_s


def measure_parting(args: argparse.Namespace, root: Path) -> dict[str, list[float]]:
    run = Run(max(1, round(args.values / 3.15)), 4)
    size = sum(t.numel() * t.element_size() for tensors in run.state.capture().files.values() for t in tensors.values())
    source, target = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    figures: dict[str, list[float]] = {"memcpy": []}
    snapshotter = snapshotter_for(run, root, None)
    for _ in range(2):  # both slots
        snapshotter.take()
        snapshotter.before_change()
        snapshotter.wait_committed()
        run.step(compute=False)

    def add(name: str, value_s: float) -> None:
        figures.setdefault(name, []).append(value_s)

    for _ in range(args.rounds):
        add("memcpy", memcpy_s(size, source, target))
        run.step(compute=False)
        add("rank zero", parting_s(run, root, snapshotter))
        add("found kept", parting_s(run, root, None))
        run.step(compute=False)
        add("stand-in", parting_s(run, root, None))
        run.step(compute=False)
        empty = root / "empty"
        empty.mkdir()
        add("stand-in, empty tier", parting_s(run, empty, None))
        shutil.rmtree(empty)
    snapshotter.close()
    figures["size_mb"] = [size / 1e6]
    return figures


def norms() -> nn.Module:
    """As many BatchNorm layers as ResNet-50 has, with as many channels."""
    widths = [64]
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        widths += [width, width, 4 * width] * blocks + [4 * width]
    return nn.Sequential(*(nn.BatchNorm1d(width) for width in widths))


def measure_keeping(args: argparse.Namespace) -> dict[str, list[float]]:
    task = BoundTask(StackTask, {"num_layers": 1})
    modules = {"BatchNorm": norms(), "no buffers": nn.Sequential(*(nn.Linear(8, 8) for _ in range(53)))}
    figures: dict[str, list[float]] = {}
    for name, module in modules.items():
        shadow = Shadow(module, task, torch.device("cpu"))
        shadow.keep(0)
        shadow.observe()
        for _ in range(args.rounds):
            began_s = time.perf_counter()
            for step in range(KEEPS_PER_ROUND):
                if shadow.is_needed:  # the loop asks once, after the first step
                    shadow.keep(step)
            figures.setdefault(name, []).append((time.perf_counter() - began_s) / KEEPS_PER_ROUND)
    return figures


def main() -> None:
    as_ranks_do()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=100, help="millions of fp32 values in the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.values, args.rounds = 6.3, 2
    root = Path(tempfile.mkdtemp(prefix="parting-", dir="/dev/shm"))
    try:
        parting = measure_parting(args, root)
    finally:
        shutil.rmtree(root)
    keeping = measure_keeping(args)
    (size_mb,) = parting.pop("size_mb")
    print(f"state of {size_mb:.0f} MB; medians of {args.rounds} rounds")
    for name, times in parting.items():
        ratios = [a / b for a, b in zip(times, parting["memcpy"], strict=True)]
        print(f"  {name:<24}{statistics.median(times) * 1e3:9.1f} ms   {statistics.median(ratios):6.2f} × memcpy")
    print("per step, to keep what forward passes move")
    for name, times in keeping.items():
        print(f"  {name:<24}{statistics.median(times) * 1e6:9.1f} µs")
    if args.json:
        args.json.write_text(json.dumps({"size_mb": size_mb, "parting_s": parting, "keeping_s": keeping}, indent=2))


if __name__ == "__main__":
    main()
