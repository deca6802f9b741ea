"""What a snapshot costs: stall of training, time to durable, restore, and throughput; against the alternatives.

    python benchmarks/snapshot.py [--values 100] [--rounds 7] [--json FILE] [--quick]

One state, 100 million fp32 values by default (400 MB): a model and Adam's two moments. All contenders take turns in
one process and one run. Ratios are to what the same machine did in the same run: one memcpy of those bytes (the median
over the rounds), and in the same round one plain write with fsync, one plain read.

- **stall**: how long training stands still for a snapshot. *nothing to hide behind* asks for the optimizer step right
  after; *beside compute* does a forward and backward pass in between that lasts longer than the copy, with a core
  free. `torch.save` and `dcp.save` write where training waits; `dcp.async_save` has a reused stager and is timed until
  it gives the state back. *first* and *second* are the first two of a life, whose memory is not there when it begins.
- **durable**: from the beginning of the snapshot until it is in the durable tier, verified, fsynced.
- **restore**: finding, verifying and taking over the newest snapshot of the durable tier; from the disk (nothing in the
  page cache) and from the page cache, each against plain reads of the same files in the same condition.
- **throughput**: training with a snapshot every 20 steps against without, see `snapshot_throughput.py`.

Goals: a stall of never more than 1.2 memcpys, and 0.3 beside compute; durable within 1.2 plain writes, restored within
1.5 plain reads; throughput of 0.99 where storage keeps up.
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
from goals import Goal, judge, not_judged
from snapshot_run import RUN_ID, WIDTH, Run, as_ranks_do, snapshotter_for
from snapshot_throughput import Segment, describe, goal, keeps_up, measure_throughput, throughput

from elastictrain.checkpoint.persist_loop import PersisterSettings
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.checkpoint.store import open_store
from elastictrain.training.restore import Lookup, Restorer

FIRST_AT_STEP = 5
"""When the first snapshot of a life is measured."""


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
        while num_bytes := file.readinto(into[position : position + (8 << 20)]):
            position += num_bytes


class Figures:
    """Seconds by name, one per round."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[float]] = {}

    def add(self, name: str, value_s: float) -> None:
        self.rounds.setdefault(name, []).append(value_s)

    def ratios(self, name: str, base: str) -> list[float]:
        if base == "memcpy":  # the same in every round
            return [a / statistics.median(self.rounds[base]) for a in self.rounds[name]]
        return [a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True)]


def measure(args: argparse.Namespace, disk: Path, memory: Path) -> tuple[Figures, list[Segment]]:
    num_layers = max(1, round(args.values * 1e6 / 3 / (WIDTH * WIDTH + WIDTH)))
    torch.set_num_threads(1)
    run = Run(num_layers, args.batch_size)
    size = sum(p.numel() * 4 for p in run.trainee.replica.module.parameters()) * 3
    print(f"state: {size / 1e6:.0f} MB in {3 * 2 * num_layers} tensors; {os.cpu_count()} cores", flush=True)
    figures = Figures()
    measure_durable(args, run, disk, memory, size, figures)  # first: the peers leave threads and gigabytes behind
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    ours = snapshotter_for(run, memory, None)
    state = {"model": run.trainee.replica.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    stager = make_stager()
    for slot in range(3):  # every slot's pages, and every peer's buffers, are paid for once
        ours.take()
        run.step(ours.before_change)
        ours.wait_committed()
        del slot
    async_save(state, disk / "warm", stager)
    target.fill(2)
    for _ in range(args.rounds):
        measure_first(run, memory, figures)
    for number in range(args.rounds):
        os.sync()  # the kernel is done with what the peers have written: it takes a core and memory bandwidth
        run.compute()
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
    segments = measure_throughput(
        run, disk, memory, num_rounds=args.segments, num_steps=args.steps, num_threads=args.threads
    )
    return figures, segments


def measure_first(run: Run, memory: Path, figures: Figures) -> None:
    """The first two snapshots of a life, in memory that is not there when it begins: the steps before the first are
    the time in which it is had."""
    with tempfile.TemporaryDirectory(dir=memory) as root:
        ours = snapshotter_for(run, Path(root), None)
        for _ in range(FIRST_AT_STEP):
            run.step(ours.before_change)
            ours.due(0)
        for name in ("ours, first", "ours, second"):
            before_s = ours.stall_s
            ours.take()
            run.step(ours.before_change, compute=False)
            figures.add(name, ours.stall_s - before_s)
            ours.wait_committed()
        ours.close()


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
    store = disk / "store"
    persister = Persister(
        PersisterSettings(url=str(store), keep_last=1),
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

    def read_all() -> None:
        for path in stored_files(store):
            read_plainly(path, buffer)

    snapshot()
    run.step(ours.before_change)
    for number in range(args.rounds):
        figures.add("plain write", seconds(lambda: write_plainly(disk / "plain", data)))
        figures.add("ours, durable", seconds(snapshot))
        run.step(ours.before_change)
        for path in stored_files(store):
            forget(path)
        figures.add("plain read", seconds(read_all))
        for path in stored_files(store):
            forget(path)
        figures.add("ours, restore", seconds(lambda: restore(run, str(store), disk)))
        figures.add("plain read, cached", seconds(read_all))
        figures.add("ours, restore, cached", seconds(lambda: restore(run, str(store), disk)))
        print(f"durable and restore: round {number + 1} of {args.rounds}", flush=True)
    ours.close()
    persister.close(finish=True)


def stored_files(store: Path) -> list[Path]:
    """The files of the newest snapshot in a folder of snapshots."""
    return sorted(max(store.glob("step-*")).iterdir())


def forget(path: Path) -> None:
    """Drops a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restore(run: Run, url: str, disk: Path) -> None:
    def fail(what: str, why: object) -> None:
        sys.exit(f"{what}: {why}")

    restorer = Restorer(
        run.place,
        allowed=frozenset(),
        on_passed_over=fail,
        on_wait=fail,
        on_incomplete=fail,
        progress=lambda _bytes: None,
    )
    restored = restorer.restore(run.state, Lookup((), open_store(url), RUN_ID, disk / "scratch", 1.0))
    assert restored is not None


def report(figures: Figures, segments: list[Segment]) -> dict[str, Any]:
    groups = {
        "memcpy": [
            "ours, nothing to hide behind",
            "ours, beside compute",
            "ours, first",
            "ours, second",
            "torch.save",
            "dcp.save",
            "dcp.async_save",
        ],
        "plain write": ["ours, durable"],
        "plain read": ["ours, restore"],
        "plain read, cached": ["ours, restore, cached"],
    }
    result: dict[str, Any] = {}
    print(f"\n{'':32}{'median ms':>12}{'ratio':>9}{'worst':>9}")
    for base, names in groups.items():
        base_s = statistics.median(figures.rounds[base])
        print(f"{base:32}{base_s * 1e3:12.1f}{1:9.2f}{max(figures.rounds[base]) / base_s:9.2f}")
        for name in names:
            ratios = figures.ratios(name, base)
            median_ms = statistics.median(figures.rounds[name]) * 1e3
            print(f"  {name:30}{median_ms:12.1f}{statistics.median(ratios):9.2f}{max(ratios):9.2f}")
            result[name] = {"median_ms": median_ms, "ratio": statistics.median(ratios), "worst_ratio": max(ratios)}
    compute_ms = statistics.median(figures.rounds["compute"]) * 1e3
    print(f"\nforward and backward: {compute_ms:.0f} ms")
    print(describe(segments))
    memcpy_ms = statistics.median(figures.rounds["memcpy"]) * 1e3
    return {
        **result,
        "memcpy_ms": memcpy_ms,
        "compute_ms": compute_ms,
        "throughput": throughput(segments),
        "seconds": figures.rounds,
    }


def goals_of(result: dict[str, Any], segments: list[Segment]) -> list[Goal]:
    """What we are held to; a stall is never to be longer, the rest by their medians."""
    goals = [
        Goal(
            "stall, nothing to hide behind / memcpy, worst", result["ours, nothing to hide behind"]["worst_ratio"], 1.2
        ),
        Goal("stall of the first snapshot / memcpy, worst", result["ours, first"]["worst_ratio"], 1.2),
        Goal("stall of the second snapshot / memcpy, worst", result["ours, second"]["worst_ratio"], 1.2),
        Goal("time to durable / plain write", result["ours, durable"]["ratio"], 1.2),
        Goal("restore / plain read", result["ours, restore"]["ratio"], 1.5),
        Goal("restore, cached / plain read, cached", result["ours, restore, cached"]["ratio"], 1.5),
    ]
    copies_beside = len(os.sched_getaffinity(0)) > 1 and result["compute_ms"] > result["memcpy_ms"]
    if copies_beside:
        goals.append(Goal("stall, beside compute / memcpy", result["ours, beside compute"]["ratio"], 0.3))
    if keeps_up(segments):
        goals.append(goal(segments))
    return goals


def main() -> int:
    as_ranks_do()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=100, help="millions of fp32 values in the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--segments", type=int, default=12, help="rounds of the throughput part")
    parser.add_argument("--steps", type=int, default=20, help="from one snapshot to the next, in the throughput part")
    parser.add_argument("--threads", type=int, default=1, help="of the computation, in the throughput part")
    parser.add_argument("--batch-size", type=int, default=64, help="sets how long forward and backward last")
    parser.add_argument("--disk", type=Path, help="folder of the disk to measure; default: that of temporary files")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.values, args.rounds, args.segments = min(args.values, 9), 2, 3
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    with tempfile.TemporaryDirectory(dir=args.disk) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        figures, segments = measure(args, Path(disk).absolute(), Path(memory))
    result = report(figures, segments)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return not_judged("--quick") if args.quick else judge(goals_of(result, segments))


if __name__ == "__main__":
    sys.exit(main())
