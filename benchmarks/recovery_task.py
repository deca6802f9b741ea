"""The model and data of the recovery benchmarks, for our task and for the script of the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

MICRO_BATCH_SIZE = 32


class Mlp(nn.Module):
    """A perceptron of a million parameters: 4 MB, a step of some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 640), nn.ReLU(), nn.Linear(640, 10)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(8192, 256, generator=generator), torch.randint(0, 10, (8192,), generator=generator)
    )


class RecoveryTask:
    """The same for elastictrain."""

    def model(self) -> nn.Module:
        return Mlp()

    def train_data(self) -> TensorDataset:
        return dataset()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
