"""The copy of a state into host memory: beside the training, by a thread that the training helps where it must wait.

`ctypes.memmove` releases the interpreter lock, and glibc's copy of large blocks goes around the caches.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.training.stability import Stability

CHUNK_BYTES = 8 << 20
"""A copy is cut into pieces of this size, so that two threads can share it evenly."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes to move from one address to another."""

    target: int
    source: int
    size_bytes: int


class HostCopy:
    """A copy that several threads can work on.

    Args:
        now: pairs of (target, source) that are copied before this returns.
        later: pairs on the host that are copied by whoever calls `work`.
        stability: of the latter; is asked before the copy is called done.
    """

    def __init__(
        self, now: Sequence[tuple[Tensor, Tensor]], later: Sequence[tuple[Tensor, Tensor]], stability: Stability
    ) -> None:
        with torch.no_grad():
            for target, source in now:
                target.copy_(source)
        self._stability = stability
        self._pieces: deque[_Piece] = deque()
        self._others: deque[tuple[Tensor, Tensor]] = deque()
        """What only torch can copy."""
        for target, source in later:
            if source.is_contiguous():
                self._pieces.extend(_cut(target, source))
            else:
                self._others.append((target, source))
        self._left = len(self._pieces) + len(self._others)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        if not self._left:
            self._done.set()

    def before_change(self) -> None:
        """Returns once all is copied, or cannot be: the sources are about to change."""
        if not self._done.is_set():
            self.work()
            self._done.wait()

    def complete(self) -> None:
        """Returns once all is copied. Raises what went wrong: the copy is of no use then."""
        self.work()
        self._done.wait()
        if self._error is not None:
            raise self._error

    def work(self) -> None:
        """Copies until nothing is left to begin with. A copy that fails ends it all."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever torch raises costs this snapshot, not the training
            self._error = error
            self._done.set()

    @torch.no_grad()
    def _work(self) -> None:
        finished = 0
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                break
            ctypes.memmove(piece.target, piece.source, piece.size_bytes)
            finished += 1
        while True:
            try:
                target, source = self._others.popleft()
            except IndexError:
                break
            target.copy_(source)
            finished += 1
        with self._lock:
            self._left -= finished
            if self._left == 0:
                self._stability.changed()
                self._done.set()


def _cut(target: Tensor, source: Tensor) -> list[_Piece]:
    size_bytes = source.numel() * source.element_size()
    to, origin = target.data_ptr(), source.data_ptr()
    return [
        _Piece(to + begin, origin + begin, min(CHUNK_BYTES, size_bytes - begin))
        for begin in range(0, size_bytes, CHUNK_BYTES)
    ]
