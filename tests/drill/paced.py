"""A small regression that goes at a walking pace until it is told to hurry, and writes down what it does.

With `data.shuffle = false`, sample i belongs to step i // GLOBAL_BATCH: what a rank was given says which step it is at,
whatever the supervisor believes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastictrain.protocol import ENV_RUN_DIR

GLOBAL_BATCH = 2
STEPS_FILE = "steps.jsonl"
HURRY_FILE = "hurry"
DETACHED = "987654"
"""Argument of the `sleep` that each rank leaves behind, to tell it from others."""


class Data(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"index": index, "x": torch.randn(3, generator=generator), "y": torch.rand((), generator=generator)}


class Task:
    """Paced.

    Args:
        folder: where it writes what it does, and looks for the word to hurry.
        pause_s: of every step, before that.
        fail_at: step that always fails; -1 never does.
        detaches: start a process that has nothing to do with us any more: of a session of its own, with process 1 for
            a parent.
    """

    def __init__(self, folder: str, pause_s: float = 0.0, fail_at: int = -1, detaches: bool = False) -> None:
        self.folder = Path(folder)
        self.pause_s = pause_s
        self.fail_at = fail_at
        self.incarnation = int(Path(os.environ[ENV_RUN_DIR]).name)
        self.steps = (self.folder / STEPS_FILE).open("a", buffering=1) if os.environ["RANK"] == "0" else None
        if detaches:
            subprocess.run(["setsid", "--fork", "sleep", DETACHED], check=True)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_data(self) -> Data:
        return Data()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        step = int(batch["index"][0]) // GLOBAL_BATCH
        if self.steps is not None:
            self.steps.write(json.dumps([self.incarnation, step]) + "\n")
        if self.pause_s and not (self.folder / HURRY_FILE).exists():
            time.sleep(self.pause_s)
        if step == self.fail_at:
            raise RuntimeError("this step always fails")
        return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
