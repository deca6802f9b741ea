"""A snapshot is of its step, whatever training does meanwhile: weights set right after the copy began, Adam's step
counts, buffers that the next forward pass moves, averages that evaluation swaps in."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from elastictrain.checkpoint import memory_tier
from elastictrain.checkpoint.catalog import newest_first, open_candidate
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.config.schema import DdpConfig, ModelConfig, ScalerConfig
from elastictrain.core.batch import BatchPlan, resolve_batch
from elastictrain.core.identity import DataIdentity
from elastictrain.core.phases import Phase
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule
from elastictrain.core.window import WindowPlan
from elastictrain.logs import make_logger
from elastictrain.training.device import Place
from elastictrain.training.ema import Ema
from elastictrain.training.host_copy import HostCopy
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.session import Session
from elastictrain.training.snapshot import Snapshotter
from elastictrain.training.snapshot_writer import Origin
from elastictrain.training.state import TrainingState
from elastictrain.training.task import BoundTask
from elastictrain.training.trainee import Trainee

CPU = torch.device("cpu")


class Task:
    def __init__(self) -> None:
        self.tensor = torch.ones(3)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))

    def train_data(self) -> list[int]:
        return [0, 1]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        return {"tensor": self.tensor}


class Rig:
    """One rank's state and what takes its snapshots, without a loop."""

    def __init__(self, folder: Path) -> None:
        (folder / "shm").mkdir()
        self.folder = folder
        self.log = io.StringIO()
        place = Place()
        self.session = Session(place)
        task = BoundTask(Task, {})
        self.task: Any = task
        self.replica = Replica(task.build_model(), place, ModelConfig(), DdpConfig())
        self.model = self.replica.module
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = Ema(self.model, 0.5)
        trainee = Trainee(
            replica=self.replica,
            optimizer=self.optimizer,
            updater=None,  # type: ignore[arg-type]
            precision=Precision("fp32", CPU, ScalerConfig()),
            scheduler=None,
            ema=self.ema,
            channels_last=False,
        )
        batch: BatchPlan = resolve_batch(
            micro_batch_size=2,
            global_batch_size=2,
            accumulation_steps=None,
            world_size=1,
            kept_global_batch_size=None,
        )
        state = TrainingState(self.session, task, trainee, DataIdentity(0, 2, True), batch)
        self.tier = MemoryTier.for_job(folder / "shm", job="job", state_dir=folder)
        self.snapshotter = Snapshotter(
            state,
            [self.tier],
            None,
            SnapshotSchedule(every_steps=1),
            first=LastSnapshot(0, 0.0),
            mean_time_between_failures_s=1e9,
            origin=Origin("job", "0badcafe", {}),
            device=CPU,
            log=make_logger(self.log),
        )

    def step(self) -> None:
        """An update with a gradient of one; counters move."""
        session = self.session
        assert session.begin_step(WindowPlan(2, 2, 2)) is not None
        session.enter(Phase.DATA)
        session.enter(Phase.FORWARD)
        session.enter(Phase.BACKWARD)
        session.enter(Phase.OPTIMIZER)
        self.snapshotter.before_change()
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        session.commit(applied=True)

    def stored(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of the newest snapshot, by file and name."""
        self.snapshotter.wait_committed()
        with open_candidate(newest_first(self.tier, None)[0], self.folder) as reader:
            found = {f: load(bytes(reader.read(f))) for f in reader.files if f.endswith(".safetensors")}
            found["trainer"] = SimpleNamespace(**json.loads(bytes(reader.read("trainer.json"))))  # type: ignore[assignment]
            return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.snapshotter.close()
    made.tier.close()


class Held:
    """Holds the snapshot's thread back at its first copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        work = HostCopy.work

        def slow(job: HostCopy) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.go_on.wait(60)
            work(job)

        monkeypatch.setattr(HostCopy, "work", slow)


def test_weights_set_at_once_after_the_copy_began(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = rig.model.get_parameter("0.weight")
    rig.step()
    held = Held(monkeypatch)
    with torch.no_grad():
        weight.fill_(1.0)
    moments = {n: {k: v.clone() for k, v in rig.optimizer.state[p].items()} for n, p in rig.model.named_parameters()}
    rig.snapshotter.take()
    rig.snapshotter.before_change()  # copies what the thread has not
    with torch.no_grad():
        weight.fill_(2.0)
        for state in rig.optimizer.state.values():
            for value in state.values():
                value.add_(7)
    held.go_on.set()
    stored = rig.stored()
    assert stored["model.safetensors"]["0.weight"].item() == 1.0
    for name, fields in moments.items():
        for key, value in fields.items():
            found = stored["optimizer.safetensors"][f"{name}/{key}"]
            assert torch.equal(found, value), (name, key)
            assert found.dtype == value.dtype


def test_the_next_step_does_not_reach_the_snapshot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    for number in range(1, 4):
        rig.step()
        expected = {name: value.clone() for name, value in rig.model.state_dict().items()}
        held.go_on.clear()
        rig.snapshotter.take()
        if number == 3:
            break
        rig.step()
        held.go_on.set()
        stored = rig.stored()
        assert all(torch.equal(stored["model.safetensors"][n], v) for n, v in expected.items())
        assert stored["optimizer.safetensors"]["0.weight/step"].item() == 2 * number - 1
        assert stored["trainer"].counters["global_step"] == 2 * number - 1  # type: ignore[attr-defined]
    held.go_on.set()


def test_what_a_forward_pass_changes_is_copied_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    rig.step()
    rig.model(torch.tensor([[1.0], [3.0]]))
    mean = rig.model.get_buffer("1.running_mean").clone()
    rig.snapshotter.take()
    rig.model(torch.tensor([[100.0], [300.0]]))  # the next step's forward pass; no update yet
    rig.task.task.tensor.fill_(5.0)
    held.go_on.set()
    stored = rig.stored()
    assert torch.equal(stored["model.safetensors"]["1.running_mean"], mean)
    assert stored["model.safetensors"]["1.num_batches_tracked"].item() == 1
    assert stored["state.safetensors"]["state['task']['tensor']"].tolist() == [1.0] * 3


def test_averages_swapped_in_do_not_leak(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    rig.step()
    rig.ema.update()
    weight = rig.model.get_parameter("0.weight").detach().clone()
    average = rig.ema.averages["0.weight"].clone()
    assert not torch.equal(weight, average)
    rig.snapshotter.take()
    rig.snapshotter.before_change()  # as the loop does before it evaluates
    with rig.ema.swapped_in():
        held.go_on.set()
        stored = rig.stored()
    assert torch.equal(stored["model.safetensors"]["0.weight"], weight)
    assert torch.equal(stored["ema.safetensors"]["0.weight"], average)


def test_a_slot_that_is_full_costs_one_snapshot_and_no_training(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while the manifest is written: reported, the one before stays, the next one is taken."""
    rig.step()
    rig.snapshotter.take()
    rig.snapshotter.wait_committed()
    replace = memory_tier.safefs.replace_file

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_tier.safefs, "replace_file", full)
    rig.step()
    rig.snapshotter.take()
    rig.snapshotter.wait_committed()
    assert "snapshot_failed" in rig.log.getvalue()
    assert [s.global_step for s in rig.tier.snapshots()] == [1]
    monkeypatch.setattr(memory_tier.safefs, "replace_file", replace)
    rig.step()
    rig.snapshotter.take()
    rig.snapshotter.wait_committed()
    assert [s.global_step for s in rig.tier.snapshots()] == [3, 1]
