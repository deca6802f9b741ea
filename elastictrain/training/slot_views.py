"""The files of the memory tier as tensors: views of mapped memory that a state is copied into, kept from one snapshot
to the next, and page-locked where CUDA copies into them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from elastictrain.checkpoint.slot_writer import SlotFiles
from elastictrain.errors import SnapshotError


class SlotViews:
    """Views of the slots of one tier.

    Args:
        page_locked: for copies from a CUDA device, which run beside the computation only into page-locked memory.
    """

    def __init__(self, *, page_locked: bool) -> None:
        self._page_locked = page_locked
        self._views: dict[tuple[int, str], tuple[memoryview, dict[str, Tensor]]] = {}

    def of(self, slot: SlotFiles, file: str, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where in a file each tensor belongs, by name: their order may be another at each snapshot."""
        buffer = slot.buffers[file]
        known = self._views.get((slot.index, file))
        if known is not None and known[0] is buffer:
            return known[1]
        if known is not None and self._page_locked:
            _page_unlock(known[0])
        offsets = slot.layouts[file].offsets
        views = {
            name: _view_of(buffer, offsets[name][0], source.dtype, tuple(source.shape))
            for name, source in sources.items()
        }
        if self._page_locked:
            _page_lock(buffer)
        self._views[slot.index, file] = (buffer, views)
        return views

    def forget(self) -> None:
        """Lets go of all slots: other files will be mapped."""
        if self._page_locked:
            for buffer, _ in self._views.values():
                _page_unlock(buffer)
        self._views = {}


def _view_of(buffer: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over part of a mapped file, without a copy."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)


def _address_of(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def _page_unlock(buffer: memoryview) -> None:
    """Must come before the mapping goes: CUDA would go on believing in it."""
    torch.cuda.cudart().cudaHostUnregister(_address_of(buffer))


def _page_lock(buffer: memoryview) -> None:
    """Page-locks a mapped file for CUDA, so that copies into it run beside the computation."""
    code = torch.cuda.cudart().cudaHostRegister(_address_of(buffer), len(buffer), 0)
    if int(code) != 0:
        raise SnapshotError(
            f"CUDA cannot page-lock {len(buffer)} bytes of the memory tier: error {int(code)}",
            "Raise the limit of locked memory: ulimit -l, or LimitMEMLOCK= in the unit.",
        )
