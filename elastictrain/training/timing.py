"""Where a step's time goes: data, compute, reduce, other.

On a CPU the host's phases are the truth. On CUDA the host runs ahead of the device, so the device's own events are
asked, all at once, when a report is due: recording one costs about two microseconds and waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastictrain.core.phases import Phase


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds of an interval, on one rank.

    Args:
        data: waiting for batches.
        compute: forward, backward, optimizer.
        reduce: this rank's gradients were complete and waited for the others'.
        aside: evaluation and snapshots, which belong to no step.
    """

    data: float
    compute: float
    reduce: float
    aside: float


class DeviceTimer:
    """CUDA events at the edges of a step; on a CPU it does nothing.

    Args:
        device: what the run computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._steps: list[list[torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """The step's first forward pass is about to be queued."""
        if self._is_cuda:
            self._steps.append([])
            self.mark()

    def mark(self) -> None:
        """The next edge: last gradient there, reduction over, optimizer done."""
        if self._is_cuda:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1].append(event)

    def take(self) -> tuple[float, float] | None:
        """(compute, reduce) in seconds since the last call, or None on a CPU. Waits for the last recorded event."""
        if not self._is_cuda:
            return None
        compute_ms = reduce_ms = 0.0
        for events in self._steps:
            events[-1].synchronize()
            edges = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
            if len(edges) == 3:
                compute_ms += edges[0] + edges[2]
                reduce_ms += edges[1]
            else:
                compute_ms += sum(edges)
            self._free.extend(events)
        self._steps = []
        return compute_ms / 1e3, reduce_ms / 1e3


def time_spent(phase_s: Sequence[float], on_device: tuple[float, float] | None) -> TimeSpent:
    """Sums up an interval.

    Args:
        phase_s: seconds by `Phase`, on the host.
        on_device: (compute, reduce) in seconds by the device's clock, where it has one.
    """
    compute = phase_s[Phase.FORWARD] + phase_s[Phase.BACKWARD] + phase_s[Phase.OPTIMIZER]
    reduce = phase_s[Phase.REDUCE]
    if on_device is not None:
        compute, reduce = on_device
    return TimeSpent(phase_s[Phase.DATA], compute, reduce, phase_s[Phase.EVAL] + phase_s[Phase.SNAPSHOT])
