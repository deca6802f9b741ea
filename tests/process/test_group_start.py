"""Ranks join their process group while they make the task and its data: tasks that ask for the group, and that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.helpers import run_cli, write_job

TASK = """
import os, pathlib, signal
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

FOUND = (dist.is_initialized(), dist.get_rank() == int(os.environ["RANK"]))


class MyTask:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        (self.folder / f"found-{os.environ['RANK']}").write_text(str(FOUND))
        dist.barrier()

    def model(self):
        return torch.nn.Linear(4, 1)

    def train_data(self):
        total = torch.ones(1)
        dist.all_reduce(total)
        mark = self.folder / "struck"
        if os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            STRIKE
        return TensorDataset(torch.full((64, 4), total.item()))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""


@pytest.mark.parametrize(
    ("strike", "code"),
    [("pass", 0), ("os.kill(os.getpid(), signal.SIGKILL)", 0), ("raise OSError('mine')", 78)],
    ids=["sound", "killed", "raises"],
)
def test_a_task_that_asks_for_its_group_has_it(tmp_path: Path, strike: str, code: int) -> None:
    job = write_job(
        tmp_path / "job",
        "task:MyTask",
        params={"folder": str(tmp_path)},
        train={"max_steps": 4},
        elastic={"nproc_per_node": 2},
    )
    (tmp_path / "job" / "task.py").write_text(TASK.replace("STRIKE", strike))
    finished = run_cli("run", job, "--state-dir", tmp_path / "state", "--output", "json", cwd=tmp_path)
    assert finished.code == code, finished.stderr
    assert [(tmp_path / f"found-{rank}").read_text() for rank in range(2)] == ["(True, True)"] * 2
    if code:
        assert "rank 1, step 0: MyTask.train_data() raised OSError: mine" in finished.stderr
        assert "Traceback" not in finished.stderr
