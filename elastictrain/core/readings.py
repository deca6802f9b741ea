"""Reads values out of an event's fields, whatever they hold: what is not as it should be is as good as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from elastictrain.core.status import Number


def first_known(value: int | None, fallback: int | None) -> int | None:
    """The value, or what stands in for it."""
    return value if value is not None else fallback


def integer(fields: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a whole number."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def text(fields: Mapping[str, Any], *names: str) -> str:
    """The first of these that is a text or a whole number; "" if none is."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
            return str(value)
    return ""


def finite(fields: Mapping[str, Any], name: str) -> float | None:
    """A finite number."""
    value = number(fields, name)
    return value if isinstance(value, float) else None


def number(fields: Mapping[str, Any], name: str) -> Number | None:
    """A number, as the status document has it: what JSON has no word for is a text."""
    value = fields.get(name)
    if value in ("NaN", "Infinity", "-Infinity"):
        return cast(Number, value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return "Infinity" if value > 0 else "-Infinity"
    if math.isfinite(found):
        return found
    return "NaN" if math.isnan(found) else "Infinity" if found > 0 else "-Infinity"
