"""The data order: a permutation, uniform, and as cheap for 10**12 samples as for ten."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.core.order import MAX_LENGTH, Permutation, order, samples
from elastictrain.core.seeds import Stream, derive, mix64

SEEDS = st.integers(0, 2**64 - 1)


@given(seed=SEEDS, length=st.integers(1, 3000))
def test_it_is_a_permutation(seed: int, length: int) -> None:
    indices = Permutation(seed, length)(np.arange(length))
    assert sorted(indices.tolist()) == list(range(length))


@given(seed=SEEDS, length=st.integers(1, MAX_LENGTH), data=st.data())
def test_a_place_maps_to_the_same_sample_whatever_it_is_asked_with(seed: int, length: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    permutation = Permutation(seed, length)
    together = permutation(np.array(places)).tolist()
    assert together == [int(permutation(np.array([place]))[0]) for place in places]
    assert all(0 <= index < length for index in together)
    assert len(set(together)) == len(set(places)), "two places of an epoch hold the same sample"


def test_all_orders_of_four_samples_are_equally_frequent() -> None:
    draws = 7_200
    counts = Counter(tuple(order(seed, 0, 4)(np.arange(4)).tolist()) for seed in range(draws))
    assert set(counts) == set(itertools.permutations(range(4))), "some orders never come"
    expected = draws / 24
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 49.7, "chi-square with 23 degrees of freedom exceeds this once in a thousand"


@pytest.mark.parametrize("length", [5, 16, 33])
def test_each_sample_comes_first_equally_often(length: int) -> None:
    draws = 100 * length
    counts = np.bincount([int(order(seed, 3, length)(np.array([0]))[0]) for seed in range(draws)], minlength=length)
    chi_square = float(((counts - 100) ** 2 / 100).sum())
    degrees = length - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5, counts


def test_the_order_of_an_epoch_is_not_that_of_another_epoch_or_seed() -> None:
    places = np.arange(1000)
    base = order(1, 0, 1000)(places)
    assert (base == order(1, 1, 1000)(places)).sum() < 20, "epochs must not repeat one order"
    assert (base == order(2, 0, 1000)(places)).sum() < 20, "seeds must not share one order"
    assert (base == places).sum() < 20


def test_a_trillion_samples_take_no_memory_of_their_own() -> None:
    length = 10**12
    order.cache_clear()
    tracemalloc.start()
    epochs, indices = samples(5, length - 2, length + 2, length)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert epochs.tolist() == [0, 0, 1, 1]
    assert all(0 <= index < length for index in indices.tolist())
    assert peak_bytes < 1 << 20, f"a shuffled list would take 8 TB; this took {peak_bytes} bytes"


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1])
def test_lengths_that_cannot_be(length: int) -> None:
    with pytest.raises(ValueError, match="elements"):
        Permutation(0, length)


@settings(max_examples=30)
@given(seed=SEEDS, length=st.integers(1, 200), start=st.integers(0, 2000), count=st.integers(0, 100))
def test_samples_of_a_range_are_those_of_its_positions(seed: int, length: int, start: int, count: int) -> None:
    epochs, indices = samples(seed, start, start + count, length)
    for offset, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
        place = (start + offset) % length
        assert epoch == (start + offset) // length
        assert index == int(order(seed, epoch, length)(np.array([place]))[0])


def test_without_shuffling_samples_come_as_they_are() -> None:
    epochs, indices = samples(7, 3, 9, 5, shuffle=False)
    assert indices.tolist() == [3, 4, 0, 1, 2, 3]
    assert epochs.tolist() == [0, 0, 1, 1, 1, 1]


def test_streams_of_one_seed_are_distinct() -> None:
    seeds = {derive(0, stream, a, b) for stream in Stream for a in range(50) for b in range(50)}
    assert len(seeds) == len(Stream) * 50 * 50, "two places of a run share a seed"
    assert derive(0, Stream.MICROBATCH, 1, 2) != derive(0, Stream.MICROBATCH, 2, 1), "(step, microbatch) is no sum"
    assert derive(0, Stream.MODEL) != derive(1, Stream.MODEL)


@given(seed=SEEDS, stream=st.sampled_from(Stream), place=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
def test_a_seed_is_a_64_bit_function_of_its_place(seed: int, stream: Stream, place: tuple[int, int]) -> None:
    assert derive(seed, stream, *place) == derive(seed, stream, *place)
    assert 0 <= derive(seed, stream, *place) < 2**64


def test_each_input_bit_of_the_mixer_reaches_about_half_of_the_output() -> None:
    for bit in range(64):
        flipped = [(mix64(value) ^ mix64(value ^ (1 << bit))).bit_count() for value in range(1, 200)]
        assert 28 < sum(flipped) / len(flipped) < 36, f"bit {bit}"


def test_seeds_and_orders_never_change() -> None:
    """They are the identity of every run that is under way: another value is another data order on resume."""
    assert derive(0, Stream.SAMPLE, 1, 2) == 10219387197042190808
    assert order(7, 0, 10)(np.arange(10)).tolist() == [8, 3, 6, 4, 1, 9, 5, 7, 0, 2]
