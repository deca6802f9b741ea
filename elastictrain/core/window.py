"""Which samples one step consumes, how they are cut into microbatches, and which rank reads which.

Everything follows from the sample position, so a run can resume at any position with any world size, and even
with another batch size. Nothing here depends on the world size but `share`, which says only who does the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EpochTail(StrEnum):
    """What happens where an epoch's samples do not fill the last window."""

    CONTINUE = "continue"
    """The window runs on into the next epoch; every step is full."""
    PARTIAL = "partial"
    """The epoch's last window is short, and weighted exactly."""
    DROP = "drop"
    """The samples that do not fill a window are left out of this epoch."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward and backward pass on one rank: sample positions `[start, stop)` of window place `index`."""

    index: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Window:
    """All samples of one step: sample positions `[start, stop)`, in microbatches of `micro_batch_size`."""

    start: int
    stop: int
    micro_batch_size: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def num_microbatches(self) -> int:
        return -(-self.num_samples // self.micro_batch_size)

    def microbatch(self, index: int) -> Microbatch:
        start = self.start + index * self.micro_batch_size
        return Microbatch(index, start, min(start + self.micro_batch_size, self.stop))

    def share(self, rank: int, world_size: int) -> tuple[Microbatch, ...]:
        """The microbatches of one rank: a contiguous run; the ranks' runs differ in length by at most one.

        A short window may have fewer microbatches than there are ranks; the last ranks' runs are then empty.
        """
        first, last = split(self.num_microbatches, rank, world_size)
        return tuple(self.microbatch(index) for index in range(first, last))


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How the stream of sample positions is cut into windows.

    Args:
        length: number of samples in the dataset, N.
        global_batch_size: samples per full window.
        micro_batch_size: samples per full microbatch; divides `global_batch_size`.
        epoch_tail: what to do at the end of an epoch.
    """

    length: int
    global_batch_size: int
    micro_batch_size: int
    epoch_tail: EpochTail = EpochTail.CONTINUE

    def window_at(self, position: int) -> Window:
        """The window of a step that begins at sample position `position`.

        With `DROP`, a window that would cross the epoch's end begins at the next epoch instead.
        """
        start, stop = position, position + self.global_batch_size
        epoch_end = (position // self.length + 1) * self.length
        if stop > epoch_end:
            if self.epoch_tail is EpochTail.PARTIAL:
                stop = epoch_end
            elif self.epoch_tail is EpochTail.DROP:
                start, stop = epoch_end, epoch_end + self.global_batch_size
        return Window(start, stop, self.micro_batch_size)

    def start_of(self, stop: int) -> int:
        """Where the window begins that ends at sample position `stop`."""
        if self.epoch_tail is EpochTail.PARTIAL and stop % self.length == 0:
            return max(0, stop - (self.length % self.global_batch_size or self.global_batch_size))
        return max(0, stop - self.global_batch_size)

    def steps_in(self, num_epochs: int) -> int:
        """How many steps `num_epochs` epochs take from position 0, the last one included where it runs over."""
        match self.epoch_tail:
            case EpochTail.CONTINUE:
                return -(-num_epochs * self.length // self.global_batch_size)
            case EpochTail.PARTIAL:
                return num_epochs * -(-self.length // self.global_batch_size)
            case EpochTail.DROP:
                return num_epochs * (self.length // self.global_batch_size)

    def epochs_done(self, position: int) -> int:
        """How many whole epochs lie behind `position`; with `DROP`, a tail that cannot be filled counts as done."""
        epochs, place = divmod(position, self.length)
        dropped = self.epoch_tail is EpochTail.DROP and place + self.global_batch_size > self.length
        return epochs + 1 if dropped else epochs


def split(count: int, part: int, num_parts: int) -> tuple[int, int]:
    """Deals `count` things to `num_parts` contiguous near-equal parts; the first parts take the odd ones.

    Returns:
        (first, last): the half-open range of part `part`.
    """
    size, odd = divmod(count, num_parts)
    first = part * size + min(part, odd)
    return first, first + size + (1 if part < odd else 0)
