"""Tasks for the tree reduction: one that has everything it must get right, and those it must refuse."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from tests.process.tasks import Branches, Samples, make_model, rank


class Everything:
    """Least squares with dropout, an optimizer with moments, a schedule, an evaluation.

    Args:
        length: number of samples.
        model: which of `make_model`, or "dtypes".
        weighted: the loss is a (total, weight), whose weights are no whole numbers and differ from sample to sample.
        infinite: samples that make the loss infinite.
    """

    def __init__(
        self,
        length: int = 20,
        model: str = "dropout",
        weighted: bool = False,
        infinite: tuple[int, ...] = (),
    ) -> None:
        self.length, self.kind = length, model
        self.infinite = torch.tensor(list(infinite), dtype=torch.int64)
        if weighted:
            self.weight = self._weight

    def model(self) -> nn.Module:
        return Dtypes() if self.kind == "dtypes" else make_model(self.kind)

    def train_data(self) -> Samples:
        return Samples(self.length)

    def eval_data(self) -> Samples | None:
        return Samples(7)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.03, fused=self.kind != "dtypes")  # not for complex numbers

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler:
        return ExponentialLR(optimizer, 0.9)

    @staticmethod
    def _weight(batch: dict[str, Tensor]) -> float:
        return float((0.1 + 0.37 * batch["index"].double()).sum())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        x = batch["x"]
        prediction = (model(x, batch["index"]) if self.kind == "branches" else model(x)).squeeze(1).float()
        errors = F.mse_loss(prediction + 0.1 * batch["noise"][:, 0].float(), batch["y"], reduction="none")
        if bool(torch.isin(batch["index"], self.infinite).any()):
            errors = errors * float("inf")
        if hasattr(self, "weight"):
            weight = 0.1 + 0.37 * batch["index"].double()
            return (errors * weight.float()).sum(), self._weight(batch)
        return errors.mean()


class Unfit(Everything):
    """A model, or a loss, that the tree cannot keep its promise with.

    Args:
        what: which.
    """

    def __init__(self, what: str) -> None:
        super().__init__(model="linear")
        self.what = what

    def eval_data(self) -> Samples | None:
        return Samples(4) if "evaluation" in self.what else None

    def model(self) -> nn.Module:
        match self.what:
            case "batchnorm" | "frozen batchnorm" | "batchnorm without statistics":
                model = nn.Sequential(
                    nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats="without" not in self.what), nn.Linear(4, 1)
                )
                if "frozen" in self.what:
                    model[1].eval()
                return model
            case "syncbatchnorm":
                return nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))
            case "sparse":
                return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Embedding(3, 4, sparse=True))
            case "spectral norm":
                return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1))
            case "max_norm":
                return Renormalised()
            case "unused":
                return Branches()
        return super().model()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if self.what == "unused":
            return F.mse_loss(model(batch["x"], batch["index"]).squeeze(1), batch["y"])
        if self.what == "nondeterministic" or ("evaluation" in self.what and not model.training):
            batch["x"].put_(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
        return super().loss(model, batch)


class Dtypes(nn.Module):
    """Layers of four dtypes and odd sizes, and a convolution, whose weights may lie in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (1, 2), padding=(0, 1))
        self.wide = nn.Linear(15, 7, dtype=torch.float64)
        self.narrow = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.turn = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.reshape(-1, 3, 1, 1).expand(-1, -1, 1, 2)).flatten(1)
        x = self.narrow(self.wide(x.double()).bfloat16()).float()
        return (x * self.frozen * self.turn).real.sum(dim=1, keepdim=True)


class Renormalised(nn.Module):
    """An embedding whose weights every forward pass renormalises in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4, max_norm=0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed((x[:, 0] > 0).long()))
        return out


class RankStops(Everything):
    """Rank 1 stops in a forward pass of the third step, while the others go on to the reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        self.losses += 1
        if rank() == 1 and self.losses == 5:  # two microbatches a step
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().loss(model, batch)
