"""Which state directory a command means: by name, path, --state-dir, or as the only one there is."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from elastictrain.errors import MissingInputError, NoPermissionError, UsageError
from elastictrain.folders import numbered_folders
from elastictrain.protocol import IDENTITY_FILE, JOURNAL_FILE, RUNS_DIR, SERVICE_STATE, SPEC_FILE

DEFAULT_ROOT = Path("checkpoints")
"""Where state directories are made, each named like its job; those of services lie elsewhere, see `roots`."""
_NOT_OURS_HINT = "Join the group elastictrain, or use sudo."


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
        return numbered_folders(self.path / RUNS_DIR)


def roots() -> list[Path]:
    """Where state directories lie: of runs by hand, of this user's services, of the machine's."""
    found = [DEFAULT_ROOT]
    # %S of a user's service manager: the second before systemd 254.
    for variable, usual in (("XDG_STATE_HOME", ".local/state"), ("XDG_CONFIG_HOME", ".config")):
        with contextlib.suppress(RuntimeError):  # a user without a home
            found.append(Path(os.environ.get(variable) or Path.home() / usual) / "elastictrain")
    return [*found, SERVICE_STATE]


def find_job_dir(job: str | None, state_dir: Path | None) -> JobDir:
    """The job that the command line names; where it names none, the only one there is.

    Args:
        job: name of a job (its state directory is checkpoints/<name>, or that of its service), or path of a job.toml or
            its folder, or an example's name.
        state_dir: a state directory.

    Raises:
        UsageError: nothing, or too much, was named.
        MissingInputError: there is no such job.
        NoPermissionError: it is not for this user to see.
    """
    if job is None and state_dir is None:
        found = all_job_dirs()
        if len(found) == 1:
            return found[0]
        if not found:
            raise MissingInputError(
                f"no job has run here: there is no state directory in {_places()}", "Give JOB or --state-dir DIR."
            )
        raise UsageError("which job? Give JOB or --state-dir DIR", f"There are: {', '.join(j.name for j in found)}.")
    path = find_state_dir(job, state_dir)
    return JobDir(path, _name_of(path))


def find_state_dir(job: str | None, state_dir: Path | None) -> Path:
    """The state directory that one of the two names, absolute. Raises as `find_job_dir`."""
    if job is not None and state_dir is not None:
        raise UsageError("JOB and --state-dir name the same thing: give one of them")
    if job is not None:
        state_dir = _of_name(job) or _of_file(job)
    assert state_dir is not None
    if not _is_folder(state_dir):
        raise MissingInputError(
            f"the state directory {state_dir} does not exist",
            "The job has not run here yet; use --state-dir DIR if it writes elsewhere.",
        )
    if not os.access(state_dir, os.R_OK | os.X_OK):
        raise NoPermissionError(f"{state_dir} is not for this user to see", _NOT_OURS_HINT)
    return state_dir.absolute()


def _of_name(name: str) -> Path | None:
    """The state directory of that name; of several, the one that has a supervisor."""
    if not name or Path(name).name != name:
        return None
    found = [root / name for root in roots() if _is_folder(root / name)]
    if len(found) > 1:
        from elastictrain.supervisor.address import find_address

        having = [path for path in found if os.access(path, os.X_OK) and find_address(path.absolute()) is not None]
        if len(having) != 1:
            names = " and ".join(str(path) for path in found)
            raise UsageError(f"{name} is the name of several jobs: {names}", "Name one of these with --state-dir DIR.")
        return having[0]
    return found[0] if found else None


def _of_file(job: str) -> Path:
    """The state directory of a job that is named by its file."""
    from elastictrain.config.find import read_name

    try:
        name = read_name(job)
    except MissingInputError as error:
        raise MissingInputError(
            f"there is no job {job}: neither a folder of that name in {_places()}, nor a job.toml, nor an example",
            "Use --state-dir DIR for a run that writes elsewhere.",
        ) from error
    return _of_name(name) or DEFAULT_ROOT / name


def _is_folder(path: Path) -> bool:
    """Also for a path that leads through a folder of somebody else, such as root's home after `sudo -u`."""
    try:
        return path.is_dir()
    except PermissionError:
        return False


def _places() -> str:
    return " or ".join(f"{root}/" for root in roots() if root == DEFAULT_ROOT or _is_folder(root))


def all_job_dirs() -> list[JobDir]:
    """All jobs that this user may see: those under checkpoints/, by name, then those of services."""
    return [
        JobDir(path.absolute(), _name_of(path.absolute())) for path in _listed() if os.access(path, os.R_OK | os.X_OK)
    ]


def hidden_job_dirs() -> list[Path]:
    """State directories that are not for this user to see."""
    return [path for path in _listed() if not os.access(path, os.R_OK | os.X_OK)]


def _listed() -> list[Path]:
    found: list[Path] = []
    for root in roots():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found += [path for path in sorted(root.iterdir()) if path.is_dir() and _looks_like_state(path)]
    return found


def _looks_like_state(path: Path) -> bool:
    try:
        return any((path / sign).exists() for sign in (JOURNAL_FILE, IDENTITY_FILE, RUNS_DIR))
    except PermissionError:
        return True  # nothing else is kept there behind a closed door


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
