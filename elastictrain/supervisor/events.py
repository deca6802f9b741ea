"""Where the supervisor's events go: the journal (`record.Record`), or nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class EventSink(Protocol):
    """Keeps events. It must return soon, and never raise: what is lost here is a record, not the training."""

    def append(self, kind: str, fields: Mapping[str, Any]) -> None: ...


class NullSink:
    """Keeps nothing."""

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        return None
