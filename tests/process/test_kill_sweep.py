"""kill -9 at every point of the write path and at random times: always a loadable snapshot, never a torn one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastictrain.checkpoint.catalog import newest_first, open_candidate
from elastictrain.checkpoint.faults import ENV_FAULT, POINTS
from tests.process.snapshot_payload import RUN_ID, assert_holds, store_of, tier_of

PROGRAM = Path(__file__).with_name("snapshot_payload.py")
NUM_LONG_PASSES = (1, 2, 3, 4, 5, 6)
NUM_LONG_RANDOM = 100


def run_writer(folder: Path, *options: str, fault: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, ENV_FAULT: fault},
    )


def promised(output: str) -> tuple[int, int]:
    """The last step that was said to be in (the memory tier, the durable tier)."""
    last = {"memory": 0, "durable": 0}
    for line in output.splitlines():
        kind, _, step = line.partition(" ")
        if kind in last and step.isdigit():
            last[kind] = int(step)
    return last["memory"], last["durable"]


def check_remains(folder: Path, memory_step: int, durable_step: int, size: int = 1000) -> int:
    """Everything that looks complete is, and nothing that was promised is lost. Returns the newest step."""
    tier, store = tier_of(folder), store_of(folder)
    assert tier.damaged() == []
    steps: dict[str, list[int]] = {"memory": [0], "durable": [0]}
    for candidate in newest_first(tier, store, RUN_ID):
        with open_candidate(candidate, folder) as reader:
            assert_holds(reader, size)
        steps[candidate.tier].append(candidate.global_step)
    assert max(steps["memory"]) >= memory_step
    assert max(steps["durable"]) >= durable_step
    return max(map(max, steps.values()))


def check_no_leftovers(folder: Path) -> None:
    """A last run to the end, after which only what belongs there is there."""
    process = run_writer(folder, "--steps", "3")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    memory_step, durable_step = promised(output)
    assert memory_step == durable_step
    check_remains(folder, memory_step, durable_step)
    store = store_of(folder)
    assert sorted(p.name for p in store.path.iterdir()) == sorted(s.name for s in store.snapshots())
    assert [s.global_step for s in store.snapshots()] == [durable_step, durable_step - 1]
    tier = tier_of(folder)
    assert tier.clean()
    assert list((folder / "shm").iterdir()) == []


def sweep_points(folder: Path, passes: tuple[int, ...], points: tuple[str, ...] = POINTS) -> int:
    """Kills at each point, when it is passed for the n-th time. Each run resumes from what the last one left."""
    kills = 0
    for count in passes:
        for point in points:
            process = run_writer(folder, "--steps", "9", fault=f"{point}:{count}:kill")
            output, errors = process.communicate(timeout=60)
            assert process.returncode == -9, (point, count, output, errors)
            kills += 1
            check_remains(folder, *promised(output))
    return kills


def test_killed_at_every_point(tmp_path):
    assert sweep_points(tmp_path, (1,)) == len(POINTS)
    check_no_leftovers(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_at_every_point_many_times(tmp_path):
    kills = sweep_points(tmp_path, NUM_LONG_PASSES)
    assert kills + NUM_LONG_RANDOM >= 200
    check_no_leftovers(tmp_path)


def kill_at_random(folder: Path, num_kills: int, seed: int) -> None:
    generator = random.Random(seed)
    size = 200_000
    for _ in range(num_kills):
        process = run_writer(folder, "--steps", "100000", "--size", str(size), "--no-wait")
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline(), process.stdout.readline()]
            time.sleep(generator.uniform(0, 0.1))  # not to wait for anything: the time of the kill
        finally:
            process.kill()
        output, errors = process.communicate(timeout=60)
        assert lines[0] == "ready\n", errors
        check_remains(folder, *promised("".join(lines) + output), size)


def test_killed_at_random_times(tmp_path):
    kill_at_random(tmp_path, 4, seed=time.time_ns())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_at_random_times_many_times(tmp_path):
    kill_at_random(tmp_path, NUM_LONG_RANDOM, seed=time.time_ns())
