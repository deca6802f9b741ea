"""Removes what old incarnations and incidents have left in a state directory, so that it does not grow for ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from elastictrain.folders import numbered_folders
from elastictrain.protocol import INCIDENT_FILE, INCIDENTS_DIR, RUNS_DIR


def prune(state_dir: Path, *, keep_incarnations: int, keep_incidents: int) -> None:
    """Keeps the newest of both, and the incarnations of the incidents that are kept. Numbers are not used again: the
    newest stays. What cannot be removed stays.

    Args:
        state_dir: of the job.
        keep_incarnations: at least two: a persister may still be at work for the one before the newest.
        keep_incidents: at least one.
    """
    incidents = numbered_folders(state_dir / INCIDENTS_DIR)
    for folder in incidents[:-keep_incidents]:
        shutil.rmtree(folder, ignore_errors=True)
    named = {_incarnation_of(folder) for folder in incidents[-keep_incidents:]}
    for folder in numbered_folders(state_dir / RUNS_DIR)[:-keep_incarnations]:
        if int(folder.name) not in named:
            shutil.rmtree(folder, ignore_errors=True)


def _incarnation_of(incident: Path) -> int | None:
    try:
        number = json.loads((incident / INCIDENT_FILE).read_text())["incarnation"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None
