"""The benchmarks run: what a change elsewhere has broken in one shows here, not when somebody wants a figure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.helpers import DEADLINE_S, ROOT


def test_the_one_of_snapshots_runs(tmp_path: Path) -> None:
    """Small and short, on whatever else goes on here: no figure is judged."""
    command = [sys.executable, ROOT / "benchmarks" / "snapshot.py", "--quick", "--values", "1", "--disk", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "goals not judged" in done.stdout
    for figure in ("torch.save", "dcp.async_save", "ours, durable", "ours, restore", "throughput relative"):
        assert figure in done.stdout


@pytest.mark.soak
def test_those_of_the_loop_run() -> None:
    command = [
        sys.executable,
        ROOT / "benchmarks" / "loop_overhead.py",
        "--quick",
        "--workloads",
        "small",
        "--ranks",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goals not judged" in done.stdout
    assert any(line.split()[:1] == ["elastictrain"] for line in done.stdout.splitlines())
