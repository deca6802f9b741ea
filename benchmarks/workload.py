"""What all contenders train: model, data, optimizer, schedule. Knows torch only, so it runs in every environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import TensorDataset

NUM_FEATURES = 64
NUM_CLASSES = 10
ACCUMULATION_STEPS = 2
CLIP_NORM = 1.0
LEARNING_RATE = 1e-3

Tick = Callable[[], None]
"""Called by a contender once per optimizer step."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One contender's whole task.

    Args:
        name: small or compute-bound.
        width: units of a hidden layer.
        layers: number of hidden layers.
        micro_batch_size: samples per forward pass and rank.
        precision: fp32 or bf16.
        num_samples: size of the dataset.
        num_steps: optimizer steps to train.
    """

    name: str
    width: int
    layers: int
    micro_batch_size: int
    precision: str
    num_samples: int
    num_steps: int

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return cls(**json.loads(text))


def make_model(width: int, layers: int) -> nn.Module:
    """A perceptron: (batch, NUM_FEATURES) to logits (batch, NUM_CLASSES)."""
    hidden = [part for _ in range(layers) for part in (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(NUM_FEATURES, width), *hidden, nn.Linear(width, NUM_CLASSES))


def make_dataset(num_samples: int) -> TensorDataset:
    """(features, class) in memory, the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(NUM_CLASSES, (num_samples,), generator=generator))


def make_optimizer(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def make_scheduler(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, num_steps)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features, classes = batch
    return F.cross_entropy(model(features), classes)
