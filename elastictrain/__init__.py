"""elastictrain: fault-tolerant elastic training for PyTorch.

Importing this package is cheap: `Session`, the only name here that needs torch, is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastictrain.training.session import Session as Session

__version__ = "0.1.0"
__all__ = ["Session", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Session":
        from elastictrain.training.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
