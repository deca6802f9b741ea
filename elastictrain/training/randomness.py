"""Seeds every generator a forward pass or a dataset may draw from, in microseconds.

`torch.manual_seed` also visits every backend and takes 200 µs; a step has no room for that. The generators are
seeded directly instead: torch's CPU generator, the current CUDA device's, Python's `random`, NumPy's legacy one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

    def seed_torch(self, value: int) -> None:
        """Seeds torch's generators alone."""
        self._cpu.manual_seed(value)
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


class SampleSeeder:
    """Reads samples with every generator seeded for each, without paying for those that a dataset never uses.

    Seeding `random` and NumPy's generator takes several times as long as seeding torch's, and most datasets draw from
    neither. So both are put at the start of a known sequence, and a sample is followed by one draw from each: where
    that is the next of the sequence, nobody drew, and the seed did not matter. The first time it is not, the sample is
    read again, seeded, and from then on all of them are seeded first.

    Args:
        generators: this process's.
    """

    def __init__(self, generators: Generators) -> None:
        self.generators = generators
        self._python: list[float] = []
        self._numpy: list[float] = []
        self._place = _SEQUENCE_LENGTH
        self.draws = False
        """Whether the dataset was seen to draw from `random` or NumPy."""

    def begin(self) -> None:
        """To be called before samples are read after anything else may have drawn."""
        if not self.draws:
            self.generators.seed(_SEQUENCE_SEED)
            if not self._python:
                self._python = [random.random() for _ in range(_SEQUENCE_LENGTH)]
                self._numpy = [np.random.random() for _ in range(_SEQUENCE_LENGTH)]
                self.generators.seed(_SEQUENCE_SEED)
            self._place = 0

    def read(self, dataset: Any, index: int, seed: int) -> Any:
        """`dataset[index]`, as if every generator had been seeded with `seed` before."""
        if self.draws:
            self.generators.seed(seed)
            return dataset[index]
        if self._place == _SEQUENCE_LENGTH:
            self.begin()
        self.generators.seed_torch(seed)
        sample = dataset[index]
        place, self._place = self._place, self._place + 1
        if random.random() == self._python[place] and np.random.random() == self._numpy[place]:
            return sample
        self.draws = True
        return self.read(dataset, index, seed)


_SEQUENCE_SEED = 0x5EED
_SEQUENCE_LENGTH = 256
