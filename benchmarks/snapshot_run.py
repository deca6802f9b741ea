"""The run that the benchmarks of snapshots measure: a model and Adam on one rank, stepped by hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.persister_client import Persister
from elastictrain.config.schema import DdpConfig, ModelConfig, OptimizerConfig, ScalerConfig
from elastictrain.core.batch import BatchPlan
from elastictrain.core.identity import DataIdentity
from elastictrain.core.phases import Phase
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule
from elastictrain.core.window import WindowPlan
from elastictrain.logs import make_logger
from elastictrain.supervisor.launcher import COPY_TUNABLES
from elastictrain.training.device import Place
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.session import Session
from elastictrain.training.snapshot import Snapshotter
from elastictrain.training.snapshot_writer import Origin
from elastictrain.training.state import TrainingState
from elastictrain.training.task import BoundTask
from elastictrain.training.trainee import Trainee
from elastictrain.training.update import Updater, make_optimizer

WIDTH = 1024
RUN_ID = "00000000"


class Stack(nn.Module):
    """Linear layers of about a million values each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class StackTask:
    """The least that a task must have; the benchmark steps by itself."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def model(self) -> nn.Module:
        return Stack(self.num_layers)

    def train_data(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


class Run:
    """A run of one rank: everything that a snapshot holds, and one training step by hand."""

    def __init__(self, num_layers: int, batch_size: int) -> None:
        self.place = Place()
        self.session = Session(self.place, seed=1)
        self.task = BoundTask(StackTask, {"num_layers": num_layers})
        replica = Replica(self.task.build_model(), self.place, ModelConfig(), DdpConfig())
        precision = Precision("fp32", self.place.device, ScalerConfig())
        self.optimizer = make_optimizer(replica.module, OptimizerConfig(), self.place.device)
        updater = Updater(self.optimizer, precision, clip_norm=None, check_gradients=False)
        self.trainee = Trainee(replica, self.optimizer, updater, precision, None, None, channels_last=False)
        data = DataIdentity(1, 1_000_000, shuffle=True)
        self.state = TrainingState(self.session, self.task, self.trainee, data, BatchPlan(1, 1))
        self.plan = WindowPlan(1_000_000, 1, 1)
        self.batch = torch.randn(batch_size, WIDTH)
        self.step()

    def compute(self) -> None:
        """Forward and backward."""
        self.task.loss(self.trainee.replica.module, self.batch).backward()

    def step(self, before_update: Callable[[], None] = lambda: None, compute: bool = True) -> None:
        """One step; `before_update` is called where the loop calls the snapshotter."""
        step = self.session.begin_step(self.plan)
        assert step is not None
        self.session.enter(Phase.DATA)
        self.session.begin_microbatch(step.microbatches[0])
        self.session.enter(Phase.BACKWARD)
        if compute:
            self.compute()
        self.session.enter(Phase.OPTIMIZER)
        before_update()
        self.session.settle()
        if compute:
            self.session.commit(self.trainee.updater.apply().applied)
        else:
            self.session.commit(True)


def as_ranks_do() -> None:
    """Begins this program anew with what the launcher has in its environment: glibc looks there only once."""
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": COPY_TUNABLES})


def snapshotter_for(run: Run, root: Path, persister: Persister | None) -> Snapshotter:
    log = make_logger(Path(os.devnull).open("w"))  # noqa: SIM115 - lives as long as the process
    return Snapshotter(
        run.state,
        [MemoryTier(root / "tier", base=root)],
        persister,
        SnapshotSchedule(every_steps=1),
        first=LastSnapshot(0, 0.0),
        mean_time_between_failures_s=3600.0,
        origin=Origin("bench", RUN_ID, {"elastictrain": "0", "torch": torch.__version__, "python": "3"}),
        device=run.place.device,
        log=log,
    )
