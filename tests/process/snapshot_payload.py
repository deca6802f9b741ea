"""A state that is a function of the step, and a program that takes snapshots of it (see `main`)."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from elastictrain.checkpoint.catalog import SnapshotReader, first_sound, newest_first, open_candidate
from elastictrain.checkpoint.format import TensorSpec, layout
from elastictrain.checkpoint.local_store import LocalStore
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot, OpenSnapshot
from elastictrain.checkpoint.memory_tier import Declined, MemoryTier
from elastictrain.checkpoint.persist_loop import PersisterSettings
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.checkpoint.slot_writer import SlotWriter
from elastictrain.checkpoint.store import Store, open_store

RUN_ID = "0badcafe"
JOB = "job"


def arrays(step: int, size: int = 1000) -> dict[str, dict[str, np.ndarray]]:
    """What a snapshot of this step must hold, by file and name."""
    generator = np.random.default_rng(step)
    weights = generator.standard_normal(size, dtype=np.float32)
    return {
        "model.safetensors": {"weight": weights, "half": weights[:5].astype(np.float16)},
        "optimizer.safetensors": {"exp_avg": weights * np.float32(0.1), "step": np.array(step, dtype=np.int64)},
    }


_DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64"}


def layouts(size: int = 1000):
    return {
        file: layout({name: TensorSpec(_DTYPES[str(a.dtype)], a.shape) for name, a in named.items()})
        for file, named in arrays(0, size).items()
    }


def trainer(step: int) -> dict:
    return {
        "counters": {"global_step": step, "applied": step, "skipped": 0, "sample_position": 8 * step},
        "epoch": 0,
        "world_size": 1,
        "data_order": {"seed": 1, "length": 100, "shuffle": True, "fingerprint": None},
        "aliases": {"model": {"tied": "weight"}},
    }


def fill(writer: SlotWriter, step: int, size: int = 1000) -> None:
    for file, named in arrays(step, size).items():
        for name, array in named.items():
            begin, end = writer.layouts[file].offsets[name]
            writer.buffers[file][begin:end] = array.tobytes()


def write(tier: MemoryTier, step: int, size: int = 1000, run_id: str = RUN_ID) -> MemorySnapshot:
    """One snapshot into the memory tier."""
    writer = tier.begin(layouts(size))
    assert not isinstance(writer, Declined), writer
    fill(writer, step, size)
    return writer.commit(job=JOB, run_id=run_id, global_step=step, versions={"python": "3"}, trainer=trainer(step))


def assert_holds(reader: SnapshotReader, size: int = 1000) -> None:
    """The snapshot is, to the byte, that of its step."""
    step = reader.manifest.global_step
    assert reader.trainer == trainer(step)
    for file, named in arrays(step, size).items():
        found = reader.layout(file)
        assert found.specs.keys() == named.keys()
        for name, array in named.items():
            begin, end = found.offsets[name]
            assert bytes(reader.read(file, begin, end)) == array.tobytes(), (step, file, name)


def put(store: Store, tier: MemoryTier, step: int, size: int = 1000) -> str:
    """Writes a snapshot into the memory tier, and from there into a store; returns its name."""
    snapshot = write(tier, step, size)
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        store.put(source)
    return snapshot.name


def stored_steps(url: str, options: Mapping[str, Any], scratch: Path) -> list[int]:
    """Steps of the snapshots in a store, newest first, each of which was read and holds what was written."""
    steps = []
    for candidate in newest_first(None, open_store(url, options)):
        with open_candidate(candidate, scratch) as reader:
            assert_holds(reader)
        steps.append(candidate.global_step)
    return steps


def tier_of(folder: Path) -> MemoryTier:
    return MemoryTier.for_job(folder / "shm", job=JOB, state_dir=folder)


def store_of(folder: Path) -> LocalStore:
    store = open_store(folder / "snapshots")
    assert isinstance(store, LocalStore)
    return store


def main() -> None:
    """Resumes from the newest snapshot, takes one of each step, and says what exists: `memory N`, `durable N`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--no-wait", action="store_true")
    options = parser.parse_args()
    folder: Path = options.folder
    (folder / "shm").mkdir(exist_ok=True)
    tier, store = tier_of(folder), store_of(folder)

    def complain(candidate: object, error: Exception) -> None:
        raise SystemExit(f"passed over: {candidate}: {error}")

    first = 1
    with tempfile.TemporaryDirectory() as scratch:
        reader = first_sound(newest_first(tier, store, RUN_ID), lambda c: open_candidate(c, Path(scratch)), complain)
        if reader is not None:
            with reader:
                assert_holds(reader, options.size)
                first = reader.manifest.global_step + 1
    settings = PersisterSettings(url=str(folder / "snapshots"), keep_last=2)
    # A thread, so that one kill takes the writer and the persister at once.
    persister = Persister(settings, in_process=True)
    print("ready", flush=True)
    for step in range(first, first + options.steps):
        snapshot = write(tier, step, options.size)
        print(f"memory {step}", flush=True)
        persister.submit(snapshot)
        if not options.no_wait:
            assert persister.wait(step, 60), persister.status
            print(f"durable {step}", flush=True)
    persister.close(finish=True)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
