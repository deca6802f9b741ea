"""A regression that comes to grief at one place of one life, for snapshots at failure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from elastictrain.checkpoint import faults
from elastictrain.checkpoint.format import MANIFEST_FILE
from elastictrain.training import metrics
from tests.process.faulty import strike
from tests.process.resume_tasks import Resumable
from tests.process.tasks import Samples, rank


class Calls:
    """Strikes at one call of one place on some ranks.

    Args:
        grief: [place, kind, ranks, number of the call, counted from 1]; empty for none.
        fault: armed just before (see `checkpoint.faults`).
        lost: folder whose snapshots are gone by then: the memory of a node that has lost its power. "" for none.
    """

    def __init__(self, grief: list[Any], fault: str, lost: str) -> None:
        self._grief, self._fault, self._lost = grief, fault, lost
        self._calls: dict[str, int] = {}

    def at(self, place: str) -> None:
        self._calls[place] = self._calls.get(place, 0) + 1
        if not self._grief:
            return
        where, kind, ranks, number = self._grief
        if place == where and rank() in ranks and self._calls[place] == number:
            if self._lost:
                for manifest in Path(self._lost).rglob(MANIFEST_FILE):
                    manifest.unlink()
            if self._fault:
                faults.arm(self._fault)
            strike(kind)


def _hold_back(first_step: int) -> None:
    real = metrics.json_line

    def held(record: metrics.Record) -> str:
        while record["step"] >= first_step:
            time.sleep(1.0)
        return real(record)

    metrics.json_line = held


class GrievedSamples(Samples):
    """Samples whose reading is a place."""

    calls: Calls

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.calls.at("item")
        sample: dict[str, Any] = super().__getitem__(index)
        return sample


class Embedded(nn.Module):
    """An embedding whose rows are rescaled in every forward pass, behind the optimizer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 3, max_norm=0.5)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        which = (x.abs().sum(dim=1) * 100).long() % 8
        out: Tensor = self.head(torch.cat([x, self.rows(which)], dim=1))
        return out


class Grieved(Resumable):
    """`Resumable`, with places "item", "eval_data" (between the restoring and the first step), "loss",
    "backward", "reduced" and "update"; with two ranks, a microbatch each,
    the n-th call of "loss" is in the n-th step of the life.

    Args:
        grief: see `Calls`.
        fault: see `Calls`.
        lost: see `Calls`.
        pause_s: of every loss, so that a test can do something meanwhile.
        lines_from: rank zero's lines from this step on are never written: its disk stands still.
    """

    def __init__(
        self,
        grief: list[Any] | None = None,
        fault: str = "",
        lost: str = "",
        pause_s: float = 0.0,
        lines_from: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        if lines_from is not None and rank() == 0:
            _hold_back(lines_from)
        self.calls = Calls(grief or [], fault, lost)
        self.pause_s = pause_s

    def model(self) -> nn.Module:
        return Embedded() if self.kind == "embedded" else super().model()

    def train_data(self) -> GrievedSamples:
        data = GrievedSamples(self.length)
        data.calls = self.calls
        return data

    def eval_data(self) -> Samples | None:
        self.calls.at("eval_data")
        return super().eval_data()

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(lambda *_: self.calls.at("update"))
        return optimizer

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        time.sleep(self.pause_s)
        self.calls.at("loss")
        loss.register_hook(self._in_backward)
        return loss

    def _in_backward(self, _gradient: Tensor) -> None:
        self.calls.at("backward")
        # When the pass is over its callbacks run, in order: this one, then that of DistributedDataParallel, which waits
        # for the reduction, then what this one queues.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: self.calls.at("reduced")))
