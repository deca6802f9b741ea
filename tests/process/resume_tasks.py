"""A task that has everything a snapshot must keep, and that can stop or kill its own rank after an update."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from elastictrain.checkpoint.memory_tier import MemoryTier
from tests.process.tasks import Samples, make_model, rank, record


class Tied(nn.Module):
    """Two layers with one weight, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(torch.tanh(self.first(x))))
        return out


class WithExtraState(nn.Module):
    """Keeps a tensor and a number as extra state; the output depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.history = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.history = self.history * 0.5 + x.detach().mean()
        out: Tensor = self.layer(x) + self.history.sum()
        return out

    def get_extra_state(self) -> Tensor:
        return self.history.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.history = state.clone()


class Complex(nn.Module):
    """A complex buffer that every forward pass turns, and integers wider than torch computes with."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.turn: Tensor
        self.register_buffer("turn", torch.ones((), dtype=dtype))
        self.register_buffer("words", torch.arange(4, dtype=torch.int32).to(torch.uint32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.turn.mul_(torch.polar(torch.ones(()), torch.tensor(0.7)))
        out: Tensor = self.layer(x) * self.turn.real.to(torch.float32)
        return out


class Voting(Optimizer):
    """Moves a weight by the votes of its gradients' signs, counted in integers too large for float32; keeps a mean of
    its gradients in float64 beside a name, and how often it was called for all of them."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["votes"] = torch.full_like(parameter, 2**40, dtype=torch.int64)
                    state["means"] = [torch.zeros_like(parameter, dtype=torch.float64), "of gradients"]
                mean, name = state["means"]
                assert name == "of gradients"
                mean.lerp_(parameter.grad.double(), 1 / 3)
                parameter.sub_(mean.float(), alpha=0.1 * group["lr"])
                state["votes"] += parameter.grad.sign().long()
                parameter.sub_((state["votes"] - 2**40).float(), alpha=group["lr"])
        calls: Any = self.state
        calls["all"] = {"calls": calls.get("all", {"calls": 0})["calls"] + 1}


def resumable_model(kind: str, hidden: int) -> nn.Module:
    match kind:
        case "tied":
            return Tied()
        case "extra_state":
            return WithExtraState()
        case "complex64":
            return Complex()
        case "complex128":
            return Complex(torch.complex128)
        case "wide":
            return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        case "mixed":
            return nn.Sequential(
                nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)
            )
    return make_model(kind)


def make_scheduler(name: str, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
    match name:
        case "":
            return None
        case "step":
            return StepLR(optimizer, 2, 0.5)
        case "multistep":
            return MultiStepLR(optimizer, [1, 3, 3, 5], 0.5)
        case "cosine":
            return CosineAnnealingLR(optimizer, num_steps)
        case "plateau":
            return ReduceLROnPlateau(optimizer)
        case "onecycle":
            return OneCycleLR(optimizer, 0.1, total_steps=num_steps)
        case "lambda":
            return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        case "sequential":
            return SequentialLR(
                optimizer,
                [
                    LinearLR(optimizer, 0.1, total_iters=3),
                    CosineAnnealingLR(optimizer, num_steps),
                    ConstantLR(optimizer),
                ],
                milestones=[3, 6],
            )
        case "warm cosine" | "warm polynomial":
            warm = LinearLR(optimizer, 0.1, total_iters=2)
            kind = CosineAnnealingLR if name == "warm cosine" else PolynomialLR
            return SequentialLR(optimizer, [warm, kind(optimizer, num_steps - 2)], milestones=[2])
        case "own":
            return Own(optimizer, num_steps)
    raise ValueError(name)


class Own(LRScheduler):
    """Goes down to zero at the end; each rate follows from the one before."""

    def __init__(self, optimizer: Optimizer, total_iters: int) -> None:
        self.total_iters = total_iters
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        left = self.total_iters - self.last_epoch
        factor = left / (left + 1) if self.last_epoch else 1.0
        return [group["lr"] * factor for group in self.optimizer.param_groups]


class Resumable:
    """Least squares on `Samples`.

    Args:
        length: number of samples.
        model: see `resumable_model`.
        hidden: width of the model "wide".
        optimizer: "sgd", "momentum", "adam", "adamw", "adafactor", "voting".
        implementation: "fused", "foreach" or "for-loop".
        scheduler: see `make_scheduler`.
        infinite: samples that make the loss infinite.
        eval_length: samples to evaluate.
        own_state: "" for none; "good" keeps tensors and plain data that the loss depends on; "bad" holds an object;
            "turning" gives its tensors in another order each time.
        stop_after, kill_after: updates in this start, after which the rank gets SIGTERM or SIGKILL.
        on_ranks: which ranks stop or kill themselves.
        job_folder: the test's folder of this job; a rank that kills itself waits until a snapshot of this start is
            complete in the memory tier there, so that each start comes a step further.
    """

    def __init__(
        self,
        length: int = 11,
        model: str = "mlp",
        hidden: int = 8,
        optimizer: str = "adamw",
        implementation: str = "for-loop",
        scheduler: str = "",
        infinite: tuple[int, ...] = (),
        eval_length: int = 0,
        own_state: str = "",
        stop_after: int = 0,
        stops: int = 1,
        kill_after: int = 0,
        on_ranks: tuple[int, ...] = (0,),
        fingerprint: str = "",
        job_folder: str = "",
    ) -> None:
        self.job_folder, self.began_with = job_folder, 0
        self.length, self.kind, self.hidden, self.eval_length = length, model, hidden, eval_length
        self.optimizer_name, self.implementation, self.scheduler_name = optimizer, implementation, scheduler
        self.infinite = torch.tensor(list(infinite), dtype=torch.int64)
        self.stop_after, self.stops, self.kill_after, self.on_ranks = stop_after, stops, kill_after, tuple(on_ranks)
        self.fingerprint = fingerprint
        self.updates = 0
        self.own_state = own_state
        self.memory = torch.zeros(3)
        self.seen: list[int] = []
        self.turns = 0
        self.nothing: Any = object()
        if own_state:
            self.state_dict = self._state_dict
            self.load_state_dict = self._load_state_dict

    # ---- the task

    def model(self) -> nn.Module:
        return resumable_model(self.kind, self.hidden)

    def train_data(self) -> Samples:
        data = Samples(self.length)
        if self.fingerprint:
            data.fingerprint = self.fingerprint
        return data

    def eval_data(self) -> Samples | None:
        return Samples(self.eval_length) if self.eval_length else None

    def optimizer(self, model: nn.Module) -> Optimizer:
        options: dict[str, Any] = {
            "fused": self.implementation == "fused",
            "foreach": self.implementation == "foreach",
        }
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1], "lr": 0.03}, {"params": parameters[1:]}]
        optimizer: Optimizer
        match self.optimizer_name:
            case "sgd":
                optimizer = SGD(groups, lr=0.1, **options)
            case "momentum":
                optimizer = SGD(groups, lr=0.05, momentum=0.9, **options)
            case "adam":
                optimizer = Adam(groups, lr=0.05, amsgrad=True, **options)
            case "voting":
                optimizer = Voting(groups)
            case "adafactor":
                optimizer = Adafactor(groups, lr=0.05)
            case _:
                optimizer = AdamW(groups, lr=0.05, **options)
        optimizer.register_step_post_hook(self._after_update)
        return optimizer

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
        return make_scheduler(self.scheduler_name, optimizer, num_steps)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        prediction = model(batch["x"]).squeeze(1).float()
        record("microbatch", indices=batch["index"].tolist(), drawn=torch.rand(()).item())
        loss = F.mse_loss(prediction + 0.1 * batch["noise"][:, 0].float(), batch["y"])
        if self.own_state:
            loss = loss * (1 + 0.1 * self.memory.sum())
            self.memory = 0.5 * self.memory + batch["x"].mean(dim=0)
            self.seen.append(int(batch["index"][0]))
        if bool(torch.isin(batch["index"], self.infinite).any()):
            loss = loss * float("inf")
        return loss

    def _state_dict(self) -> dict[str, Any]:
        if self.own_state == "turning":
            self.turns += 1
            pair = [("one", torch.full((3,), 1.0)), ("two", torch.full((3,), 2.0))]
            return dict(pair if self.turns % 4 in (0, 1) else pair[::-1])
        state = {"memory": self.memory, "seen": list(self.seen), "pair": (1, 2.5), "nan": float("nan"), "raw": b"\0\1"}
        if self.own_state == "bad":
            state["deep"] = [{"thing": self.nothing}]
        return state

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        if self.own_state == "turning":
            record("loaded", **{name: value.tolist() for name, value in state.items()})
            return
        assert state["pair"] == (1, 2.5)
        assert state["nan"] != state["nan"]
        assert state["raw"] == b"\0\1"
        self.memory, self.seen = state["memory"], state["seen"]

    # ---- the end of it

    def _after_update(self, *_: Any) -> None:
        self.updates += 1
        if rank() not in self.on_ranks:
            return
        if self.job_folder and self.updates == 1:
            self.began_with = self._newest_step()
        if self.updates == self.kill_after:
            while self.job_folder and self._newest_step() == self.began_with:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.updates == self.stop_after:
            for _number in range(self.stops):
                os.kill(os.getpid(), signal.SIGTERM)
        assert threading.current_thread() is threading.main_thread()

    def _newest_step(self) -> int:
        folder = Path(self.job_folder)
        tier = MemoryTier.for_job(folder / "shm", job="job", state_dir=folder / "state")
        return max((snapshot.global_step for snapshot in tier.snapshots()), default=0)


class Configured:
    """Least squares with the optimizer of job.toml.

    Args:
        scheduler: see `make_scheduler`.
    """

    def __init__(self, scheduler: str = "") -> None:
        self._task = Resumable(scheduler=scheduler)

    def model(self) -> nn.Module:
        return self._task.model()

    def train_data(self) -> Samples:
        return self._task.train_data()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self._task.loss(model, batch)

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
        return self._task.scheduler(optimizer, 9)
