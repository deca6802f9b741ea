"""Counter-based randomness: a seed is a function of where we are, never a state that could be lost.

Every random draw of a run belongs to a place: the model's initialisation, microbatch `m` of step `s`,
sample `i` of epoch `e`. `derive` turns the run's seed and such a place into a 64-bit seed by the finaliser
of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), absorbed
once per word. Nearby places give unrelated seeds; the same place gives the same seed on every rank, at every
world size, in every loader worker and after every restart.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

_MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class Stream(IntEnum):
    """What a seed is for. The numbers are part of the run's identity: never renumber them."""

    ORDER = 1
    """(epoch,): the permutation of the samples."""
    MODEL = 2
    """(): model construction and initialisation."""
    MICROBATCH = 3
    """(step, microbatch): dropout and whatever else the forward pass draws."""
    SAMPLE = 4
    """(epoch, index): augmentation inside `dataset[index]`."""
    EVAL_BATCH = 5
    """(batch,): an evaluation batch, the same at every evaluation."""
    EVAL_SAMPLE = 6
    """(index,): a sample read for evaluation."""
    COLLATE = 7
    """(position,): making a batch of the samples from this sample position on."""
    EVAL_COLLATE = 8
    """(index,): the same for evaluation, from this index on."""


def mix64(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=64)
def stream_state(seed: int, stream: Stream) -> int:
    """What all seeds of a stream have in common: `derive` absorbs the place into it, word by word."""
    state = mix64((seed + GOLDEN_GAMMA) & _MASK)
    return mix64((state ^ stream) + GOLDEN_GAMMA & _MASK)


def derive(seed: int, stream: Stream, *place: int) -> int:
    """The 64-bit seed of one place in a run.

    Args:
        seed: the run's seed, any integer.
        stream: what the seed is for.
        place: the coordinates that `Stream` names, non-negative integers.
    """
    state = stream_state(seed, stream)
    for word in place:
        state = mix64((state ^ (word & _MASK)) + GOLDEN_GAMMA & _MASK)
    return state
