"""Which state directory a command means: by name, path, --state-dir, or as the only one there is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from elastictrain.errors import MissingInputError, UsageError
from elastictrain.protocol import IDENTITY_FILE, JOURNAL_FILE, RUNS_DIR, SPEC_FILE

DEFAULT_ROOT = Path("checkpoints")
"""Where state directories are made, each named like its job."""


@dataclass(frozen=True, slots=True)
class JobDir:
    """A job that has run here.

    Args:
        path: its state directory, absolute.
        name: of the job.
    """

    path: Path
    name: str

    @property
    def runs(self) -> list[Path]:
        """Folders of its incarnations, oldest first."""
        folder = self.path / RUNS_DIR
        if not folder.is_dir():
            return []
        return sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def find_job_dir(job: str | None, state_dir: Path | None) -> JobDir:
    """The job that the command line names; where it names none, the only one there is.

    Args:
        job: name of a job (its state directory is checkpoints/<name>), or path of a job.toml or its folder, or an
            example's name.
        state_dir: a state directory.

    Raises:
        UsageError: nothing, or too much, was named.
        MissingInputError: there is no such job.
    """
    if job is None and state_dir is None:
        found = all_job_dirs()
        if len(found) == 1:
            return found[0]
        if not found:
            raise MissingInputError(
                f"no job has run here: there is no state directory in {DEFAULT_ROOT}/", "Give JOB or --state-dir DIR."
            )
        raise UsageError("which job? Give JOB or --state-dir DIR", f"There are: {', '.join(j.name for j in found)}.")
    path = find_state_dir(job, state_dir)
    return JobDir(path, _name_of(path))


def find_state_dir(job: str | None, state_dir: Path | None) -> Path:
    """The state directory that one of the two names, absolute. Raises as `find_job_dir`."""
    if job is not None and state_dir is not None:
        raise UsageError("JOB and --state-dir name the same thing: give one of them")
    if job is not None:
        state_dir = DEFAULT_ROOT / job
        if not state_dir.is_dir():
            from elastictrain.config.find import read_name

            try:
                state_dir = DEFAULT_ROOT / read_name(job)
            except MissingInputError as error:
                raise MissingInputError(
                    f"there is no job {job}: neither a folder {state_dir}, nor a job.toml, nor an example",
                    "Use --state-dir DIR for a run that writes elsewhere.",
                ) from error
    assert state_dir is not None
    if not state_dir.is_dir():
        raise MissingInputError(
            f"the state directory {state_dir} does not exist",
            "The job has not run here yet; use --state-dir DIR if it writes elsewhere.",
        )
    return state_dir.absolute()


def all_job_dirs() -> list[JobDir]:
    """All jobs under checkpoints/, by name."""
    if not DEFAULT_ROOT.is_dir():
        return []
    signs = (JOURNAL_FILE, IDENTITY_FILE, RUNS_DIR)
    paths = [p for p in sorted(DEFAULT_ROOT.iterdir()) if p.is_dir() and any((p / sign).exists() for sign in signs)]
    return [JobDir(path.absolute(), _name_of(path.absolute())) for path in paths]


def _name_of(path: Path) -> str:
    """As the last incarnation had it; a state directory may be called otherwise."""
    for run in reversed(JobDir(path, path.name).runs):
        try:
            name = json.loads((run / SPEC_FILE).read_text())["config"]["name"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(name, str):
            return name
    return path.name
