"""What a job's events so far add up to: where it stands, and where its time went. `summary` folds it."""

from __future__ import annotations

from dataclasses import dataclass

from elastictrain.core.events import Moment
from elastictrain.core.lifecycle import State
from elastictrain.core.status import Evaluated, Number, Restart


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where the time went, in seconds."""

    useful_s: float = 0.0
    lost_s: float = 0.0
    overhead_s: float = 0.0
    away_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.useful_s + self.lost_s + self.overhead_s

    @property
    def total_s(self) -> float:
        return self.wall_s + self.away_s


@dataclass(frozen=True, slots=True)
class Life:
    """The current or last incarnation's training.

    Args:
        first_step: global step it began at.
        reached_step: global step it has reached.
        useful_s: time it trained.
    """

    first_step: int = 0
    reached_step: int = 0
    useful_s: float = 0.0


@dataclass(frozen=True, slots=True)
class History:
    """All that the events so far say. The empty history is that of a job that never started."""

    last: Moment | None = None
    state: State = State.NOT_RUNNING
    reason: str = "it has never been started"
    pid: int | None = None
    version: str | None = None
    incarnation: int | None = None
    alive: bool = False
    """The incarnation has started and not ended."""
    attempt: str | None = None
    world_size: int | None = None
    global_step: int | None = None
    max_steps: int | None = None
    steps_per_s: Number | None = None
    samples_per_s: Number | None = None
    tokens_per_s: Number | None = None
    loss: Number | None = None
    evaluation: Evaluated | None = None
    restored_step: int | None = None
    """What the present incarnation began with; None until it has said so."""
    in_memory: tuple[int, Moment] | None = None
    durable: tuple[int, Moment] | None = None
    store_error: tuple[str, Moment] | None = None
    """What the store failed with last, and since when it fails; None since it last worked."""
    restarts: tuple[Restart, ...] = ()
    num_restarts: int = 0
    num_incidents: int = 0
    accounts: Accounts = Accounts()
    life: Life = Life()
    failure: str | None = None
    """What went wrong since ranks last trained, first cause."""
    failed_rank: int | None = None
    incident: str | None = None
    open_restart: Restart | None = None
    """The incarnation that ended last, until ranks train again."""
    open_lost_s: float = 0.0
    """Lost since ranks last trained."""
