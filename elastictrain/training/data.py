"""From sample positions to batches: seeded reading, loader workers, prefetch, and errors that name the sample.

A loader is asked for *spans* of sample positions, never for indices: which samples a span holds is computed where it
is read (`core.order`), so nothing about the order has to be kept, sent, or restored.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Generator, Iterable, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory as pin_batch

from elastictrain.core.order import sample_list
from elastictrain.core.seeds import Stream, derive
from elastictrain.errors import DataError
from elastictrain.procs import die_with_parent
from elastictrain.training.randomness import Generators, SampleSeeder
from elastictrain.training.task import user_traceback

Span = tuple[int, int]
"""Sample positions `[start, stop)`."""


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """What a loader returns in place of a batch it could not read: it travels from a loader process as a value."""

    index: int | None
    epoch: int
    what: str
    details: str

    def as_error(self, step: int | None) -> DataError:
        when = f"epoch {self.epoch}" + (f", step {step}" if step is not None else "")
        where = f"sample {self.index}" if self.index is not None else "a batch"
        return DataError(f"the dataset failed at {where} ({when}): {self.what}", self.details)


_COLLATE_STREAM = {Stream.SAMPLE: Stream.COLLATE, Stream.EVAL_SAMPLE: Stream.EVAL_COLLATE}


class SeededReader(Dataset[Any]):
    """The user's dataset, read by spans, with every generator seeded before each sample.

    Args:
        dataset: the user's map-style dataset.
        seed: the run's seed.
        stream: `SAMPLE` for training, in permuted order; `EVAL_SAMPLE` for evaluation, in the dataset's own.
        shuffle: permute (training only).
        seed_samples: seed before each sample.
    """

    def __init__(self, dataset: Any, *, seed: int, stream: Stream, shuffle: bool, seed_samples: bool) -> None:
        self._dataset = dataset
        self._length = len(dataset)
        self._seed = seed
        self._stream = stream
        self._shuffle = shuffle and stream is Stream.SAMPLE
        self._seed_samples = seed_samples
        # Datasets run on the CPU; a loader process must never touch CUDA.
        self._seeder = SampleSeeder(Generators(torch.device("cpu")))

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("a SeededReader is read by spans")

    def __getitems__(self, span: Span) -> list[Any] | FetchFailed:
        """Reads the samples of a span; called by torch's fetcher, in a loader process or in this one. The generators
        are left seeded for making a batch of them."""
        read = self._read(span)
        if self._seed_samples:
            self._seeder.generators.seed(derive(self._seed, _COLLATE_STREAM[self._stream], span[0]))
        return read

    def _read(self, span: Span) -> list[Any] | FetchFailed:
        wanted, dataset = self._wanted(span), self._dataset_for(span)
        if not self._seed_samples and (batched := getattr(dataset, "__getitems__", None)) is not None:
            try:
                return cast(list[Any], batched([index for _, index, _ in wanted]))
            except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
                return _failed(error, None, wanted[0][0])
        read = []
        self._seeder.begin()
        for epoch, index, seed in wanted:
            try:
                read.append(self._seeder.read(dataset, index, seed) if self._seed_samples else dataset[index])
            except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
                return _failed(error, index, epoch)
        return read

    def _dataset_for(self, _span: Span) -> Any:
        """Where the samples of a span are read from: always the same, but in a drill (`training.injection`)."""
        return self._dataset

    def _wanted(self, span: Span) -> list[tuple[int, int, int]]:
        """(epoch, index, seed) of each sample of a span."""
        if self._stream is Stream.SAMPLE:
            return sample_list(self._seed, *span, self._length, shuffle=self._shuffle)
        indices = [position % self._length for position in range(*span)]
        return [(0, index, derive(self._seed, self._stream, index)) for index in indices]


class SeededCollate:
    """The task's collate function; passes failures through, and reports its own."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, read: list[Any] | FetchFailed) -> Any:
        if isinstance(read, FetchFailed):
            return read
        try:
            return self._collate(read)
        except Exception as error:  # noqa: BLE001 - the user's collate may raise anything
            failed = _failed(error, None, 0)
            return replace(failed, what=f"collate raised {failed.what}")


def _failed(error: Exception, index: int | None, epoch: int) -> FetchFailed:
    return FetchFailed(index, epoch, f"{type(error).__name__}: {error}", user_traceback(error))


def _init_loader_process(_worker_id: int) -> None:
    """A loader process ends with its rank, and leaves signals to it: a preempted rank still needs its data."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(os.getppid())


def batches(
    reader: SeededReader,
    collate: Callable[[list[Any]], Any],
    spans: Iterable[Span],
    *,
    num_workers: int,
    prefetch_batches: int,
    pin_memory: bool,
) -> Generator[Any, None, None]:
    """Reads spans in order, ahead of time where there are loader processes.

    Close it to end them: they ignore the signal by which multiprocessing would end them when this process exits, and
    it would wait for them for ever.

    Args:
        reader: what to read from.
        collate: makes a batch of a list of samples.
        spans: what to read, possibly without end.
        num_workers: loader processes; 0 reads in this one, when asked.
        prefetch_batches: batches each of them keeps ready.
        pin_memory: copy into page-locked memory.

    Yields:
        batches, or `FetchFailed`.
    """
    safe_collate = SeededCollate(collate)
    if num_workers == 0:
        for span in spans:
            batch = safe_collate(cast(list[Any], reader.__getitems__(span)))
            yield pin_batch(batch) if pin_memory else batch
        return
    loader = DataLoader(
        reader,
        batch_sampler=spans,  # type: ignore[arg-type]  # our reader takes a span where torch's takes a list
        collate_fn=safe_collate,
        num_workers=num_workers,
        # Forked: neither dataset nor generators have to be picklable, and torch need not be imported again.
        multiprocessing_context="fork",
        prefetch_factor=prefetch_batches,
        pin_memory=pin_memory,
        worker_init_fn=_init_loader_process,
        # The base seed would be drawn from the global generator, which is not ours to move.
        generator=torch.Generator().manual_seed(0),
    )
    yield from loader


def to_device(batch: Any, device: torch.device, *, non_blocking: bool, channels_last: bool = False) -> Any:
    """Moves every tensor of a batch to a device; tuples, lists, dicts, dataclasses keep their type.

    Args:
        batch: tensors and containers of them; anything else is passed through.
        device: where to.
        non_blocking: copy beside the computation, from pinned memory.
        channels_last: give 4-d tensors this memory format.
    """
    if isinstance(batch, Tensor):
        if channels_last and batch.dim() == 4:
            return batch.to(device, non_blocking=non_blocking, memory_format=torch.channels_last)
        return batch.to(device, non_blocking=non_blocking)

    def move(item: Any) -> Any:
        return to_device(item, device, non_blocking=non_blocking, channels_last=channels_last)

    if isinstance(batch, MutableMapping):
        moved_mapping = copy.copy(batch)
        for key, value in batch.items():
            moved_mapping[key] = move(value)
        return moved_mapping
    if isinstance(batch, tuple):
        moved = [move(item) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else tuple(moved)
    if isinstance(batch, list):
        return [move(item) for item in batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: move(getattr(batch, f.name)) for f in fields(batch) if f.init})
    return batch
