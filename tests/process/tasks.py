"""Tiny tasks that write down what they see.

Each rank appends to `seen-<rank>.jsonl` in `RECORD_DIR`: every microbatch (its samples, what the generators drew),
every gradient an optimizer was given, every set of weights it left. JSON keeps a float to the last bit.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch.utils.data import Dataset


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def record(kind: str, **fields: Any) -> None:
    """Appends one line to this rank's file."""
    folder = os.environ.get("RECORD_DIR")
    if folder:
        with (Path(folder) / f"seen-{rank()}.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


class Samples(Dataset[dict[str, Any]]):
    """Sample i: three features and a target that are functions of i, and what the generators drew when it was read."""

    def __init__(self, length: int, *, shape: tuple[int, ...] = (3,)) -> None:
        generator = torch.Generator().manual_seed(99)
        self._x = torch.randn(length, *shape, generator=generator)
        self._y = torch.randn(length, generator=generator)

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "x": self._x[index],
            "y": self._y[index],
            "noise": torch.rand(2, dtype=torch.float64),
            "draws": torch.tensor([random.random(), np.random.random()], dtype=torch.float64),
        }


class Branches(nn.Module):
    """Two layers, of which a batch uses the one its first sample says: by turns, some parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.common = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        layer = self.even if int(index[0]) % 2 == 0 else self.odd
        out: Tensor = layer(x) + self.common(x)
        return out


def make_model(kind: str) -> nn.Module:
    match kind:
        case "linear":
            return nn.Linear(3, 1)
        case "mlp":
            return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        case "dropout":
            return nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 1))
        case "batchnorm":
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        case "conv":
            return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
        case "branches":
            return Branches()
    raise ValueError(kind)


class Regression:
    """Least squares on `Samples`.

    Args:
        length: number of samples.
        model: which of `make_model`.
        optimizer: "sgd" (the step is lr times the gradient) or "adamw".
        implementation: "fused", "foreach" or "for-loop".
        lr: learning rate.
        gamma: of an ExponentialLR; None for none.
        step_size: of a StepLR with factor 0.1; None for none.
        infinite: samples that make the loss infinite.
        eval_length: samples to evaluate; 0 for none. Also reports the state of the optimizer and the scheduler.
        rank_bias: adds the rank to a weight, which no model may do.
    """

    def __init__(
        self,
        length: int = 16,
        model: str = "linear",
        optimizer: str = "sgd",
        implementation: str = "for-loop",
        lr: float = 0.1,
        gamma: float | None = None,
        step_size: int | None = None,
        infinite: tuple[int, ...] = (),
        eval_length: int = 0,
        rank_bias: bool = False,
        raise_on_rank: int | None = None,
    ) -> None:
        self.length, self.kind, self.lr, self.gamma, self.step_size = length, model, lr, gamma, step_size
        self.optimizer_name, self.implementation = optimizer, implementation
        self.infinite = torch.tensor(list(infinite), dtype=torch.int64)
        self.eval_length = eval_length
        self.rank_bias = rank_bias
        self.raise_on_rank = raise_on_rank
        self.made: list[Any] = []

    def model(self) -> nn.Module:
        model = make_model(self.kind)
        if self.rank_bias:
            with torch.no_grad():
                next(model.parameters()).add_(rank())
        return model

    def train_data(self) -> Samples:
        return Samples(self.length, shape=(2, 4, 4) if self.kind == "conv" else (3,))

    def eval_data(self) -> Samples | None:
        if not self.eval_length:
            return None
        return Samples(self.eval_length, shape=(2, 4, 4) if self.kind == "conv" else (3,))

    def optimizer(self, model: nn.Module) -> Optimizer:
        options: dict[str, Any] = {
            "fused": self.implementation == "fused",
            "foreach": self.implementation == "foreach",
        }
        optimizer: Optimizer
        if self.optimizer_name == "sgd":
            optimizer = SGD(model.parameters(), lr=self.lr, **options)
        else:
            optimizer = AdamW(model.parameters(), lr=self.lr, **options)
        self.made.append(optimizer)

        def before(*_: Any) -> None:
            gradients = {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}
            record("gradients", gradients=gradients)

        def after(*_: Any) -> None:
            record("weights", weights={n: p.tolist() for n, p in model.named_parameters()})

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
        scheduler: LRScheduler | None = None
        if self.gamma is not None:
            scheduler = ExponentialLR(optimizer, self.gamma)
        if self.step_size is not None:
            scheduler = StepLR(optimizer, self.step_size, 0.1)
        self.made.append(scheduler)
        return scheduler

    def _predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        prediction: Tensor = model(batch["x"], batch["index"]) if self.kind == "branches" else model(batch["x"])
        return prediction.squeeze(1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if self.raise_on_rank == rank():
            raise RuntimeError(f"rank {rank()} has had enough")
        prediction = self._predict(model, batch)
        record(
            "microbatch",
            indices=batch["index"].tolist(),
            noise=batch["noise"].tolist(),
            draws=batch["draws"].tolist(),
            drawn=[torch.rand((), dtype=torch.float64).item(), random.random(), np.random.random()],
            dtype=str(prediction.dtype),
            parameter_dtype=str(next(model.parameters()).dtype),
            wrapper=type(model).__name__,
        )
        loss = F.mse_loss(prediction.float(), batch["y"])
        if bool(torch.isin(batch["index"], self.infinite).any()):
            loss = loss * float("inf")
        return loss

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        record("evaluated", indices=batch["index"].tolist(), training=model.training)
        optimizer, scheduler = self.made
        values: dict[str, Any] = {"index": batch["index"].double().mean()}
        values["lr"] = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
        values["loss"] = F.mse_loss(self._predict(model, batch).float(), batch["y"])
        states = list(optimizer.state.values())
        if states and "step" in states[0]:
            values["optimizer_step"] = states[0]["step"].double()
        if scheduler is not None:
            values["last_epoch"] = torch.tensor(float(scheduler.last_epoch))
        return values


class Tokens(Dataset[Tensor]):
    """Sample i: a run of tokens, -1 where there is none; shape (width,)."""

    def __init__(self, rows: list[list[float]]) -> None:
        self._width = max(map(len, rows))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        row = self._rows[index]
        return torch.tensor(row + [-1.0] * (self._width - len(row)), dtype=torch.float64)


class OneWeight(nn.Module):
    """A single weight, 1.0 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.w * tokens


class TokenMean:
    """The loss of a token t is w · t, so its gradient is t, and a step's gradient is the mean of its tokens.

    Args:
        rows: tokens of each sample.
        as_pair: loss returns (total, weight) rather than the microbatch's mean.
    """

    def __init__(self, rows: list[list[float]], as_pair: bool = False) -> None:
        self.rows = rows
        self.as_pair = as_pair

    def model(self) -> nn.Module:
        return OneWeight()

    def train_data(self) -> Tokens:
        return Tokens(self.rows)

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(
            lambda *_: record("gradients", gradient=next(model.parameters()).grad.item())  # type: ignore[union-attr]
        )
        return optimizer

    def weight(self, batch: Tensor) -> float:
        return float((batch >= 0).sum())

    def loss(self, model: nn.Module, batch: Tensor) -> Any:
        counted = batch >= 0
        total = model(batch)[counted].sum()
        return (total, counted.sum()) if self.as_pair else total / counted.sum()
