"""Looks at a user's batches for the mistakes the advice in `core.advice` is about."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from elastictrain.core.advice import Advice, mean_of_means_advice
from elastictrain.training.data import FetchFailed

IGNORE_INDEX = -100
"""cross_entropy's default ignore_index: such targets are left out of its mean."""
BATCHES_INSPECTED = 4


def counted_elements(batch: Any) -> tuple[int, str] | None:
    """How many elements of a batch a masked mean would count, and how that was recognised; None if it has no mask."""
    if isinstance(batch, Tensor):
        if batch.dtype in (torch.int64, torch.int32) and batch.numel() and bool((batch == IGNORE_INDEX).any()):
            return int((batch != IGNORE_INDEX).sum()), f"targets of {IGNORE_INDEX} are ignored"
        return None
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            is_mask = isinstance(value, Tensor) and "mask" in str(key).lower() and not value.is_floating_point()
            if is_mask and bool((value == 0).any()):
                return int((value != 0).sum()), f"{key!r} is a mask"
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for item in batch:
            if (found := counted_elements(item)) is not None:
                return found
    return None


def inspecting(
    stream: Generator[Any, None, None], advise: Callable[[Advice | None], None]
) -> Generator[Any, None, None]:
    """Passes batches through; looks at the first few for a mean of means. Closing it closes `stream`."""
    with closing(stream):
        yield from _inspecting(stream, advise)


def _inspecting(
    stream: Generator[Any, None, None], advise: Callable[[Advice | None], None]
) -> Generator[Any, None, None]:
    counts: list[int] = []
    for _ in range(BATCHES_INSPECTED):
        batch = next(stream, None)
        if batch is None:
            return
        if not isinstance(batch, FetchFailed) and (found := counted_elements(batch)) is not None:
            counts.append(found[0])
            if (advice := mean_of_means_advice(counts, found_by=found[1])) is not None:
                advise(advice)
                yield batch
                break
        yield batch
    yield from stream
