"""What one worker group has compiled, the next one does not compile again: real kernels, by a real C++ compiler."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.helpers import start_cli, wait_until, write_job

TASK = """
import json, os, pathlib
import torch
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset


class MyTask:
    def __init__(self, marks):
        self.marks = pathlib.Path(marks)
        self.steps = 0

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))

    def train_data(self):
        return TensorDataset(torch.randn(4096, 8))

    def loss(self, model, batch):
        loss = model(batch[0]).square().mean()
        self.steps += 1
        if self.steps == 4:  # forward and backward pass have been compiled
            mark = self.marks / f"{pathlib.Path(os.environ['ELASTICTRAIN_RUN_DIR']).name}-{os.environ['RANK']}"
            mark.with_suffix(".new").write_text(json.dumps({"pid": os.getpid(), **counters["inductor"]}))
            mark.with_suffix(".new").rename(mark)
        return loss
"""


def built(state: Path) -> dict[str, int]:
    """What a compiler has made, and when."""
    return {str(path): path.stat().st_mtime_ns for path in (state / "compile-cache").rglob("*.so")}


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("fast_restart", [True, False], ids=["forked", "started anew"])
def test_a_new_worker_group_compiles_nothing_again(tmp_path: Path, fast_restart: bool) -> None:
    marks, state = tmp_path / "marks", tmp_path / "state"
    marks.mkdir()
    job = write_job(
        tmp_path / "job",
        "task:MyTask",
        params={"marks": str(marks)},
        train={"max_steps": 10**6},
        elastic={"nproc_per_node": 2, "fast_restart": fast_restart},
        model={"compile": True},
        metrics={"every_steps": 500},
    )
    (tmp_path / "job" / "task.py").write_text(TASK)

    def counted(incarnation: int) -> list[dict[str, Any]]:
        """Inductor's counters of both ranks; empty until they have trained some steps."""
        found = [marks / f"{incarnation:04d}-{rank}" for rank in range(2)]
        return [json.loads(path.read_text()) for path in found] if all(path.exists() for path in found) else []

    with start_cli("run", job, "--state-dir", state, "--output", "json") as process:
        first = wait_until(lambda: counted(1), deadline_s=240)
        assert any(rank.get("fxgraph_cache_miss") for rank in first), first
        before = built(state)
        assert before, "it was compiled"
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = wait_until(lambda: counted(2), deadline_s=240)
        for rank in second:
            assert rank.get("fxgraph_cache_hit", 0) >= 2, (rank, "forward and backward pass")
            assert not rank.get("fxgraph_cache_miss"), rank
            assert not rank.get("fxgraph_cache_bypass"), rank
        assert built(state) == before
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
