"""Seeds every generator a forward pass or a dataset may draw from, in microseconds.

`torch.manual_seed` also visits every backend and takes 200 µs; a step has no room for that. The generators are
seeded directly instead: torch's CPU generator, the current CUDA device's, Python's `random`, NumPy's legacy one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Generators:
    """The global generators of this process.

    Args:
        device: a CUDA device's generator is seeded too.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.default_generator
        self._cuda: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.init()
            self._cuda = torch.cuda.default_generators[device.index or 0]

    def seed(self, value: int) -> None:
        """Seeds all of them.

        Args:
            value: 64 bits; NumPy's legacy generator takes the lower 32.
        """
        self._cpu.manual_seed(value)
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        if self._cuda is not None:
            self._cuda.manual_seed(value)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leaves all of them as they were, whatever happens inside."""
        cpu, python, numpy = self._cpu.get_state(), random.getstate(), np.random.get_state()
        cuda = self._cuda.get_state() if self._cuda is not None else None
        try:
            yield
        finally:
            self._cpu.set_state(cpu)
            random.setstate(python)
            np.random.set_state(numpy)
            if self._cuda is not None and cuda is not None:
                self._cuda.set_state(cuda)
