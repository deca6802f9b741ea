"""What the supervisor remembers of what the ranks have said, and how it shows them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from elastictrain.config.schema import JobConfig
from elastictrain.core.status import RankView
from elastictrain.supervisor.life import Life
from elastictrain.supervisor.output import Event
from elastictrain.supervisor.settings import samples_in_step
from elastictrain.supervisor.watch import NS_PER_S


class Said:
    """What the ranks have said in their events.

    Args:
        config: of the job.
        data: what they have said to an earlier supervisor about their data, see `data`.
    """

    def __init__(self, config: JobConfig, data: Mapping[str, int] | None = None) -> None:
        self._config = config
        self._start: dict[str, Any] = dict(data or {})
        self._devices: dict[int, str] = {}
        self.durable_step = -1
        """The newest step that is durable; -1 before any."""

    def hear(self, event: Event) -> None:
        """Takes note of an event. One that lacks what it should have, such as a print of the user's, is passed over."""
        fields = event.fields
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if event.name == "training_started":
                self._devices[int(fields["rank"])] = str(fields["device"])
                self._start = dict(fields)
            elif event.name == "snapshot_durable":
                self.durable_step = max(self.durable_step, int(fields["at_step"]))

    @property
    def max_steps(self) -> int | None:
        steps = self._start.get("max_steps", self._config.train.max_steps)
        return int(steps) if steps is not None else None

    @property
    def world_size(self) -> int:
        return int(self._start.get("world_size", self._config.elastic.nproc_per_node))

    @property
    def data(self) -> dict[str, int]:
        """What it takes to tell which samples a step holds; empty while nobody has said it."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return {name: int(self._start[name]) for name in ("samples", "global_batch_size")}
        return {}

    def samples_in_step(self, step: int) -> str:
        """In words; empty while nobody has said how much data there is."""
        data = self.data
        if not data:
            return ""
        length, global_batch_size = data["samples"], data["global_batch_size"]
        with contextlib.suppress(
            Exception
        ):  # said before the job file was changed, it may not fit: no diagnosis for that
            return samples_in_step(self._config, step=step, length=length, global_batch_size=global_batch_size)
        return ""

    def rank_views(self, life: Life, now_s: float) -> tuple[RankView, ...]:
        """The ranks of this node at one moment."""
        host = socket.gethostname()
        views = []
        for rank, beat in life.heartbeats.items():
            if beat is None:
                views.append(RankView(rank=rank, host=host, phase="none", phase_s=now_s - life.started_s))
                continue
            views.append(
                RankView(
                    rank=rank,
                    pid=beat.pid,
                    host=host,
                    phase=beat.phase.name.lower(),
                    phase_s=max(0.0, now_s - beat.phase_since_ns / NS_PER_S),
                    step=beat.step,
                    heartbeat_age_s=max(0.0, now_s - max(beat.tick_ns, beat.moved_ns) / NS_PER_S),
                    cpu_percent=life.cpu_percent(beat.pid),
                    memory_bytes=beat.memory_bytes,
                    device=self._devices.get(rank, ""),
                    microbatch=beat.microbatch,
                    device_bytes=beat.device_bytes,
                )
            )
        return tuple(views)
