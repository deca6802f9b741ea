"""Evaluation: every sample once, none padded, weighted exactly, the training trajectory untouched.

Batches are cut by `micro_batch_size` and dealt to the ranks, so a batch holds the same samples at any world size. No
collective runs inside a batch; totals and weights are brought together once, at the end, and summed in float64 in the
order of the batches, so that the number of ranks does not show in the sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from elastictrain.core.seeds import Stream, derive
from elastictrain.core.window import split
from elastictrain.errors import TaskError
from elastictrain.training.collectives import broadcast_bytes, gather_by_index
from elastictrain.training.data import FetchFailed, SeededReader, batches, to_device
from elastictrain.training.device import Place
from elastictrain.training.ema import Ema
from elastictrain.training.losses import split_loss
from elastictrain.training.precision import Precision
from elastictrain.training.randomness import Generators
from elastictrain.training.replica import Replica
from elastictrain.training.task import BoundTask


class Evaluation:
    """What is evaluated, and when.

    Args:
        evaluators: one per dataset.
        every_steps: after every so many steps; None for no such schedule.
        every_epochs: after every so many epochs; None for no such schedule.
        use_ema: evaluate the averaged weights, where there are any.
    """

    def __init__(
        self, evaluators: list[Evaluator], *, every_steps: int | None, every_epochs: int | None, use_ema: bool
    ) -> None:
        self._evaluators = evaluators
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._use_ema = use_ema
        self._done_at: int | None = None
        self.is_owed = False
        """The evaluation of the step that the run goes on from was interrupted."""
        self.last: dict[str, float] = {}
        """Values of the last evaluation."""

    def due(self, step: int, epochs_before: int, epochs_after: int) -> bool:
        """Whether the step that led to `step`, and from one number of whole epochs to another, is followed by one."""
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        every = self._every_epochs
        return every is not None and epochs_after // every > epochs_before // every

    def __bool__(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self._evaluators)

    def take_up(self, step: int, values: dict[str, float] | None, *, was_due: bool) -> None:
        """The run goes on from a step.

        Args:
            step: which.
            values: of its evaluation, which is not done again; None if there was none, or it was interrupted.
            was_due: it should have been evaluated.
        """
        if values is not None:
            self._done_at, self.last = step, values
        self.is_owed = values is None and was_due

    def wanted_at(self, step: int) -> bool:
        """False where there is nothing to evaluate, or this step has been."""
        return bool(self._evaluators) and self._done_at != step

    def run(self, step: int, replica: Replica, ema: Ema | None) -> dict[str, float]:
        """Evaluates on every dataset. Collective."""
        self._done_at, self.is_owed = step, False
        self.last = {}
        for evaluator in self._evaluators:
            self.last |= evaluator.run(replica, ema if self._use_ema else None)
        return self.last


class Evaluator:
    """Evaluates a task's model on one dataset.

    Args:
        name: of the dataset, the prefix of its values.
        dataset: map-style.
        task: whose `metrics`, or loss, are computed.
        micro_batch_size: samples per pass.
        seed: the run's seed: an evaluation that draws random numbers draws the same ones every time.
        channels_last: memory format of 4-d inputs.
        beat: called with the number of every batch: an evaluation that gets on is no hang, however long it takes.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        task: BoundTask,
        *,
        place: Place,
        precision: Precision,
        micro_batch_size: int,
        seed: int,
        channels_last: bool = False,
        beat: Callable[[int], None] = lambda _number: None,
    ) -> None:
        self.name = name
        self._beat = beat
        self._task = task
        self._place = place
        self._precision = precision
        self._seed = seed
        self._channels_last = channels_last
        self._generators = Generators(place.device)
        self._reader = SeededReader(dataset, seed=seed, stream=Stream.EVAL_SAMPLE, shuffle=False, seed_samples=True)
        length = len(dataset)
        self._num_batches = -(-length // micro_batch_size)
        self._first, last = split(self._num_batches, place.rank, place.world_size)
        self._spans = [
            (i * micro_batch_size, min((i + 1) * micro_batch_size, length)) for i in range(self._first, last)
        ]

    def run(self, replica: Replica, ema: Ema | None) -> dict[str, float]:
        """Evaluates; collective: every rank must call it.

        Args:
            replica: the model.
            ema: evaluate these averages instead of the weights.

        Returns:
            `{"<dataset>/<name>": value}`, the same on every rank.
        """
        measured: list[dict[str, Tensor]] = []
        with ExitStack() as stack:
            stack.enter_context(self._generators.kept())
            if ema is not None:
                stack.enter_context(ema.swapped_in())
            model = stack.enter_context(replica.evaluating())
            stack.enter_context(torch.no_grad())
            stream = batches(
                self._reader,
                self._task.collate,
                self._spans,
                num_workers=0,
                prefetch_batches=1,
                pin_memory=False,
            )
            for number, (span, batch) in enumerate(zip(self._spans, stream, strict=True), start=self._first):
                if isinstance(batch, FetchFailed):
                    raise batch.as_error(step=None)
                self._beat(number)
                self._generators.seed(derive(self._seed, Stream.EVAL_BATCH, number))
                measured.append(self._measure(model, batch, span[1] - span[0]))
        return self._reduce(measured)

    def _measure(self, model: torch.nn.Module, batch: Any, num_samples: int) -> dict[str, Tensor]:
        """Total and weight of every value, in float64."""
        default_weight = float(num_samples) if self._task.weight is None else float(self._task.weight(batch))
        on_device = to_device(batch, self._place.device, non_blocking=False, channels_last=self._channels_last)
        with self._precision.autocast():
            if self._task.metrics is None:
                values: Mapping[str, Any] = {"loss": self._task.loss(model, on_device)}
            else:
                values = self._task.metrics(model, on_device)
        if not isinstance(values, Mapping):
            raise TaskError(
                f"{self._task.name}.metrics() returned {type(values).__name__}",
                "It must return a mapping from names to scalar tensors or (total, weight).",
            )
        measured = {}
        for name, value in values.items():
            tensor, weight = split_loss(value, f"{self._task.name}.metrics()[{name!r}]")
            total = tensor.detach().to(torch.float64)
            if weight is None:
                weight = torch.tensor(default_weight, dtype=torch.float64, device=total.device)
                total = total * weight
            measured[name] = torch.stack([total, torch.as_tensor(weight, dtype=torch.float64, device=total.device)])
        return measured

    def _reduce(self, measured: list[dict[str, Tensor]]) -> dict[str, float]:
        names = sorted({name for values in measured for name in values})
        if self._place.world_size > 1:
            # Rank zero always has a batch, so it knows all names; the last ranks may have none.
            names = json.loads(broadcast_bytes(json.dumps(names).encode(), 0, self._place))
            unknown = {name for values in measured for name in values} - set(names)
            if unknown:
                raise TaskError(
                    f"{self._task.name}.metrics() gave {sorted(unknown)} on rank {self._place.rank} but not on rank 0",
                    "Every batch must give the same names.",
                )
        device = self._place.device
        zero = torch.zeros(2, dtype=torch.float64, device=device)
        mine = torch.zeros((len(measured), len(names), 2), dtype=torch.float64, device=device)
        for row, values in zip(mine, measured, strict=True):
            row.copy_(torch.stack([values.get(name, zero).to(device) for name in names]))
        batches_of_all = gather_by_index(mine, self._first, self._num_batches, self._place).tolist()
        found = {}
        for column, name in enumerate(names):
            total, weight = (sum(batch[column][part] for batch in batches_of_all) for part in (0, 1))
            found[f"{self.name}/{name}"] = total / weight if weight else float("nan")
        return found
