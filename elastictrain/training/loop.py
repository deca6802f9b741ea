"""The built-in training loop.

    fetch window → for each of my microbatches: seed, autocast(forward, loss), scaled backward (no reduction on all
    but my last) → reduce → settle the step before → unscale, clip, finite?, optimizer step, scaler update → commit

It stands on `Session` alone. What is in here is the order of things; the parts are modules of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.core.counters import Counters
from elastictrain.core.phases import Phase
from elastictrain.core.skips import SkippedUpdate, SkipWatch
from elastictrain.errors import HaltError, TaskError
from elastictrain.training.collectives import gather_by_index
from elastictrain.training.data import to_device
from elastictrain.training.evaluate import Evaluation
from elastictrain.training.feed import Feed
from elastictrain.training.losses import split_loss
from elastictrain.training.report import Reporter, StepRecord
from elastictrain.training.session import Session, Step
from elastictrain.training.shadow import Shadow
from elastictrain.training.snapshot import Snapshotter
from elastictrain.training.task import BoundTask
from elastictrain.training.timing import DeviceTimer
from elastictrain.training.trainee import Trainee


class Loop:
    """Trains until the feed's limits are reached or the session stops.

    Args:
        session: counters, phases, stop flag.
        task: the user's task.
        trainee: model and optimizer.
        feed: this rank's batches.
        evaluation: what is evaluated, and when.
        reporter: gets every step.
        timer: the device's clock.
        skip_watch: halts a run that only skips.
        snapshotter: keeps the state, on the rank that does; None on the others.
        shadow: holds what forward passes change as it was at the last commit, for a snapshot at failure.
    """

    def __init__(
        self,
        session: Session,
        task: BoundTask,
        trainee: Trainee,
        feed: Feed,
        evaluation: Evaluation,
        reporter: Reporter,
        timer: DeviceTimer,
        skip_watch: SkipWatch,
        snapshotter: Snapshotter | None,
        shadow: Shadow,
    ) -> None:
        self._session = session
        self._place = session.place
        self._task = task
        self._trainee = trainee
        self._replica = trainee.replica
        self._precision = trainee.precision
        self._feed = feed
        self._evaluation = evaluation
        self._reporter = reporter
        self._timer = timer
        self._skip_watch = skip_watch
        self._snapshotter = snapshotter
        self._shadow: Shadow | None = shadow
        self._tree = trainee.replica.tree
        # DDP divides by the number of ranks; the tree gives the sum.
        self._divisor = self._place.world_size if self._tree is None else 1
        self._non_blocking = self._place.device.type == "cuda"
        self._reducing = False
        session.on_settled(self._settled)
        if self._place.world_size > 1 and self._tree is None:
            self._replica.on_last_gradient(self._last_gradient)

    # ---- the run

    def run(self) -> bool:
        """Trains; returns True if the run is complete, False if it was stopped before."""
        self._reporter.start()
        try:
            self._run()
        except HaltError:
            self._reporter.report()  # all ranks halt at the same step; the steps before it are worth seeing
            raise
        return self._complete

    def _run(self) -> None:
        session, plan = self._session, self._feed.plan
        if session.phase is Phase.INIT:
            session.enter(Phase.READY)
        # What is no part of a snapshot, such as a buffer that is not persistent, is rank zero's as well.
        self._replica.broadcast_buffers()
        if self._evaluation.is_owed:
            self.evaluate()
        while not self._complete and (step := session.begin_step(plan)) is not None:
            epochs_before = plan.epochs_done(session.sample_position)
            self._step(step)
            number = session.global_step
            # A step that is in a snapshot is not done again: what there is to say about it is said before.
            if self._reporter.due(number):
                self._reporter.report()
            if self._snapshotter is not None:
                if session.take_snapshot_request():
                    self._snapshotter.ask()
                if self._snapshotter.due(number):
                    self._snapshot()
            if self._evaluation.due(number, epochs_before, plan.epochs_done(session.sample_position)):
                self.evaluate()
        self._reporter.report()
        if self._snapshotter is not None and self._snapshotter.last_step != session.global_step:
            # Evaluation at the end may take long: nothing of what was trained shall hang on it.
            self._snapshot()

    def _snapshot(self) -> None:
        assert self._snapshotter is not None
        self._session.enter(Phase.SNAPSHOT)
        self._reporter.settle()
        self._snapshotter.take()
        self._session.enter(Phase.READY)

    @property
    def _complete(self) -> bool:
        return self._feed.limits.reached(self._session.global_step, self._session.sample_position)

    def evaluate(self) -> None:
        """Evaluates on every dataset, unless this very step has been. Collective."""
        session, step = self._session, self._session.global_step
        if not self._evaluation.wanted_at(step):
            return
        session.settle()
        session.enter(Phase.EVAL)
        self._before_change()  # evaluating puts other weights in for a while
        values = self._evaluation.run(step, self._replica, self._trainee.ema)
        session.enter(Phase.READY)
        self._reporter.evaluated(values)

    # ---- one step

    def _step(self, step: Step) -> None:
        session, world_size = self._session, self._place.world_size
        if self._shadow is not None:
            self._shadow.keep(step.index)
        num_mine = len(step.microbatches)
        # A short window may leave ranks without work; then nobody reduces in the backward pass.
        by_hand = self._tree is None and step.window.num_microbatches < world_size
        if self._tree is not None:
            self._tree.begin(step.window.num_microbatches)
        model = self._replica.module if by_hand else self._replica.forward_module
        session.enter(Phase.DATA)
        fetched: list[Any] = []
        weights: list[float] = []
        total_weight: float | Tensor = float(step.window.num_samples)
        if self._task.weight is not None:
            fetched = [self._feed.fetch(step) for _ in range(num_mine)]
            weights = [self._weigh(batch, step) for batch in fetched]
            total_weight = self._total_weight(weights, step)
        losses: list[Tensor] = []
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
                batch, weight = self._feed.fetch(step), float(microbatch.num_samples)
            batch = to_device(
                batch, self._place.device, non_blocking=self._non_blocking, channels_last=self._trainee.channels_last
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
            if self._tree is not None:
                self._tree.push(microbatch.index)
            losses.append(share.detach())
        if self._shadow is not None and num_mine:
            self._shadow.observe()
            if not self._shadow.is_needed:
                self._shadow = None
        if world_size > 1:
            self._replica.after_first_backward()
            if session.phase is not Phase.REDUCE:
                self._last_gradient_mark()
            if by_hand:
                self._replica.reduce_by_hand()
        if self._tree is not None:
            self._tree.reduce()
        if world_size > 1:
            self._replica.broadcast_buffers()
            self._timer.mark()
        self._before_change()
        session.settle()  # it may halt the run: the state is that of a commit until the next line
        session.enter(Phase.OPTIMIZER)
        lr = self._trainee.optimizer.param_groups[0]["lr"]
        scale = self._precision.scale()
        result = self._trainee.updater.apply()
        self._timer.mark()
        self._reporter.record(
            StepRecord(
                step=step.index + 1,
                losses=self._losses(losses, step),
                divisor=self._divisor,
                grad_norm=result.grad_norm,
                lr=float(lr),
                scale=scale,
                num_samples=step.window.num_samples,
                weight=total_weight,
            )
        )
        session.commit(result.applied)
        if self._shadow is not None:
            self._shadow.mark()

    def _before_change(self) -> None:
        """The state is about to change: a snapshot that is still being copied must be done first."""
        if self._snapshotter is not None:
            self._snapshotter.before_change()

    def _weigh(self, batch: Any, step: Step) -> float:
        assert self._task.weight is not None
        weight = float(self._task.weight(batch))
        if not 0 <= weight < float("inf"):
            raise TaskError(
                f"{self._task.name}.weight() returned {weight} at step {step.index}",
                "A weight is a finite number, 0 or more: how many tokens, say, count in the microbatch's loss.",
            )
        return weight

    def _total_weight(self, weights: list[float], step: Step) -> float | Tensor:
        """The window's weight over all ranks. Every rank knows its own before its first forward pass."""
        mine = sum(weights)
        if self._tree is not None:
            row = torch.tensor(weights, dtype=torch.float64, device=self._place.device)
            by_index = gather_by_index(row, self._first(step), step.window.num_microbatches, self._place)
            total = by_index.sum()
        elif self._place.world_size == 1:
            if mine == 0:
                self._no_weight(step)
            return mine
        else:
            total = torch.tensor(mine, dtype=torch.float64, device=self._place.device)
            dist.all_reduce(total)
        if total.device.type == "cpu":
            if total.item() == 0:
                self._no_weight(step)
            return float(total.item())
        return total

    @staticmethod
    def _first(step: Step) -> int:
        """This rank's first microbatch within the window; any, if it has none."""
        return step.microbatches[0].index if step.microbatches else 0

    def _losses(self, mine: list[Tensor], step: Step) -> Tensor:
        """What this rank knows of the window's loss: its sum; with the tree, every microbatch's part by its index."""
        if self._tree is None:
            return functools.reduce(torch.add, mine or [torch.zeros((), device=self._place.device)]).reshape(1)
        row = torch.zeros(step.window.num_microbatches, dtype=torch.float64, device=self._place.device)
        if mine:
            first = self._first(step)
            row[first : first + len(mine)] = torch.stack(mine)
        return row

    def _no_weight(self, step: Step) -> None:
        raise TaskError(
            f"the samples of step {step.index} weigh nothing: {self._task.name}.weight() returned 0 for all of them",
            "A step needs something to average over.",
        )

    def _share(self, value: Any, weight: float, total_weight: float | Tensor) -> Tensor:
        """This microbatch's part of the window's mean loss, times the number that the reduction divides by."""
        loss, returned_weight = split_loss(value, f"{self._task.name}.loss()")
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        if returned_weight is None:
            if weight == 0:
                raise TaskError(
                    f"{self._task.name}.loss() returned a mean over a microbatch of weight 0",
                    "Return (total, weight) where a microbatch can weigh nothing: a mean over nothing is NaN.",
                )
            factor = weight * self._divisor / total_weight
        else:
            self._check_weight(returned_weight, weight)
            factor = self._divisor / total_weight
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
            if self._trainee.scheduler is not None:
                self._trainee.scheduler.step()
            if self._trainee.ema is not None:
                self._trainee.ema.update()
            return
        record = self._reporter.last
        skipped = SkippedUpdate(
            step=record.step,
            scale=record.scale.item() if record.scale is not None else None,
            grad_norm=record.grad_norm.item() if record.grad_norm is not None else None,
        )
        if diagnosis := self._skip_watch.observe(skipped, counters):
            raise HaltError(diagnosis, SkipWatch.advice(self._precision.mode))
