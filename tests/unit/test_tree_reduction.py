"""The tree reduction of one rank: which sums the parameters get."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from elastictrain.errors import ConfigError, TaskError
from elastictrain.training.device import Place
from elastictrain.training.rank_independence import naming_nondeterministic_operations
from elastictrain.training.tree_reduction import TreeReduction


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(3))
        self.right = nn.Parameter(torch.zeros(2, 2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def reduced(module: Two, windows: list[list[tuple[list[float] | None, float]]]) -> TreeReduction:
    """Goes through windows of microbatches with these gradients of `left`, and this one in all of `right`."""
    tree = TreeReduction(module, Place(), allow_unused=True)
    for window in windows:
        tree.begin(len(window))
        for index, (left, right) in enumerate(window):
            module.left.grad = None if left is None else torch.tensor(left)
            module.right.grad = torch.full((2, 2), right)
            tree.push(index)
            assert module.left.grad is None, "the next backward pass would add to it"
        tree.reduce()
    return tree


def signs(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    return [math.copysign(1.0, value) for value in tensor.tolist()]


def test_the_sum_is_that_of_the_tree() -> None:
    module = Two()
    # One after the other, each 1 is lost in 2^24; two of them together are not.
    window = [
        ([2.0**24, 1.0, 1.0], 0.1),
        ([1.0, 2.0**24, 1.0], 0.1),
        ([1.0, 1.0, 1.0], 0.1),
        ([1.0, 1.0, 2.0**24], 0.1),
    ]
    reduced(module, [window] * 2)
    assert module.left.grad is not None
    assert module.left.grad.tolist() == [2.0**24 + 2, 2.0**24 + 2, 2.0**24 + 2]
    assert module.frozen.grad is None


def test_a_missing_gradient_counts_as_positive_zero() -> None:
    """Whether the rank adds it to a sum that it has, or writes it out as the first of its own."""
    negative = [-0.0, -0.0, -0.0]
    for window in ([(negative, 1.0), (None, 1.0)], [(None, 1.0), (negative, 1.0)]):
        module = Two()
        reduced(module, [window])
        assert signs(module.left.grad) == [1.0] * 3
    module = Two()
    reduced(module, [[(negative, 1.0), (negative, 1.0)]])
    assert signs(module.left.grad) == [-1.0] * 3


def test_a_parameter_that_a_whole_window_does_not_use_has_no_gradient() -> None:
    module = Two()
    reduced(module, [[([1.0, 2.0, 3.0], 1.0)] * 2, [(None, 1.0)] * 2])
    assert module.left.grad is None
    assert module.right.grad is not None
    assert module.right.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_gradients_that_share_memory_are_added_once() -> None:
    """Autograd may give two parameters the same gradient. It must not be written to."""
    module = Two()
    module.right = nn.Parameter(torch.zeros(3))
    tree = TreeReduction(module, Place(), allow_unused=False)
    tree.begin(4)
    for index in range(4):
        shared = torch.ones(3)
        module.left.grad, module.right.grad = shared, shared.view(3)
        tree.push(index)
        assert shared.tolist() == [1.0] * 3
    tree.reduce()
    assert module.left.grad is not None
    assert module.right.grad is not None
    assert module.left.grad.tolist() == module.right.grad.tolist() == [4.0] * 3


def test_a_gradient_has_its_parameters_strides() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    tree = TreeReduction(module, Place(), allow_unused=False)
    tree.begin(2)
    expected = torch.zeros_like(module.weight)
    for index in range(2):
        module(torch.randn(2, 3, 5, 5)).square().sum().backward()
        expected = expected + module.weight.grad
        tree.push(index)
    tree.reduce()
    assert module.weight.grad.stride() == module.weight.stride()
    assert torch.equal(module.weight.grad, expected)


def test_no_more_memory_is_taken_than_the_partial_sums_need() -> None:
    """Eight microbatches: three levels wait at most; the sums of one window are used again in the next."""
    module = Two()
    made: list[int] = []
    tree = TreeReduction(module, Place(), allow_unused=False)
    new = tree._layout.new

    def counted() -> object:
        made.append(1)
        return new()

    tree._layout.new = counted  # type: ignore[method-assign, assignment]
    for _ in range(3):
        tree.begin(8)
        for index in range(8):
            module.left.grad, module.right.grad = torch.ones(3), torch.ones(2, 2)
            tree.push(index)
        tree.reduce()
    assert len(made) == 3


def test_a_sparse_gradient_is_refused_where_it_shows() -> None:
    module = Two()
    tree = TreeReduction(module, Place(), allow_unused=True)
    tree.begin(1)
    module.left.grad = torch.ones(3).to_sparse()
    with pytest.raises(TaskError, match="the gradient of left is sparse"):
        tree.push(0)


def test_instance_norm_with_running_statistics_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="the model is a InstanceNorm1d with running statistics"):
        TreeReduction(nn.InstanceNorm1d(3, track_running_stats=True), Place(), allow_unused=True)
    TreeReduction(nn.InstanceNorm1d(3, affine=True), Place(), allow_unused=True)


def test_a_cache_that_is_not_kept_may_change() -> None:
    module = Two()
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    module.register_buffer("state", torch.zeros(1))
    tree = TreeReduction(module, Place(), allow_unused=True)
    tree.begin(2)
    module.cache = torch.ones(2)
    tree.push(0)
    module.state = torch.ones(1)
    with pytest.raises(TaskError, match="microbatch 1 of the window changed state of the model"):
        tree.push(1)


def test_other_errors_of_a_task_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="mine"), naming_nondeterministic_operations():
        raise RuntimeError("mine")
