"""What tensors a snapshot can hold: torch's dtypes in the snapshot format's words."""

from __future__ import annotations

import torch
from torch import Tensor

from elastictrain.checkpoint.format import TensorSpec
from elastictrain.errors import StateValueError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' names of the dtypes that can be kept."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Form = tuple[torch.dtype, torch.layout, torch.Size]


def spec_of(tensor: Tensor, name: str) -> TensorSpec:
    """A tensor's dtype and shape in the snapshot format's words.

    Raises:
        StateValueError: the format has no word for it.
    """
    if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_quantized:
        raise StateValueError(
            f"{name} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}, which a snapshot cannot hold",
            "Snapshots hold dense tensors of the dtypes that safetensors knows.",
        )
    return TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
