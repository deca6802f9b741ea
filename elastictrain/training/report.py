"""Keeps what each step did, and every so many steps brings the ranks' numbers together and reports them.

Between two reports nothing is exchanged and nothing read from the device: a step leaves references to its scalars, and
a report reads them all with one collective and one transfer.
"""

from __future__ import annotations

import fcntl
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.core.advice import Advice, TimeShares, bound_advice
from elastictrain.core.counters import Counters
from elastictrain.logs import Logger
from elastictrain.training.device import peak_memory_bytes
from elastictrain.training.metrics import MetricsWriter, Record
from elastictrain.training.session import Session
from elastictrain.training.timing import DeviceTimer, TimeSpent, time_spent


@dataclass(slots=True)
class StepRecord:
    """One step, as this rank knows it.

    Args:
        step: the global step it made.
        losses: what this rank adds to the window's mean loss times `divisor`: one number, or one for each microbatch by
            its index, 0 where it is another rank's. 1-d on the device, as long on every rank. The loss is summed over
            the ranks first, then in the order of the index.
        divisor: see there.
        grad_norm: norm before clipping, 0-d on the device; None if not computed.
        lr: learning rate of the update, first parameter group.
        scale: loss scale, 0-d on the device; None where there is no scaler.
        num_samples: samples of the window, over all ranks.
        weight: total weight of the window.
        applied: None until it is known.
    """

    step: int
    losses: Tensor
    divisor: int
    grad_norm: Tensor | None
    lr: float
    scale: Tensor | None
    num_samples: int
    weight: float | Tensor
    applied: bool | None = None


class Reporter:
    """Collects step records and makes reports of them.

    Args:
        session: whose phases and counters are reported.
        timer: the device's clock.
        writer: where records go; None on every rank but zero.
        log: for events.
        every_steps: steps between two reports.
        incarnation: stamped on every record.
        run_id: lineage of the run, stamped on evaluations.
        num_workers: loader processes, for advice.
        tokens_per_sample: for tokens/s, where the window's weight does not tell.
        weight_is_tokens: the window's weight counts tokens.
        max_steps: for progress.
        advise: is given every remark.
    """

    def __init__(
        self,
        session: Session,
        timer: DeviceTimer,
        writer: MetricsWriter | None,
        log: Logger,
        *,
        every_steps: int,
        incarnation: int,
        run_id: str,
        num_workers: int,
        tokens_per_sample: int | None,
        weight_is_tokens: bool,
        max_steps: int,
        advise: Callable[[Advice | None], None],
    ) -> None:
        self._session = session
        self._timer = timer
        self._writer = writer
        self._log = log
        self._every_steps = every_steps
        self._incarnation = incarnation
        self._run_id = run_id
        self._num_workers = num_workers
        self._tokens_per_sample = tokens_per_sample
        self._weight_is_tokens = weight_is_tokens
        self._max_steps = max_steps
        self._advise = advise
        self._records: list[StepRecord] = []
        self._since_s = perf_counter()
        self._totals = RunTotals()
        self._shares_seen = 0
        self.last_loss: float | None = None
        """Mean loss of the last reported window."""
        session.on_settled(self._settled)

    def due(self, global_step: int) -> bool:
        """Whether this step is followed by a report."""
        return global_step % self._every_steps == 0

    def record(self, record: StepRecord) -> None:
        """Keeps one step; its outcome arrives when the session settles it."""
        self._records.append(record)

    def _settled(self, applied: bool, _counters: Counters) -> None:
        self._records[-1].applied = applied

    @property
    def last(self) -> StepRecord:
        return self._records[-1]

    @property
    def totals(self) -> RunTotals:
        return self._totals

    def start(self) -> None:
        """The clock of the first interval starts now."""
        self._session.take_phase_times()
        self._since_s = perf_counter()

    def report(self) -> None:
        """Exchanges and writes what came together since the last report. Collective: all ranks call it."""
        counters = self._session.counters
        records = self._records
        if not records:
            return
        place = self._session.place
        on_device = self._timer.take()
        now_s = perf_counter()
        wall_s = now_s - self._since_s
        spent = time_spent(self._session.take_phase_times(), on_device)
        mine = torch.cat([r.losses.to(torch.float64) for r in records])
        clock = torch.tensor(
            [spent.data, spent.compute, spent.reduce, spent.aside, float(peak_memory_bytes(place.device))],
            dtype=torch.float64,
            device=place.device,
        )
        rows = _all_rows(torch.cat([mine, clock]), place.world_size)
        self._records = []  # not before they are exchanged: a rank that fails here still has them to report alone
        self._since_s = now_s
        num = len(mine)
        terms = iter([sum(row[i] for row in rows) for i in range(num)])
        losses = [sum(itertools.islice(terms, len(r.losses))) / r.divisor for r in records]
        spent = TimeSpent(*(sum(row[num + i] for row in rows) / place.world_size for i in range(4)))
        self.last_loss = losses[-1]
        device = self._session.place.device
        self._session.tell(self.last_loss, torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
        memory_bytes = int(max(row[num + 4] for row in rows))
        self._publish(records, losses, spent, wall_s, memory_bytes, counters)

    def _publish(
        self,
        records: list[StepRecord],
        losses: list[float],
        spent: TimeSpent,
        wall_s: float,
        memory_bytes: int,
        counters: Counters,
    ) -> None:
        stepping_s = max(wall_s - spent.aside, 1e-9)
        busy_s = spent.data + spent.compute + spent.reduce
        other_s = max(0.0, stepping_s - busy_s)
        whole_s = busy_s + other_s
        shares = TimeShares(spent.data / whole_s, spent.compute / whole_s, spent.reduce / whole_s, other_s / whole_s)
        num_samples = sum(r.num_samples for r in records)
        num_tokens: float | None = None
        if self._weight_is_tokens:
            num_tokens = sum(float(r.weight) for r in records)
        elif self._tokens_per_sample is not None:
            num_tokens = float(num_samples * self._tokens_per_sample)
        self._totals.add(num_samples, num_tokens, stepping_s, spent, other_s, memory_bytes)
        # The first interval holds imports, allocations and compilation: no advice from it.
        self._shares_seen += len(records) if self._shares_seen or counters.global_step > len(records) else 1
        if self._session.place.is_rank_zero:
            self._advise(
                bound_advice(
                    shares,
                    num_steps=self._shares_seen,
                    num_workers=self._num_workers,
                    world_size=self._session.place.world_size,
                )
            )
        if self._writer is None:
            return
        lines = [self._line(record, loss) for record, loss in zip(records, losses, strict=True)]
        last = lines[-1]
        report: dict[str, Any] = {
            "step": counters.global_step,
            "max_steps": self._max_steps,
            "loss": sum(losses) / len(losses),
            "lr": last["lr"],
            "grad_norm": last["grad_norm"],
            "applied": counters.applied,
            "skipped": counters.skipped,
            "sample_position": counters.sample_position,
            "samples_per_s": num_samples / stepping_s,
            "tokens_per_s": num_tokens / stepping_s if num_tokens is not None else None,
            "steps_per_s": len(records) / stepping_s,
            "time_shares": {
                "data": shares.data,
                "compute": shares.compute,
                "reduce": shares.reduce,
                "other": shares.other,
            },
            "peak_memory_bytes": memory_bytes,
        }
        if "loss_scale" in last:
            report["loss_scale"] = last["loss_scale"]
        self._writer.write([*lines, {"kind": "report", "incarnation": self._incarnation, **report}])
        self._log.info("progress", **report)

    def settle(self) -> None:
        """What was reported is in the file, where the disk keeps up: a snapshot that comes next takes its step past
        being done again, and a process that is killed then would take the lines with it."""
        if self._writer is not None:
            self._writer.settle()

    def report_alone(self, writer: MetricsWriter, last_step: int, marks: Path) -> None:
        """Writes the lines of the steps since the last report, without the other ranks: some are gone. Then a loss is
        that of this rank's part of the window alone, and the line says so.

        Args:
            writer: of rank zero, or of whoever stands in for it.
            last_step: the steps after it will be done again.
            marks: file by which the ranks see to it that one of them writes about a step.
        """
        records, self._records = self._records, []
        with marks.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            done = max(map(int, file.read().split()), default=0)
            records = [record for record in records if done < record.step <= last_step]
            if records:
                file.write(f"{records[-1].step}\n")
        partial = {"partial": True} if self._session.place.world_size > 1 else {}
        if records:
            writer.write([{**self._line(record, record.losses.sum().item()), **partial} for record in records])

    def _line(self, record: StepRecord, loss: float) -> Record:
        return {
            "kind": "step",
            "step": record.step,
            "incarnation": self._incarnation,
            "loss": loss,
            "grad_norm": record.grad_norm.item() if record.grad_norm is not None else None,
            "lr": record.lr,
            "applied": record.applied,
            "samples": record.num_samples,
            "weight": float(record.weight),
            **({"loss_scale": record.scale.item()} if record.scale is not None else {}),
        }

    def evaluated(self, values: dict[str, float]) -> None:
        """Writes the values of an evaluation."""
        if self._writer is None:
            return
        step = self._session.global_step
        line = {"kind": "eval", "step": step, "incarnation": self._incarnation, "run_id": self._run_id}
        self._writer.write([{**line, "values": values}])
        self._log.info("evaluated", **values)


@dataclass(slots=True)
class RunTotals:
    """Sums over the reports of this process's life."""

    num_samples: int = 0
    num_tokens: float | None = None
    stepping_s: float = 0.0
    data_s: float = 0.0
    compute_s: float = 0.0
    reduce_s: float = 0.0
    other_s: float = 0.0
    peak_memory_bytes: int = 0

    def add(
        self,
        num_samples: int,
        num_tokens: float | None,
        stepping_s: float,
        spent: TimeSpent,
        other_s: float,
        memory_bytes: int,
    ) -> None:
        self.num_samples += num_samples
        if num_tokens is not None:
            self.num_tokens = (self.num_tokens or 0.0) + num_tokens
        self.stepping_s += stepping_s
        self.data_s += spent.data
        self.compute_s += spent.compute
        self.reduce_s += spent.reduce
        self.other_s += other_s
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes)


def _all_rows(row: Tensor, world_size: int) -> list[list[float]]:
    """Every rank's row, in rank order."""
    if world_size == 1:
        return [row.tolist()]
    rows = [torch.empty_like(row) for _ in range(world_size)]
    dist.all_gather(rows, row)
    return [r.tolist() for r in rows]
