"""The status as Prometheus metrics, made anew at every scrape: there is no second bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from elastictrain.core.lifecycle import State
from elastictrain.core.status import Number, Status

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render_metrics(status: Status) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status))
    return generate_latest(registry)


class _StatusCollector(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        s = self._status
        job = [s.job]

        def gauge(name: str, help_: str, value: Number | None) -> Iterator[Metric]:
            if value is not None:
                family = GaugeMetricFamily(f"elastictrain_{name}", help_, labels=["job"])
                family.add_metric(job, float(value))
                yield family

        def counter(name: str, help_: str, value: float) -> Iterator[Metric]:
            family = CounterMetricFamily(f"elastictrain_{name}", help_, labels=["job"])
            family.add_metric(job, value)
            yield family

        info = GaugeMetricFamily("elastictrain_info", "Version of elastictrain", labels=["job", "version"])
        info.add_metric([s.job, s.daemon.version or ""], 1)
        yield info
        states = GaugeMetricFamily("elastictrain_state", "1 for the state the job is in", labels=["job", "state"])
        for state in State:
            states.add_metric([s.job, state], float(s.state == state))
        yield states
        yield from gauge("global_step", "Windows consumed", s.global_step)
        yield from gauge("max_steps", "Windows until complete", s.max_steps)
        yield from gauge("steps_per_second", "Rate of the last report", s.steps_per_s)
        yield from gauge("samples_per_second", "Rate of the last report", s.samples_per_s)
        yield from gauge("tokens_per_second", "Rate of the last report", s.tokens_per_s)
        yield from gauge("loss", "Mean loss of the last report", s.loss)
        yield from gauge("eta_seconds", "Time to completion at this rate", s.eta_s)
        yield from gauge("incarnation", "Number of the worker group", s.incarnation)
        yield from gauge("world_size", "Ranks over all nodes", s.world_size)
        yield from gauge("goodput_ratio", "Useful time over wall time", s.goodput)
        yield from gauge("last_event_age_seconds", "Time since anything was heard", s.last_event_age_s)
        yield from gauge("journal_degraded", "1 while events cannot be written", float(s.journal.state != "ok"))
        yield from counter("restarts", "Worker groups that ended and should not have", s.num_restarts)
        yield from counter("incidents", "Hangs found", s.num_incidents)
        yield from counter("journal_dropped_events", "Events lost by this supervisor", s.journal.dropped)
        # Gauges, though they mostly grow: time that looked useful may turn out to be lost.
        yield from gauge("wall_seconds", "Time since the first start, less deliberate pauses", s.wall_s)
        yield from gauge("useful_seconds", "Time of training that still counts", s.useful_s)
        yield from gauge("lost_seconds", "Time lost to failures", s.lost_s)
        yield from self._snapshots()
        yield from self._ranks()

    def _snapshots(self) -> Iterator[Metric]:
        labels = ["job", "tier"]
        step = GaugeMetricFamily("elastictrain_snapshot_step", "Newest snapshot", labels=labels)
        age = GaugeMetricFamily("elastictrain_snapshot_age_seconds", "Age of the newest snapshot", labels=labels)
        for tier in ("memory", "durable"):
            snapshot = getattr(self._status.snapshots, tier)
            if snapshot is not None:
                step.add_metric([self._status.job, tier], snapshot.step)
                age.add_metric([self._status.job, tier], snapshot.age_s)
        yield step
        yield age
        failing = GaugeMetricFamily(
            "elastictrain_store_error_seconds",
            "Time since the durable tier fails; 0 if it works",
            labels=["job"],
        )
        error = self._status.snapshots.store_error
        failing.add_metric([self._status.job], error.lasts_s if error is not None else 0.0)
        yield failing

    def _ranks(self) -> Iterator[Metric]:
        fields = {
            "step": ("step", "Global step of the rank"),
            "phase_seconds": ("phase_s", "Time in its phase"),
            "heartbeat_age_seconds": ("heartbeat_age_s", "Time since its last sign of life"),
            "cpu_percent": ("cpu_percent", "Share of a core"),
            "memory_bytes": ("memory_bytes", "Resident memory"),
        }
        for name, (field, help_) in fields.items():
            family = GaugeMetricFamily(f"elastictrain_rank_{name}", help_, labels=["job", "rank"])
            for rank in self._status.ranks:
                value = getattr(rank, field)
                if value is not None:
                    family.add_metric([self._status.job, str(rank.rank)], float(value))
            yield family
        phases = GaugeMetricFamily("elastictrain_rank_phase", "1 for its phase", labels=["job", "rank", "phase"])
        for rank in self._status.ranks:
            phases.add_metric([self._status.job, str(rank.rank), rank.phase], 1)
        yield phases
