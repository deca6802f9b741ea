"""The one tree along which a window's microbatches are summed, whoever computed them.

Floating-point addition is not associative: a sum depends, in its last bits, on where the brackets stand. Here they
stand at the same places at every world size. Node `(level, place)` covers the microbatches
`[place · 2^level, (place + 1) · 2^level)`, as far as the window has them; its value is the left half's plus the right
half's, rounded once, or the left half's alone where the window ends before the right one.

A rank has a contiguous run of microbatches. It can add up what lies wholly within its run: the largest nodes that fit.
Their values are what the ranks exchange; put together in order, they are summed by the same rule to the root.

The carries are those of a binary counter, as in pairwise summation (Higham, *The Accuracy of Floating Point
Summation*, SIAM J. Sci. Comput. 14, 1993), whose error grows with log2 of the count rather than with the count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from elastictrain.core.window import split

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree: the microbatches `[place · 2^level, (place + 1) · 2^level)`, cut at the window's end."""

    level: int
    place: int

    @property
    def first(self) -> int:
        """The first microbatch it covers."""
        return self.place << self.level

    @property
    def stop(self) -> int:
        """The first microbatch behind it, if the window is long enough."""
        return (self.place + 1) << self.level


class Partials(Generic[T]):
    """Sums values that arrive in the order of their microbatches, each as soon as both halves of a node are there.

    Args:
        count: microbatches of the window, M.
        add: gives left + right; may do so in place.
        keep: called with a value that was pushed and waits for its other half: the place to copy what is only lent.
    """

    def __init__(self, count: int, add: Callable[[T, T], T], keep: Callable[[T], T] = lambda value: value) -> None:
        self._count = count
        self._add = add
        self._keep = keep
        self._waiting: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Takes the value of the next node.

        Raises:
            ValueError: it does not lie behind what was pushed before, or not within the window.
        """
        end = self._waiting[-1][0].stop if self._waiting else 0
        if not end <= node.first < self._count:
            raise ValueError(f"microbatch {node.first} cannot follow {end} of {self._count}")
        is_lent = True
        while True:
            if node.place % 2 == 0:
                # Nothing to the right of it within the window: the node above has the same value.
                if node.place == 0 or node.stop < self._count:
                    break
            elif self._waiting and self._waiting[-1][0] == Node(node.level, node.place - 1):
                value = self._add(self._waiting.pop()[1], value)
                is_lent = False
            else:
                break
            node = Node(node.level + 1, node.place // 2)
        self._waiting.append((node, self._keep(value) if is_lent else value))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes whose values wait for others, in order."""
        return tuple(node for node, _ in self._waiting)

    @property
    def values(self) -> list[T]:
        """Their values. One, once all of the window was pushed."""
        return [value for _, value in self._waiting]


def decompose(first: int, last: int, count: int) -> tuple[Node, ...]:
    """The largest nodes within the run `[first, last)` of a window of `count` microbatches, in order: what is left
    waiting when a rank has pushed its run. At most `max(1, 2 · floor(log2(last - first)))`, one where the run is
    itself a node."""

    def within(node: Node) -> Iterator[Node]:
        stop = min(node.stop, count)
        if stop <= first or last <= node.first:
            return
        if first <= node.first and stop <= last:
            yield node
            return
        for place in (2 * node.place, 2 * node.place + 1):
            yield from within(Node(node.level - 1, place))

    if first >= last:
        return ()
    return tuple(within(Node((count - 1).bit_length(), 0)))


@lru_cache(maxsize=64)
def partition(count: int, world_size: int) -> tuple[tuple[Node, ...], ...]:
    """What each rank has to give to a window's sum: the nodes of its share (`Window.share`), none for an empty one."""
    return tuple(decompose(*split(count, rank, world_size), count) for rank in range(world_size))


def most_waiting(first: int, last: int, count: int) -> int:
    """The most values that wait at a time while the run `[first, last)` is pushed: copies of the gradient in memory."""
    partials: Partials[None] = Partials(count, lambda _left, _right: None)
    most = 0
    for index in range(first, last):
        partials.push(Node(0, index), None)
        most = max(most, len(partials.nodes))
    return most
