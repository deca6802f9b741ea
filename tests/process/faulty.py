"""A small regression that comes to grief at chosen places, each once: the worker group after it gets past.

With `data.shuffle = false` sample i belongs to step i // GLOBAL_BATCH of the first epoch, so a fault is named by its
step. Marks in `marks` remember which faults have been.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastictrain.core.phases import Phase
from elastictrain.heartbeat import my_heartbeat, read_heartbeat

GLOBAL_BATCH = 4
FOREVER_S = 10**6


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def strike(kind: str) -> None:
    """Does what it says."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(FOREVER_S)
        case "slow":
            time.sleep(1.5)
        case "lock":  # PyDLL keeps the interpreter lock; a mutex, unlike a sleep, is not woken by a signal
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        case "crunch":  # some seconds in C, without the interpreter lock, that no signal cuts short
            hashlib.pbkdf2_hmac("sha256", b"", b"", 12_000_000)
        case "supervisor":  # over agent and launcher
            psutil.Process().parents()[2].kill()
            time.sleep(FOREVER_S)
        case "segv":
            ctypes.string_at(0)
        case "raise":
            raise RuntimeError("struck")
        case "exit":
            os._exit(3)
        case "reduce":
            dist.all_reduce(torch.ones(10))
        case "barrier":  # the other rank leaves it out
            dist.barrier()
        case _:
            raise ValueError(kind)


class Faults:
    """What is to happen where: `[place, kind, rank, step]`; for metrics and eval item, step is the
    sample; elsewhere outside training it is ignored."""

    def __init__(self, faults: list[list[Any]], marks: str, always: bool) -> None:
        self._faults = faults
        self._marks = Path(marks)
        self._always = always

    def at(self, place: str, step: int | None = None) -> None:
        for number, (where, kind, who, when) in enumerate(self._faults):
            if where != place or who != rank() or (step is not None and step != when):
                continue
            mark = self._marks / f"struck-{number}-{kind}"
            if self._always or not mark.exists():
                mark.touch()
                strike(kind)


class Data(Dataset[dict[str, Any]]):
    def __init__(self, length: int, faults: Faults, place: str) -> None:
        self._length, self._faults, self._place = length, faults, place

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._faults.at(self._place, index // GLOBAL_BATCH)
        generator = torch.Generator().manual_seed(index)
        return {"index": index, "x": torch.randn(3, generator=generator), "y": torch.rand((), generator=generator)}


class Task:
    """Places: model, item, loss, state (in a snapshot), metrics, eval item, atexit.

    Args:
        faults: see `Faults`.
        marks: folder that remembers what has been.
        always: strike every time.
        eval_length: samples to evaluate.
        pause_s: of every loss: so that a test can do something meanwhile.
    """

    def __init__(
        self,
        faults: list[list[Any]] | None = None,
        marks: str = ".",
        always: bool = False,
        eval_length: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        self.snapshots_taken = 0
        self.faults = Faults(faults or [], marks, always)
        self.eval_length = eval_length
        self.pause_s = pause_s
        atexit.register(self.faults.at, "atexit")

    def model(self) -> nn.Module:
        self.faults.at("model")
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def train_data(self) -> Data:
        return Data(100_000, self.faults, "item")

    def eval_data(self) -> Data | None:
        return Data(self.eval_length, self.faults, "eval item") if self.eval_length else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(self.pause_s)
        self.faults.at("loss", int(batch["index"][0]) // GLOBAL_BATCH)
        return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])

    def state_dict(self) -> dict[str, Any]:
        # It is asked for at every step, for a snapshot at failure; here the regular ones count.
        heartbeat = my_heartbeat()
        beat = read_heartbeat(heartbeat.path) if heartbeat is not None else None
        if beat is not None and beat.phase is Phase.SNAPSHOT:
            self.snapshots_taken += 1
            self.faults.at("state", self.snapshots_taken)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.faults.at("metrics", int(batch["index"][0]))
        return {"loss": F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])}
