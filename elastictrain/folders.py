"""Folders that are numbered, such as those of incarnations and incidents: listed in the order of their numbers."""

from __future__ import annotations

from pathlib import Path


def numbered_folders(root: Path) -> list[Path]:
    """Folders whose name is a number, in order; none where `root` is not there or cannot be read."""
    try:
        found = [path for path in root.iterdir() if path.name.isdigit() and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))


def last_number(root: Path) -> int:
    """The highest of their numbers; 0 before the first."""
    return max((int(path.name) for path in numbered_folders(root)), default=0)
