"""Freed memory stays with the process: page faults of windows of the tree reduction, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.process.helpers import ROOT

COUNT_FAULTS = """
import resource, sys
import torch
from torch import nn
from elastictrain.training import tree_reduction
from elastictrain.training.device import Place

torch.set_num_threads(1)
if sys.argv[1] == "give back":
    tree_reduction.keep_freed_memory = lambda: False
layers = [part for _ in range(4) for part in (nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU())]
model, samples = nn.Sequential(*layers), torch.randn(64, 512)
tree = tree_reduction.TreeReduction(model, Place(), allow_unused=False)

def window():
    tree.begin(4)
    for index in range(4):
        model.zero_grad(set_to_none=True)
        model(samples).square().mean().backward()
        tree.push(index)
    tree.reduce()

for _ in range(5):
    window()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    window()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    command = [sys.executable, "-c", COUNT_FAULTS, how]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_gradients_that_come_and_go_cost_no_page_faults() -> None:
    given_back = faults("give back")
    if given_back < 10_000:
        pytest.skip(f"the C library keeps freed memory by itself: {given_back} page faults")
    assert faults("keep") < given_back / 10
