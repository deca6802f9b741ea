"""Bitwise comparison of two runs: every step's numbers, and every tensor of the state that was kept."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastictrain.checkpoint.catalog import Candidate, newest_first, open_candidate
from elastictrain.checkpoint.format import TRAINER_FILE, digest
from elastictrain.checkpoint.store import Store
from elastictrain.errors import ElasticTrainError, MissingInputError

_STEP_KEYS = ("loss", "grad_norm", "lr", "applied", "samples", "loss_scale")
_TRAINER_KEYS = ("counters", "epoch", "data_order", "aliases", "state")


@dataclass(frozen=True, slots=True)
class FinalState:
    """What a run has kept: the state that one snapshot holds.

    Args:
        step: of the snapshot.
        files: digest of each tensor file.
        tensors: digest of each tensor, by file and name.
        trainer: counters, scheduler and so on, each as text.
        counters: as plain numbers.
        size_bytes: of the snapshot.
    """

    step: int
    files: Mapping[str, str]
    tensors: Mapping[tuple[str, str], str]
    trainer: Mapping[str, str]
    counters: Mapping[str, int]
    size_bytes: int


def state_of_step(store: Store, step: int) -> FinalState:
    """Reads the durable snapshot of a step, every byte of it.

    Raises:
        MissingInputError: there is none.
        SnapshotDamagedError: it is not what was written.
    """
    candidates = newest_first(None, store)
    found = next((candidate for candidate in candidates if candidate.global_step == step), None)
    if found is None:
        steps = ", ".join(str(candidate.global_step) for candidate in candidates) or "none"
        raise MissingInputError(f"there is no snapshot of step {step} in {store.where}, only of: {steps}")
    return read_state(found)


def newest_state(list_newest_first: Callable[[], Sequence[Candidate]]) -> FinalState | None:
    """The state in the newest snapshot; None if there is none, or it is not what was written."""
    try:
        candidates = list_newest_first()
        return read_state(candidates[0]) if candidates else None
    except ElasticTrainError:
        return None


def read_state(candidate: Candidate) -> FinalState:
    """Reads a snapshot, every byte of it.

    Raises:
        SnapshotDamagedError: it is not what was written.
    """
    with tempfile.TemporaryDirectory() as scratch, open_candidate(candidate, Path(scratch)) as reader:
        tensors = {}
        for file in sorted(reader.files):
            if file != TRAINER_FILE:
                layout = reader.layout(file)
                for name, (begin, end) in layout.offsets.items():
                    # Not the bytes alone: a tensor of another shape or type is another tensor.
                    tensors[file, name] = f"{layout.specs[name]} {digest(reader.read(file, begin, end))}"
        manifest, trainer = reader.manifest, reader.trainer
        return FinalState(
            candidate.global_step,
            {name: entry.xxh3_128 for name, entry in manifest.files.items() if name != TRAINER_FILE},
            tensors,
            {key: json.dumps(trainer.get(key), sort_keys=True) for key in _TRAINER_KEYS},
            dict(trainer.get("counters", {})),
            manifest.size_bytes,
        )


def first_difference(
    reference_lines: Iterable[Mapping[str, Any]],
    lines: Iterable[Mapping[str, Any]],
    reference: FinalState | None,
    final: FinalState | None,
) -> str:
    """The first differing step, and the first differing tensor at the end; "" if there is none.

    Args:
        reference_lines: the reference's steps.
        lines: the other run's; those done twice must be the same both times. A killed rank zero takes lines with it
            that it had not written: a step without one is not compared here, the state at the end is.
        reference: the reference's state at its end; None to compare steps alone.
        final: the other run's.
    """
    expected = {line["step"]: _values(line) for line in reference_lines}
    differing = [
        (line["step"], key)
        for line in lines
        for key, value in _values(line).items()
        if expected.get(line["step"], {}).get(key) != value
    ]
    parts = []
    if differing:
        step, key = min(differing)
        parts.append(f"step {step} ({key})")
    if reference is not None and final is not None and (name := _differing_state(reference, final)):
        parts.append(name)
    return ", ".join(parts)


def _values(line: Mapping[str, Any]) -> dict[str, str]:
    # repr keeps a float to its last bit. The loss of a line that one rank wrote alone, since the others were gone, is
    # that of its own part of the window; the gradient's norm is that of the whole.
    keys = [key for key in _STEP_KEYS if not (key == "loss" and line.get("partial"))]
    return {key: repr(line.get(key)) for key in keys}


def _differing_state(reference: FinalState, final: FinalState) -> str:
    if reference.step != final.step:
        return f"kept step {final.step} instead of {reference.step}"
    for file, name in sorted(reference.tensors.keys() | final.tensors.keys()):
        if reference.tensors.get((file, name)) != final.tensors.get((file, name)):
            return f"tensor {name} in {file}"
    for name in sorted(reference.files.keys() | final.files.keys()):
        if reference.files.get(name) != final.files.get(name):
            return name
    for key in _TRAINER_KEYS:
        if reference.trainer[key] != final.trainer[key]:
            return f"{key} in {TRAINER_FILE}"
    return ""
