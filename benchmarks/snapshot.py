"""What a snapshot costs: stall of training, time to durable, restore, and throughput; against the alternatives.

    python benchmarks/snapshot.py [--values 100] [--rounds 7] [--json FILE] [--quick]

One state, 100 million fp32 values by default (400 MB): a model and Adam's two moments. All contenders take turns in
one process and one run. Ratios are to what the same machine did in the same round: one memcpy of those bytes, one
plain write with fsync, one plain read.

- **stall**: how long training stands still for a snapshot. *nothing to hide behind* asks for the optimizer step right
  after; *beside compute* does a forward and backward pass in between that lasts longer than the copy, with a core
  free. `torch.save` and `dcp.save` write where training waits; `dcp.async_save` has a reused stager and is timed until
  it gives the state back.
- **durable**: from the beginning of the snapshot until it is in the durable tier, verified, fsynced.
- **restore**: finding, verifying and taking over the newest snapshot of the durable tier.
- **throughput**: training with a snapshot every 20 steps against without.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.persist_loop import PersisterSettings
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.checkpoint.store import open_store
from elastictrain.config.schema import DdpConfig, ModelConfig, OptimizerConfig, ScalerConfig
from elastictrain.core.batch import BatchPlan
from elastictrain.core.identity import DataIdentity
from elastictrain.core.phases import Phase
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule
from elastictrain.core.window import WindowPlan
from elastictrain.logs import make_logger
from elastictrain.training.device import Place
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.restore import Lookup, Restorer
from elastictrain.training.session import Session
from elastictrain.training.snapshot import Origin, Snapshotter
from elastictrain.training.state import TrainingState
from elastictrain.training.task import BoundTask
from elastictrain.training.trainee import Trainee
from elastictrain.training.update import Updater, make_optimizer

WIDTH = 1024
RUN_ID = "00000000"


class Stack(nn.Module):
    """Linear layers of about a million values each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class StackTask:
    """The least that a task must have; the benchmark steps by itself."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def model(self) -> nn.Module:
        return Stack(self.num_layers)

    def train_data(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


class Run:
    """A run of one rank: everything that a snapshot holds, and one training step by hand."""

    def __init__(self, num_layers: int, batch_size: int) -> None:
        self.place = Place()
        self.session = Session(self.place, seed=1)
        self.task = BoundTask(StackTask, {"num_layers": num_layers})
        replica = Replica(self.task.build_model(), self.place, ModelConfig(), DdpConfig())
        precision = Precision("fp32", self.place.device, ScalerConfig())
        self.optimizer = make_optimizer(replica.module, OptimizerConfig(), self.place.device)
        updater = Updater(self.optimizer, precision, clip_norm=None, check_gradients=False)
        self.trainee = Trainee(replica, self.optimizer, updater, precision, None, None, channels_last=False)
        data = DataIdentity(1, 1_000_000, shuffle=True)
        self.state = TrainingState(self.session, self.task, self.trainee, data, BatchPlan(1, 1))
        self.plan = WindowPlan(1_000_000, 1, 1)
        self.batch = torch.randn(batch_size, WIDTH)
        self.step()

    def compute(self) -> None:
        """Forward and backward."""
        self.task.loss(self.trainee.replica.module, self.batch).backward()

    def step(self, before_update: Callable[[], None] = lambda: None, compute: bool = True) -> None:
        """One step; `before_update` is called where the loop calls the snapshotter."""
        step = self.session.begin_step(self.plan)
        assert step is not None
        self.session.enter(Phase.DATA)
        self.session.begin_microbatch(step.microbatches[0])
        self.session.enter(Phase.BACKWARD)
        if compute:
            self.compute()
        self.session.enter(Phase.OPTIMIZER)
        before_update()
        self.session.settle()
        if compute:
            self.session.commit(self.trainee.updater.apply().applied)
        else:
            self.session.commit(True)


def snapshotter_for(run: Run, root: Path, persister: Persister | None) -> Snapshotter:
    log = make_logger(Path(os.devnull).open("w"))  # noqa: SIM115 - lives as long as the process
    return Snapshotter(
        run.state,
        [MemoryTier(root / "tier", base=root)],
        persister,
        SnapshotSchedule(every_steps=1),
        first=LastSnapshot(0, 0.0),
        mean_time_between_failures_s=3600.0,
        origin=Origin("bench", RUN_ID, {"elastictrain": "0", "torch": torch.__version__, "python": "3"}),
        device=run.place.device,
        log=log,
    )


def seconds(action: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def write_plainly(path: Path, data: memoryview) -> None:
    """Plain writes of 8 MiB and one fsync."""
    with path.open("wb", buffering=0) as file:
        for begin in range(0, len(data), 8 << 20):
            file.write(data[begin : begin + (8 << 20)])
        os.fsync(file.fileno())


def read_plainly(path: Path, into: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        position = 0
        while position < len(into):
            position += file.readinto(into[position : position + (8 << 20)])


class Figures:
    """Seconds by name, one per round."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[float]] = {}

    def add(self, name: str, value_s: float) -> None:
        self.rounds.setdefault(name, []).append(value_s)

    def ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True)]


def measure(args: argparse.Namespace, disk: Path, memory: Path) -> Figures:
    num_layers = max(1, round(args.values * 1e6 / 3 / (WIDTH * WIDTH + WIDTH)))
    torch.set_num_threads(1)
    run = Run(num_layers, args.batch_size)
    size = sum(p.numel() * 4 for p in run.trainee.replica.module.parameters()) * 3
    print(f"state: {size / 1e6:.0f} MB in {3 * 2 * num_layers} tensors; {os.cpu_count()} cores", flush=True)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    figures = Figures()
    ours = snapshotter_for(run, memory, None)
    state = {"model": run.trainee.replica.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    stager = make_stager()
    for slot in range(3):  # every slot's pages, and every peer's buffers, are paid for once
        ours.take()
        run.step(ours.before_change)
        ours.wait_committed()
        del slot
    async_save(state, disk / "warm", stager)
    for number in range(args.rounds):
        figures.add("memcpy", seconds(lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, size)))
        figures.add("compute", seconds(run.compute))
        run.optimizer.zero_grad()

        before_s = ours.stall_s
        ours.take()
        run.step(ours.before_change, compute=False)
        figures.add("ours, nothing to hide behind", ours.stall_s - before_s)
        ours.wait_committed()

        before_s = ours.stall_s
        ours.take()
        run.step(ours.before_change)
        figures.add("ours, beside compute", ours.stall_s - before_s)
        ours.wait_committed()
        run.step()

        figures.add("torch.save", seconds(lambda: torch_save(state, disk / "torch.pt")))
        figures.add("dcp.save", seconds(lambda: dcp.save(state, checkpoint_id=disk / "dcp", no_dist=True)))
        figures.add("dcp.async_save", async_save(state, disk / "async", stager))
        for folder in ("dcp", "async"):
            shutil.rmtree(disk / folder, ignore_errors=True)
        print(f"stall: round {number + 1} of {args.rounds}", flush=True)
    ours.close()
    measure_durable(args, run, disk, memory, size, figures)
    return figures


def torch_save(state: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def make_stager() -> Any:
    """Staged into buffers that are reused; pinned memory and asynchronous staging need a CUDA device."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def async_save(state: Any, path: Path, stager: Any) -> float:
    """Seconds until the state may change; the saving itself is awaited outside of that."""
    began_s = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=path, async_stager=stager, no_dist=True)
    stalled_s = time.perf_counter() - began_s
    future.result()
    return stalled_s


def measure_durable(args: argparse.Namespace, run: Run, disk: Path, memory: Path, size: int, figures: Figures) -> None:
    durable = threading.Event()
    url = str(disk / "store")
    persister = Persister(
        PersisterSettings(url=url, keep_last=1),
        lambda report: durable.set() if report.kind == "persisted" else None,
    )
    ours = snapshotter_for(run, memory / "durable", persister)
    (memory / "durable").mkdir(exist_ok=True)
    data = memoryview(np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8))
    buffer = memoryview(np.empty(size, np.uint8))

    def snapshot() -> None:
        durable.clear()
        ours.take()
        ours.wait_committed()
        durable.wait()

    snapshot()
    run.step(ours.before_change)
    for number in range(args.rounds):
        figures.add("plain write", seconds(lambda: write_plainly(disk / "plain", data)))
        figures.add("ours, durable", seconds(snapshot))
        run.step(ours.before_change)
        figures.add("plain read", seconds(lambda: read_plainly(disk / "plain", buffer)))
        figures.add("ours, restore", seconds(lambda: restore(run, url, disk)))
        print(f"durable and restore: round {number + 1} of {args.rounds}", flush=True)
    for number in range(args.rounds):
        figures.add("steps without", seconds(lambda: train(run, None, args.steps)))
        figures.add("steps with", seconds(lambda: train(run, ours, args.steps)))
        print(f"throughput: round {number + 1} of {args.rounds}", flush=True)
    ours.close()
    persister.close(finish=True)


def restore(run: Run, url: str, disk: Path) -> None:
    restorer = Restorer(run.place, allowed=frozenset(), on_passed_over=lambda where, why: sys.exit(f"{where}: {why}"))
    restored = restorer.restore(run.state, Lookup((), open_store(url), RUN_ID, disk / "scratch", 1.0))
    assert restored is not None


def train(run: Run, snapshotter: Snapshotter | None, steps: int) -> None:
    for number in range(steps):
        if snapshotter is None:
            run.step()
            continue
        run.step(snapshotter.before_change)
        if number % 20 == 19:
            snapshotter.take()


def report(figures: Figures) -> dict[str, Any]:
    groups = {
        "memcpy": [
            "ours, nothing to hide behind",
            "ours, beside compute",
            "torch.save",
            "dcp.save",
            "dcp.async_save",
        ],
        "plain write": ["ours, durable"],
        "plain read": ["ours, restore"],
        "steps without": ["steps with"],
    }
    result: dict[str, Any] = {}
    print(f"\n{'':32}{'median ms':>12}{'ratio':>9}{'worst':>9}")
    for base, names in groups.items():
        print(f"{base:32}{statistics.median(figures.rounds[base]) * 1e3:12.1f}{1:9.2f}")
        for name in names:
            ratios = figures.ratios(name, base)
            median_ms = statistics.median(figures.rounds[name]) * 1e3
            print(f"  {name:30}{median_ms:12.1f}{statistics.median(ratios):9.2f}{max(ratios):9.2f}")
            result[name] = {"median_ms": median_ms, "ratio": statistics.median(ratios), "worst_ratio": max(ratios)}
    compute_ms = statistics.median(figures.rounds["compute"]) * 1e3
    throughput = statistics.median(
        a / b for a, b in zip(figures.rounds["steps without"], figures.rounds["steps with"], strict=True)
    )
    print(f"\nforward and backward: {compute_ms:.0f} ms; throughput with a snapshot every 20 steps: {throughput:.3f}")
    return {**result, "compute_ms": compute_ms, "throughput": throughput, "seconds": figures.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=100, help="millions of fp32 values in the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="per block of the throughput part")
    parser.add_argument("--batch-size", type=int, default=64, help="sets how long forward and backward last")
    parser.add_argument("--disk", type=Path, help="folder of the disk to measure; default: that of temporary files")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.values, args.rounds, args.steps = 9, 2, 20
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    with tempfile.TemporaryDirectory(dir=args.disk) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        figures = measure(args, Path(disk).absolute(), Path(memory))
    result = report(figures)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
