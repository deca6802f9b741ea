"""Small things told between ranks: integers, bytes, tensors of any dtype. Each is collective: all ranks call it.

With one rank they cost nothing and need no process group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.training.device import Place


def gather_ints(values: Sequence[int], place: Place) -> list[list[int]]:
    """One row per rank; every rank gives as many values."""
    if place.world_size == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.int64, device=place.device)
    rows = [torch.empty_like(mine) for _ in range(place.world_size)]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def gather_by_index(values: Tensor, first: int, count: int, place: Place) -> Tensor:
    """`count` rows in the order of their index, of which each rank has a run: this one `values`, from row `first`.

    A row is one rank's alone, and the others add zeros to it: exact, in whatever order. So what is summed up of the
    rows afterwards does not depend on the number of ranks.
    """
    table = values.new_zeros((count, *values.shape[1:]))
    table[first : first + len(values)] = values
    if place.world_size > 1:
        dist.all_reduce(table)
    return table


def broadcast_ints(values: Sequence[int], source: int, place: Place) -> list[int]:
    """The source's values on every rank; the others give as many, of any value."""
    if place.world_size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64, device=place.device)
    dist.broadcast(tensor, src=source)
    told: list[int] = tensor.tolist()
    return told


def broadcast_bytes(data: bytes, source: int, place: Place) -> bytes:
    """The source's bytes on every rank; what the others give is not looked at."""
    if place.world_size == 1:
        return data
    (size,) = broadcast_ints([len(data)], source, place)
    body = torch.zeros(size, dtype=torch.uint8, device=place.device)
    if place.rank == source:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(body, src=source)
    return bytes(body.cpu().numpy())


def broadcast_tensor(tensor: Tensor, source: int, place: Place) -> None:
    """Gives every rank the source's values, in place, bit for bit, whatever dtype, device and memory format."""
    if place.world_size == 1 or tensor.numel() == 0:
        return
    staged = tensor.to(place.device).contiguous()
    dist.broadcast(staged.reshape(-1).view(torch.uint8), src=source)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)
