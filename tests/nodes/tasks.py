"""A task whose job goes at a walking pace until it is told to hurry."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.process.tree_tasks import Everything

HURRY_FILE = "hurry"


class Paced(Everything):
    """Weighted least squares with dropout, moments and a schedule.

    Args:
        folder: which all nodes see; where there is a file `hurry` in it, there are no pauses.
        pause_s: of each microbatch.
    """

    def __init__(self, folder: str, pause_s: float) -> None:
        super().__init__(weighted=True)
        self._hurry, self._pause_s = Path(folder) / HURRY_FILE, pause_s

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if model.training and not self._hurry.exists():
            time.sleep(self._pause_s)
        return super().loss(model, batch)
