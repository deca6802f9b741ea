"""What the supervisor shows of itself: values without behaviour, for `status` and whoever else asks."""

from __future__ import annotations

from dataclasses import dataclass

from elastictrain.core.lifecycle import State


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of this node.

    Args:
        rank: in the job.
        pid: of its process; None before its first heartbeat.
        host: where it runs.
        phase: what it does, in lower case; "none" before its first heartbeat.
        phase_s: since when.
        step: windows it has consumed.
        heartbeat_age_s: since its Python code last ran; None before the first.
        cpu_percent: of one core, since the last time somebody asked.
        memory_bytes: resident.
        device: what it computes on; "" while that is not known.
        microbatch: index within the window.
        device_bytes: memory allocated on the device.
        loss: of the last reported step; NaN before the first.
    """

    rank: int
    pid: int | None
    host: str
    phase: str
    phase_s: float
    step: int
    heartbeat_age_s: float | None
    cpu_percent: float
    memory_bytes: int
    device: str
    microbatch: int = 0
    device_bytes: int = 0
    loss: float = float("nan")


@dataclass(frozen=True, slots=True)
class RestartView:
    """One life that ended, and why.

    Args:
        incarnation: its number.
        cause: in words.
        kind: of the cause, see `core.policy.CauseKind`.
        global_step: how far it had got.
        lived_s: from its start to its end.
        ended_at: seconds since the epoch, for people to read; never computed with.
    """

    incarnation: int
    cause: str
    kind: str
    global_step: int
    lived_s: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class SupervisorView:
    """The supervisor at one moment.

    Args:
        job: its name.
        state: what it is doing.
        reason: why, in words.
        global_step: the furthest of the present worker group.
        max_steps: of the whole run; None until the ranks have said.
        incarnation: number of the present, or last, worker group; 0 before the first.
        world_size: ranks of the job.
        ranks: those of this node.
        restarts: lives that ended in failure, oldest first.
        lost_s: time in which the job did not get further than it had been.
        started_at: seconds since the epoch, for people to read.
        uptime_s: since this supervisor was started.
        pid: of the supervisor.
        last_incident: number of the newest incident; None if there was none.
    """

    job: str
    state: State
    reason: str
    global_step: int
    max_steps: int | None
    incarnation: int
    world_size: int
    ranks: tuple[RankView, ...]
    restarts: tuple[RestartView, ...]
    lost_s: float
    started_at: float
    uptime_s: float
    pid: int
    last_incident: int | None
