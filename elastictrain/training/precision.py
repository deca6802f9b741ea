"""Mixed precision as a scoped policy: parameters stay fp32, forward passes run under autocast.

fp16 needs loss scaling, since its smallest normal number is 6e-5; bf16 has fp32's exponent and needs none.
See https://docs.pytorch.org/docs/stable/amp.html and Micikevicius et al., *Mixed Precision Training* (ICLR 2018).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from elastictrain.config.schema import ScalerConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of a run.

    Args:
        mode: fp32, bf16 or fp16.
        device: where it computes.
        scaler: how the loss scale moves; fp16 only.
        tf32: let fp32 matrix products on CUDA use TensorFloat-32.
    """

    def __init__(self, mode: str, device: torch.device, scaler: ScalerConfig, *, tf32: bool = False) -> None:
        self.mode = mode
        self._device_type = device.type
        self._dtype = _DTYPES.get(mode)
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32
        self.scaler: GradScaler | None = None
        self._one = torch.ones((), device=device)
        if mode == "fp16":
            self.scaler = GradScaler(
                device.type,
                init_scale=scaler.init_scale,
                growth_factor=scaler.growth_factor,
                backoff_factor=scaler.backoff_factor,
                growth_interval=scaler.growth_interval,
            )

    def autocast(self) -> AbstractContextManager[object]:
        """The scope of a forward pass and its loss; the backward pass stays outside."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Backward pass from a scalar loss, scaled where there is a scaler."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def scale(self) -> Tensor | None:
        """The present loss scale as a tensor on the device, without waiting for it; None where there is none."""
        return self.scaler.scale(self._one) if self.scaler is not None else None
