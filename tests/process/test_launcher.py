"""The launcher: what agents and ranks that are forked from it look like, and what it imports for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastictrain.heartbeat import Heartbeat, heartbeat_paths, read_heartbeat
from elastictrain.procs import EnvironmentSlot
from elastictrain.protocol import ENV_RUN_DIR, IMPORTS_FILE, LAUNCHER_LOG
from elastictrain.supervisor.launcher import COPY_TUNABLES
from tests.process.helpers import start_cli, wait_until, write_job

TASK = """
import os, pathlib
import torch
import {good}
import {threaded}
from torch.utils.data import TensorDataset

VERSION = {version}


class MyTask:
    def __init__(self, marks):
        self.marks = pathlib.Path(marks)

    def model(self):
        (self.marks / f"version-{{os.getpid()}}").write_text(f"{{VERSION}} {{os.environ['TORCHINDUCTOR_CACHE_DIR']}}")
        return torch.nn.Linear(4, 1)

    def train_data(self):
        return TensorDataset(torch.ones(64, 4))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""
NOTE_IMPORT = "import os, pathlib\npathlib.Path({folder!r}, f'{name}-{{os.getpid()}}').touch()\n"
START_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()\n"


def beats(state: Path, incarnation: int) -> list[Heartbeat]:
    """The records of two ranks that both train; empty until they do."""
    found = [read_heartbeat(path) for path in heartbeat_paths(state / "runs" / f"{incarnation:04d}").values()]
    known = [beat for beat in found if beat is not None and beat.steps_done >= 1]
    return sorted(known, key=lambda beat: beat.rank) if len(known) == 2 else []


def test_forked_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They look from outside like started ones; installed packages are there already, but for one that starts a
    thread; the task is read afresh."""
    good, threaded = "et_good_package", "et_threaded_package"
    marks, packages = tmp_path / "marks", tmp_path / "site-packages"
    marks.mkdir()
    for name in (good, threaded):
        (packages / name).mkdir(parents=True)
        note = NOTE_IMPORT.format(folder=str(marks), name=name)
        (packages / name / "__init__.py").write_text(note + (START_THREAD if name == threaded else ""))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    job = write_job(
        tmp_path / "job",
        "task:MyTask",
        params={"marks": str(marks)},
        train={"max_steps": 10**6},
        elastic={"nproc_per_node": 2},
        metrics={"every_steps": 500},
    )
    task, state = tmp_path / "job" / "task.py", tmp_path / "state"
    task.write_text(TASK.format(good=good, threaded=threaded, version=1))

    def importers(name: str) -> set[int]:
        return {int(path.name.rpartition("-")[2]) for path in marks.glob(f"{name}-*")}

    with start_cli("run", job, "--state-dir", state, "--output", "json") as process:
        first = wait_until(lambda: beats(state, 1))
        ranks = [psutil.Process(beat.pid) for beat in first]
        agent = ranks[0].parent()
        assert agent is not None
        launcher = agent.parent()
        assert launcher is not None
        assert launcher.ppid() == process.pid
        for rank, its in enumerate(ranks):
            assert its.environ()["RANK"] == str(rank)
            assert its.environ()[ENV_RUN_DIR] == str(state / "runs" / "0001")
            assert its.environ()["GLIBC_TUNABLES"] == COPY_TUNABLES
            assert [argument for argument in its.cmdline()[1:] if argument] == ["-m", "elastictrain.training.start"]
            assert its.parent() == agent
            assert os.getsid(its.pid) == its.pid
            sockets = [c for c in its.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert not {c.laddr.port for c in sockets} & {
                c.laddr.port for c in agent.net_connections("inet") if c.status == psutil.CONN_LISTEN
            }, "the store's port is the agent's alone"
        assert agent.environ()[ENV_RUN_DIR] == str(state / "runs" / "0001")
        assert "elastictrain.training.agent" in agent.cmdline()
        assert set(importers(good)) == {beat.pid for beat in first}

        wait_until(lambda: launcher.pid in importers(good))
        assert good in json.loads((state / IMPORTS_FILE).read_text())
        assert launcher.pid not in importers(threaded)
        assert f"{threaded} starts a thread" in (state / LAUNCHER_LOG).read_text()
        before = importers(good)
        task.write_text(TASK.format(good=good, threaded=threaded, version=2))
        os.kill(first[1].pid, signal.SIGKILL)
        second = {beat.pid for beat in wait_until(lambda: beats(state, 2))}
        assert psutil.Process(second.copy().pop()).parent().ppid() == launcher.pid
        assert not second & {beat.pid for beat in first}
        assert importers(good) == before, "it was there already"
        assert second <= importers(threaded)
        cache = state / "compile-cache" / "inductor"
        assert {(marks / f"version-{pid}").read_text() for pid in second} == {f"2 {cache}"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_until(lambda: not launcher.is_running())


def test_an_environment_slot() -> None:
    """What a forked child sets is seen by itself, by what it starts, and from outside; what has no room is refused."""
    code = """
import os, subprocess, sys
from elastictrain.procs import EnvironmentSlot, environment_of
slot = EnvironmentSlot("ET_SLOT")
assert "ET_SLOT" not in os.environ
if os.fork() == 0:
    slot.write("short")
    started = subprocess.run(["printenv", "ET_SLOT"], capture_output=True, text=True).stdout.strip()
    ok = (os.environ["ET_SLOT"], environment_of(os.getpid())["ET_SLOT"], started) == ("short",) * 3
    os._exit(0 if ok else 1)
assert os.wait()[1] == 0
assert environment_of(os.getpid())["ET_SLOT"] == "-" * 10, "the parent's stays"
try:
    slot.write("123456789")
except ValueError as error:
    assert "has room for 8 bytes, not for 9" in str(error), error
else:
    raise AssertionError("it was taken")
"""
    env = {**os.environ, "ET_SLOT": EnvironmentSlot.placeholder(8)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
