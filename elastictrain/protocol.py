"""What processes of one job share, written down in one place: files, environment, the stop board, reports.

    supervisor  →  launcher  →  agent  →  workers

The launcher starts agents and outlives the supervisor, so that nobody else does: the two talk over a socket pair, in
messages of JSON (`LaunchAgent`, `LauncherReady`, `AgentStarted`, `AgentEnded`). The supervisor lays out an *incarnation
folder* under the state directory and has the agent started on it. The agent gives every worker the folder's path.
Everything in it has one writer:

    runs/0001/spec.json         the resolved job and what the parent decided      parent, before the start
    runs/0001/board             the stop board (below)                            rank zero; anyone may ask
    runs/0001/heartbeat-<rank>  what a rank does, see `heartbeat`                 that rank
    runs/0001/output-<n>        a named pipe: all that local rank n prints        that rank; read by the parent
    runs/0001/rank-<n>.log      what came through it, see `supervisor.rank_log`   parent
    runs/0001/stacks-<rank>.txt Python stacks, at SIGUSR1                         that rank
    runs/0001/error-<rank>.json why a rank ended, where we can explain it         that rank, atomically
    runs/0001/exits.json        exit codes of the ranks that failed               agent, atomically
    runs/0001/reported          steps up to which a rank alone wrote metrics, after a failure   ranks, under flock
    runs/0001/outcome.json      how the incarnation ended                         local rank 0, atomically
    runs/0001/logs/             the agent's own folder                            agent
    incidents/0001/             evidence of a hang, see `supervisor.evidence`     parent

Events travel on the workers' standard error as JSON lines with an `event` key; whatever else appears there, or on
standard output, is the user's own print.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastictrain.errors import BY_NAME, ElasticTrainError, StateDirError, WorkerFailedError

SPEC_FILE = "spec.json"
BOARD_FILE = "board"
OUTCOME_FILE = "outcome.json"
LOG_DIR = "logs"
METRICS_FILE = "metrics.jsonl"
IDENTITY_FILE = "job.json"
RUNS_DIR = "runs"
SNAPSHOTS_DIR = "snapshots"
DURABLE_FILE = "durable.json"
"""The newest step known to be durable, see `checkpoint.durable_note`."""
MEMORY_FILE = "memory.json"
"""Where the memory tier has been, see `checkpoint.memory_note`."""
LOCK_FILE = "lock"
EXITS_FILE = "exits.json"
REPORTED_FILE = "reported"
INCIDENTS_DIR = "incidents"
INCIDENT_FILE = "incident.json"
JOURNAL_FILE = "journal.db"
COMPILE_CACHE_DIR = "compile-cache"
IMPORTS_FILE = "imports.json"
LAUNCHER_LOG = "launcher.log"

SERVICE_STATE = Path("/var/lib/elastictrain")
"""Where the machine's services keep their state directories, each named like its unit: StateDirectory= there."""
SERVICE_RUNTIME = Path("/run/elastictrain")
"""The same for their sockets: RuntimeDirectory=."""

LOOPBACK = "127.0.0.1"
"""Where the ranks of a job on one node meet."""

ENV_STORE_FD = "ELASTICTRAIN_STORE_FD"
"""Number of the descriptor that the worker group's store is to listen on, in an agent that is to serve it."""
ENV_RUN_DIR = "ELASTICTRAIN_RUN_DIR"
"""Path of the incarnation folder; the agent sets it for every worker."""


def output_pipe(run_dir: Path, local_rank: int) -> Path:
    """The named pipe that a local rank prints into."""
    return run_dir / f"output-{local_rank}"


def rank_log(run_dir: Path, local_rank: int) -> Path:
    """The file that keeps what a local rank printed."""
    return run_dir / f"rank-{local_rank}.log"


def stacks_path(run_dir: Path, rank: int) -> Path:
    """The file that a rank's stacks are appended to."""
    return run_dir / f"stacks-{rank}.txt"


def error_path(run_dir: Path, rank: int) -> Path:
    """The file in which a rank says why it ended."""
    return run_dir / f"error-{rank}.json"


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`, durably: a reader, or a crash at any moment, sees the old content or the new.

    Temporary file in the same folder, fsync, rename, fsync of the folder.
    """
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of `value` as indented JSON."""
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """What a job keeps over all its starts, in job.json. Mode 0600, since its source may say how a store is opened.

    Args:
        run_id: lineage of its snapshots, eight hex digits; `--fresh` makes a new one.
        global_batch_size: fixed at the first start from `accumulation_steps`; None where the job file fixes it.
        source: the snapshot of another run that it began with.
    """

    run_id: str
    global_batch_size: int | None
    source: SnapshotSource | None = None

    def write(self, state_dir: Path) -> None:
        write_json(state_dir / IDENTITY_FILE, asdict(self))

    @classmethod
    def read(cls, state_dir: Path) -> JobIdentity | None:
        """The identity, or None before the first start.

        Raises:
            StateDirError: it is there and cannot be read.
        """
        path = state_dir / IDENTITY_FILE
        try:
            fields = json.loads(path.read_text())
            source = fields.pop("source")
            return cls(source=SnapshotSource(**source) if source is not None else None, **fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateDirError(f"{path} cannot be read: {error}", "Restore it, or use another --state-dir.") from error


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """A snapshot of another run.

    Args:
        url: the store it is in.
        run_id: its run.
        global_step: its step.
        storage_options: for that store; None where those of the job hold. Secret, as the job's are: they are in files
            of mode 0600 alone.
    """

    url: str
    run_id: str
    global_step: int
    storage_options: dict[str, Any] | None = field(default=None, repr=False)

    def options_of(self, job_options: dict[str, Any]) -> dict[str, Any]:
        """For its store, in a job whose own store has these."""
        return self.storage_options if self.storage_options is not None else job_options


@dataclass(frozen=True, slots=True)
class Group:
    """One worker group over all nodes, as one node sees it.

    Args:
        attempt: its name, the same on all nodes.
        node: place of this node among `num_nodes`.
        num_nodes: that take part.
        first_rank: global rank of this node's first rank.
        world_size: ranks on all nodes.
        address: of this node, where its ranks listen for those of the others.
        store_host: where the store of the worker group is, served by the agent of node 0.
        store_port: where it listens; 0 where node 0 is the only one, and takes any.
        hosts: names of the nodes, in order.
        addresses: of the nodes, in order.
    """

    attempt: str
    node: int = 0
    num_nodes: int = 1
    first_rank: int = 0
    world_size: int = 1
    address: str = LOOPBACK
    store_host: str = LOOPBACK
    store_port: int = 0
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @classmethod
    def alone(cls, attempt: str, *, world_size: int, host: str) -> Group:
        """That of a job with one node."""
        return cls(attempt, world_size=world_size, hosts=(host,), addresses=(LOOPBACK,))

    @property
    def others(self) -> frozenset[str]:
        """Addresses of the other nodes."""
        return frozenset(self.addresses) - {self.address}


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the parent hands to the workers of one incarnation.

    Args:
        group: over all nodes.
        incarnation: number of this life of the worker group, from 1, never reused within a state directory.
        state_dir: the job's state directory, absolute.
        job_dir: folder of job.toml, put first on the module path; None for an example that ships in the package.
        config: the resolved job, as plain data.
        kept_global_batch_size: what an earlier start fixed from `accumulation_steps`; None at the first start.
        run_id: lineage of the run's snapshots, eight hex digits.
        source: a snapshot of another run to begin with, while there is none of this run.
        allowed_differences: names of what a snapshot may have differently (`core.identity.ALLOWABLE`).
        mean_time_between_failures_s: as seen so far, for the interval between snapshots.
        begins_run: no incarnation before this one was of this run: what cannot be read is not the run's.
    """

    incarnation: int
    group: Group
    state_dir: str
    job_dir: str | None
    config: dict[str, Any]
    kept_global_batch_size: int | None
    run_id: str
    source: SnapshotSource | None
    allowed_differences: list[str]
    mean_time_between_failures_s: float
    begins_run: bool = False

    def write(self, run_dir: Path) -> None:
        write_json(run_dir / SPEC_FILE, asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> RunSpec:
        fields = json.loads((run_dir / SPEC_FILE).read_text())
        source, group = fields.pop("source"), fields.pop("group")
        group |= {name: tuple(group[name]) for name in ("hosts", "addresses")}
        return cls(group=Group(**group), source=SnapshotSource(**source) if source is not None else None, **fields)


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Why a rank ended.

    Args:
        rank: the rank that ended.
        kind: class name, one of ours where we can explain it, else that of the exception.
        what: what was wrong, and where.
        hint: what to do.
        exit_code: the rank's exit code.
        step: global step it was at.
        kept_step: of the newest snapshot in its node's memory tier when it left; None if it did not get so far.
        secondary: True where the cause is that another rank failed first.
        traceback: of the user's code, empty for mistakes that need none.
    """

    rank: int
    kind: str
    what: str
    hint: str
    exit_code: int
    step: int
    secondary: bool = False
    traceback: str = ""
    kept_step: int | None = None

    def write(self, run_dir: Path) -> None:
        write_json(error_path(run_dir, self.rank), asdict(self))

    def as_error(self) -> ElasticTrainError:
        """The exception to raise on the reader's side; same class and exit code as on the rank."""
        cls = BY_NAME.get(self.kind, WorkerFailedError)
        return cls(f"rank {self.rank}, step {self.step}: {self.what}", self.hint)


def read_error_reports(run_dir: Path) -> list[ErrorReport]:
    """All reports of an incarnation: first causes before consequences, then by rank."""
    reports = []
    for path in run_dir.glob("error-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            reports.append(ErrorReport(**json.loads(path.read_text())))
    return sorted(reports, key=lambda report: (report.secondary, report.rank))


class StopBoard:
    """How the ranks of one node agree, without a message, after which step to stop.

    Five 64-bit words in a shared mapping: *asked*, set by whoever was told to stop, a rank or the parent; *after*, one
    more than the global step after which all stop; *hurry*, set by whoever was told a second time: nothing is waited
    for any more; *snapshot*, counted up by the parent when it wants one; *passing*, set by the parent where the next
    worker group follows at once, so that the last snapshot need not be durable, and taken back where none does after
    all. Only rank zero writes *after*, before it
    enters its window's reduction; the others read it once their own reduction is over. A reduction ends on no rank
    before every rank has entered it, so all see the same value at the end of the same step. Ranks on several nodes have
    no memory in common: they vote, see `training.vote`.
    """

    SIZE_BYTES = 40

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._map: mmap.mmap | None = None
            self._words = memoryview(bytearray(self.SIZE_BYTES)).cast("q")
        else:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), self.SIZE_BYTES)
            self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path) -> None:
        path.write_bytes(bytes(cls.SIZE_BYTES))

    @classmethod
    def from_environment(cls) -> StopBoard:
        """The board of the incarnation this process belongs to; outside of one, a board of this process alone."""
        run_dir = os.environ.get(ENV_RUN_DIR)
        return cls(Path(run_dir) / BOARD_FILE if run_dir else None)

    def ask(self) -> None:
        self._words[0] = 1

    @property
    def asked(self) -> bool:
        return self._words[0] != 0

    def ask_to_hurry(self) -> None:
        self._words[2] = 1

    @property
    def hurry(self) -> bool:
        return self._words[2] != 0

    def pass_on(self) -> None:
        """The next worker group follows at once, and finds the state in memory."""
        self._words[4] = 1

    def pass_on_no_more(self) -> None:
        """No worker group may follow: the state in memory could be lost."""
        self._words[4] = 0

    @property
    def is_passing_on(self) -> bool:
        return self._words[4] != 0

    def ask_for_snapshot(self) -> None:
        self._words[3] += 1

    @property
    def snapshots_asked(self) -> int:
        """How many snapshots were asked for so far."""
        return self._words[3]

    def stop_after(self, step: int) -> None:
        self._words[1] = step + 1

    @property
    def last_step(self) -> int | None:
        """The step after which to stop, or None."""
        word = self._words[1]
        return word - 1 if word else None

    def close(self) -> None:
        self._words.release()
        if self._map is not None:
            self._map.close()


MAX_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LaunchAgent:
    """The supervisor to the launcher: start an agent.

    With it may come a listening socket, for the store of the worker group that the agent is to serve.

    Args:
        run_dir: folder of its incarnation.
        command: what to run, where agents are not forked.
    """

    run_dir: str
    command: list[str]

    @property
    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class LauncherReady:
    """The launcher to the supervisor: all is imported, the next agent starts at once."""

    @property
    def encoded(self) -> bytes:
        return json.dumps({"ready": True}).encode()


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """The launcher to the supervisor.

    Args:
        pid: of the agent, a child of the launcher.
    """

    pid: int

    @property
    def encoded(self) -> bytes:
        return json.dumps({"started": self.pid}).encode()


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The launcher to the supervisor.

    Args:
        pid: of the agent; None if there never was one.
        exit_code: negative for a signal; None if there never was one.
        error: why it could not be started; "" if it was.
    """

    pid: int | None
    exit_code: int | None
    error: str = ""

    @property
    def encoded(self) -> bytes:
        return json.dumps({"ended": self.pid, "exit_code": self.exit_code, "error": self.error}).encode()


def read_message(sock: socket.socket) -> dict[str, Any] | None:
    """The next message; None if the other end is gone."""
    return read_message_with_fd(sock)[0]


def read_message_with_fd(sock: socket.socket) -> tuple[dict[str, Any] | None, int | None]:
    """The next message, and the descriptor that came with it; None if the other end is gone, or if there is none."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
    except ConnectionError:
        return None, None
    if not data:
        return None, None
    message: dict[str, Any] = json.loads(data)
    return message, fds[0] if fds else None
