"""job.toml: its schema, and how it is found, read, overridden and explained when wrong."""

from elastictrain.config.load import LoadedJob, load_job
from elastictrain.config.schema import JobConfig

__all__ = ["JobConfig", "LoadedJob", "load_job"]
