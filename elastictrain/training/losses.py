"""What a task's loss may return, and how it becomes a share of the step's mean.

A step's loss is `(Σ totals) / (Σ weights)` over all samples of the window. A microbatch that returns its mean counts
with its weight; one that returns `(total, weight)` says both. DDP averages gradients over W ranks, so each
microbatch's share is multiplied by W.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from elastictrain.errors import TaskError


def split_loss(value: Any, source: str) -> tuple[Tensor, Tensor | float | None]:
    """Checks what a loss or metric returned.

    Args:
        value: a scalar tensor, or (total, weight).
        source: who returned it, for messages.

    Returns:
        (mean, None), or (total, weight).

    Raises:
        TaskError: it is neither.
    """
    if isinstance(value, Tensor):
        return _scalar(value, source), None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor):
        total, weight = value
        if isinstance(weight, Tensor):
            return _scalar(total, source), _scalar(weight.detach(), f"{source}, weight")
        if isinstance(weight, int | float):
            return _scalar(total, source), float(weight)
    what = "None" if value is None else f"{type(value).__name__}"
    raise TaskError(
        f"{source} returned {what}, not a tensor",
        "Return a scalar tensor (the mean over the microbatch), or (total, weight) with the sum and its divisor.",
    )


def _scalar(tensor: Tensor, source: str) -> Tensor:
    if tensor.numel() != 1:
        raise TaskError(
            f"{source} returned a tensor of shape {tuple(tensor.shape)}, not a scalar",
            'Reduce it: reduction="mean", or return (loss.sum(), weight).',
        )
    return tensor if tensor.dim() == 0 else tensor.reshape(())
