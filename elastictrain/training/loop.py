"""The built-in training loop.

    fetch window → for each of my microbatches: seed, autocast(forward, loss), scaled backward (no reduction on all
    but my last) → reduce → settle the step before → unscale, clip, finite?, optimizer step, scaler update → commit

It stands on `Session` alone. What is in here is the order of things; the parts are modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from elastictrain.core.counters import Counters
from elastictrain.core.phases import Phase
from elastictrain.core.skips import SkippedUpdate, SkipWatch
from elastictrain.core.window import WindowPlan
from elastictrain.errors import HaltError, TaskError
from elastictrain.training.data import FetchFailed, Span, to_device
from elastictrain.training.ema import Ema
from elastictrain.training.evaluate import Evaluator
from elastictrain.training.losses import split_loss
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.report import Reporter, StepRecord
from elastictrain.training.session import Session, Step
from elastictrain.training.task import BoundTask
from elastictrain.training.timing import DeviceTimer
from elastictrain.training.update import Updater


class Limits:
    """When a run is complete.

    Args:
        plan: how the samples are cut into windows.
        max_steps: optimizer steps; None for no such limit.
        max_epochs: epochs; None for no such limit.
    """

    def __init__(self, plan: WindowPlan, max_steps: int | None, max_epochs: int | None) -> None:
        self._plan = plan
        self._max_steps = max_steps
        self._max_epochs = max_epochs

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = [self._max_steps] if self._max_steps is not None else []
        if self._max_epochs is not None:
            steps.append(self._plan.steps_in(self._max_epochs))
        return min(steps)

    def reached(self, global_step: int, sample_position: int) -> bool:
        if self._max_steps is not None and global_step >= self._max_steps:
            return True
        return self._max_epochs is not None and self._plan.epochs_done(sample_position) >= self._max_epochs


def my_spans(session: Session, plan: WindowPlan, limits: Limits) -> Iterator[Span]:
    """What this rank will read from the session's position on, until the run is complete."""
    step, position = session.global_step, session.sample_position
    while not limits.reached(step, position):
        window = plan.window_at(position)
        for microbatch in window.share(session.place.rank, session.place.world_size):
            yield microbatch.start, microbatch.stop
        step, position = step + 1, window.stop


class Loop:
    """Trains until the limits are reached or the session stops.

    Args:
        session: counters, phases, plan.
        task: the user's task.
        replica: the model.
        updater: the end of a step.
        precision: autocast and loss scale.
        scheduler: advanced once per applied update; None for a constant learning rate.
        ema: averaged weights; None for none.
        evaluators: run when due.
        reporter: gets every step.
        timer: the device's clock.
        plan: how samples are cut into windows.
        limits: when the run is complete.
        stream: this rank's batches, in order.
        skip_watch: halts a run that only skips.
    """

    def __init__(
        self,
        *,
        session: Session,
        task: BoundTask,
        replica: Replica,
        updater: Updater,
        precision: Precision,
        scheduler: LRScheduler | None,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
        evaluators: list[Evaluator],
        reporter: Reporter,
        timer: DeviceTimer,
        plan: WindowPlan,
        limits: Limits,
        stream: Iterator[Any],
        skip_watch: SkipWatch,
        report_every: int,
        eval_every_steps: int | None,
        eval_every_epochs: int | None,
        eval_with_ema: bool,
        channels_last: bool,
    ) -> None:
        self._session = session
        self._place = session.place
        self._task = task
        self._replica = replica
        self._updater = updater
        self._precision = precision
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._ema = ema
        self._evaluators = evaluators
        self._reporter = reporter
        self._timer = timer
        self._plan = plan
        self._limits = limits
        self._stream = stream
        self._skip_watch = skip_watch
        self._report_every = report_every
        self._eval_every_steps = eval_every_steps
        self._eval_every_epochs = eval_every_epochs
        self._eval_with_ema = eval_with_ema
        self._channels_last = channels_last
        self._non_blocking = self._place.device.type == "cuda"
        self._reducing = False
        self._evaluated_at = -1
        self.last_evaluation: dict[str, float] = {}
        session.on_settled(self._settled)
        if self._place.world_size > 1:
            replica.on_last_gradient(self._last_gradient)

    # ---- the run

    def run(self) -> bool:
        """Trains; returns True if the run is complete, False if it was stopped before."""
        session = self._session
        self._reporter.start()
        while not self._complete and (step := session.begin_step(self._plan)) is not None:
            epochs_before = self._plan.epochs_done(session.sample_position)
            self._step(step)
            number = session.global_step
            if number % self._report_every == 0:
                self._reporter.report()
            epoch_ended = self._plan.epochs_done(session.sample_position) // (self._eval_every_epochs or 1) > (
                epochs_before // (self._eval_every_epochs or 1)
            )
            if (self._eval_every_steps and number % self._eval_every_steps == 0) or (
                self._eval_every_epochs and epoch_ended
            ):
                self.evaluate()
        self._reporter.report()
        return self._complete

    @property
    def _complete(self) -> bool:
        return self._limits.reached(self._session.global_step, self._session.sample_position)

    def evaluate(self) -> None:
        """Evaluates on every dataset, unless this very step has been. Collective."""
        session = self._session
        if not self._evaluators or self._evaluated_at == session.global_step:
            return
        session.settle()
        session.enter(Phase.EVAL)
        ema = self._ema if self._eval_with_ema else None
        values: dict[str, float] = {}
        for evaluator in self._evaluators:
            values |= evaluator.run(self._replica, ema)
        session.enter(Phase.READY)
        self._evaluated_at = session.global_step
        self.last_evaluation = values
        self._reporter.evaluated(values)

    # ---- one step

    def _step(self, step: Step) -> None:
        session, world_size = self._session, self._place.world_size
        num_mine = len(step.microbatches)
        # A short window may leave ranks without work; then nobody reduces in the backward pass.
        by_hand = step.window.num_microbatches < world_size
        if by_hand:
            self._replica.broadcast_buffers()
        model = self._replica.module if by_hand else self._replica.forward_module
        session.enter(Phase.DATA)
        fetched: list[Any] = []
        weights: list[float] = []
        total_weight: float | Tensor = float(step.window.num_samples)
        if self._task.weight is not None:
            fetched = [self._fetch(step) for _ in range(num_mine)]
            weights = [self._weigh(batch, step) for batch in fetched]
            total_weight = self._total_weight(sum(weights), step)
        loss_sum: Tensor | None = None
        if not num_mine:
            self._timer.begin()
        for number, microbatch in enumerate(step.microbatches):
            is_last = number == num_mine - 1
            if weights:
                batch, weight = fetched[number], weights[number]
                fetched[number] = None
            else:
                if number:
                    session.enter(Phase.DATA)
                batch, weight = self._fetch(step), float(microbatch.num_samples)
            batch = to_device(
                batch, self._place.device, non_blocking=self._non_blocking, channels_last=self._channels_last
            )
            if number == 0:
                self._timer.begin()
            session.begin_microbatch(microbatch)
            with self._replica.accumulating(reduce=is_last and not by_hand):
                with self._precision.autocast():
                    value = self._task.loss(model, batch)
                share = self._share(value, weight, total_weight)
                session.enter(Phase.BACKWARD)
                self._reducing = is_last and not by_hand
                self._precision.backward(share)
            self._reducing = False
            loss_sum = share.detach() if loss_sum is None else loss_sum + share.detach()
        if world_size > 1:
            self._replica.after_first_backward()
            if session.phase is not Phase.REDUCE:
                self._last_gradient_mark()
            if by_hand:
                self._replica.reduce_by_hand()
            self._timer.mark()
        session.enter(Phase.OPTIMIZER)
        session.settle()
        lr = self._optimizer.param_groups[0]["lr"]
        scale = self._precision.scale()
        result = self._updater.apply()
        self._timer.mark()
        self._reporter.record(
            StepRecord(
                step=step.index + 1,
                loss=loss_sum if loss_sum is not None else torch.zeros((), device=self._place.device),
                grad_norm=result.grad_norm,
                lr=float(lr),
                scale=scale,
                num_samples=step.window.num_samples,
                weight=total_weight,
            )
        )
        session.commit(result.applied)

    def _fetch(self, step: Step) -> Any:
        batch = next(self._stream)
        if isinstance(batch, FetchFailed):
            raise batch.as_error(step.index)
        return batch

    def _weigh(self, batch: Any, step: Step) -> float:
        assert self._task.weight is not None
        weight = float(self._task.weight(batch))
        if not 0 <= weight < float("inf"):
            raise TaskError(
                f"{self._task.name}.weight() returned {weight} at step {step.index}",
                "A weight is a finite number, 0 or more: how many tokens, say, count in the microbatch's loss.",
            )
        return weight

    def _total_weight(self, mine: float, step: Step) -> float | Tensor:
        """The window's weight over all ranks. Every rank knows its own before its first forward pass."""
        if self._place.world_size == 1:
            if mine == 0:
                self._no_weight(step)
            return mine
        total = torch.tensor(mine, dtype=torch.float64, device=self._place.device)
        dist.all_reduce(total)
        if total.device.type == "cpu":
            if total.item() == 0:
                self._no_weight(step)
            return float(total.item())
        return total

    def _no_weight(self, step: Step) -> None:
        raise TaskError(
            f"the samples of step {step.index} weigh nothing: {self._task.name}.weight() returned 0 for all of them",
            "A step needs something to average over.",
        )

    def _share(self, value: Any, weight: float, total_weight: float | Tensor) -> Tensor:
        """This microbatch's part of the window's mean loss, times the world size, which the reduction divides by."""
        loss, returned_weight = split_loss(value, f"{self._task.name}.loss()")
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        if returned_weight is None:
            if weight == 0:
                raise TaskError(
                    f"{self._task.name}.loss() returned a mean over a microbatch of weight 0",
                    "Return (total, weight) where a microbatch can weigh nothing: a mean over nothing is NaN.",
                )
            factor = weight * self._place.world_size / total_weight
        else:
            self._check_weight(returned_weight, weight)
            factor = self._place.world_size / total_weight
        if isinstance(factor, Tensor):
            factor = factor.to(loss.dtype)
        return loss * factor

    def _check_weight(self, returned: Tensor | float, announced: float) -> None:
        if isinstance(returned, Tensor) and returned.device.type != "cpu" and self._session.global_step > 0:
            return  # reading it would wait for the device; a task that is wrong is wrong in its first step
        if float(returned) != announced:
            by = "weight() announced" if self._task.weight is not None else "its number of samples is"
            raise TaskError(
                f"{self._task.name}.loss() returned weight {float(returned):g}, but {by} {announced:g}",
                "The step's total weight must be known before the first backward pass: define weight(batch) to "
                "return the same number.",
            )

    # ---- called back

    def _last_gradient(self) -> None:
        if self._reducing:
            self._last_gradient_mark()

    def _last_gradient_mark(self) -> None:
        self._session.enter(Phase.REDUCE)
        self._timer.mark()

    def _settled(self, applied: bool, counters: Counters) -> None:
        if applied:
            if self._scheduler is not None:
                self._scheduler.step()
            if self._ema is not None:
                self._ema.update()
            return
        record = self._reporter.last
        skipped = SkippedUpdate(
            step=record.step,
            scale=record.scale.item() if record.scale is not None else None,
            grad_norm=record.grad_norm.item() if record.grad_norm is not None else None,
        )
        if diagnosis := self._skip_watch.observe(skipped, counters):
            raise HaltError(diagnosis, SkipWatch.advice(self._precision.mode))
