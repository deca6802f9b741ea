"""One rank's copy of the model: prepared, checked against the others, wrapped for gradient reduction.

What must be equal on all ranks is checked before the first step: DistributedDataParallel would silently overwrite a
different initialisation by rank zero's, and the reason for the difference would go on living.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from elastictrain.config.schema import DdpConfig, ModelConfig
from elastictrain.core.window import EpochTail, WindowPlan
from elastictrain.errors import ConfigError, ReplicaMismatchError
from elastictrain.training.collectives import gather_ints
from elastictrain.training.device import Place
from elastictrain.training.rank_independence import naming_nondeterministic_operations
from elastictrain.training.tree_reduction import TreeReduction

_NO_SYNC: dict[str, Any] = next(
    {name: False}
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
"""Has DistributedDataParallel not broadcast buffers before a forward pass; torch 2.13 gave that another name."""
_BROADCAST_BYTES = 250 << 20
"""Buffers are joined to messages of this size, as DistributedDataParallel does."""


class Replica:
    """The model on one rank.

    Args:
        model: the task's model, initialised the same on every rank.
        place: rank, world size and device.
        model_config: what is done to the model.
        ddp_config: how gradients are reduced.
        reduction: "default", by DistributedDataParallel, or "tree".

    Attributes:
        module: the model itself: its parameters' names are those of the task's model.
        forward_module: what a loss calls: the model, wrapped where there are several ranks and DDP reduces.
        tree: what reduces instead of DDP; None with the default reduction.

    Raises:
        ReplicaMismatchError: the model is not the same on all ranks.
        ConfigError: an option does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Place,
        model_config: ModelConfig,
        ddp_config: DdpConfig,
        reduction: Literal["default", "tree"] = "default",
    ) -> None:
        self.place = place
        if model_config.sync_batchnorm:
            if place.device.type != "cuda":
                raise ConfigError(
                    "model.sync_batchnorm = true, but torch's SyncBatchNorm runs on CUDA only",
                    "Normalise by group or layer on the CPU.",
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.module = model.to(place.device)
        if model_config.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if model_config.activation_checkpointing:
            _checkpoint_activations(self.module, model_config.activation_checkpointing)
        if place.world_size > 1:
            check_equal_on_all_ranks(self.module, place)
        self._ddp: DistributedDataParallel | None = None
        self.tree: TreeReduction | None = None
        if reduction == "tree":
            # One rank takes the same way as many: even where it has nobody to reduce with.
            self.tree = TreeReduction(self.module, place, allow_unused=ddp_config.find_unused_parameters)
        elif place.world_size > 1:
            self._ddp = DistributedDataParallel(
                self.module,
                device_ids=[place.device] if place.device.type == "cuda" else None,
                find_unused_parameters=ddp_config.find_unused_parameters,
                gradient_as_bucket_view=ddp_config.gradient_as_bucket_view,
                static_graph=ddp_config.static_graph,
                bucket_cap_mb=ddp_config.bucket_cap_mb,
                # Done by `broadcast_buffers` at the end of a step: then all replicas are equal at every commit.
                **_NO_SYNC,
            )
            if not ddp_config.static_graph and not ddp_config.find_unused_parameters:
                _fix_buckets(self._ddp)
        if model_config.compile:
            _compile(self.module, model_config.compile_backend)
        self.forward_module: nn.Module = self._ddp if self._ddp is not None else self.module
        self._last_hook: LastGradientHook | None = None

    def batchnorm_layers(self) -> list[str]:
        """Names of the layers whose statistics come from one rank's microbatch."""
        return [
            name
            for name, module in self.module.named_modules()
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        ]

    def on_last_gradient(self, callback: Callable[[], None]) -> None:
        """Has `callback` called in every backward pass when this rank's last gradient is there: from then on the
        pass only waits for the others."""
        self._last_hook = LastGradientHook(self.module, callback)

    def after_first_backward(self) -> None:
        """To be called after each backward pass that could tell which gradient is last; cheap."""
        if self._last_hook is not None:
            self._last_hook.after_first_backward()

    def accumulating(self, *, reduce: bool) -> AbstractContextManager[object]:
        """The scope of one microbatch's forward and backward pass; gradients are reduced at its end, or not."""
        if self.tree is not None:
            return naming_nondeterministic_operations()
        if reduce or self._ddp is None:
            return nullcontext()
        return self._ddp.no_sync()

    def reduce_by_hand(self) -> None:
        """Averages the gradients over all ranks where some had no microbatch, and so no backward pass to do it in.

        A parameter that got no gradient on any rank keeps none, as after an ordinary reduction.
        """
        if self._ddp is None:
            return
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=self.place.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.place.world_size)

    def broadcast_buffers(self) -> None:
        """Gives every rank rank zero's buffers (such as running statistics): rank zero is the authority.

        DistributedDataParallel would do so at the begin of a step's first forward pass. At the end of the step before
        it costs the same, and whichever rank survives the others holds the whole state.
        """
        if self._ddp is not None and (buffers := self._buffers()):
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                self._ddp.process_group, buffers, _BROADCAST_BYTES, 0
            )
            if not self.place.is_rank_zero:
                torch.autograd.graph.increment_version(buffers)  # a collective changes them behind torch's count

    def _buffers(self) -> list[Tensor]:
        """Collected at each use: a module may put another tensor in place of a buffer."""
        return [buffer for buffer in self.module.buffers() if buffer.numel()]

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The bare model in evaluation mode, with rank zero's buffers; all is put back at the end."""
        modes = [(module, module.training) for module in self.module.modules()]
        kept = [buffer.clone() for buffer in self._buffers()]
        self.broadcast_buffers()
        self.module.eval()
        try:
            with naming_nondeterministic_operations() if self.tree is not None else nullcontext():
                yield self.module
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, value in zip(self._buffers(), kept, strict=True):
                    buffer.copy_(value)


def _compile(module: nn.Module, backend: str) -> None:
    """Has calls of the module compiled, with its parameters' names as they are.

    As `nn.Module.compile`, which does nothing, without a word, for a module whose `forward` is torch's own, such as a
    Sequential: dynamo leaves frames of torch.nn alone (seen with torch 2.13). It follows calls into them from ours.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call, backend=backend)


def _fix_buckets(ddp: DistributedDataParallel) -> None:
    """Has DDP settle its buckets before the first step, the same way at every start.

    DDP lays its buckets out anew after its first reduction, in the order in which gradients came. With three ranks or
    more the sum of an element depends, in its last bits, on its place in a bucket; so the first step after a restart
    would differ from the same step of a run that was never interrupted. Two passes over a function of all parameters,
    with gradients of zero, bring the new layout about; their order is that of the model's parameters, last to first,
    as in most backward passes.
    """
    module = ddp.module
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in module.modules()):
        return  # sparse gradients are not reduced in buckets
    parameters = [p for p in module.parameters() if p.requires_grad]
    kept = [buffer.clone() for buffer in module.buffers()]
    forward = module.forward

    def touch_all() -> Tensor:
        total = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:
            total = total + (parameter.reshape(-1)[:1] * 0).sum()
        return total

    module.forward = touch_all
    try:
        for _ in range(2):
            ddp().backward()
            for parameter in parameters:
                parameter.grad = None
    finally:
        module.forward = forward
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), kept, strict=True):
            buffer.copy_(value)


def check_static_graph(plan: WindowPlan, world_size: int) -> None:
    """Refuses a static graph where torch would reduce it wrongly: it counts each rank's backward passes of the first
    step, and expects as many reductions ever after."""
    full = plan.global_batch_size // plan.micro_batch_size
    short = plan.length % plan.global_batch_size if plan.epoch_tail is EpochTail.PARTIAL else 0
    if full == world_size and (short == 0 or -(-short // plan.micro_batch_size) == world_size):
        return
    raise ConfigError(
        "ddp.static_graph = true needs exactly one microbatch per rank and step, since torch cannot accumulate "
        f"gradients over a static graph; a step has {full} microbatches for {world_size} ranks",
        "Leave ddp.static_graph out, or make train.global_batch_size = train.micro_batch_size × ranks, with "
        'data.epoch_tail = "continue" or "drop".',
    )


class LastGradientHook:
    """Calls back when the parameter whose gradient is ready last has got it.

    Which one that is shows in the first backward pass; later passes pay for one hook only.
    """

    def __init__(self, module: nn.Module, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._last: nn.Parameter | None = None
        self._handles = [
            p.register_post_accumulate_grad_hook(self._remember) for p in module.parameters() if p.requires_grad
        ]

    def _remember(self, parameter: Tensor) -> None:
        self._last = parameter  # type: ignore[assignment]

    def after_first_backward(self) -> None:
        """Keeps the hook of the last parameter and drops the others. Does nothing when called again."""
        if not self._handles or self._last is None:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._last.register_post_accumulate_grad_hook(lambda _parameter: self._callback())


def _checkpoint_activations(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Recomputes the activations of matching modules in the backward pass; names and state stay as they are."""
    matched = [
        module
        for name, module in model.named_modules()
        if name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    inner = {id(child) for module in matched for child in module.modules() if child is not module}
    outermost = [module for module in matched if id(module) not in inner]
    if not outermost:
        names = [name for name, _ in model.named_modules() if name][:8]
        raise ConfigError(
            f"model.activation_checkpointing = {list(patterns)} matches no module",
            f"The model's modules are named: {', '.join(names)}, …",
        )
    for module in outermost:
        forward = module.forward

        def recomputed(*args: Any, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        module.forward = recomputed


def tensor_digest(tensor: Tensor) -> int:
    """63-bit xxh3 digest of a tensor's dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.intdigest() >> 1


def check_equal_on_all_ranks(model: nn.Module, place: Place) -> None:
    """Compares every parameter and buffer across ranks by digest.

    Raises:
        ReplicaMismatchError: on every rank, naming the first tensor that differs and on which ranks.
    """
    named = list(model.state_dict().items())
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    names_digest = xxhash.xxh3_64("\0".join(name for name, _ in tensors).encode()).intdigest() >> 1
    counts = gather_ints([len(tensors), names_digest], place)
    if len({tuple(row) for row in counts}) > 1:
        listing = ", ".join(f"rank {rank}: {row[0]} tensors" for rank, row in enumerate(counts))
        raise ReplicaMismatchError(
            f"the model is not built the same on all ranks: {listing}",
            "model() must not depend on the rank.",
        )
    digests = gather_ints([tensor_digest(value) for _, value in tensors], place)
    for column, (name, _) in enumerate(tensors):
        different = [rank for rank, row in enumerate(digests) if row[column] != digests[0][column]]
        if different:
            raise ReplicaMismatchError(
                f"the model is not initialised the same on all ranks: {name} on rank(s) "
                f"{', '.join(map(str, different))} differs from rank 0",
                "model() is called with the same seed everywhere; it must not draw from other generators, read the "
                "clock or the rank, or load different files.",
            )
