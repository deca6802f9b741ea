"""Where the supervisor's events go. The journal is one such place; a file of JSON lines is the simplest."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from elastictrain.logs import finite


class EventSink(Protocol):
    """Keeps events. It must return soon, and never raise: what is lost here is a record, not the training."""

    def append(self, kind: str, fields: Mapping[str, Any]) -> None: ...


class NullSink:
    """Keeps nothing."""

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        return None


class JsonLinesSink:
    """Appends each event to a file, as a line of JSON.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        line = {**finite(dict(fields)), "event": kind, "timestamp": datetime.now(UTC).isoformat()}
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
