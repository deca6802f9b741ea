"""The copy of a state into host memory: beside the training, by a thread that the training helps where it must wait.

`memmove` of ctypes releases the interpreter lock. What glibc takes for a large block it writes around the caches, in
half the time; by itself it may take nothing below hundreds of megabytes for one, so ranks are told otherwise by their
environment (`supervisor.launcher.COPY_TUNABLES`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from ctypes import memmove

import torch
from torch import Tensor

from elastictrain.training.stability import Stability

CHUNK_BYTES = 8 << 20
"""A copy is cut into pieces of this size, so that two threads can share it evenly."""


_Piece = tuple[int, int, int]
"""Where to, where from, how many bytes."""


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
        # Whoever copies looks at a tensor first and cuts it up: training need not wait for that as well.
        self._tensors = deque(later)
        self._alive = later
        """Pieces are addresses."""
        self._pieces: deque[_Piece] = deque()
        self._left = len(later)
        """Tensors and pieces that are not copied yet."""
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
        """Copies until nothing is left to begin with. A copy that fails ends it all; so does one that is cut short by a
        rank's leaving, which goes on: nobody must wait for the rest of it."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever torch raises costs this snapshot, not the training
            self._error = error
            self._done.set()
        except BaseException:
            self._error = InterruptedError("the copy was cut short")
            self._done.set()
            raise

    @torch.no_grad()
    def _work(self) -> None:
        finished = 0
        while True:
            if not self._pieces:
                try:
                    target, source = self._tensors.popleft()
                except IndexError:
                    break
                if not source.is_contiguous():  # only torch can copy it
                    target.copy_(source)
                    finished += 1
                    continue
                pieces = _cut(target.data_ptr(), source.data_ptr(), source.nbytes)
                with self._lock:
                    self._left += len(pieces) - 1
                self._pieces.extend(pieces)
            with contextlib.suppress(IndexError):  # the other was faster
                to, origin, size_bytes = self._pieces.popleft()
                memmove(to, origin, size_bytes)
                finished += 1
        with self._lock:
            self._left -= finished
            if self._left == 0:
                self._stability.changed()
                self._done.set()


def _cut(to: int, origin: int, size_bytes: int) -> list[_Piece]:
    if size_bytes <= CHUNK_BYTES:
        return [(to, origin, size_bytes)]
    return [
        (to + begin, origin + begin, min(CHUNK_BYTES, size_bytes - begin))
        for begin in range(0, size_bytes, CHUNK_BYTES)
    ]
