"""An optimizer's state by the names of its parameters, and back.

torch's own `load_state_dict` converts what it is given: tensors to the parameter's dtype, also in lists and
dictionaries, and whatever else can be iterated over to its own type over an iterator, which a string does not survive.
So what a parameter's state was is put back after it, value by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastictrain.checkpoint.format import TensorSpec
from elastictrain.errors import StateValueError
from elastictrain.training.hyperparameters import COMPUTATION_KEYS
from elastictrain.training.tensor_forms import DTYPES

STEP = "step"
"""A field whose dtype and device torch chooses by how the update is computed (torch.optim.Adam): on the host unless the
optimizer is fused or capturable."""
_HINT = "Snapshots hold what torch.optim.Optimizer documents: a dictionary for each parameter of a group."


class OptimizerState:
    """What an optimizer holds.

    Args:
        optimizer: over a model's parameters.
        names: of the parameters, by their identity.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._names = [names[id(p)] for p in self._parameters]
        self._index_of = {name: index for index, name in enumerate(self._names)}
        self._reshaped: frozenset[str] = frozenset()
        """Parameters that have not the shape they had in the snapshot whose tensors were asked for."""

    @property
    def form(self) -> str:
        """What must be the same for a state to be taken over."""
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        return f"{type(self._optimizer).__name__} over {sizes} parameters"

    # ---- out

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors as `<parameter>/<field>`, and the rest.

        Raises:
            StateValueError: state that is nobody's.
        """
        raw = self._raw()
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[Any, Any]] = {}
        shared: dict[Any, Any] = {}
        for index, fields in raw["state"].items():
            if type(index) is not int or not 0 <= index < len(self._names):
                shared[index] = fields
                continue
            name = self._names[index]
            if not isinstance(fields, dict):
                raise StateValueError(f"the optimizer's state of {name} is of type {type(fields).__qualname__}", _HINT)
            rest = {}
            for key, value in fields.items():
                # A name must lead back to its key.
                if isinstance(value, Tensor) and isinstance(key, str) and "/" not in key:
                    tensors[f"{name}/{key}"] = value.detach()
                else:
                    rest[key] = value
            if rest or not fields:
                plain[name] = rest
        groups = [{**group, "params": [self._names[i] for i in group["params"]]} for group in raw["param_groups"]]
        found: dict[str, Any] = {"plain": plain, "param_groups": groups}
        further = {key: value for key, value in raw.items() if key not in ("state", "param_groups")}
        if shared:
            found["shared"] = shared
        if further:
            found["further"] = further
        return tensors, found

    def _raw(self) -> dict[str, Any]:
        try:
            return self._optimizer.state_dict()
        except KeyError as error:
            mine = {id(p) for p in self._parameters}
            key: Any
            for key in self._optimizer.state:
                if isinstance(key, Tensor) and id(key) not in mine:
                    raise StateValueError(
                        f"the optimizer has state for a tensor of shape {list(key.shape)} that is in none of its "
                        "groups of parameters",
                        _HINT,
                    ) from error
            raise

    # ---- in

    def targets(
        self,
        specs: Mapping[str, TensorSpec],
        model_specs: Mapping[str, TensorSpec],
        on_host: frozenset[str],
    ) -> dict[str, Tensor]:
        """New tensors for a snapshot's, by name: before its first step an optimizer has none. None for a parameter of
        another shape, of which what the optimizer kept does not fit any more. All of it or nothing, the rest that
        `load` is given as well: an optimizer that finds part of its state believes in the rest.

        Args:
            specs: the optimizer's tensors in the snapshot.
            model_specs: the model's.
            on_host: names of those that were on the host though the run was not.
        """
        self._reshaped = frozenset(
            name
            for name, parameter in zip(self._names, self._parameters, strict=True)
            if name in model_specs and model_specs[name].shape != tuple(parameter.shape)
        )
        found = {}
        for full_name, spec in specs.items():
            name, _, key = full_name.rpartition("/")
            if name in self._index_of and name not in self._reshaped:
                found[full_name] = self._moment(name, key, spec, on_host=full_name in on_host)
        return found

    def _moment(self, name: str, key: str, spec: TensorSpec, *, on_host: bool) -> Tensor:
        dtype = DTYPES[spec.dtype]
        parameter = self._parameters[self._index_of[name]]
        if key == STEP:
            group = next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))
            on_host = not (group.get("fused") or group.get("capturable"))
        if spec.shape == tuple(parameter.shape) and parameter.dim() and not on_host:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(spec.shape, dtype=dtype, device="cpu" if on_host else parameter.device)

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `capture` gave.

        Args:
            plain: what it gave besides tensors.
            tensors: those that this optimizer has room for, see `targets`.
        """
        state: dict[int, dict[Any, Any]] = {}
        for name, fields in plain["plain"].items():
            if name in self._index_of and name not in self._reshaped:
                state.setdefault(self._index_of[name], {}).update(fields)
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition("/")
            state.setdefault(self._index_of[name], {})[key] = tensor
        mine = self._optimizer.state_dict()["param_groups"]
        groups = [{**theirs, "params": own["params"]} for own, theirs in zip(mine, plain["param_groups"], strict=True)]
        # How the update is computed is this start's choice, not the snapshot's.
        for own, group in zip(mine, groups, strict=True):
            group.update({k: own[k] for k in COMPUTATION_KEYS if k in own})
        self._optimizer.load_state_dict(
            {
                **plain.get("further", {}),
                "state": {**state, **plain.get("shared", {})},
                "param_groups": groups,
            }
        )
        for index, fields in state.items():
            self._put_back(self._optimizer.state[self._parameters[index]], fields)

    def _put_back(self, own: dict[Any, Any], fields: Mapping[Any, Any]) -> None:
        converts = self._converts_itself
        for key, value in fields.items():
            # Whoever loads in a way of its own may keep a value in another form; but not in a narrower one.
            if key != STEP and (not converts or _is_other_dtype(own.get(key), value)):
                own[key] = value

    @property
    def _converts_itself(self) -> bool:
        """Whether this optimizer's state is not simply what it is given."""
        optimizer = self._optimizer
        return bool(
            type(optimizer).load_state_dict is not Optimizer.load_state_dict
            or optimizer._optimizer_load_state_dict_pre_hooks
            or optimizer._optimizer_load_state_dict_post_hooks
        )


def _is_other_dtype(own: Any, value: Any) -> bool:
    return isinstance(own, Tensor) and isinstance(value, Tensor) and own.dtype != value.dtype
