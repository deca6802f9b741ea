"""A task whose job goes at a walking pace until it is told to hurry."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.process.tasks import Samples
from tests.process.tree_tasks import Everything

HURRY_FILE = "hurry"
HOLD_FILE = "hold-{place}"
HELD_FILE = "held-{rank}"


class Paced(Everything):
    """Weighted least squares with dropout, moments and a schedule.

    Args:
        folder: which all nodes see; where there is a file `hurry` in it, there are no pauses. Where there is a file
            `hold-PLACE`, a worker group of several ranks gets no further than there: to "loss", where rank zero alone
            is held, or to "eval_data", between the restoring and the first step. Who is held leaves `held-RANK`.
        pause_s: of each microbatch.
    """

    def __init__(self, folder: str, pause_s: float) -> None:
        super().__init__(weighted=True)
        self._folder, self._hurry, self._pause_s = Path(folder), Path(folder) / HURRY_FILE, pause_s

    def _hold(self, place: str) -> None:
        hold = self._folder / HOLD_FILE.format(place=place)
        while dist.is_initialized() and dist.get_world_size() > 1 and hold.exists():
            (self._folder / HELD_FILE.format(rank=dist.get_rank())).touch()
            time.sleep(0.05)

    def eval_data(self) -> Samples | None:
        self._hold("eval_data")
        return super().eval_data()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if model.training and dist.is_initialized() and not dist.get_rank():
            self._hold("loss")
        if model.training and not self._hurry.exists():
            time.sleep(self._pause_s)
        return super().loss(model, batch)
