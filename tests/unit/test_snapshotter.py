"""The snapshotter alone: what it stores is the state at its step, whatever happens to the state afterwards."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from elastictrain.checkpoint.catalog import newest_first, open_candidate
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.config.schema import DdpConfig, ModelConfig, OptimizerConfig, ScalerConfig
from elastictrain.core.batch import BatchPlan
from elastictrain.core.identity import DataIdentity
from elastictrain.core.phases import Phase
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule
from elastictrain.core.window import WindowPlan
from elastictrain.logs import make_logger
from elastictrain.training.device import Place
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.session import Session
from elastictrain.training.snapshot import Snapshotter, Taken
from elastictrain.training.snapshot_writer import Origin
from elastictrain.training.state import TrainingState
from elastictrain.training.task import BoundTask
from elastictrain.training.trainee import Trainee
from elastictrain.training.update import Updater, make_optimizer


class _Task:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))

    def train_data(self) -> list[int]:
        return [0]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


class _Run:
    """A run of one rank, stepped by hand."""

    def __init__(self, *tiers: MemoryTier) -> None:
        place = Place()
        self.session = Session(place)
        self.task = BoundTask(_Task, {})
        torch.manual_seed(0)
        replica = Replica(self.task.build_model(), place, ModelConfig(), DdpConfig())
        self.module = replica.module
        precision = Precision("fp32", place.device, ScalerConfig())
        self.optimizer = make_optimizer(self.module, OptimizerConfig(), place.device)
        updater = Updater(self.optimizer, precision, clip_norm=None, check_gradients=True)
        self.trainee = Trainee(replica, self.optimizer, updater, precision, None, None, channels_last=False)
        data = DataIdentity(0, 100, shuffle=True)
        self.state = TrainingState(self.session, self.task, self.trainee, data, BatchPlan(1, 1))
        self.plan = WindowPlan(100, 1, 1)
        self.snapshotter = Snapshotter(
            self.state,
            tiers,
            None,
            SnapshotSchedule(every_steps=1),
            first=LastSnapshot(0, 0.0),
            mean_time_between_failures_s=3600.0,
            origin=Origin("job", "0123abcd", {"elastictrain": "0", "torch": "0", "python": "3"}),
            device=place.device,
            log=make_logger(io.StringIO()),
        )

    def step(self) -> None:
        step = self.session.begin_step(self.plan)
        assert step is not None
        self.session.enter(Phase.DATA)
        self.session.begin_microbatch(step.microbatches[0])
        loss = self.task.loss(self.module, torch.randn(4, 3))
        self.session.enter(Phase.BACKWARD)
        loss.backward()
        self.session.enter(Phase.OPTIMIZER)
        self.snapshotter.before_change()
        self.session.commit(self.trainee.updater.apply().applied)

    def values(self) -> dict[str, bytes]:
        """Every tensor's bytes, by file and name."""
        return {
            f"{file}:{name}": tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for file, tensors in self.state.capture().files.items()
            for name, tensor in tensors.items()
        }


def _stored(tier: MemoryTier, scratch: Path) -> dict[str, bytes]:
    with open_candidate(newest_first(tier, None)[0], scratch) as reader:
        values = {}
        for file in reader.files:
            if file.endswith(".safetensors"):
                for name, (begin, end) in reader.layout(file).offsets.items():
                    values[f"{file}:{name}"] = np.frombuffer(reader.read(file, begin, end), np.uint8).tobytes()
        return values


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[MemoryTier]:
    tier = MemoryTier(tmp_path / "tier", base=tmp_path)
    yield tier
    tier.close()


def test_a_snapshot_holds_the_step_it_was_begun_at(tier: MemoryTier, tmp_path: Path) -> None:
    """The next step changes weights, moments, step counts and running statistics at once; a copy by reference would
    hold those."""
    run = _Run(tier)
    for _ in range(3):
        run.step()
        at_step = run.values()
        assert run.snapshotter.take() is Taken.BEGUN
        run.step()
        run.snapshotter.wait_committed()
        assert _stored(tier, tmp_path) == at_step
        assert run.values() != at_step
    run.snapshotter.close()


def test_memory_for_the_first_snapshots_is_had_beside_the_training(tier: MemoryTier, tmp_path: Path) -> None:
    """Once the first step has made the optimizer's state; a snapshot that comes at once waits, and holds its step."""
    run = _Run(tier)
    run.step()
    assert run.snapshotter.due(1)
    run.snapshotter.wait_committed()
    assert (tier.root / "slot-0" / "optimizer.safetensors").stat().st_size > 0
    ready = {files.index: files.buffers for files in tier.make_room(run.snapshotter._writer._layouts, lambda _: True)}
    for index in (0, 1):
        at_step = run.values()
        assert run.snapshotter.take() is Taken.BEGUN
        assert run.snapshotter._filling is not None
        slot = run.snapshotter._filling._slot
        assert (slot.index, slot.buffers) == (index, ready[index])
        run.step()
        run.snapshotter.due(1)
        run.snapshotter.wait_committed()
        assert _stored(tier, tmp_path) == at_step
    for _ in range(3):
        run.snapshotter.prepare()
        at_step = run.values()
        run.snapshotter.take()
        run.step()
        run.snapshotter.wait_committed()
        assert _stored(tier, tmp_path) == at_step
    run.snapshotter.close()


def test_state_in_another_order_is_stored_under_its_names(tier: MemoryTier, tmp_path: Path) -> None:
    """Loading an optimizer may turn its state round; stored by place, one tensor would overwrite another."""
    run = _Run(tier)
    run.step()
    run.snapshotter.take()
    run.snapshotter.wait_committed()
    state = run.optimizer.state_dict()
    turned = {key: dict(reversed(fields.items())) for key, fields in reversed(state["state"].items())}
    run.optimizer.load_state_dict({**state, "state": turned})
    for _ in range(3):
        run.step()
        at_step = run.values()
        run.snapshotter.take()
        run.snapshotter.wait_committed()
        assert _stored(tier, tmp_path) == at_step
    run.snapshotter.close()


def test_a_full_tier_gives_way_to_the_next(tmp_path: Path) -> None:
    small = MemoryTier(tmp_path / "small", base=tmp_path, budget_bytes=10)
    large = MemoryTier(tmp_path / "large", base=tmp_path)
    run = _Run(small, large)
    run.step()
    at_step = run.values()
    assert run.snapshotter.take() is Taken.BEGUN
    run.snapshotter.wait_committed()
    assert _stored(large, tmp_path) == at_step
    run.snapshotter.close()
    large.close()
