"""The snapshotter alone: what it stores is the state at its step, whatever happens to the state afterwards."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastictrain.checkpoint.catalog import newest_first, open_candidate
from elastictrain.checkpoint.memory_snapshot import OpenSnapshot
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.persister_client import PersisterStatus
from elastictrain.config.schema import DdpConfig, ModelConfig, OptimizerConfig, ScalerConfig
from elastictrain.core.batch import BatchPlan
from elastictrain.core.identity import DataIdentity
from elastictrain.core.phases import Phase
from elastictrain.core.snapshot_interval import LastSnapshot, SnapshotSchedule
from elastictrain.core.window import WindowPlan
from elastictrain.errors import StateValueError
from elastictrain.logs import make_logger
from elastictrain.training import snapshot as snapshot_module
from elastictrain.training.device import Place
from elastictrain.training.host_copy import HostCopy
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.session import Session
from elastictrain.training.snapshot import RETRY_S, Snapshotter, Taken
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

    def __init__(self, *tiers: MemoryTier, every_steps: int = 1, persister: Any = None) -> None:
        place = Place()
        self.log = io.StringIO()
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
            persister,
            SnapshotSchedule(every_steps=every_steps),
            first=LastSnapshot(0, 0.0),
            mean_time_between_failures_s=3600.0,
            origin=Origin("job", "0123abcd", {"elastictrain": "0", "torch": "0", "python": "3"}),
            device=place.device,
            log=make_logger(self.log),
        )

    def step(self, *, is_skipped: bool = False) -> None:
        step = self.session.begin_step(self.plan)
        assert step is not None
        self.session.enter(Phase.DATA)
        self.session.begin_microbatch(step.microbatches[0])
        loss = self.task.loss(self.module, torch.randn(4, 3))
        self.session.enter(Phase.BACKWARD)
        loss.backward()
        self.session.enter(Phase.OPTIMIZER)
        self.snapshotter.before_change()
        if is_skipped:
            self.optimizer.zero_grad()
        self.session.commit(not is_skipped and self.trainee.updater.apply().applied)

    @property
    def is_due(self) -> bool:
        return self.snapshotter.due(self.session.global_step)

    def events(self, name: str) -> int:
        return self.log.getvalue().count(name)

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
    assert run.snapshotter._working is not None
    run.snapshotter._working.result()  # undisturbed: a snapshot that wants the thread would end it early
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


def test_memory_is_had_once_an_update_has_been_applied(tier: MemoryTier, tmp_path: Path) -> None:
    """With fp16 the first ones are usually skipped: until then the optimizer has no moments to make room for. Nor does
    a snapshot that comes before count as having done so."""
    run = _Run(tier)
    run.step(is_skipped=True)
    assert run.snapshotter.due(1)
    assert run.snapshotter._working is None
    assert run.snapshotter.take() is Taken.BEGUN
    run.step(is_skipped=True)
    run.snapshotter.wait_committed()
    run.step()
    assert run.snapshotter.due(3)
    assert run.snapshotter._working is not None
    run.snapshotter._working.result()
    assert run.snapshotter._writer._layouts["optimizer.safetensors"].specs
    at_step = run.values()
    assert run.snapshotter.take() is Taken.BEGUN
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


class _Clock:
    """Stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(snapshot_module, "perf_counter", lambda: self.now_s)


class _Durability:
    """A persister that is told what to report."""

    def __init__(self) -> None:
        self.status = PersisterStatus()

    def submit(self, snapshot: Any) -> None:
        self.status = replace(self.status, pending_step=snapshot.global_step)


@pytest.fixture
def two_slots(tmp_path: Path) -> Iterator[MemoryTier]:
    tier = MemoryTier(tmp_path / "two", base=tmp_path, budget_bytes=6000)
    yield tier
    tier.close()


def _filled(tier: MemoryTier, run: _Run) -> None:
    """Both slots hold a snapshot; the next one would go over the older one."""
    for _ in range(2):
        run.step()
        assert run.snapshotter.take() is Taken.BEGUN
        run.snapshotter.wait_committed()
    assert [s.global_step for s in tier.snapshots()] == [2, 1]


def test_a_refused_snapshot_is_not_tried_at_every_step(two_slots: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one slot is being read and the other holds the newest one: nothing is gathered, one warning is written, and
    the next attempt waits for the persister, or for a while."""
    clock, durability = _Clock(monkeypatch), _Durability()
    run = _Run(two_slots, persister=durability)
    _filled(two_slots, run)
    captures: list[int] = []
    capture = run.state.capture
    monkeypatch.setattr(run.state, "capture", lambda: (captures.append(run.session.global_step), capture())[1])
    oldest = two_slots.snapshots()[-1]
    with OpenSnapshot(oldest.path, oldest.name):
        run.step()
        assert run.is_due
        assert run.snapshotter.take() is Taken.DECLINED
        for _ in range(3):
            run.step()
            assert not run.is_due
        clock.now_s += RETRY_S
        assert run.is_due
        assert run.snapshotter.take() is Taken.DECLINED
        assert not run.is_due
        durability.status = replace(durability.status, durable_step=1)
        assert run.is_due
        assert run.snapshotter.take() is Taken.DECLINED
        assert captures == []
        assert run.events("snapshot_left_out") == 1
    durability.status = replace(durability.status, durable_step=2)
    assert run.is_due
    assert run.snapshotter.take() is Taken.BEGUN
    run.snapshotter.wait_committed()
    assert captures == [run.session.global_step]
    assert [s.global_step for s in two_slots.snapshots()] == [6, 2]
    newest = two_slots.snapshots()[-1]
    with OpenSnapshot(newest.path, newest.name):
        run.step()
        assert run.snapshotter.take() is Taken.DECLINED
    assert run.events("snapshot_left_out") == 2, "what succeeded in between makes it news again"
    run.snapshotter.close()


def test_what_was_asked_for_is_kept_until_it_has_begun(two_slots: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    run = _Run(two_slots, every_steps=1000)
    _filled(two_slots, run)
    oldest = two_slots.snapshots()[-1]
    with OpenSnapshot(oldest.path, oldest.name):
        run.step()
        assert not run.is_due
        run.snapshotter.ask()
        assert run.is_due
        assert run.snapshotter.take() is Taken.DECLINED
        run.step()
        assert not run.is_due
    clock.now_s += RETRY_S
    assert run.is_due
    assert run.snapshotter.take() is Taken.BEGUN
    assert not run.is_due
    run.step()
    assert not run.is_due
    run.snapshotter.close()


def test_what_was_asked_for_is_kept_over_a_failure(two_slots: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not tried at every step."""
    clock = _Clock(monkeypatch)
    run = _Run(two_slots, every_steps=1000)
    run.step()
    begin = MemoryTier.begin

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MemoryTier, "begin", full)
    run.snapshotter.ask()
    assert run.snapshotter.take() is Taken.FAILED
    for _ in range(3):
        run.step()
        run.snapshotter.ask()  # as the supervisor does that hears of the failure
        assert not run.is_due
        clock.now_s += RETRY_S
        assert run.is_due
        assert run.snapshotter.take() is Taken.FAILED
    assert run.events("snapshot_failed") == 1
    clock.now_s += RETRY_S
    run.step()
    monkeypatch.setattr(MemoryTier, "begin", begin)
    assert run.snapshotter.take() is Taken.BEGUN
    run.snapshotter.close()


def test_a_state_of_another_form_gets_a_slot_of_its_own(tier: MemoryTier, tmp_path: Path) -> None:
    """One was reserved for the form before."""
    run = _Run(tier)
    run.step()
    run.snapshotter.take()
    run.step()
    run.module.register_buffer("more", torch.arange(5000.0))
    at_step = run.values()
    assert run.snapshotter.take() is Taken.BEGUN
    run.snapshotter.wait_committed()
    assert _stored(tier, tmp_path) == at_step
    run.snapshotter.close()


def test_a_state_that_cannot_be_kept_gives_its_slot_back(two_slots: MemoryTier) -> None:
    run = _Run(two_slots)
    _filled(two_slots, run)
    run.step()
    run.module.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(StateValueError, match="complex128"):
        run.snapshotter.take()
    del run.module._buffers["wide"]
    assert run.snapshotter.take() is Taken.BEGUN
    run.snapshotter.close()


def test_a_snapshot_that_a_forward_pass_spoilt_is_taken_again_at_the_next_step(
    tier: MemoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one due may be thousands of steps away."""
    run = _Run(tier, every_steps=1000)
    weight = run.module.get_parameter("2.weight")
    run.module.register_forward_pre_hook(lambda *_: _decay(weight))
    go_on, work = threading.Event(), HostCopy.work

    def late(copy: HostCopy) -> None:
        """The thread begins when the next step is over, as where the copy lasts longer than the forward pass."""
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)
        work(copy)

    monkeypatch.setattr(HostCopy, "work", late)
    run.step()
    assert not run.is_due
    run.snapshotter.ask()
    assert run.snapshotter.take() is Taken.BEGUN
    run.step()
    go_on.set()
    run.snapshotter.wait_committed()
    assert run.events("snapshot_left_out") == 1
    assert run.is_due
    go_on.clear()
    at_step = run.values()
    assert run.snapshotter.take() is Taken.BEGUN
    run.step()
    go_on.set()
    run.snapshotter.wait_committed()
    assert _stored(tier, tmp_path) == at_step
    assert not run.is_due
    run.snapshotter.close()


def _decay(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)
