"""Tasks that find the places where a resumed run could quietly go another way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 24


class Numbers(Dataset[Tensor]):
    """Draws nothing."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(8, dtype=torch.float32) * 0.1 + index


class Plain:
    """A few layers of odd sizes, so that sums over ranks depend on where an element lies in a bucket."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 37), nn.Tanh(), nn.Linear(37, 19), nn.Tanh(), nn.Linear(19, 1))

    def train_data(self) -> Numbers:
        return Numbers()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch) - batch.mean(dim=1, keepdim=True)).square().mean()


class RandomCollate(Plain):
    """Draws from every generator where a batch is made, and nowhere else."""

    def collate(self, samples: list[Tensor]) -> Tensor:
        noise = np.random.beta(0.4, 0.4) + random.random() + float(torch.rand(()))
        return torch.stack(samples) * (1 + 0.1 * noise)


class _Renormalised(nn.Module):
    """The embedding's weights are changed by every forward pass, though the optimizer trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LENGTH + 8, 256, max_norm=0.5)
        self.head = nn.Linear(256, 1)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.head(F.gelu(self.embed(batch[:, 0].long())))
        return out


class Renormalised(Plain):
    def model(self) -> nn.Module:
        return _Renormalised()


class OutsideModel(Plain):
    """The optimizer trains something that is not the model's."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(()))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), self.weight], lr=0.1)


class BytesFingerprint(Plain):
    def train_data(self) -> Numbers:
        data = Numbers()
        data.fingerprint = b"no text"  # type: ignore[attr-defined]
        return data


class Unkeepable(Plain):
    """Has state that no snapshot can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2, 3}}
