"""Starts real runs and reads what they left.

Two ways to run a job, both with real processes and real gloo collectives:

- `run_cli` and `start_cli` start `elastictrain` as a user does. Each costs two imports of torch, about five seconds.
- `train` starts the ranks alone, from a fork server that has torch imported: about half a second. The ranks run
  `elastictrain.training.worker`, unchanged; a store of this process's own stands in for the agent's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from elastictrain.checkpoint import faults
from elastictrain.cli.state_dir import StartOptions, StateDir
from elastictrain.config import load_job
from elastictrain.drill.nodes.process import DEADLINE_S as DEADLINE_S
from elastictrain.drill.nodes.process import wait_until as wait_until
from elastictrain.protocol import ENV_RUN_DIR, METRICS_FILE, OUTCOME_FILE, ErrorReport, read_error_reports

ROOT = Path(__file__).resolve().parents[2]

Sections = Mapping[str, Mapping[str, Any]]


# ---- jobs


def write_task(folder: Path, source: str) -> None:
    """Writes `task.py`, and a small job.toml for the class `MyTask` in it where there is none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(textwrap.dedent(source))
    if not (folder / "job.toml").exists():
        write_job(folder, "task:MyTask")


def write_job(
    folder: Path,
    task: str,
    *,
    params: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Path:
    """Writes a job.toml; what is not given is small: two steps of two samples, no TensorBoard, on the CPU. Its memory
    tier is in the test's own folder: what a killed job leaves there goes with it."""
    memory_path = folder.absolute() / "shm"
    memory_path.mkdir(parents=True, exist_ok=True)
    lengths = {} if train and "max_epochs" in train else {"max_steps": 2}
    batch = {} if train and "accumulation_steps" in train else {"global_batch_size": 2}
    job = {
        "name": "job",
        "task": task,
        "params": dict(params or {}),
        "train": {**lengths, **batch, "micro_batch_size": 1, **(train or {})},
        **{name: dict(section) for name, section in sections.items()},
    }
    job["elastic"] = {"device": "cpu", "threads_per_rank": 1, **job.get("elastic", {})}
    job["metrics"] = {"tensorboard": False, **job.get("metrics", {})}
    job["checkpoint"] = {"memory_path": str(memory_path), **job.get("checkpoint", {})}
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(job))
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def read_metrics(state_dir: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl, in order."""
    return [line for line in read_json_lines(state_dir / METRICS_FILE) if line["kind"] == kind]


# ---- the command line


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """Standard output of `--output json`: every line must be JSON with an event."""
        return [_strict_event(line) for line in self.stdout.splitlines()]

    def events_named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def _strict_event(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON: {line}")

    event = json.loads(line, parse_constant=refuse)
    assert isinstance(event["event"], str), line
    return event


def _command(args: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-W", "error::UserWarning:elastictrain", "-m", "elastictrain.cli.main", *map(str, args)]


def _environment() -> dict[str, str]:
    # torch sets the caches' folders when it is imported, as it is in this process.
    dropped = ("COV_", "PYTEST_", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    path = os.pathsep.join([str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    return {**env, "PYTHONPATH": path, "COLUMNS": "200"}


def run_cli(
    *args: str | Path, cwd: Path | None = None, deadline_s: float = DEADLINE_S, under: Sequence[str] = ()
) -> Finished:
    """Runs `elastictrain ARGS` to its end; `under` a command that runs others, where there is one."""
    command = [*under, *_command(args)]
    done = subprocess.run(
        command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=deadline_s, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@contextmanager
def start_cli(*args: str | Path, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Starts `elastictrain ARGS`; whatever is left of it at the end is killed."""
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    process = subprocess.Popen(
        _command(args),
        cwd=cwd,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - holds no lock
    )
    try:
        yield process
    finally:
        with process:
            for child in descendants(process.pid):
                child.kill()
            if process.poll() is None:
                process.kill()


def descendants(pid: int) -> list[psutil.Process]:
    """All processes under one, those of its sessions included; none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    """True if none of them runs any more."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


# ---- ranks alone


@dataclass(frozen=True, slots=True)
class Trained:
    """What the ranks of one incarnation left.

    Args:
        codes: exit code of every rank.
        state_dir: the state directory.
        outcome: what rank zero wrote; None if it failed.
        errors: the ranks' reports, first causes first.
        output: what each rank printed, by rank.
        seen: what the task recorded (see `tasks.record`), by rank.
    """

    codes: list[int]
    state_dir: Path
    outcome: dict[str, Any] | None
    errors: list[ErrorReport]
    output: list[str]
    seen: list[list[dict[str, Any]]]

    def metrics(self, kind: str = "step") -> list[dict[str, Any]]:
        return read_metrics(self.state_dir, kind)

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step, as reported."""
        return [line["loss"] for line in self.metrics()]

    @property
    def counters(self) -> dict[str, int]:
        assert self.outcome is not None, self.output
        counters: dict[str, int] = self.outcome["summary"]["counters"]
        return counters

    def recorded(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """What the task recorded on a rank, of one kind, in order."""
        return [line for line in self.seen[rank] if line["kind"] == kind]

    def events(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        """Events of a rank by name."""
        lines = [json.loads(line) for line in self.output[rank].splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == name]


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is imported by the first DistributedDataParallel; pytest, since a child imports its main module.
    context.set_forkserver_preload(["pytest", "torch._dynamo", "elastictrain.training.worker", "tests.process.tasks"])
    return context


def _rank_main(environment: dict[str, str], output: str) -> None:
    os.environ.update(environment)
    faults.arm(os.environ.get(faults.ENV_FAULT))  # its module was imported before the environment was known
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A child of a fork server would start its loader processes from one as well; ranks fork them.
    multiprocessing.set_start_method("fork", force=True)
    from elastictrain.training import worker

    sys.exit(worker.main())


def train(
    folder: Path,
    task: str = "",
    *,
    world_size: int = 1,
    overrides: Sequence[str] = (),
    options: StartOptions | None = None,
    expect_success: bool = True,
    deadline_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
    while_running: Callable[[list[Any]], None] | None = None,
    **job: Any,
) -> Trained:
    """Trains a job on `world_size` ranks of its own and waits for them.

    Args:
        folder: where job.toml, the state directory and what the task records go.
        task: class in `tests.process.tasks`, or "module:Class"; empty takes the job.toml that is there.
        world_size: how many ranks.
        overrides: as `--set`.
        options: where to begin, as `--fresh`, `--from` and `--allow` say.
        expect_success: fail, with all output, if a rank fails.
        deadline_s: for the whole run.
        environment: more of it for the ranks.
        while_running: called with the ranks' processes once they are started.
        job: as `write_job` takes.
    """
    from torch.distributed import TCPStore

    folder.mkdir(parents=True, exist_ok=True)
    if task:
        write_job(folder, task if ":" in task else f"tests.process.tasks:{task}", **job)
    state = StateDir(folder / "state")
    loaded = load_job(str(folder), [f"elastic.nproc_per_node={world_size}", *overrides])
    incarnation = state.prepare(loaded, options)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _fork_server()
    ranks = []
    for rank in range(world_size):
        rank_environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            # The store is here already, as under torchrun: rank zero must not make one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            ENV_RUN_DIR: str(incarnation.run_dir),
            "RECORD_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        output = str(incarnation.run_dir / f"output-{rank}.txt")
        ranks.append(context.Process(target=_rank_main, args=(rank_environment, output)))
    for process in ranks:
        process.start()
    try:
        if while_running is not None:
            while_running(ranks)
        wait_until(lambda: all(process.exitcode is not None for process in ranks), deadline_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    outcome = incarnation.run_dir / OUTCOME_FILE
    result = Trained(
        codes=[process.exitcode for process in ranks],
        state_dir=state.path,
        outcome=json.loads(outcome.read_text()) if outcome.exists() else None,
        errors=read_error_reports(incarnation.run_dir),
        output=[(incarnation.run_dir / f"output-{rank}.txt").read_text() for rank in range(world_size)],
        seen=[read_json_lines(folder / f"seen-{rank}.jsonl") for rank in range(world_size)],
    )
    if expect_success:
        assert result.codes == [0] * world_size, "\n".join(result.output)
    return result
