"""The whole state of a run, as named tensors and plain data, and back.

What is in a snapshot is decided here, and nothing but here: the model, the optimizer by parameter name, the averaged
weights, the scheduler, the scaler, the counters, the identity of the data order, the task's own state. Tensors are
handed out as they are, not copied: who keeps them must copy them before the next update (`training.snapshot_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastictrain.checkpoint.format import EMA_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, TensorSpec
from elastictrain.checkpoint.tree import decode, encode
from elastictrain.core.batch import BatchPlan
from elastictrain.core.counters import Counters
from elastictrain.core.identity import DataIdentity, Difference, ReductionIdentity
from elastictrain.errors import SnapshotMismatchError
from elastictrain.training.hyperparameters import (
    built_with,
    differences,
    put_into_groups,
    put_into_scaler,
)
from elastictrain.training.optimizer_state import STEP, OptimizerState
from elastictrain.training.schedules import load_scheduler
from elastictrain.training.session import Session
from elastictrain.training.shadow import Shadow
from elastictrain.training.task import BoundTask
from elastictrain.training.tensor_forms import DTYPES, Form, spec_of
from elastictrain.training.trainee import Trainee

_EXTRA_STATE = "_extra_state"
"""End of the names of what modules give by `get_extra_state` and take by `set_extra_state`: values, even if tensors."""

TensorFiles = dict[str, dict[str, Tensor]]
"""Tensors by file and name."""


@dataclass(slots=True)
class Captured:
    """The state at one step.

    Args:
        counters: where the run stands.
        files: the live tensors.
        volatile: the names, by file, of those that a forward pass or the task may change: they must be copied before
            training goes on. All others change in the optimizer step only.
        trainer: everything that is not a tensor, plain JSON.
    """

    counters: Counters
    files: TensorFiles
    volatile: dict[str, set[str]]
    trainer: dict[str, Any] = field(default_factory=dict)

    def forms(self) -> dict[str, dict[str, Form]]:
        """What decides the specs: they are the same where this is."""
        return {
            file: {name: (t.dtype, t.layout, t.shape) for name, t in tensors.items()}
            for file, tensors in self.files.items()
        }

    def specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Dtype and shape of every tensor, by file and name. Raises StateValueError for one that cannot be kept."""
        return {file: {name: spec_of(t, name) for name, t in tensors.items()} for file, tensors in self.files.items()}


class TrainingState:
    """Everything a run is, gathered from its parts.

    Args:
        session: counters and seed.
        task: whose own state is kept, where it has any.
        trainee: model, optimizer, scheduler, scaler, averages.
        data: identity of the training data's order.
        batch: batch sizes of this start.
    """

    def __init__(
        self, session: Session, task: BoundTask, trainee: Trainee, data: DataIdentity, batch: BatchPlan
    ) -> None:
        self._session = session
        self._task = task
        self._data = data
        self._batch = batch
        self._reduction = ReductionIdentity(
            "default" if trainee.replica.tree is None else "tree", torch.get_num_threads(), batch.micro_batch_size
        )
        self._module = module = trainee.replica.module
        self._optimizer = optimizer = trainee.optimizer
        self._scheduler = trainee.scheduler
        self._precision = trainee.precision
        self._ema = trainee.ema
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._optimizer_state = OptimizerState(optimizer, names)
        self._built_with = built_with(optimizer, self._precision.scaler)
        self._hyperparameters = self._built_with
        self.not_laid_out_anew: list[str] = []
        """Classes of schedulers for which `load` could not compute the rate by the new length of the run."""

    # ---- out

    @property
    def global_step(self) -> int:
        """The step that a capture would be of."""
        return self._session.global_step

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far that were applied."""
        return self._session.counters.applied

    def capture(self, shadow: Shadow | None = None) -> Captured:
        """The state now. Settles the last update; the session must not be in update.

        Args:
            shadow: what has moved since the last commit is taken from there. Without it nothing may have moved.

        Raises:
            SnapshotMismatchError: in the middle of an update, or what has moved is in no shadow.
        """
        if self._session.in_update:
            raise SnapshotMismatchError("a snapshot cannot be taken in the middle of an update")
        counters = self._session.counters
        # A shadow of an earlier step: no forward pass has begun since the commit, all is as it was then.
        moved = shadow if shadow is not None and shadow.step == counters.global_step else None
        model, aliases, extra = self._model_tensors()
        task = None
        if moved is not None:
            if lost := list(moved.lost()):
                raise SnapshotMismatchError(f"a forward pass has changed what never changed before: {lost[0]}")
            model |= {name: tensor for name, tensor in moved.tensors().items() if name in model}
            plain_then = moved.plain()
            extra |= plain_then.extra
            task = plain_then.task
        elif self._task.has("state_dict"):
            task = self._task.call("state_dict")
        trained = {name for name, p in self._module.named_parameters() if p.requires_grad}
        optimizer_tensors, optimizer_plain = self._optimizer_state.capture()
        plain, extracted = encode(
            {
                "model_extra": extra,
                "optimizer": optimizer_plain,
                "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
                "scaler": self._precision.scaler.state_dict() if self._precision.scaler is not None else None,
                "task": task,
            },
            lambda value: isinstance(value, Tensor),
        )
        files: TensorFiles = {MODEL_FILE: model, OPTIMIZER_FILE: optimizer_tensors}
        if self._ema is not None:
            files[EMA_FILE] = dict(self._ema.averages)
        if extracted:
            files[STATE_FILE] = {key: tensor.detach() for key, tensor in extracted.items()}
        volatile = {MODEL_FILE: set(model) - trained, STATE_FILE: set(extracted)}
        trainer = {
            "counters": asdict(counters),
            "epoch": counters.sample_position // self._data.length,
            "data_order": asdict(self._data),
            "world_size": self._session.place.world_size,
            "batch": asdict(self._batch),
            "precision": self._precision.mode,
            "reduction": asdict(self._reduction),
            "aliases": {"model": aliases},
            "optimizer": self._optimizer_state.form,
            "hyperparameters": self._hyperparameters,
            "state": plain,
        }
        if on_host := self._on_host(files):
            trainer["on_host"] = on_host
        return Captured(counters, files, volatile, trainer)

    def _on_host(self, files: TensorFiles) -> dict[str, list[str]]:
        """What is to come back on the host though the run computes elsewhere: a generator's state is of no use on a
        GPU. A run on the host has nothing to tell."""
        if self._session.place.device.type == "cpu":
            return {}
        found = {
            file: [
                name
                for name, tensor in files.get(file, {}).items()
                if tensor.device.type == "cpu" and not (file == OPTIMIZER_FILE and name.endswith(f"/{STEP}"))
            ]
            for file in (OPTIMIZER_FILE, STATE_FILE)
        }
        return {file: names for file, names in found.items() if names}

    def _model_tensors(self) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        """The model's tensors, each stored once; further names of the same tensor; state that is no tensor."""
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        extra: dict[str, Any] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor) or name.endswith(_EXTRA_STATE):
                extra[name] = value
                continue
            same = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
            if value.numel() and same in seen:
                aliases[name] = seen[same]
                continue
            seen[same] = name
            tensors[name] = value.detach()
        return tensors, aliases, extra

    # ---- in

    def differences(
        self, trainer: Mapping[str, Any], specs: Mapping[str, Mapping[str, TensorSpec]]
    ) -> list[Difference]:
        """What a snapshot has differently from this run and what must not differ unless allowed by name."""
        found = self._data.differences(DataIdentity(**trainer["data_order"]))
        if "reduction" in trainer:
            kept = ReductionIdentity(**trainer["reduction"])
        else:  # of a version that knew only one
            kept = ReductionIdentity("default", self._reduction.threads_per_rank, self._batch.micro_batch_size)
        found += self._reduction.differences(kept)
        mine = {name: spec_of(tensor, name) for name, tensor in self._model_tensors()[0].items()}
        theirs = specs[MODEL_FILE]
        for name in [*mine, *(n for n in theirs if n not in mine)]:
            if mine.get(name) != theirs.get(name):
                found.append(
                    Difference("model", f"{name}: {theirs.get(name, 'absent')}", f"{mine.get(name, 'absent')}")
                )
        if trainer["optimizer"] != self._optimizer_state.form:
            found.append(Difference("optimizer", trainer["optimizer"], self._optimizer_state.form))
        return found

    def hyperparameter_differences(self, trainer: Mapping[str, Any]) -> list[Difference]:
        """What a snapshot's run was built with differently, of what its state holds: one of the two must give way."""
        if trainer["optimizer"] != self._optimizer_state.form or "hyperparameters" not in trainer:
            return []
        return differences(trainer["hyperparameters"], self._built_with)

    def targets(
        self, trainer: Mapping[str, Any], specs: Mapping[str, Mapping[str, TensorSpec]]
    ) -> dict[str, dict[str, Tensor]]:
        """The tensors that a snapshot's tensors are copied into, in a fixed order: this run's own, and new ones for
        what this run does not have yet, such as the optimizer's moments before its first step."""
        files: dict[str, dict[str, Tensor]] = {MODEL_FILE: {}, OPTIMIZER_FILE: {}}
        model = self._model_tensors()[0]
        files[MODEL_FILE] = {
            n: model[n] for n, s in specs[MODEL_FILE].items() if n in model and spec_of(model[n], n) == s
        }
        on_host = {file: frozenset(names) for file, names in trainer.get("on_host", {}).items()}
        files[OPTIMIZER_FILE] = self._optimizer_state.targets(
            specs[OPTIMIZER_FILE], specs[MODEL_FILE], on_host.get(OPTIMIZER_FILE, frozenset())
        )
        if self._ema is not None and EMA_FILE in specs:
            averages = self._ema.averages
            files[EMA_FILE] = {
                n: averages[n] for n, s in specs[EMA_FILE].items() if n in averages and spec_of(averages[n], n) == s
            }
        if STATE_FILE in specs:
            device, host = self._session.place.device, on_host.get(STATE_FILE, frozenset())
            files[STATE_FILE] = {
                name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cpu" if name in host else device)
                for name, spec in specs[STATE_FILE].items()
            }
        return files

    @torch.no_grad()
    def load(
        self,
        trainer: Mapping[str, Any],
        loaded: Mapping[str, Mapping[str, Tensor]],
        *,
        own_hyperparameters: bool = False,
    ) -> Counters:
        """Takes over a snapshot whose tensors have been copied into `targets`.

        Args:
            trainer: content of its trainer.json.
            loaded: the targets.
            own_hyperparameters: where this start was built with other hyper-parameters, they hold, not the snapshot's.

        Returns:
            the counters to begin with.
        """
        changed = bool(own_hyperparameters and self.hyperparameter_differences(trainer))
        plain = decode(trainer["state"], dict(loaded.get(STATE_FILE, {})))
        if plain["model_extra"]:
            self._module.load_state_dict(plain["model_extra"], strict=False)
        if trainer["optimizer"] == self._optimizer_state.form:
            if changed:
                own = self._optimizer.state_dict()["param_groups"]
                put_into_groups(plain["optimizer"]["param_groups"], own, trainer["hyperparameters"], self._built_with)
            self._optimizer_state.load(plain["optimizer"], loaded[OPTIMIZER_FILE])
            if not changed:
                self._hyperparameters = trainer.get("hyperparameters", self._built_with)
        if self._scheduler is not None and plain["scheduler"] is not None:
            self.not_laid_out_anew = load_scheduler(self._scheduler, plain["scheduler"], own_rates=changed)
        if self._precision.scaler is not None and plain["scaler"]:
            scaling = plain["scaler"]
            if changed:
                scaling = put_into_scaler(scaling, trainer["hyperparameters"], self._built_with)
            self._precision.scaler.load_state_dict(scaling)
        if self._ema is not None:
            # What the snapshot has no average of has the weights of the build there, which are not the run's.
            self._ema.restart(self._ema.averages.keys() - loaded.get(EMA_FILE, {}).keys())
        if plain["task"] is not None and self._task.has("load_state_dict"):
            self._task.call("load_state_dict", plain["task"])
        return Counters(**trainer["counters"])
