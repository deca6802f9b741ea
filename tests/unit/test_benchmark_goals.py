"""A benchmark that misses its goal says so and fails, and counts what it could not measure."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(BENCHMARKS)
    yield load
    for module in [m for m in sys.modules.values() if str(getattr(m, "__file__", "")).startswith(str(BENCHMARKS))]:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("value", "at_least", "code", "said"),
    [
        (0.4, False, 0, "goal met: a figure: 0.4 s, at most 0.5 s"),
        (0.5, False, 0, "goal met: a figure: 0.5 s, at most 0.5 s"),
        (0.51, False, 1, "goal missed: a figure: 0.51 s, at most 0.5 s"),
        (0.51, True, 0, "goal met: a figure: 0.51 s, at least 0.5 s"),
        (0.4, True, 1, "goal missed: a figure: 0.4 s, at least 0.5 s"),
        (None, False, 1, "goal missed: a figure: nothing was measured, at most 0.5 s"),
        (None, True, 1, "goal missed: a figure: nothing was measured, at least 0.5 s"),
    ],
)
def test_a_missed_goal_is_said_and_fails(load, capsys, value, at_least, code, said):
    goals = load("goals")
    met = goals.Goal("another", 1, 1)
    assert goals.judge([met, goals.Goal("a figure", value, 0.5, "s", at_least=at_least)]) == code
    assert capsys.readouterr().out.splitlines() == ["goal met: another: 1, at most 1", said]


@pytest.mark.parametrize(
    ("fault", "seconds", "reference_s", "missed"),
    [
        ("kill", [0.3, 0.4, 0.6], 2.7, []),
        ("kill", [0.3, 0.4], 2.7, ["kill: times not recovered: 1"]),
        ("kill", [0.6, 0.6, 0.6], 3.1, ["kill: median: 0.6 s"]),
        ("kill", [0.4, 0.4, 0.4], 1.9, ["kill: times faster than torchrun: 4.75"]),
        (
            "kill",
            [],
            2.7,
            ["kill: times not recovered: 3", "kill: median: nothing", "kill: times faster than torchrun"],
        ),
        ("stop", [5.4, 5.5, 5.5], 9.0, []),
        ("agent", [1.4, 1.6, 1.7], None, ["agent: median: 1.6 s"]),
    ],
)
def test_recovery_is_held_to_its_goals(load, fault, seconds, reference_s, missed):
    found = [str(goal) for goal in load("recovery").goals_of(fault, seconds, reference_s, 3) if not goal.is_met]
    assert len(found) == len(missed)
    assert all(text.startswith(words) for text, words in zip(found, missed, strict=True)), found


class Victim:
    """A job whose rank is a process that sleeps, and which never starts another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.step = 200

    def seen(self, _rank: int) -> Any:
        self.step += 1
        return importlib.import_module("recovery_jobs").Seen(self.process.pid, 0, self.step)


def test_goodput_counts_kills_that_find_nobody_and_jobs_that_do_not_come_back(load, monkeypatch):
    goodput = load("goodput")
    monkeypatch.setattr(goodput, "PACE_S", 0.01)
    job = Victim()
    try:
        found = goodput.measure(job, [(0.0, 0), (0.0, 1), (0.0, 0)], 0.05)
    finally:
        job.process.kill()
        job.process.wait()
    assert (found.kills, found.not_recovered, found.not_placed) == (1, 1, 2)


def test_a_benchmark_ends_with_its_goals_and_a_code_that_says_the_same():
    command = [sys.executable, "supervision.py", "--ranks", "2", "--seconds", "0.2", "--hangs", "0"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False, env={**os.environ})
    goals = [line for line in done.stdout.splitlines() if line.startswith("goal ")]
    assert len(goals) == 2, done
    assert done.returncode == int(any(line.startswith("goal missed: ") for line in goals)), done
