"""The copy of a state from a CUDA device into page-locked host memory: on a stream of its own, beside the training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elastictrain.training.stability import Stability


class DeviceCopy:
    """A copy on a stream. Nothing of it waits on the host, but for `complete`.

    Args:
        now: pairs of (target, source) that the next forward pass may overwrite: it waits for them, on the device.
        later: pairs that do not change before `before_change`.
        stability: of the latter.
        stream: the copy's own.
    """

    def __init__(
        self,
        now: Sequence[tuple[Tensor, Tensor]],
        later: Sequence[tuple[Tensor, Tensor]],
        stability: Stability,
        stream: torch.cuda.Stream,
    ) -> None:
        self._stability = stability
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for target, source in now:
                target.copy_(source, non_blocking=True)
            volatile_copied = stream.record_event()
            for target, source in later:
                target.copy_(source, non_blocking=True)
            self._copied = stream.record_event()
        torch.cuda.current_stream().wait_event(volatile_copied)

    def before_change(self) -> None:
        """What the training computes from here on, on the device, comes after the copy."""
        self._stability.changed()
        torch.cuda.current_stream().wait_event(self._copied)

    def complete(self) -> None:
        """Returns once all is copied."""
        self._stream.synchronize()
