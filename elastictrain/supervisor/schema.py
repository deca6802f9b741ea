"""The JSON Schema of the status document. `python -m elastictrain.supervisor.schema > docs/status.schema.json`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from elastictrain.core.status import Status


def status_schema() -> dict[str, Any]:
    """The schema: every key is there, always; further keys may be added."""
    schema = TypeAdapter(Status).json_schema(mode="serialization")
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


def render() -> str:
    """As docs/status.schema.json has it."""
    return json.dumps(status_schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(render(), end="")
