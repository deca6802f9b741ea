"""Runs `elastictrain drill` on a tiny job of two ranks, as a user does, and reads its report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.process.helpers import Finished, run_cli, write_job

DEADLINE_S = 1500.0
TASK = "tests.process.faulty:Task"


@dataclass(frozen=True, slots=True)
class Drilled:
    """A finished `elastictrain drill --json`."""

    finished: Finished
    folder: Path

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.finished.stdout)
        return document

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["fault"]: row for row in self.document["rows"]}


def tiny_job(folder: Path, world_size: int = 2, **sections: Mapping[str, Any]) -> Path:
    """Writes a job whose steps take a few hundredths of a second; its memory tier is in the test's own folder."""
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    return write_job(
        folder,
        TASK,
        params={"pause_s": 0.02},
        train={"max_steps": 16, "global_batch_size": 4, "micro_batch_size": 1, **sections.pop("train", {})},
        elastic={"nproc_per_node": world_size, **sections.pop("elastic", {})},
        supervisor={"min_step_timeout_s": 3.0, **sections.pop("supervisor", {})},
        checkpoint={"memory_path": str(folder / "shm"), **sections.pop("checkpoint", {})},
        **sections,
    )


def drill(folder: Path, *names: str, **sections: Any) -> Drilled:
    """Drills the tiny job."""
    options = sections.pop("options", ())
    job = tiny_job(folder, **sections)
    before = job.read_bytes()
    finished = run_cli(
        "drill", *names, job, "--scratch", folder / "scratch", "--json", *options, cwd=folder, deadline_s=DEADLINE_S
    )
    assert job.read_bytes() == before, "the job was changed"
    assert_nothing_left(folder)
    return Drilled(finished, folder)


def assert_nothing_left(folder: Path) -> None:
    """No process of a drill in this folder, and nothing in its memory tier."""
    assert processes_of(folder) == []
    assert [str(path) for path in (folder / "shm").iterdir()] == []
    assert not (folder / "checkpoints").exists()


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that have this folder in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            known = [*words, *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(str(folder / "scratch") in text for text in known):
            found.append(" ".join(words))
    return found


def assert_exact(row: dict[str, Any]) -> None:
    """Bitwise equal, every sample once, and no step done again."""
    assert row["bitwise_equal"] is True, row
    assert (row["samples_repeated"], row["samples_skipped"]) == (0, 0), row
    assert row["steps_lost"] == 0, row
    assert row["verdict"] == "holds", row


def assert_resumed(row: dict[str, Any]) -> None:
    """A new worker group went on, exactly."""
    assert_exact(row)
    assert row["detected_s"] is not None, row
    assert row["recovered_s"] is not None, row
    assert row["recovered_s"] > row["detected_s"], row
