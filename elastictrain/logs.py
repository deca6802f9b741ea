"""Events: one JSON line each, with keys. People on a terminal see them rendered by the command line.

A logger is made once per process and passed on; nothing is configured globally.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger

from elastictrain.core.finite import finite as finite

Logger = FilteringBoundLogger
EventDict = MutableMapping[str, Any]

MAX_LINE_BYTES = 4000
"""Writes to a pipe up to PIPE_BUF (4096 on Linux, pipe(7)) are atomic: lines of several ranks never mix."""
MAX_KEY_BYTES = 24
"""Room for a key, its quotes and its comma."""


class Writable(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


def make_logger(
    stream: Writable | None = None, stamp: Callable[[], dict[str, Any]] | None = None, **bound: Any
) -> Logger:
    """A logger that writes JSON lines.

    Args:
        stream: where to; default: standard error.
        stamp: called for every event; its keys are added (such as the step that a rank is at).
        bound: keys of every event, such as rank and incarnation.
    """

    def add_stamp(_logger: Any, _method: str, event: EventDict) -> EventDict:
        if stamp is not None:
            for key, value in stamp().items():
                event.setdefault(key, value)
        return event

    out = stream if stream is not None else sys.stderr
    logger: Logger = structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", out)),
        processors=[
            add_stamp,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
            structlog.processors.format_exc_info,
            _shorten,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("INFO"),
        cache_logger_on_first_use=True,
        **bound,
    )
    return logger


def _shorten(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Cuts over-long texts, so that a line stays under `MAX_LINE_BYTES`. JSON writes some characters as six bytes."""
    if _rendered_bytes(dict(event)) <= MAX_LINE_BYTES:
        return event
    budget = MAX_LINE_BYTES // max(1, len(event)) - MAX_KEY_BYTES
    for key, value in event.items():
        if isinstance(value, str) and (size := _rendered_bytes(value)) > budget:
            kept = value
            while size > budget:
                kept = kept[: min(len(kept) - 1, len(kept) * budget // size)]
                size = _rendered_bytes(kept + "…")
            event[key] = kept + "…"
    return event


def _rendered_bytes(value: Any) -> int:
    return len(json.dumps(value, default=str))
