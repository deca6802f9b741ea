"""What forward passes may change, as it was at the last commit: so that a rank that fails in the middle of a step can
still keep the step before, bit for bit.

Parameters and moments change in the optimizer step alone; only the rest is copied, at the begin of each step: buffers
(the running statistics of a BatchNorm), extra state of modules, the task's own state, embeddings with max_norm, and
other parameters for which the first step shows that a forward pass changes them. A model without any of it costs
nothing.

Whether a tensor has changed is asked of torch's count of changes in place, so that large buffers that stand still, and
frozen weights, are not copied again and again. Normalisation layers go past that count, and are copied every time, as
is whatever the first step shows to do so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastictrain.checkpoint.tree import decode, encode
from elastictrain.training.task import BoundTask


@dataclass(slots=True)
class _Held:
    """A tensor of the model.

    Args:
        name: as in the model's state dictionary.
        owner: the table of its module that it is in: a module may put another tensor in its place.
        key: its name there.
        is_counted: torch counts its changes.
        is_lazy: copied only once it has been changed: a frozen parameter.
        tensor: what was there last.
        version: how often that had been changed by then.
        copy: as it was at the commit; None for a frozen parameter that has never been changed.
    """

    name: str
    owner: dict[str, Any]
    key: str
    is_counted: bool
    is_lazy: bool = False
    tensor: Tensor | None = None
    version: int = -1
    copy: Tensor | None = None

    @property
    def has_moved(self) -> bool:
        """By torch's count."""
        now = self.owner.get(self.key)
        return now is not self.tensor or _version_of(now) != self.version


@dataclass(slots=True)
class Plain:
    """State that is given by methods, as it was at the commit.

    Args:
        extra: the modules' extra state, by name.
        task: the task's own; None where it has none.
    """

    extra: dict[str, Any] = field(default_factory=dict)
    task: Any = None


class Shadow:
    """Holds what a forward pass may change.

    Args:
        module: the model.
        task: whose own state is held too.
        device: what the run computes on.
    """

    def __init__(self, module: nn.Module, task: BoundTask, device: torch.device) -> None:
        self._module = module
        self._task = task if task.has("state_dict") else None
        self._held: list[_Held] = []
        self._extras: list[tuple[str, nn.Module]] = []
        self._plain: tuple[Any, dict[str, Tensor]] | None = None
        self._trial: list[tuple[_Held, int]] = []
        self._is_new = True
        self.step: int | None = None
        """The step that the copies are of; None before the first, and while they are being made."""
        self.marked: torch.cuda.Event | None = torch.cuda.Event() if device.type == "cuda" else None
        """On CUDA: when the device has done all that the state of the last commit depends on."""
        for prefix, owner in module.named_modules():
            dot = f"{prefix}." if prefix else ""
            is_counted = not isinstance(owner, _NormBase)
            self._held += [
                _Held(dot + key, owner._buffers, key, is_counted)
                for key, buffer in owner._buffers.items()
                if buffer is not None and key not in owner._non_persistent_buffers_set
            ]
            if type(owner).get_extra_state is not nn.Module.get_extra_state:
                self._extras.append((f"{dot}_extra_state", owner))

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to hold, as far as is known."""
        holds = bool(self._trial or self._held or self._extras) or self._task is not None
        return holds or self._is_new or self.marked is not None

    # ---- while training

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Takes the state as it is: nothing has changed since the commit of `step`."""
        self.step = None
        if self._is_new:
            self._is_new = False
            self._watch_parameters()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for held in self._held:
            now = held.owner.get(held.key)
            if now is None or (held.is_counted and now is held.tensor and _version_of(now) == held.version):
                continue
            is_first_look = held.tensor is None
            held.tensor, held.version = now, _version_of(now)
            if held.copy is not None and held.copy.shape == now.shape and held.copy.dtype == now.dtype:
                targets.append(held.copy)
                sources.append(now)
            elif not (held.is_lazy and is_first_look):
                held.copy = now.detach().clone()
        if targets:
            torch._foreach_copy_(targets, sources)
        if self._extras or self._task is not None:
            self._plain = self._take_plain()
        self.mark()
        self.step = step

    def mark(self) -> None:
        """The state is that of a commit, once the device has done what it was given so far."""
        if self.marked is not None:
            self.marked.record()

    def _take_plain(self) -> tuple[Any, dict[str, Tensor]]:
        state = {
            "extra": {name: owner.get_extra_state() for name, owner in self._extras},
            "task": self._task.call("state_dict") if self._task is not None else None,
        }
        plain, tensors = encode(state, lambda value: isinstance(value, Tensor))
        return plain, {key: tensor.detach().clone() for key, tensor in tensors.items()}

    def _watch_parameters(self) -> None:
        """Frozen parameters are watched for ever, since regular snapshots do not trust them either; those that are
        trained for one step, since the optimizer moves their counts as well."""
        for prefix, owner in self._module.named_modules():
            for key, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                held = _Held(f"{prefix}.{key}" if prefix else key, owner._parameters, key, is_counted=True)
                if getattr(owner, "max_norm", None) is not None:
                    self._held.append(held)  # an embedding that says of itself that its forward pass rescales its rows
                elif parameter.requires_grad:
                    self._trial.append((held, _version_of(parameter)))
                    held.tensor = parameter
                else:
                    held.is_lazy = True
                    self._held.append(held)

    @torch.no_grad()
    def observe(self) -> None:
        """After the first step's passes, before its update: what have they changed? Free at any other step."""
        if not self._trial or self.step is None:
            return
        for held in self._held:
            if held.is_counted and held.copy is not None and held.tensor is not None and not held.has_moved:
                held.is_counted = torch.equal(held.copy, held.tensor)
        for held, version in self._trial:
            now = held.owner.get(held.key)
            if now is not held.tensor or _version_of(now) != version:
                # Its value at the commit is gone; from the next step on there is a copy.
                held.tensor, held.is_counted = None, False
                self._held.append(held)
        self._trial = []

    # ---- after a failure

    def tensors(self) -> dict[str, Tensor]:
        """The model's tensors that have copies, by name."""
        return {held.name: held.copy for held in self._held if held.copy is not None}

    def lost(self) -> Iterator[str]:
        """Names of tensors that were changed since the commit for the first time: there is no copy of them."""
        yield from (held.name for held in self._held if held.copy is None and held.has_moved)
        for held, version in self._trial:
            if held.owner.get(held.key) is not held.tensor or _version_of(held.tensor) != version:
                yield held.name

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """On CUDA, computes on a stream of its own, after what the last commit depends on: the stream of the training
        may wait for a collective that never ends."""
        if self.marked is None:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_event(self.marked)
        with torch.cuda.stream(stream):
            yield

    def plain(self) -> Plain:
        """State that is given by methods."""
        return Plain(**decode(*self._plain)) if self._plain is not None else Plain()


def _version_of(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
