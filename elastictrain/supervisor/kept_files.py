"""What is kept of a job in files, as the control interface tells it: the ranks' output, and the incidents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elastictrain.errors import MissingInputError
from elastictrain.folders import numbered_folders
from elastictrain.protocol import INCIDENT_FILE, INCIDENTS_DIR, RUNS_DIR

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
    runs = numbered_folders(state_dir / RUNS_DIR)
    run = runs[-1] if runs else None
    logs = {} if run is None else rank_logs(run, rank)
    if not logs or run is None:
        raise MissingInputError("there is no log" if rank is None else f"rank {rank} has no log", "")
    ranks = {str(number): _tail(path).splitlines()[-num_lines:] for number, path in logs.items()}
    return {"incarnation": int(run.name), "ranks": ranks}


def rank_logs(run: Path, rank: int | None) -> dict[int, Path]:
    """Files of an incarnation's ranks, or of the one, by rank in order."""
    found = [(p.stem.removeprefix("rank-"), p) for p in run.glob("rank-*.log")]
    numbered = sorted((int(number), p) for number, p in found if number.isdigit())
    return {number: p for number, p in numbered if rank is None or number == rank}


def incidents(state_dir: Path) -> list[dict[str, Any]]:
    """What was judged in each incident that is kept, oldest first."""
    folders = numbered_folders(state_dir / INCIDENTS_DIR)
    return [{"incident": int(folder.name), **read_incident(folder)} for folder in folders]


def incident(state_dir: Path, number: int) -> dict[str, Any]:
    """One incident with its evidence: the text of every file by name.

    Raises:
        MissingInputError: there is no such incident.
    """
    folder = state_dir / INCIDENTS_DIR / f"{number:04d}"
    if not folder.is_dir():
        raise MissingInputError(f"there is no incident {number}", "GET /incidents lists them.")
    files = {path.name: _tail(path) for path in _entries(folder) if path.suffix == ".txt"}
    return {"incident": number, **read_incident(folder), "files": files}


def read_incident(folder: Path) -> dict[str, Any]:
    """What was judged; `damaged` says why nothing can be told, as where the disk was full."""
    try:
        fields = json.loads((folder / INCIDENT_FILE).read_text())
    except (OSError, ValueError) as error:
        return {"damaged": f"{INCIDENT_FILE} cannot be read: {error}"}
    return fields if isinstance(fields, dict) else {"damaged": f"{INCIDENT_FILE} is not an object"}


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
