"""Throughput of training with a snapshot every 20 steps against without.

    python benchmarks/snapshot_throughput.py [--values 100] [--segments 12] [--steps 20] [--threads 1] [--json FILE]

A machine's speed drifts by more than a snapshot costs, so long blocks cannot be compared. Short segments of training
take turns: *without*, *with*, *without*, *control*, *without*, ... A segment *with* takes one snapshot at its first
step, and all that follows from it (copy, hash, write to the disk) falls into it: what is not durable at its end is
said. Its ratio is to the mean of its two neighbours, so that drift cancels. A *control* segment is one without,
compared in the same way: how far its ratios lie from 1 is the noise, and a cost of snapshots below that cannot be seen.

Beside it stand the processor seconds of a snapshot: of the training thread (what it takes longer, other than by
waiting: memory bandwidth, caches), of the thread that copies and hashes, and of the persister.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from goals import Goal, judge, not_judged
from snapshot_run import WIDTH, Run, as_ranks_do, snapshotter_for

from elastictrain.checkpoint.persist_loop import PersisterSettings
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.training.snapshot import Snapshotter

GOAL = 0.99


@dataclass(frozen=True, slots=True)
class Segment:
    """Some steps of training.

    Args:
        kind: without, with, control.
        seconds: wall clock.
        training_cpu_s: processor time of the training thread.
        snapshot_cpu_s: of the thread that copies and hashes.
        persister_cpu_s: of the persister.
        stall_s: how long training waited for the snapshot.
        late_s: how long after the last step the snapshot was durable; 0 if it was before.
    """

    kind: str
    seconds: float
    training_cpu_s: float
    snapshot_cpu_s: float = 0.0
    persister_cpu_s: float = 0.0
    stall_s: float = 0.0
    late_s: float = 0.0


def measure_throughput(
    run: Run, disk: Path, memory: Path, *, num_rounds: int, num_steps: int, num_threads: int
) -> list[Segment]:
    """Trains in segments; the first of each kind is left out, as are those that warm up."""
    torch.set_num_threads(num_threads)
    durable = threading.Event()
    (memory / "throughput").mkdir(exist_ok=True)
    persister = Persister(
        PersisterSettings(url=str(disk / "throughput"), keep_last=1),
        lambda report: durable.set() if report.kind == "persisted" else None,
    )
    ours = snapshotter_for(run, memory / "throughput", persister)

    def segment(kind: str) -> Segment:
        durable.clear()
        threads_s, persister_s = _snapshot_cpu_s(), _process_cpu_s(persister.pid)
        stall_s, cpu_s, began_s = ours.stall_s, time.thread_time(), time.perf_counter()
        for number in range(num_steps):
            if kind == "with" and number == 0:
                ours.take()
            run.step(ours.before_change)
        seconds, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
        if kind != "with":
            return Segment(kind, seconds, cpu_s)
        waited_s = time.perf_counter()
        was_late = not durable.is_set()
        durable.wait()
        waited_s = time.perf_counter() - waited_s
        return Segment(
            kind,
            seconds,
            cpu_s,
            _snapshot_cpu_s() - threads_s,
            _process_cpu_s(persister.pid) - persister_s,
            ours.stall_s - stall_s,
            waited_s if was_late else 0.0,
        )

    try:
        warm_up(run, ours, durable)
        kinds = islice(cycle(("without", "with", "without", "control")), 4 * num_rounds)
        segments = []
        for number, kind in enumerate([*kinds, "without"]):
            segments.append(segment(kind))
            if number % 4 == 3:
                print(f"throughput: round {number // 4 + 1} of {num_rounds}", flush=True)
        return segments
    finally:
        ours.close()
        persister.close(finish=True)


def warm_up(run: Run, ours: Snapshotter, durable: threading.Event) -> None:
    """Every slot's pages are paid for, and the persister is there."""
    for _ in range(3):
        durable.clear()
        ours.take()
        run.step(ours.before_change)
        durable.wait()


def ratios(segments: list[Segment], kind: str) -> list[float]:
    """Speed of each segment of this kind, relative to that of its two neighbours."""
    return [
        (before.seconds + after.seconds) / 2 / segment.seconds
        for before, segment, after in zip(segments, segments[1:], segments[2:], strict=False)
        if segment.kind == kind
    ]


def throughput(segments: list[Segment]) -> float:
    """That of training with snapshots relative to without."""
    return statistics.median(ratios(segments, "with"))


def keeps_up(segments: list[Segment]) -> bool:
    """Whether every snapshot was durable when its segment ended: the goal is for storage that keeps up."""
    return not any(segment.late_s for segment in segments)


def goal(segments: list[Segment]) -> Goal:
    """What throughput with snapshots is held to."""
    return Goal("throughput with a snapshot / without", throughput(segments), GOAL, at_least=True)


def describe(segments: list[Segment]) -> str:
    """The figures in words."""
    taken = [s for s in segments if s.kind == "with"]
    plain = [s for s in segments if s.kind != "with"]
    lines = [f"throughput relative to without; a segment without takes {_median(plain, 'seconds') * 1e3:.0f} ms"]
    for kind, name in (("with", "with a snapshot"), ("control", "control (without, too)")):
        found = sorted(ratios(segments, kind))
        low, high = found[len(found) // 4], found[-1 - len(found) // 4]
        lines.append(f"  {name:24} median {statistics.median(found):.4f}, middle half {low:.4f} to {high:.4f}")
    more_ms = (_median(taken, "training_cpu_s") - _median(plain, "training_cpu_s")) * 1e3
    lines.append(
        f"processor time of a snapshot: {_median(taken, 'snapshot_cpu_s') * 1e3:.0f} ms in its thread, "
        f"{_median(taken, 'persister_cpu_s') * 1e3:.0f} ms in the persister; the training thread takes {more_ms:+.0f} "
        f"ms; stall {_median(taken, 'stall_s') * 1e3:.1f} ms"
    )
    if late := [s.late_s for s in taken if s.late_s]:
        lines.append(f"storage did not keep up in {len(late)} of {len(taken)} segments, by {max(late):.2f} s at most")
    return "\n".join(lines)


def _median(segments: list[Segment], field: str) -> float:
    return statistics.median(getattr(s, field) for s in segments)


def _snapshot_cpu_s() -> float:
    """Processor seconds of this process's threads that take snapshots."""
    threads = [t for t in threading.enumerate() if t.name.startswith("snapshot") and t.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in threads if t.ident is not None)


def _process_cpu_s(pid: int | None) -> float:
    """Processor seconds of another process; clock_getcpuclockid(3) makes the clock's number like this."""
    return time.clock_gettime((~pid << 3) | 2) if pid is not None else 0.0


def main() -> int:
    as_ranks_do()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=100, help="millions of fp32 values in the state")
    parser.add_argument("--segments", type=int, default=12, help="rounds of four segments")
    parser.add_argument("--steps", type=int, default=20, help="of a segment: from one snapshot to the next")
    parser.add_argument("--threads", type=int, default=1, help="of the computation")
    parser.add_argument("--batch-size", type=int, default=64, help="sets how long forward and backward last")
    parser.add_argument("--disk", type=Path, help="folder of the disk to measure; default: that of temporary files")
    parser.add_argument("--json", type=Path, help="write the segments there")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(args.threads)
    run = Run(max(1, round(args.values * 1e6 / 3 / (WIDTH * WIDTH + WIDTH))), args.batch_size)
    with tempfile.TemporaryDirectory(dir=args.disk) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        segments = measure_throughput(
            run,
            Path(disk).absolute(),
            Path(memory),
            num_rounds=args.segments,
            num_steps=args.steps,
            num_threads=args.threads,
        )
    print(describe(segments))
    if args.json:
        args.json.write_text(json.dumps([asdict(s) for s in segments], indent=2) + "\n")
    return judge([goal(segments)]) if keeps_up(segments) else not_judged("storage did not keep up")


if __name__ == "__main__":
    sys.exit(main())
