"""The status of a job, as a value: what `elastictrain status --json` and `GET /status` answer.

`docs/status.schema.json` is generated from the dataclasses here; the docstring under a field is its description there.
Keys are added, not renamed or removed, within one `schema_version`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from elastictrain.core.lifecycle import State

SCHEMA_VERSION = 1
_DESCRIBED: dict[str, Any] = {"use_attribute_docstrings": True}
"""Has pydantic, which generates the schema, take the docstrings as descriptions."""

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""JSON knows no others than finite numbers."""


ACTIVE: frozenset[str] = frozenset({State.STARTING, State.TRAINING, State.RECOVERING, State.STOPPING, State.DRAINING})
"""States that need a supervisor to be alive."""


EXIT_CODES: dict[str, int] = {
    State.STARTING: 0,
    State.TRAINING: 0,
    State.STOPPING: 0,
    State.DRAINING: 0,
    State.NOT_RUNNING: 3,  # as LSB has it for a service that does not run
    State.STOPPED: 3,
    State.RECOVERING: 4,
    State.COMPLETED: 5,
    State.DRAINED: 6,
    State.HALTED: 79,  # as `elastictrain run` ends then
}
"""What `elastictrain status JOB` ends with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank, as its supervisor sees it now."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    rank: int
    """Its number."""
    pid: int | None = None
    """Its process."""
    host: str = ""
    """Where it runs."""
    phase: str = ""
    """What it is doing (core/phases.py), in lower case."""
    phase_s: float | None = None
    """Seconds it has been doing so."""
    step: int | None = None
    """Global step it is at."""
    heartbeat_age_s: float | None = None
    """Seconds since its last sign of life."""
    cpu_percent: float | None = None
    """Its process's share of one core, in percent."""
    memory_bytes: int | None = None
    """Its process's resident memory."""
    device: str = ""
    """Where it computes: cpu, cuda:0."""
    microbatch: int | None = None
    """Index of the microbatch within the window."""
    device_bytes: int | None = None
    """Memory it has allocated on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of a job on several, as this node's supervisor knows it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    node: str
    """Its name, unique within the job."""
    host: str
    """Its host's name."""
    address: str
    """Under which its ranks are reached."""
    standing: str
    """What it is about: ready, warming, running, leaving, away, done; silent: it is not heard of any more."""
    reason: str
    """Why, in words."""
    first_rank: int | None
    """Global rank of its first rank; null where it takes no part."""
    num_ranks: int
    """Ranks that it has."""
    heard_s: float | None
    """Seconds since it was last heard of; null for this node."""
    is_me: bool
    """Whether it is this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorView:
    """What a living supervisor knows beyond its journal. What is None is known from there, or not at all.

    Args:
        state: what it is doing.
        reason: why, in words.
        global_step: the furthest of the present worker group.
        max_steps: of the whole run.
        incarnation: number of the present, or last, worker group.
        world_size: ranks of the job.
        ranks: those of all nodes.
        attempt: name of the present, or last, worker group.
        nodes: of the job, where there may be several.
        cgroup: folder of the control group that the ranks of this node are in.
    """

    state: State
    reason: str = ""
    global_step: int | None = None
    max_steps: int | None = None
    incarnation: int | None = None
    world_size: int | None = None
    ranks: tuple[RankView, ...] = ()
    attempt: str | None = None
    nodes: tuple[NodeView, ...] = ()
    cgroup: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAge:
    """The newest snapshot of a tier."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    step: int
    """Its global step."""
    age_s: float
    """Seconds since it was complete there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreError:
    """A durable tier that fails. It is tried again for as long as it takes; training goes on meanwhile."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    error: str
    """What it failed with last, without secrets."""
    since: str
    """Of its first failure since it last worked: ISO 8601, UTC."""
    lasts_s: float
    """Seconds since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """The newest snapshot of each tier; null where none is known of."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    memory: SnapshotAge | None = None
    """In the memory tier."""
    durable: SnapshotAge | None = None
    """In the durable tier."""
    store_error: StoreError | None = None
    """Why nothing becomes durable at present; null since the durable tier last worked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker group that ended and should not have."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    incarnation: int | None
    """The one that ended."""
    time: str
    """When it ended: ISO 8601, UTC."""
    cause: str
    """Why, in words."""
    rank: int | None = None
    """The rank that was the cause, where there is one."""
    incident: str | None = None
    """The incident whose folder has the evidence."""
    global_step: int | None = None
    """The step it had reached."""
    resumed_step: int | None = None
    """The step from which the next one went on; null until it does."""
    kept_step: int | None = None
    """The step of the snapshot that its ranks left behind when it failed; null where none of them could: then the last
    regular snapshot counts."""
    steps_lost: int | None = None
    """Steps that had been committed and were done again; null until the next one goes on."""
    lost_s: float = 0.0
    """Seconds lost: standing still, being down, doing steps again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The last evaluation."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    step: int | None
    """At this global step."""
    values: dict[str, Number]
    """By name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """The supervisor."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    pid: int | None = None
    """Its process; the last one's where it does not run."""
    version: str | None = None
    """Of elastictrain."""
    answers: bool = False
    """Whether it answered. If it runs and does not answer, this is what the journal says."""
    socket: str | None = None
    """Path of its control socket."""
    cgroup: str | None = None
    """Folder of the control group that the present worker group is in; null where none could be made: then processes
    that it starts are found by their environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHealth:
    """Whether events are being kept."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    state: Literal["ok", "degraded", "missing", "unreadable"] = "ok"
    """degraded: events cannot be written, and are kept in memory meanwhile. Training goes on."""
    reason: str = ""
    """Why it is not ok; or what happened to it earlier."""
    dropped: int = 0
    """Events of this supervisor that are lost, since memory for them is bounded too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A job, at a moment."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _DESCRIBED

    schema_version: int = SCHEMA_VERSION
    """Of this document."""
    job: str
    """Name of the job."""
    state_dir: str
    """Its state directory."""
    state: str
    """not_running, starting, training, recovering, stopping, stopped, draining, drained, halted or completed."""
    reason: str
    """Why, in words."""
    daemon_running: bool
    """Whether its supervisor lives on this host."""
    daemon: Daemon
    """The supervisor."""
    global_step: int | None
    """Windows consumed."""
    max_steps: int | None
    """Windows until the job is complete."""
    steps_per_s: Number | None
    """Of the last report."""
    samples_per_s: Number | None
    """Of the last report."""
    tokens_per_s: Number | None
    """Of the last report, where the task has tokens."""
    loss: Number | None
    """Mean loss of the last report's steps."""
    eta_s: float | None
    """Seconds to completion at the last report's rate; null unless it is training."""
    evaluation: Evaluated | None
    """The last evaluation."""
    incarnation: int | None
    """Number of the worker group."""
    attempt: str | None
    """Its name, the same on all nodes and in all logs."""
    world_size: int | None
    """Ranks in it, over all nodes."""
    ranks: list[RankView]
    """The ranks of all nodes; empty where the supervisor does not answer."""
    nodes: list[NodeView]
    """The nodes; empty for a job on one node, and where the supervisor does not answer."""
    snapshots: Snapshots
    """The newest snapshots."""
    num_restarts: int
    """Worker groups that ended and should not have."""
    restarts: list[Restart]
    """The last of them, oldest first."""
    num_incidents: int
    """Hangs that were found."""
    wall_s: float
    """Seconds since the job's first start, less the time it was stopped, drained, halted or complete."""
    useful_s: float
    """Seconds of training that still count: not stood still, not done again."""
    lost_s: float
    """Seconds lost to failures: stood still, down, done again. The rest of the wall time went into starting."""
    goodput: float | None
    """useful_s / wall_s; null before the first start."""
    last_event_age_s: float | None
    """Seconds since anything was heard."""
    journal: JournalHealth
    """Whether events are being kept."""
