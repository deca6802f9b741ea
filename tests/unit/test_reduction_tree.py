"""The reduction tree: any partition of any window gives, bit for bit, the sum of one rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastictrain.core.reduction_tree import Node, Partials, decompose, most_waiting, partition
from elastictrain.core.window import split

WIDTH = 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def add(left: Tensor, right: Tensor) -> Tensor:
    return left + right


def pushed(leaves: list[Tensor], first: int, last: int) -> Partials[Tensor]:
    """What a rank has once it has pushed the microbatches `[first, last)`."""
    partials = Partials(len(leaves), add)
    for index in range(first, last):
        partials.push(Node(0, index), leaves[index])
    return partials


def over_ranks(leaves: list[Tensor], bounds: list[tuple[int, int]]) -> Tensor:
    """The window's sum where each rank adds up its own run, and the ranks' nodes are put together."""
    together = Partials(len(leaves), add)
    for first, last in bounds:
        mine = pushed(leaves, first, last)
        assert mine.nodes == decompose(first, last, len(leaves))
        for node, value in zip(mine.nodes, mine.values, strict=True):
            together.push(node, value)
    (total,) = together.values
    return total


def by_definition(leaves: list[Tensor], node: Node) -> Tensor:
    """The value of a node, from its definition alone."""
    if node.level == 0:
        return leaves[node.place]
    left, right = Node(node.level - 1, 2 * node.place), Node(node.level - 1, 2 * node.place + 1)
    if right.first >= len(leaves):
        return by_definition(leaves, left)
    return by_definition(leaves, left) + by_definition(leaves, right)


def bits(value: Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


@st.composite
def windows(draw: st.DrawFn) -> list[Tensor]:
    """The gradients of a window's microbatches, each scaled by a weight of its own. Zeros of both signs among them."""
    count = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(DTYPES))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = generator.integers(0, 50, count) / generator.integers(50, 2000)
    values = generator.standard_normal((count, WIDTH)) * 10.0 ** generator.integers(-3, 4, (count, WIDTH))
    values[generator.random((count, WIDTH)) < 0.2] = 0.0
    values *= np.where(generator.random((count, WIDTH)) < 0.5, -1.0, 1.0)
    return [torch.from_numpy(value * weight).to(dtype) for value, weight in zip(values, weights, strict=True)]


@given(windows(), st.data())
def test_any_partition_gives_the_sum_of_one_rank(leaves: list[Tensor], data: st.DataObject) -> None:
    count = len(leaves)
    edges = sorted(data.draw(st.lists(st.integers(0, count), max_size=8)))
    bounds = list(zip([0, *edges], [*edges, count], strict=True))  # equal edges: ranks without work
    expected = by_definition(leaves, Node((count - 1).bit_length(), 0))
    assert bits(over_ranks(leaves, [(0, count)])) == bits(expected)
    assert bits(over_ranks(leaves, bounds)) == bits(expected)


@given(windows(), st.integers(1, 60))
def test_any_world_size_gives_the_sum_of_one_rank(leaves: list[Tensor], world_size: int) -> None:
    count = len(leaves)
    bounds = [split(count, rank, world_size) for rank in range(world_size)]
    assert bits(over_ranks(leaves, bounds)) == bits(over_ranks(leaves, [(0, count)]))
    assert partition(count, world_size) == tuple(decompose(*run, count) for run in bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_ranks_would_give_other_bits(dtype: torch.dtype) -> None:
    """What the tree is for: rank by rank, as an ordinary reduction adds, the sum depends on the world size."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(200, generator=generator, dtype=torch.float64).to(dtype) for _ in range(7)]

    def rank_by_rank(world_size: int) -> bytes:
        shares = [split(7, rank, world_size) for rank in range(world_size)]
        return bits(sum(sum(leaves[first + 1 : last], leaves[first]) for first, last in shares))  # type: ignore[arg-type]

    assert len({rank_by_rank(world_size) for world_size in (1, 2, 3)}) == 3
    assert len({bits(over_ranks(leaves, [split(7, r, w) for r in range(w)])) for w in (1, 2, 3, 7)}) == 1


def test_a_negative_zero_alone_stays_one() -> None:
    """A node without a right half is its left half, not that plus zero: -0.0 + 0.0 would be +0.0."""
    leaves = [torch.tensor([-0.0]) for _ in range(5)]
    assert math.copysign(1.0, over_ranks(leaves, [(0, 2), (2, 5)]).item()) == -1.0


@given(st.integers(1, 300), st.data())
def test_a_run_is_covered_by_few_nodes(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    nodes = decompose(first, last, count)
    covered = [index for node in nodes for index in range(node.first, min(node.stop, count))]
    assert covered == list(range(first, last))
    bound = max(1, 2 * int(math.log2(last - first)))
    assert len(nodes) <= bound
    assert len(nodes) <= most_waiting(first, last, count) <= bound


@pytest.mark.parametrize("exponent", range(6))
def test_a_run_that_is_a_node_keeps_the_logarithm_of_copies(exponent: int) -> None:
    size = 2**exponent
    for place in range(3):
        first = place * size
        assert decompose(first, first + size, 4 * size) == (Node(exponent, place),)
        # With the gradient that is being added: log2 of the microbatches, and one.
        assert most_waiting(first, first + size, 4 * size) == max(1, exponent)


def test_what_is_pushed_out_of_order_or_beyond_the_window_is_refused() -> None:
    partials = Partials(4, add)
    partials.push(Node(0, 2), torch.zeros(1))
    for index in (1, 2, 4):
        with pytest.raises(ValueError, match=f"microbatch {index} cannot follow 3 of 4"):
            partials.push(Node(0, index), torch.zeros(1))


def test_only_what_waits_is_kept() -> None:
    """A value that is added at once need not be copied."""
    kept: list[int] = []

    def keep(value: int) -> int:
        kept.append(value)
        return value

    partials = Partials(8, lambda left, right: left + right, keep)
    for index in range(8):
        partials.push(Node(0, index), index)
    assert kept == [0, 2, 4, 6]
    assert partials.values == [28]
