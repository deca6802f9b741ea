"""What happens to a job, as its supervisor tells it: kept in the journal, and shown where it matters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from elastictrain.core.events import LINE_STAMPS, Kind
from elastictrain.core.policy import Cause, RankEnd, classify
from elastictrain.supervisor.events import EventSink
from elastictrain.supervisor.life import LifeEnd
from elastictrain.supervisor.output import Event, Line

FORWARDED = frozenset(
    {
        Kind.RESTORED,
        Kind.PROGRESS,
        Kind.SNAPSHOT_PASSED_OVER,
        Kind.SNAPSHOT_INCOMPLETE,
        Kind.SNAPSHOT_TAKEN,
        Kind.SNAPSHOT_AT_FAILURE,
        Kind.SNAPSHOT_DURABLE,
        Kind.SNAPSHOT_LEFT_OUT,
        Kind.SNAPSHOT_FAILED,
        Kind.PERSISTER_RETRYING,
        Kind.PERSISTER_STALLED,
        Kind.PERSISTER_FAILED,
        Kind.PERSISTER_FENCED,
        Kind.STORE_RETRYING,
        Kind.EVALUATED,
    }
)
"""Events of the ranks that are kept as they come."""
OF_ALL_NODES = FORWARDED - {
    Kind.RESTORED,
    Kind.PROGRESS,
    Kind.SNAPSHOT_AT_FAILURE,
    Kind.EVALUATED,
    Kind.PERSISTER_FENCED,
}
"""Those of them that rank zero alone says: other nodes keep them as well."""
SHOWN = {
    "incident_opened": "error",
    "culprit_elsewhere": "warning",
    "rank_killed": "warning",
    "incarnation_ended": "warning",
    "restart_planned": "warning",
    "halted": "error",
    "drained": "info",
    "stopped": "info",
    "snapshot_durable": "info",
    "snapshot_on_its_way": "info",
    "snapshot_not_durable": "warning",
    "persister_retrying": "warning",
    "persister_stalled": "warning",
    "persister_failed": "warning",
    "persister_fenced": "warning",
}
"""Events of the supervisor that whoever watches the run should see, and how loud they are."""


class Chronicle:
    """Events of the supervisor and of the ranks. A sink that fails costs the record, never the training.

    Args:
        sink: keeps events.
        show: gets those of the supervisor that are shown.

    Attributes:
        incarnation: number of the present worker group.
        attempt: its name.
        news: the last event of each kind that rank zero says for all nodes.
    """

    def __init__(self, sink: EventSink, show: Callable[[Line], None]) -> None:
        self._sink = sink
        self._show = show
        self._announced = 0
        self.incarnation = 0
        self.attempt: str | None = None
        self.news: dict[str, dict[str, Any]] = {}

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Keeps an event of the supervisor, and shows it if it is one of `SHOWN`."""
        self._keep(kind, fields)
        if kind in SHOWN:
            stamps = {
                "event": kind,
                "level": SHOWN[kind],
                "timestamp": datetime.now(UTC).isoformat(),
                "incarnation": self.incarnation,
                "attempt": self.attempt,
            }
            self._show(Event(kind, {**fields, **stamps}))

    def hear(self, said: Event) -> None:
        """Keeps an event of a rank, if it is one to be kept: of all that say with what they begin to train, the first
        of a worker group."""
        is_first = said.name == "training_started" and self._announced != self.incarnation
        if is_first:
            self._announced = self.incarnation
        if is_first or said.name in FORWARDED:
            fields = {key: value for key, value in said.fields.items() if key not in LINE_STAMPS}
            if said.name in OF_ALL_NODES:
                self.news[said.name] = fields
            self._keep(said.name, fields)

    def ended(self, end: LifeEnd, cause: str, classified: Cause | None) -> None:
        """A worker group has ended; shown only where that is something to worry about.

        Args:
            end: how.
            cause: why, in words.
            classified: the failure; None where it was meant, or is another node's.
        """
        fields = {
            "incarnation": end.number,
            "cause": cause,
            "kind": classified.kind.value if classified is not None else "",
            "global_step": end.reached_step,
            "failed_step": end.failed_step,
            "began_step": end.began_step,
            "kept_step": end.kept_step,
            "lived_s": round(end.lived_s, 3),
        }
        if classified is not None:
            self.emit(Kind.INCARNATION_ENDED, **fields)
        else:
            self._keep(Kind.INCARNATION_ENDED, fields)

    def rank_failed(self, rank_end: RankEnd, cause: Cause) -> None:
        """A rank has ended badly; `cause` is the worker group's."""
        words = classify([rank_end])
        self.emit(
            Kind.RANK_FAILED,
            rank=rank_end.rank,
            cause=words.kind.value,
            exit_code=rank_end.exit_code,
            step=rank_end.step,
            what=words.what,
            secondary=rank_end.rank != cause.rank,
            incarnation=self.incarnation,
        )

    def _keep(self, kind: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):
            self._sink.append(kind, fields)
