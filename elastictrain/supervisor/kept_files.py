"""What is kept of a job in files, as the control interface tells it: the ranks' output, and the incidents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elastictrain.errors import MissingInputError
from elastictrain.protocol import INCIDENTS_DIR, RUNS_DIR

_TAIL_BYTES = 1 << 20
"""The most that is read of one file."""


def recent_output(state_dir: Path, rank: int | None, num_lines: int) -> dict[str, Any]:
    """The last lines that the local ranks of the newest worker group have printed.

    Args:
        state_dir: of the job.
        rank: only this one's; None for all.
        num_lines: of each, at most.

    Raises:
        MissingInputError: there is no such log.
    """
    runs = [path for path in _entries(state_dir / RUNS_DIR) if path.name.isdigit()]
    run = max(runs, key=lambda path: int(path.name), default=None)
    logs = [] if run is None else sorted(run.glob("rank-*.log" if rank is None else f"rank-{rank}.log"))
    if not logs or run is None:
        raise MissingInputError("there is no log" if rank is None else f"rank {rank} has no log", "")
    ranks = {path.stem.removeprefix("rank-"): _tail(path).splitlines()[-num_lines:] for path in logs}
    return {"incarnation": int(run.name), "ranks": ranks}


def incidents(state_dir: Path) -> list[dict[str, Any]]:
    """What was judged in each incident that is kept, oldest first."""
    folders = sorted((p for p in _entries(state_dir / INCIDENTS_DIR) if p.name.isdigit()), key=lambda p: int(p.name))
    return [_summary(folder) for folder in folders]


def incident(state_dir: Path, number: int) -> dict[str, Any]:
    """One incident with its evidence: the text of every file by name.

    Raises:
        MissingInputError: there is no such incident.
    """
    folder = state_dir / INCIDENTS_DIR / f"{number:04d}"
    if not folder.is_dir():
        raise MissingInputError(f"there is no incident {number}", "GET /incidents lists them.")
    files = {path.name: _tail(path) for path in _entries(folder) if path.suffix == ".txt"}
    return {**_summary(folder), "files": files}


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "incident.json").read_text())
    except (OSError, ValueError):
        found = {}  # the disk was full: the rest may be there
    return {"incident": int(folder.name), **(found if isinstance(found, dict) else {})}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
