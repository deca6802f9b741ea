"""Starts jobs that snapshot at every step into folders of the test's own, and compares what they kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastictrain.checkpoint.format import TRAINER_FILE
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.cli.state_dir import StartOptions
from tests.process.helpers import Trained, train

TASK = "tests.process.resume_tasks:Resumable"
KILLED = -9


def go(
    folder: Path,
    world_size: int = 1,
    *,
    params: Mapping[str, Any] | None = None,
    train_section: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    options: StartOptions | None = None,
    expect_success: bool = True,
    task: str = TASK,
    **more: Any,
) -> Trained:
    """One start of a job: three epochs of eleven samples in windows of four, a snapshot at every step."""
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    section = dict(train_section or {})
    if "max_steps" not in section:
        section.setdefault("max_epochs", 3)
    return train(
        folder,
        task,
        world_size=world_size,
        params=dict(params or {}),
        train={"global_batch_size": 4, "micro_batch_size": 2, **section},
        checkpoint={
            "memory_path": str(folder / "shm"),
            "every_steps": 1,
            "keep_last": 2,
            **(checkpoint or {}),
        },
        metrics={"every_steps": 1},
        overrides=list(overrides),
        options=options,
        expect_success=expect_success,
        **more,
    )


def store_of(folder: Path) -> Store:
    return open_store(folder / "state" / "snapshots")


def memory_of(folder: Path) -> MemoryTier:
    return MemoryTier.for_job(folder / "shm", job="job", state_dir=folder / "state")


def steps_in(store: Store) -> list[int]:
    """Steps of the snapshots in a store, newest first."""
    return [snapshot.global_step for snapshot in store.snapshots()]


def kept(folder: Path, store: Store | None = None) -> dict[str, Any]:
    """Everything the newest durable snapshot holds of the training, fit to be compared bit for bit."""
    import json

    store = store if store is not None else store_of(folder)
    name = store.snapshots()[0].name
    assert store.verify(name) == []
    manifest = store.read_manifest(name)
    trainer = json.loads(store.read_file(name, TRAINER_FILE))
    found: dict[str, Any] = {key: trainer[key] for key in ("counters", "epoch", "data_order", "aliases", "state")}
    found |= {file: entry.xxh3_128 for file, entry in manifest.files.items() if file != TRAINER_FILE}
    assert {"model.safetensors", "optimizer.safetensors"} <= found.keys()
    return found


def trace(run: Trained) -> dict[int, tuple[Any, ...]]:
    """Loss, gradient norm, learning rate and outcome of each step. A step that was done twice must have been the same
    both times, to the last bit. Where a rank reported alone, since the others were gone, the loss is "partial"."""
    found: dict[int, tuple[Any, ...]] = {}
    for line in sorted(run.metrics(), key=lambda line: line.get("partial", False)):
        step = line["step"]
        loss = line["loss"] if not line.get("partial") else found.get(step, ("partial",))[0]
        values = (loss, line["grad_norm"], line["lr"], line["applied"], line.get("loss_scale"))
        assert repr(found.setdefault(step, values)) == repr(values), f"step {step} went another way the second time"
    assert sorted(found) == list(range(1, len(found) + 1)), "a step has no line"
    return {step: tuple(map(repr, values)) for step, values in sorted(found.items())}


def assert_same_future(run: Trained, folder: Path, whole: Trained, whole_folder: Path) -> None:
    """The interrupted run went the way of the uninterrupted one, and ended where it did."""
    assert_same_trace(run, whole)
    assert kept(folder) == kept(whole_folder)


def assert_same_trace(run: Trained, whole: Trained) -> None:
    """The same steps, to the last bit; but for losses of which only a part could be told."""
    mine, theirs = trace(run), trace(whole)
    partial = {step for step, values in mine.items() if values[0] == "'partial'"}
    assert {s: v[s in partial :] for s, v in mine.items()} == {s: v[s in partial :] for s, v in theirs.items()}


def samples(run: Trained, rank: int = 0) -> list[int]:
    """All samples a rank has read, over all starts, in order."""
    return [index for line in run.recorded("microbatch", rank) for index in line["indices"]]


def nothing_left(folder: Path) -> bool:
    """The memory tier holds nothing at all."""
    return list((folder / "shm").iterdir()) == []


def as_of_version(manifest: Path, version: int) -> None:
    """Makes a snapshot one of another version of the format, sealed as its own program would have."""
    import json

    from elastictrain.checkpoint.format import digest

    fields = {**json.loads(manifest.read_text()), "version": version}
    del fields["checksum"]
    fields["checksum"] = digest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    manifest.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
