"""The contract between the loop and the user's task, and the check that a task keeps it.

A task is any class; nothing has to be inherited. `docs/task.md` is the page for its author; the protocols below are
the same contract for a type checker. Three methods are needed, the others are looked up by name and used if present.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from elastictrain.errors import DataError, TaskError

Batch = Any
"""Whatever the task's collate function returns: a tensor, or tuples, lists, dicts and dataclasses of tensors."""

LossResult = Tensor | tuple[Tensor, Tensor | float]


class Task(Protocol):
    """What a task must have."""

    def model(self) -> nn.Module:
        """The model, on the CPU. Called once per incarnation on every rank, with the same seeds everywhere."""

    def train_data(self) -> Any:
        """A map-style dataset: `len(dataset)` and `dataset[i]`. Called once per incarnation on every rank."""

    def loss(self, model: nn.Module, batch: Batch) -> LossResult:
        """The loss of one microbatch. Called on every rank for each of its microbatches, under autocast.

        Returns either the mean over the microbatch, a scalar tensor, or `(total, weight)`: the sum, and what it is to
        be divided by. Means are weighted by `weight(batch)` where the task has it, else by their number of samples.
        """


class FullTask(Task, Protocol):
    """Everything a task may have besides."""

    tokens_per_sample: int
    """Where a sample is a fixed number of tokens: for tokens/s."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Default: as `[optimizer]` says."""

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler:
        """Advances once per applied update. `num_steps` is the run's length in optimizer steps."""

    def collate(self, samples: list[Any]) -> Batch:
        """Default: torch's default_collate."""

    def weight(self, batch: Batch) -> float:
        """What the microbatch counts in the step's mean: its tokens, say. Called on the CPU before the forward pass."""

    def eval_data(self) -> Any:
        """A map-style dataset, or a dict of them by name."""

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Evaluation of one batch, under autocast, without gradients. Each named value is a mean over the batch (a
        scalar tensor) or `(total, weight)`. Default: the loss."""

    def state_dict(self) -> Mapping[str, Any]:
        """State of the task's own, tensors and plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""


_REQUIRED: dict[str, tuple[str, ...]] = {
    "model": (),
    "train_data": (),
    "loss": ("model", "batch"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "optimizer": ("model",),
    "scheduler": ("optimizer", "num_steps"),
    "collate": ("samples",),
    "weight": ("batch",),
    "eval_data": (),
    "metrics": ("model", "batch"),
    "state_dict": (),
    "load_state_dict": ("state",),
}


def import_task(target: str, module_dir: Path | None) -> type:
    """Imports the class that job.toml names.

    Args:
        target: "package.module:Class".
        module_dir: folder of job.toml, put first on the module path.

    Raises:
        TaskError: it cannot be imported; the message has the user's own traceback where their code raised.
    """
    module_name, _, class_name = target.partition(":")
    if module_dir is not None and str(module_dir) not in sys.path:
        sys.path.insert(0, str(module_dir))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        top = module_name.partition(".")[0]
        if error.name in (module_name, top):
            raise TaskError(
                f"task = {target!r}: there is no module {error.name!r}",
                f"It is looked for in {module_dir or 'the package'} and in the Python environment ({sys.prefix}).",
            ) from error
        raise TaskError(
            f"task = {target!r}: importing it failed: {error}",
            f"Install {error.name!r} into {sys.prefix}.",
        ) from error
    except Exception as error:
        raise TaskError(
            f"task = {target!r}: importing {module_name} raised {type(error).__name__}: {error}",
            user_traceback(error),
        ) from error
    task_class = getattr(module, class_name, None)
    if not isinstance(task_class, type):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise TaskError(
            f"task = {target!r}: {module.__file__} has no class {class_name!r}",
            f"It has: {', '.join(classes) or 'no classes'}.",
        )
    return task_class


def user_traceback(error: BaseException) -> str:
    """The traceback without our frames; where all frames are ours the fault is as well, and all are kept."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    user = [
        f for f in frames if not f.filename.startswith((ours, "<frozen importlib")) and "importlib" not in f.filename
    ]
    if not user and isinstance(error, SyntaxError):  # there is no frame in the file that it is about
        return "".join(traceback.format_exception_only(error)).rstrip()
    return "".join(traceback.format_list(user or frames)).rstrip()


def check_task(task_class: type, params: Mapping[str, Any]) -> None:
    """Compares a class to the contract, without making one.

    Args:
        task_class: the user's class.
        params: its keyword arguments.

    Raises:
        TaskError: a required method is missing, or one or the constructor takes other arguments.
    """
    for name, arguments in {**_REQUIRED, **_OPTIONAL}.items():
        _check_method(task_class, name, arguments)
    try:
        inspect.signature(task_class).bind(**params)
    except TypeError as error:
        raise TaskError(
            f"[params] do not fit {task_class.__name__}{inspect.signature(task_class)}: {error}",
            "The keys of [params] are the constructor's keyword arguments.",
        ) from error


def _check_method(task_class: type, name: str, arguments: tuple[str, ...]) -> None:
    where = f"{task_class.__name__}.{name}"
    form = f"{name}(self{''.join(', ' + a for a in arguments)})"
    method = getattr(task_class, name, None)
    if method is None:
        if name in _REQUIRED:
            raise TaskError(f"{task_class.__name__} has no method {form}", "docs/task.md shows the whole contract.")
        return
    if not callable(method):
        raise TaskError(f"{where} is not a method", f"It must be {form}.")
    try:
        signature = inspect.signature(method)
    except ValueError:
        return
    is_unbound = not isinstance(inspect.getattr_static(task_class, name), staticmethod | classmethod)
    try:
        signature.bind(*((None,) if is_unbound else ()), *arguments)
    except TypeError as error:
        raise TaskError(
            f"{where}{signature} cannot be called as {form}: {error}", "docs/task.md shows the whole contract."
        ) from error


class BoundTask:
    """A user's task with its contract checked and its optional parts filled in.

    Args:
        task_class: the user's class.
        params: its keyword arguments.

    Raises:
        TaskError: the constructor fails, a required method is missing, or one takes other arguments.
    """

    def __init__(self, task_class: type, params: Mapping[str, Any]) -> None:
        self.name = task_class.__name__
        check_task(task_class, params)
        try:
            self.task = task_class(**params)
        except Exception as error:
            raise TaskError(
                f"{self.name}(**params) raised {type(error).__name__}: {error}", user_traceback(error)
            ) from error
        self.loss = cast(Callable[[nn.Module, Batch], LossResult], self.task.loss)
        self.collate: Callable[[list[Any]], Batch] = self._optional("collate") or torch.utils.data.default_collate
        self.weight: Callable[[Batch], float] | None = self._optional("weight")
        self.metrics: Callable[[nn.Module, Batch], Mapping[str, Any]] | None = self._optional("metrics")
        self.tokens_per_sample: int | None = getattr(self.task, "tokens_per_sample", None)

    def _optional(self, name: str) -> Any:
        return getattr(self.task, name, None)

    def call(self, name: str, *args: Any) -> Any:
        """Calls a method of the task; what it raises becomes a TaskError with the user's traceback."""
        try:
            return getattr(self.task, name)(*args)
        except Exception as error:
            raise TaskError(
                f"{self.name}.{name}() raised {type(error).__name__}: {error}", user_traceback(error)
            ) from error

    def has(self, name: str) -> bool:
        return self._optional(name) is not None

    def build_model(self) -> nn.Module:
        """The task's model; it must have something to train."""
        model = self.call("model")
        if not isinstance(model, nn.Module):
            raise TaskError(f"{self.name}.model() returned {type(model).__name__}", "It must return a torch.nn.Module.")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            count = sum(1 for _ in model.parameters())
            raise TaskError(
                f"{self.name}.model() returned a model with no trainable parameters",
                f"All of its {count} parameters have requires_grad = False."
                if count
                else "It has no parameters at all.",
            )
        return model

    def build_train_data(self) -> Any:
        return self._checked_dataset(self.call("train_data"), "train_data()")

    def build_eval_data(self) -> dict[str, Any]:
        """The evaluation datasets by name; a single one is called "eval"; none gives an empty dict."""
        if not self.has("eval_data"):
            return {}
        data = self.call("eval_data")
        if data is None:
            return {}
        named = dict(data) if isinstance(data, Mapping) else {"eval": data}
        return {name: self._checked_dataset(d, f"eval_data()[{name!r}]") for name, d in named.items()}

    def _checked_dataset(self, dataset: Any, source: str) -> Any:
        where = f"{self.name}.{source}"
        if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
            raise DataError(
                f"{where} returned {type(dataset).__name__}, which has no dataset[i]: iterable datasets cannot "
                "be resumed at an exact sample",
                "Return a map-style dataset, with __len__ and __getitem__; for a stream, index its records first.",
            )
        try:
            length = len(cast(Sized, dataset))
        except (TypeError, NotImplementedError) as error:
            raise DataError(
                f"{where} returned {type(dataset).__name__}, whose length is unknown",
                "Give it a __len__: the order of the samples is a permutation of that many.",
            ) from error
        if length < 1:
            raise DataError(f"{where} is empty", "It needs at least one sample.")
        return dataset

    def build_optimizer(self, model: nn.Module, default: Callable[[nn.Module], Optimizer]) -> Optimizer:
        """The task's optimizer, or the default one; it must hold every trainable parameter."""
        if not self.has("optimizer"):
            return default(model)
        optimizer = self.call("optimizer", model)
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"{self.name}.optimizer() returned {type(optimizer).__name__}",
                "It must return a torch.optim.Optimizer.",
            )
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        outside = held - {id(parameter) for parameter in model.parameters()}
        if outside:
            raise TaskError(
                f"{self.name}.optimizer() holds {len(outside)} parameter(s) that are not of the model it was given",
                "They would neither be reduced over ranks nor kept in snapshots. Make them parameters of the model.",
            )
        missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            names = ", ".join(missing[:5]) + (f", and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise TaskError(
                f"{self.name}.optimizer() leaves out {len(missing)} trainable parameter(s): {names}",
                "Add them to a parameter group, or freeze them with requires_grad_(False). The optimizer must be made "
                "from the model it is given.",
            )
        return optimizer

    def build_scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
        if not self.has("scheduler"):
            return None
        scheduler = self.call("scheduler", optimizer, num_steps)
        if scheduler is not None and not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
            raise TaskError(
                f"{self.name}.scheduler() returned {type(scheduler).__name__}",
                "It must return a scheduler of torch.optim.lr_scheduler, or None.",
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TaskError(
                f"{self.name}.scheduler() returned a ReduceLROnPlateau, which needs a metric at each step",
                "Schedulers are stepped after each applied update, with nothing but its number: use one that needs "
                "no more.",
            )
        return cast("LRScheduler | None", scheduler)
