"""The data order as a function: a keyed permutation of `[0, N)` in O(1) memory.

A shuffled index list costs memory in N and has to be made anew, or stored, before a run can resume in the
middle of it. A block cipher over the index space costs neither: place `p` of the epoch is the cipher of `p`.

The cipher is an alternating (unbalanced) Feistel network over the smallest `b` bits with `2**b >= N`; whatever
it maps outside `[0, N)` is enciphered again until it falls inside (cycle walking), which is a permutation of
`[0, N)` because the cipher is one of `[0, 2**b)`. Fewer than two walks are expected, since `2**b < 2 N`.

Sources: Black and Rogaway, *Ciphers with Arbitrary Finite Domains* (CT-RSA 2002), section 5 (cycle walking)
and 6 (Feistel on a number domain). The round function is SplitMix64's finaliser, which is not
cryptographically strong and need not be: the order has to look random to an optimiser, not to an adversary.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elastictrain.core.seeds import GOLDEN_GAMMA, Stream, derive, stream_state

ROUNDS = 10
"""Even, so that the two halves end with the widths they began with. Small domains need the most: with 10 rounds
all 24 orders of four samples come out equally often (a chi-square test in tests/unit holds this)."""

MAX_LENGTH = 1 << 62

Indices = NDArray[np.int64]


class Permutation:
    """A keyed permutation of `[0, length)`.

    Args:
        key: 64-bit key; two keys give unrelated permutations.
        length: number of elements, from 1 to 2**62.
    """

    def __init__(self, key: int, length: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"a permutation needs 1 to 2**62 elements, not {length}")
        self.length = length
        bits = max(2, (length - 1).bit_length())
        self._left_bits = np.uint64(bits // 2)
        self._right_bits = np.uint64(bits - bits // 2)
        self._round_keys = [np.uint64(derive(key, Stream.ORDER, r)) for r in range(ROUNDS)]

    def __call__(self, places: Indices) -> Indices:
        """Maps places in the epoch to sample indices, elementwise.

        Args:
            places: int64 of any shape, each in `[0, length)`.

        Returns:
            int64 of the same shape, each in `[0, length)`.
        """
        values = np.asarray(places).astype(np.uint64)
        flat = self._encipher(values.reshape(-1))
        outside = np.flatnonzero(flat >= self.length)
        while outside.size:
            walked = self._encipher(flat[outside])
            flat[outside] = walked
            outside = outside[walked >= self.length]
        return flat.astype(np.int64).reshape(values.shape)

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left_bits, right_bits = self._left_bits, self._right_bits
        left = values >> right_bits
        right = values & _low_mask(right_bits)
        for key in self._round_keys:
            left, right = right, left ^ (_mix64(right ^ key) & _low_mask(left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << right_bits) | right


def _low_mask(bits: np.uint64) -> np.uint64:
    return np.uint64((1 << int(bits)) - 1)


def _mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`seeds.mix64` over an array; unsigned arithmetic wraps, which is meant."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=8)
def order(seed: int, epoch: int, length: int) -> Permutation:
    """The order of epoch `epoch` of a run over `length` samples.

    `order(seed, e, n)(numpy.arange(a, b))` are the samples at places a to b of epoch e.
    """
    return Permutation(derive(seed, Stream.ORDER, epoch), length)


BLOCK_LENGTH = 4096
"""Positions computed at once: the arithmetic of one costs as much as that of a thousand."""


@lru_cache(maxsize=16)
def _block(seed: int, number: int, length: int, shuffle: bool) -> tuple[list[int], list[int], list[int]]:
    """Epochs, indices and seeds at positions `[number · BLOCK_LENGTH, (number + 1) · BLOCK_LENGTH)`."""
    start = number * BLOCK_LENGTH
    epochs, indices = samples(seed, start, start + BLOCK_LENGTH, length, shuffle=shuffle)
    gamma = np.uint64(GOLDEN_GAMMA)
    state = _mix64((np.uint64(stream_state(seed, Stream.SAMPLE)) ^ epochs.astype(np.uint64)) + gamma)
    seeds = _mix64((state ^ indices.astype(np.uint64)) + gamma)
    return epochs.tolist(), indices.tolist(), seeds.tolist()


def sample_list(seed: int, start: int, stop: int, length: int, *, shuffle: bool = True) -> list[tuple[int, int, int]]:
    """`samples` as (epoch, index, seed of the sample), from blocks that are computed once: for spans that follow one
    another. The seed is `derive(seed, Stream.SAMPLE, epoch, index)`."""
    pairs: list[tuple[int, int, int]] = []
    while start < stop:
        number, offset = divmod(start, BLOCK_LENGTH)
        epochs, indices, seeds = _block(seed, number, length, shuffle)
        end = min(BLOCK_LENGTH, offset + stop - start)
        pairs += zip(epochs[offset:end], indices[offset:end], seeds[offset:end], strict=True)
        start += end - offset
    return pairs


def samples(seed: int, start: int, stop: int, length: int, *, shuffle: bool = True) -> tuple[Indices, Indices]:
    """Which samples the job consumes at sample positions `[start, stop)`.

    Args:
        seed: the run's seed.
        start: first sample position.
        stop: one past the last sample position.
        length: number of samples in the dataset, N. Position p is epoch `p // N`, place `p % N`.
        shuffle: False keeps the dataset's own order in every epoch.

    Returns:
        (epochs, indices): int64 arrays of shape `(stop - start,)`.
    """
    positions = np.arange(start, stop, dtype=np.int64)
    epochs, places = np.divmod(positions, length)
    if not shuffle:
        return epochs, places
    first, last = start // length, max(start, stop - 1) // length
    if first == last:
        return epochs, order(seed, first, length)(places)
    indices = np.empty_like(places)
    for epoch in range(first, last + 1):
        here = epochs == epoch
        indices[here] = order(seed, epoch, length)(places[here])
    return epochs, indices
