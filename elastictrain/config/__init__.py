"""job.toml: its schema, and how it is found, read, overridden and explained when wrong.

The names here are loaded when first used: a command that only looks for a job need not pay for the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastictrain.config.load import LoadedJob as LoadedJob
    from elastictrain.config.load import load_job as load_job
    from elastictrain.config.schema import JobConfig as JobConfig

__all__ = ["JobConfig", "LoadedJob", "load_job"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from elastictrain.config import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
