"""The end of a step: unscale, norm, clip, finite?, optimizer step, scaler update, zero the gradients.

Whether the update was applied is known at once on the host, or a little later on the device: a fused optimizer takes
`found_inf` as a tensor and leaves the update out by itself, so that no step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from elastictrain.config.schema import OptimizerConfig
from elastictrain.training.precision import Precision


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did.

    Args:
        applied: True or False where the host knows, else a callable that asks the device.
        grad_norm: 2-norm of the whole window's gradient before clipping, 0-d on the device; None if not computed.
    """

    applied: bool | Callable[[], bool]
    grad_norm: Tensor | None


class Updater:
    """Turns the window's gradient into an optimizer step.

    Args:
        optimizer: the run's optimizer.
        precision: the run's precision, which owns the scaler.
        clip_norm: bound of the gradient's 2-norm; None does not clip.
        check_gradients: leave out an update whose gradient is not finite. fp16 does in any case.
    """

    def __init__(
        self, optimizer: Optimizer, precision: Precision, *, clip_norm: float | None, check_gradients: bool
    ) -> None:
        self._optimizer = optimizer
        self._precision = precision
        self._clip_norm = clip_norm
        self._check = check_gradients
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._steps_run: list[Tensor | None] = []
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # GradScaler calls a non-fused optimizer only if all is finite, and hands a fused one `found_inf`, which it
        # takes away afterwards: this hook is the moment to see either.
        self._steps_run.append(getattr(optimizer, "found_inf", None))

    def apply(self) -> UpdateResult:
        """Updates the weights from the gradients, once, and clears them."""
        scaler = self._precision.scaler
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        norm = self._norm_and_clip() if self._clip_norm is not None or self._check else None
        self._steps_run.clear()
        if scaler is not None:
            scaler.step(self._optimizer)
            scaler.update()
        elif norm is None or not self._check:
            self._optimizer.step()
        elif norm.device.type == "cpu":
            if math.isfinite(norm.item()):
                self._optimizer.step()
        elif self._skips_on_device:
            self._optimizer.found_inf = (~norm.isfinite()).to(torch.float32)  # type: ignore[attr-defined]
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]
            self._optimizer.step()
            del self._optimizer.found_inf, self._optimizer.grad_scale  # type: ignore[attr-defined]
        elif bool(norm.isfinite()):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not self._steps_run:
            return UpdateResult(False, norm)
        found_inf = self._steps_run[0]
        return UpdateResult(True if found_inf is None else lambda: found_inf.item() == 0, norm)

    def _norm_and_clip(self) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self._clip_norm is not None and not _is_known_below(norm, self._clip_norm):
            nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        return norm


def _is_known_below(norm: Tensor, limit: float) -> bool:
    """Whether the host knows, without waiting, that clipping would multiply by exactly one."""
    return norm.device.type == "cpu" and norm.item() + 1e-6 <= limit


def make_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> Optimizer:
    """The optimizer that `[optimizer]` describes, over all trainable parameters."""
    parameters: Iterable[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
    fused = config.implementation == "fused" or (
        config.implementation == "auto" and device.type in ("cpu", "cuda") and _all_floating(parameters)
    )
    common: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": fused,
        "foreach": None if fused else config.implementation == "foreach",
    }
    match config.name:
        case "adamw":
            return AdamW(parameters, betas=config.betas, eps=config.eps, **common)
        case "adam":
            return Adam(parameters, betas=config.betas, eps=config.eps, **common)
        case "sgd":
            return SGD(parameters, momentum=config.momentum, nesterov=config.nesterov, **common)


def _all_floating(parameters: Iterable[nn.Parameter]) -> bool:
    return all(torch.is_floating_point(p) for p in parameters)
