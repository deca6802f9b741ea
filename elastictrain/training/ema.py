"""An exponential moving average of the weights.

`average ← decay · average + (1 − decay) · weight` after every applied update (Polyak and Juditsky, *Acceleration of
Stochastic Approximation by Averaging*, 1992; used as in Tarvainen and Valpola, 2017).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """The averaged weights of a model.

    Args:
        module: the model; its trainable parameters are averaged.
        decay: in [0, 1).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.averages: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the present weights."""
        torch._foreach_lerp_(
            list(self.averages.values()), [p.detach() for p in self._parameters.values()], 1.0 - self.decay
        )

    @torch.no_grad()
    def restart(self, names: Iterable[str]) -> None:
        """The averages of these begin anew from the present weights."""
        for name in names:
            self.averages[name].copy_(self._parameters[name])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model holds the averages inside, and exactly its own weights again afterwards."""
        kept = [p.detach().clone() for p in self._parameters.values()]
        with torch.no_grad():
            for parameter, average in zip(self._parameters.values(), self.averages.values(), strict=True):
                parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._parameters.values(), kept, strict=True):
                    parameter.copy_(value)
