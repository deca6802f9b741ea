"""Every error a user can meet, in one tree, each class with its exit code.

An error says what was wrong, where, and what to do. `str(error)` is the whole message: the command line
prints it without a traceback. Codes follow sysexits(3) where one fits; 79 and above are our own.
This module imports nothing, so that every layer may raise from it.
"""

from __future__ import annotations


class ElasticTrainError(Exception):
    """Something went wrong that we can explain.

    Args:
        what: one sentence: what was wrong, and where (file, key, rank, step).
        hint: what the reader can do about it; empty if there is nothing to say.
    """

    exit_code = 70  # EX_SOFTWARE

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n{self.hint}" if self.hint else self.what


class UsageError(ElasticTrainError):
    """The command line was wrong."""

    exit_code = 64  # EX_USAGE


class ConfigError(ElasticTrainError):
    """job.toml, or a `--set`, holds something we cannot work with."""

    exit_code = 78  # EX_CONFIG


class TaskError(ElasticTrainError):
    """The user's task cannot be imported, or does not keep the contract of `docs/task.md`."""

    exit_code = 78  # EX_CONFIG: restarting does not help, editing does


class DataError(ElasticTrainError):
    """The dataset failed at a sample, or cannot be used at all."""

    exit_code = 65  # EX_DATAERR


class MissingInputError(ElasticTrainError):
    """A file or a job that was named does not exist."""

    exit_code = 66  # EX_NOINPUT


class StateDirError(ElasticTrainError):
    """The state directory cannot be created, written, or belongs to another run."""

    exit_code = 73  # EX_CANTCREAT


class BusyError(ElasticTrainError):
    """Another process holds what we need."""

    exit_code = 75  # EX_TEMPFAIL


class NotRunningError(ElasticTrainError):
    """The job has no supervisor that could obey, or it does not answer."""

    exit_code = 69  # EX_UNAVAILABLE


class UnresponsiveError(NotRunningError):
    """A supervisor is there and does not answer, or may not be asked."""


class RendezvousError(ElasticTrainError):
    """The place where the nodes of a job meet cannot be found from here."""

    exit_code = 75  # EX_TEMPFAIL: the name of a host that comes up is known later


class ReplicaMismatchError(ElasticTrainError):
    """Ranks that must hold the same thing do not."""

    exit_code = 70  # EX_SOFTWARE


class StateValueError(TaskError):
    """State that is to be stored holds something that is neither a tensor nor plain data."""

    exit_code = 78  # EX_CONFIG: the task must be edited


class SnapshotError(ElasticTrainError):
    """A snapshot cannot be used."""

    exit_code = 65  # EX_DATAERR


class SnapshotDamagedError(SnapshotError):
    """A snapshot's bytes are not those that were written, or some are missing."""

    exit_code = 65  # EX_DATAERR


class SnapshotVersionError(SnapshotError):
    """A snapshot was written by a newer program, in a version of the format that this one does not know."""

    exit_code = 65  # EX_DATAERR


class FencedError(SnapshotError):
    """A newer worker group of the same run has begun: what this one would write is refused."""


class StorageError(ElasticTrainError):
    """A store of snapshots cannot be reached, read or written."""

    exit_code = 74  # EX_IOERR


class UnreadableFileError(StorageError):
    """The bytes of one file of a snapshot cannot be read. The store may have failed, which passes, or the file is lost:
    for whoever has tried long enough this is a damaged snapshot."""


class MemoryTierError(ElasticTrainError):
    """The memory tier has no room for a snapshot: its budget, or the file system, is too small."""

    exit_code = 74  # EX_IOERR


class UnsafePathError(ElasticTrainError):
    """A folder or file that only we may own belongs to someone else, or is a symbolic link."""

    exit_code = 77  # EX_NOPERM


class NoPermissionError(ElasticTrainError):
    """This user may not look at, or talk to, what was named."""

    exit_code = 77  # EX_NOPERM


class DrillError(ElasticTrainError):
    """A run that has to go well, for there to be anything to compare, did not."""

    exit_code = 70  # EX_SOFTWARE


class NodesError(UsageError):
    """This machine cannot have nodes of namespaces."""


class DrillFailedError(ElasticTrainError):
    """A drill does not hold: the job would not have survived that fault as promised."""

    exit_code = 1


class SnapshotMismatchError(ElasticTrainError):
    """A snapshot belongs to another run than this one, or holds what cannot be kept."""

    exit_code = 78  # EX_CONFIG


class HaltError(ElasticTrainError):
    """The run was stopped on purpose: going on would do harm or lead nowhere. State is kept."""

    exit_code = 79


class WorkerFailedError(ElasticTrainError):
    """A rank died for a reason that is not one of ours: an exception in user code, a signal."""

    exit_code = 70  # EX_SOFTWARE


class IllegalTransitionError(ElasticTrainError):
    """A phase or state change that the table does not know. Always a defect in the calling loop."""

    exit_code = 70  # EX_SOFTWARE


FINAL_CODES: dict[int, str] = {
    UsageError.exit_code: "wrong use",
    DataError.exit_code: "bad data",
    MissingInputError.exit_code: "no such job",
    StateDirError.exit_code: "no state directory",
    UnsafePathError.exit_code: "no permission",
    ConfigError.exit_code: "wrong configuration",
    HaltError.exit_code: "halted",
}
"""Exit codes after which starting again does not help, and why: neither the supervisor does, nor systemd."""

BY_NAME: dict[str, type[ElasticTrainError]] = {
    cls.__name__: cls
    for cls in (
        ElasticTrainError,
        UsageError,
        ConfigError,
        TaskError,
        DataError,
        MissingInputError,
        StateDirError,
        BusyError,
        NotRunningError,
        UnresponsiveError,
        RendezvousError,
        ReplicaMismatchError,
        StateValueError,
        SnapshotError,
        SnapshotDamagedError,
        SnapshotVersionError,
        FencedError,
        StorageError,
        UnreadableFileError,
        MemoryTierError,
        UnsafePathError,
        NoPermissionError,
        DrillError,
        NodesError,
        DrillFailedError,
        SnapshotMismatchError,
        HaltError,
        WorkerFailedError,
        IllegalTransitionError,
    )
}
"""For reports that cross a process boundary: class name to class."""
