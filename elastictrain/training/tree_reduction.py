"""Reduces gradients along the one tree of `core.reduction_tree`: bitwise the same sums at every world size.

In place of DistributedDataParallel. Each microbatch's gradient is taken out of `.grad` as it is and added to the
partial sums of this rank; at the end of the window the ranks exchange them:

    all-to-all (each rank gets its shard of every rank's partial sums) → the rest of the tree, over the shard →
      all-gather of the shards

Where the microbatches and the world are powers of two each rank has one partial sum, and this moves the bytes of a ring
all-reduce (reduce-scatter and all-gather: Rabenseifner, *Optimization of Collective Reduction Operations*, ICCS 2004).
All that goes over the wire is copied, never added up on the way: the backend's order of summation plays no part.

A parameter without a gradient in a microbatch counts as +0.0 there, on whichever rank it is; one without a gradient in
the whole window has none afterwards, so that the optimizer leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor, nn

from elastictrain.core.reduction_tree import Node, Partials, most_waiting, partition
from elastictrain.core.window import split
from elastictrain.errors import TaskError
from elastictrain.training.device import Place
from elastictrain.training.heap import keep_freed_memory
from elastictrain.training.rank_independence import StateWatch, check_rank_independent

_ALIGNMENT_BYTES = 64
"""Of every parameter's part and of every shard: as torch aligns tensors of their own."""


@dataclass(slots=True)
class _Sum:
    """A sum of gradients: one flat tensor per dtype, and every parameter's part of it in the parameter's own form."""

    flats: list[Tensor]
    views: list[Tensor]


@dataclass(slots=True)
class _Lent:
    """A microbatch's gradients as autograd made them; None where a parameter got none. Never written to: two of them
    may share memory."""

    gradients: list[Tensor | None]


class TreeReduction:
    """Takes the microbatches' gradients, and gives the window's.

    Args:
        module: whose trainable parameters are meant.
        place: this rank.
        allow_unused: parameters may get no gradient in some microbatches; else that is an error.

    Raises:
        ConfigError: something in the module depends on which rank computes what.
    """

    def __init__(self, module: nn.Module, place: Place, *, allow_unused: bool) -> None:
        check_rank_independent(module)
        if place.device.type == "cpu":
            keep_freed_memory()
        self._place = place
        self._allow_unused = allow_unused
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._layout = _Layout(self._parameters, place)
        self._state = StateWatch(module)
        self._free: list[_Sum] = []
        self._lent_out: _Sum | None = None
        self._used = [False] * len(named)
        self._count = 0
        self._partials: Partials[_Sum | _Lent] = Partials(0, self._add, self._keep)

    def facts(self, count: int) -> dict[str, str | int]:
        """For the log: what windows of `count` microbatches cost this rank in memory. One copy of the gradient for each
        partial sum that waits at a time, and one that is being added."""
        mine = split(count, self._place.rank, self._place.world_size)
        return {"reduction": "tree", "gradient_copies": most_waiting(*mine, count) + 1}

    def begin(self, count: int) -> None:
        """A window of `count` microbatches begins."""
        if self._lent_out is not None:
            self._free.append(self._lent_out)
            self._lent_out = None
        self._count = count
        self._used = [False] * len(self._parameters)
        self._partials = Partials(count, self._add, self._keep)
        self._state.begin()

    @torch.no_grad()
    def push(self, index: int) -> None:
        """Takes the gradients of microbatch `index` out of the parameters. To be called in the microbatches' order.

        Raises:
            TaskError: a parameter got none and that is not allowed, or a sparse one; or the model was changed.
        """
        self._state.check(index)
        gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._check(gradients, index)
        self._partials.push(Node(0, index), _Lent(gradients))

    def _check(self, gradients: list[Tensor | None], index: int) -> None:
        missing = []
        for number, (name, gradient) in enumerate(zip(self._names, gradients, strict=True)):
            if gradient is None:
                missing.append(name)
                continue
            self._used[number] = True
            if gradient.layout is not torch.strided:
                raise TaskError(
                    f'the gradient of {name} is sparse, and elastic.reduction = "tree" sums dense ones only',
                    "Make the layer with sparse=False.",
                )
        if missing and not self._allow_unused:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise TaskError(
                f"{', '.join(missing[:3])}{more} got no gradient in microbatch {index} of the window",
                "Set ddp.find_unused_parameters = true for a model that does not use all its parameters in every "
                "microbatch, or freeze what is not trained (requires_grad_(False)).",
            )

    @torch.no_grad()
    def reduce(self) -> None:
        """Leaves the window's gradient in the parameters, the same on every rank. Collective."""
        mine = [value for value in self._partials.values if isinstance(value, _Sum)]
        world_size = self._place.world_size
        used = self._used if self._allow_unused else [True] * len(self._used)  # a rank may have had no microbatch
        total = mine[0] if mine else self._take()
        if world_size > 1:
            if self._allow_unused:
                flags = torch.tensor(used, dtype=torch.int32, device=self._place.device)
                dist.all_reduce(flags, op=dist.ReduceOp.MAX)
                used = flags.bool().tolist()
            with _unfilled():
                for group in range(len(self._layout.sizes)):
                    shard = self._reduce_shard([value.flats[group] for value in mine], total.flats[group])
                    # As bytes: whatever dtype, backends copy it.
                    gathered = _bytes(total.flats[group]).chunk(world_size)
                    dist.all_gather(list(gathered), _bytes(shard))
        for parameter, view, is_used in zip(self._parameters, total.views, used, strict=True):
            parameter.grad = view if is_used else None
        self._free += mine[1:]
        self._lent_out = total  # to the parameters, until the next window begins

    def _reduce_shard(self, mine: list[Tensor], like: Tensor) -> Tensor:
        """This rank's shard of the window's sum over one flat tensor.

        In round j every rank that has a j-th node gives it; the shards come out of the flat tensor without packing.
        """
        world_size = self._place.world_size
        nodes = partition(self._count, world_size)
        shard_size = like.numel() // world_size
        shard_bytes = shard_size * like.element_size()
        pieces: dict[Node, Tensor] = {}
        for turn in range(max(map(len, nodes))):
            givers = [rank for rank in range(world_size) if turn < len(nodes[rank])]
            received = like.new_empty(len(givers) * shard_size)
            gives = turn < len(mine)
            dist.all_to_all_single(
                _bytes(received),
                _bytes(mine[turn] if gives else like[:0]),
                output_split_sizes=[shard_bytes if rank in givers else 0 for rank in range(world_size)],
                input_split_sizes=[shard_bytes if gives else 0] * world_size,
            )
            for rank, piece in zip(givers, received.split(shard_size), strict=True):
                pieces[nodes[rank][turn]] = piece
        together: Partials[Tensor] = Partials(self._count, lambda left, right: left.add_(right))
        for rank_nodes in nodes:
            for node in rank_nodes:
                together.push(node, pieces[node])
        (shard,) = together.values
        return shard

    # ---- the partial sums of this rank

    def _add(self, left: _Sum | _Lent, right: _Sum | _Lent) -> _Sum | _Lent:
        assert isinstance(left, _Sum)  # what is lent is kept, or is the right half
        if isinstance(right, _Sum):
            torch._foreach_add_(left.flats, right.flats)
            self._free.append(right)
            return left
        there, gradients, absent = _by_presence(left.views, right.gradients)
        if there:
            torch._foreach_add_(there, gradients)
        if absent:
            torch._foreach_add_(absent, 0.0)  # not nothing: -0.0 becomes +0.0, as wherever the zeros are written out
        return left

    def _keep(self, value: _Sum | _Lent) -> _Sum | _Lent:
        if isinstance(value, _Sum):
            return value
        kept = self._take()
        there, gradients, absent = _by_presence(kept.views, value.gradients)
        if there:
            torch._foreach_copy_(there, gradients)
        if absent:
            torch._foreach_zero_(absent)
        return kept

    def _take(self) -> _Sum:
        return self._free.pop() if self._free else self._layout.new()


def _by_presence(
    views: list[Tensor], gradients: list[Tensor | None]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Views with their gradients, and views without."""
    there, present, absent = [], [], []
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            absent.append(view)
        else:
            there.append(view)
            present.append(gradient)
    return there, present, absent


@contextmanager
def _unfilled() -> Iterator[None]:
    """Where memory is written before it is read, here and in the backend: with deterministic kernels torch would fill
    it first, which takes as long as the reduction itself (torch.utils.deterministic)."""
    settings: Any = torch.utils.deterministic  # a module with a property, which mypy does not know
    was = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = was


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


class _Layout:
    """Where each parameter's gradient lies in the flat tensors: one per dtype, in whole shards.

    A parameter's place does not depend on the number of ranks, only the padding at the end does.

    Args:
        parameters: in the model's order.
        place: how many shards, and on which device.
    """

    def __init__(self, parameters: list[nn.Parameter], place: Place) -> None:
        self._device = place.device
        self._parameters = parameters
        # The strides that torch gives a gradient: the parameter's, where it is dense.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self._offsets: list[int] = []
        ends: dict[torch.dtype, int] = {}
        for parameter in parameters:
            offset = ends.setdefault(parameter.dtype, 0)
            self._offsets.append(offset)
            alignment = _ALIGNMENT_BYTES // parameter.element_size()
            ends[parameter.dtype] = offset + _up(parameter.numel(), alignment)
        self.sizes = {
            dtype: _up(end, place.world_size * _ALIGNMENT_BYTES // dtype.itemsize) for dtype, end in ends.items()
        }

    def new(self) -> _Sum:
        """A sum of zeros. What lies between the parameters stays zero for ever."""
        flats = {dtype: torch.zeros(size, dtype=dtype, device=self._device) for dtype, size in self.sizes.items()}
        views = [
            flats[p.dtype].as_strided(p.shape, stride, offset)
            for p, stride, offset in zip(self._parameters, self._strides, self._offsets, strict=True)
        ]
        return _Sum(list(flats.values()), views)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
