"""Finds what would make a microbatch's gradient depend on the rank that computes it, or on what that rank did before.

With `elastic.reduction = "tree"` such a thing is refused, with its name: most of it before the first step, the rest
where it happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastictrain.errors import ConfigError, TaskError


def check_rank_independent(module: nn.Module) -> None:
    """Looks for layers that are known to break the promise.

    Raises:
        ConfigError: there is one: running statistics, synchronised statistics, sparse gradients.
    """
    for name, layer in module.named_modules():
        who = f'layer "{name}"' if name else "the model"
        what = f'elastic.reduction = "tree", but {who} is a {type(layer).__name__}'
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"{what}: its statistics are over the microbatches that run at the same time, so they change with the "
                "number of ranks",
                "Normalise by group or layer, or use the default reduction.",
            )
        if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.training:
            raise ConfigError(
                f"{what} with running statistics: each rank would keep those of its own microbatches, so they change "
                "with the number of ranks",
                "Normalise by group or layer, make it with track_running_stats=False, or freeze it: call its eval() in "
                "model().",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ConfigError(f"{what} with sparse gradients: the tree sums dense ones", "Make it with sparse=False.")


class StateWatch:
    """Notices a forward pass that changes the model: what the next microbatch computes would depend on what its rank
    has computed before. Buffers that are not kept (`persistent=False`) are taken for caches.

    Args:
        module: whose parameters and buffers are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[tuple[str, dict[str, Any], str]] = []
        for prefix, layer in module.named_modules():
            kept = [name for name in layer._buffers if name not in layer._non_persistent_buffers_set]
            for tensors, names in ((layer._parameters, list(layer._parameters)), (layer._buffers, kept)):
                self._holders += [(f"{prefix}.{name}" if prefix else name, tensors, name) for name in names]
        self._before: list[tuple[Tensor | None, int]] = []

    def begin(self) -> None:
        """What the model is now, it must stay."""
        self._before = [_state(tensors, name) for _, tensors, name in self._holders]

    def check(self, index: int) -> None:
        """Raises TaskError if the model was changed since; by microbatch `index`, if it was not before it."""
        for (full_name, tensors, name), (tensor, version) in zip(self._holders, self._before, strict=True):
            now, version_now = _state(tensors, name)
            if now is not tensor or version_now != version:
                raise TaskError(
                    f'elastic.reduction = "tree", but microbatch {index} of the window changed {full_name} of the '
                    "model: the next one would depend on which rank computes it",
                    "A forward pass must leave the model's parameters and buffers alone. Register a mere cache with "
                    "persistent=False.",
                )


def _state(tensors: dict[str, Any], name: str) -> tuple[Tensor | None, int]:
    """A tensor and its version, which whatever writes into it in place counts up."""
    tensor: Tensor | None = tensors.get(name)
    return tensor, 0 if tensor is None else tensor._version


@contextmanager
def naming_nondeterministic_operations() -> Iterator[None]:
    """Turns torch's refusal of an operation without a deterministic kernel into an error of the task's.

    Raises:
        TaskError: with the operation's name.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        # torch/csrc, Context::alertNotDeterministic and alertCuBLASConfigNotDeterministic.
        if "torch.use_deterministic_algorithms" not in text:
            raise
        operation = text.split(" does not have a deterministic implementation")[0].splitlines()[0]
        raise TaskError(
            f'elastic.reduction = "tree" needs deterministic operations, and the task uses {operation}',
            "Replace it: https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html lists "
            "them. Or use the default reduction.",
        ) from error
