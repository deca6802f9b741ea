"""Finds the line of a key in a TOML file, for messages.

`tomllib` keeps no positions. This scanner knows table headers and `key = value` lines, which is how people write
job.toml; where a file uses inline tables or dotted keys it finds the nearest enclosing line, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"""^\s*([A-Za-z0-9_\-."']+)\s*=""")


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def find_line(text: str, path: Sequence[str]) -> int | None:
    """1-based line of the deepest part of `path` (such as `("train", "max_steps")`) that the text mentions."""
    wanted = tuple(path)
    best: tuple[int, int] | None = None
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _split(header.group(1))
            here = table
        elif key := _KEY.match(line):
            here = table + _split(key.group(1))
        else:
            continue
        if here == wanted[: len(here)] and (best is None or len(here) > best[0]):
            best = (len(here), number)
    return best[1] if best else None
