"""Jobs of two ranks on this machine, under one supervisor or another, as the recovery benchmarks see them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from elastictrain.heartbeat import heartbeat_path, read_heartbeat

BENCHMARKS = Path(__file__).resolve().parent
RANKS = 2
POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank at one moment.

    Args:
        pid: of the rank.
        first_step: the step its process began with.
        step: steps done.
    """

    pid: int
    first_step: int
    step: int


class Job(Protocol):
    """A running job."""

    process: subprocess.Popen[bytes]

    def seen(self, rank: int) -> Seen | None:
        """The rank's newest process; None while it has done nothing yet."""


class OurJob:
    """`elastictrain run`.

    Args:
        folder: for its files.
        steps: how many.
        fast: with `elastic.fast_restart`.
        limit_s: after which a rank that stands still is hung.
    """

    def __init__(self, folder: Path, steps: int, *, fast: bool, limit_s: float) -> None:
        folder.mkdir(parents=True)
        job = folder / "job.toml"
        job.write_text(
            f"""name = "recovery"
task = "recovery_task:RecoveryTask"
[train]
max_steps = {steps}
micro_batch_size = 32
global_batch_size = 64
clip_norm = 1.0
[elastic]
device = "cpu"
nproc_per_node = {RANKS}
threads_per_rank = 1
fast_restart = {str(fast).lower()}
[supervisor]
step_timeout_s = {limit_s}
backoff_s = 0.001
max_failures = 1000000
[metrics]
tensorboard = false
"""
        )
        (folder / "recovery_task.py").symlink_to(BENCHMARKS / "recovery_task.py")
        self.state = folder / "state"
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastictrain.cli.main", "run", str(job), "--state-dir", str(self.state)],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def seen(self, rank: int) -> Seen | None:
        runs = sorted((self.state / "runs").glob("[0-9]*"))
        if not runs:
            return None
        beat = read_heartbeat(heartbeat_path(runs[-1], rank))
        if beat is None or beat.first_step < 0:
            return None
        return Seen(beat.pid, beat.first_step, beat.step)


class ScriptJob:
    """`recovery_script.py` under a launcher.

    Args:
        folder: for its files.
        launcher: command that is followed by the script.
        steps: how many.
        every: steps between two checkpoints.
        limit_s: timeout of its collectives.
    """

    def __init__(self, folder: Path, launcher: list[str], steps: int, *, every: int, limit_s: float) -> None:
        from recovery_progress import read_progress

        folder.mkdir(parents=True)
        self._read: Callable[[Path, int], object] = read_progress
        self._folder = folder
        command = [*launcher, str(BENCHMARKS / "recovery_script.py"), str(folder), str(steps), str(every), str(limit_s)]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The cure for torch 2.13's broken restart, without which there is nothing to compare with.
                # torch's launcher leaves a folder of logs for each run among the temporary files.
                env={
                    **os.environ,
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder),
                },
                cwd=folder,
            )

    def seen(self, rank: int) -> Seen | None:
        found = self._read(self._folder, rank)
        if found is None:
            return None
        return Seen(found.pid, found.first_step, found.step)  # type: ignore[attr-defined]


def launchers() -> dict[str, list[str]]:
    """What can be compared with here: torchrun, and the peers whose environments are there."""
    common = ["--nnodes=1", f"--nproc-per-node={RANKS}", "--max-restarts=100000"]
    found = {
        "torchrun": [
            sys.executable, "-m", "torch.distributed.run", *common, "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--monitor-interval=0.1",
        ]
    }  # fmt: skip
    ft = BENCHMARKS.parent / ".venv-peer-nvrx" / "bin" / "ft_launcher"
    if ft.exists():
        found["ft_launcher"] = [
            str(ft), *common, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
            "--monitor-interval=0.1",
        ]  # fmt: skip
    dlrover = BENCHMARKS.parent / ".venv-peer-dlrover" / "bin" / "dlrover-run"
    if dlrover.exists():
        found["dlrover-run"] = [str(dlrover), "--standalone", *common, "--monitor-interval=0.1"]
    return found


def wait_for(job: Job, condition: Callable[[list[Seen]], bool], deadline_s: float) -> list[Seen]:
    """Waits until all ranks have been seen and `condition` holds.

    Raises:
        TimeoutError: it did not come to that.
        RuntimeError: the job has ended.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        seen = [job.seen(rank) for rank in range(RANKS)]
        if all(one is not None for one in seen):
            known = [one for one in seen if one is not None]
            if condition(known):
                return known
        if job.process.poll() is not None:
            raise RuntimeError(f"the job has ended with {job.process.returncode}")
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {deadline_s:g} s")
        time.sleep(POLL_S)


def end(job: Job) -> None:
    """Ends a job and all its processes."""
    family = psutil.Process(job.process.pid).children(recursive=True) if job.process.poll() is None else []
    if job.process.poll() is None:
        job.process.send_signal(signal.SIGTERM)
        try:
            job.process.wait(60)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
