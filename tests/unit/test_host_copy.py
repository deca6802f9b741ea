"""The copy that two threads share."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastictrain.training import host_copy
from elastictrain.training.host_copy import CHUNK_BYTES, HostCopy
from elastictrain.training.stability import Stability

SIZES = [0, 1, 1000, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, CHUNK_BYTES]


def test_two_threads_copy_every_byte_once() -> None:
    sources = [torch.randn(size) for size in SIZES] + [torch.randn(30, 20).t(), torch.randn(())]
    pairs = [(torch.zeros_like(source, memory_format=torch.contiguous_format), source) for source in sources]
    copy = HostCopy(pairs[:1], pairs[1:], Stability({}))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(copy.complete) for _ in range(2)]:
            done.result(60)
    copy.before_change()
    assert all(torch.equal(target, source) for target, source in pairs)


def test_it_is_not_done_before_the_last_piece_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds nothing left to begin with waits for the other's piece."""
    source = torch.randn(CHUNK_BYTES // 4 + 1)  # two pieces
    target = torch.zeros_like(source)
    copy = HostCopy([], [(target, source)], Stability({}))
    is_held, may_go = threading.Event(), threading.Event()

    def held_move(to: int, origin: int, size_bytes: int) -> None:
        if size_bytes == CHUNK_BYTES:
            is_held.set()
            may_go.wait(60)
        ctypes.memmove(to, origin, size_bytes)

    monkeypatch.setattr(host_copy, "memmove", held_move)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(copy.complete)
        assert is_held.wait(60)
        copy.work()
        waits = pool.submit(copy.before_change)
        with pytest.raises(TimeoutError):
            waits.result(0.2)
        assert not torch.equal(target, source)
        may_go.set()
        slow.result(60)
        waits.result(60)
    assert torch.equal(target, source)


class Leaving(BaseException):
    """As the handler of a signal raises it."""


@pytest.mark.parametrize("raised", [Leaving, ValueError])
def test_nobody_waits_for_a_copy_that_was_cut_short(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    """A rank that is told to leave in the middle of it: the thread that completes the snapshot must hear of it."""
    source = torch.randn(CHUNK_BYTES)

    def cut_short(to: int, origin: int, size_bytes: int) -> None:
        raise raised

    monkeypatch.setattr(host_copy, "memmove", cut_short)
    copy = HostCopy([], [(torch.zeros_like(source), source)], Stability({}))
    if raised is Leaving:
        with pytest.raises(Leaving):
            copy.before_change()
    else:
        copy.before_change()
    monkeypatch.undo()
    with ThreadPoolExecutor(1) as pool, pytest.raises((InterruptedError, ValueError)):
        pool.submit(copy.complete).result(60)
