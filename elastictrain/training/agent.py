"""The agent: torch's elastic launcher in a process of our own. `python -m elastictrain.training.agent RUN_DIR`.

It starts one worker group on this node and waits for it. What went wrong in a worker is in the workers' own reports,
or in the exit codes that the agent leaves in exits.json; the agent's own exit code says only whether all went well, and
its log is in the incarnation's folder.

It never restarts a group: torch's budget of restarts counts per agent, for ever, and exhausting it closes the run id
for every node. A restart is a new incarnation, with an agent and a run id of its own.

This is the cold path (`elastic.fast_restart = false`), where every process is started anew; `forking_agent` is the
fast one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from elastictrain import cgroups
from elastictrain.config.schema import JobConfig
from elastictrain.interfaces import interface_of
from elastictrain.procs import die_with_parent
from elastictrain.protocol import ENV_RUN_DIR, EXITS_FILE, LOG_DIR, RunSpec, write_json


def main(run_dir: Path) -> int:
    """Runs one incarnation; returns 0 if every rank ended well, else 1."""
    die_with_parent(os.getppid())
    spec = prepare(run_dir)

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from elastictrain.training import group_rendezvous

    group_rendezvous.register(spec.group)
    leave_signals_to_ranks()
    log_to_file(run_dir)
    config = LaunchConfig(
        min_nodes=spec.group.num_nodes,
        max_nodes=spec.group.num_nodes,
        nproc_per_node=int(spec.config["elastic"]["nproc_per_node"]),
        run_id=spec.group.attempt,
        rdzv_backend=group_rendezvous.BACKEND,
        rdzv_configs={"timeout_s": store_timeout_s(spec)},
        local_addr=spec.group.address,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / LOG_DIR)),
    )
    if hasattr(config, "signals_to_handle"):  # newer torch; it puts this into the environment
        config.signals_to_handle = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    try:
        elastic_launch(config, sys.executable)("-m", "elastictrain.training.start")
    except ChildFailedError as error:
        write_exits(run_dir, {rank: (end.pid, end.exitcode) for rank, end in error.failures.items()})
        return 1
    except SignalException:
        return 0 if not list(run_dir.glob("error-*.json")) else 1
    return 0


def prepare(run_dir: Path) -> RunSpec:
    """Sets this process up for an incarnation, and with it its ranks; needs no torch."""
    spec = RunSpec.read(run_dir)
    (run_dir / LOG_DIR).mkdir(exist_ok=True)
    os.environ[ENV_RUN_DIR] = str(run_dir)
    cgroups.enter(run_dir)
    if spec.group.num_nodes > 1 and (interface := interface_of(spec.group.address)) is not None:
        # gloo listens where the host's name leads, which on many a machine is an address that no other can reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # Where NCCL keeps its flight record, and that it writes it when a collective times out; nothing without NCCL.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run_dir / "nccl-record-"))
    return spec


def leave_signals_to_ranks() -> None:
    """An agent ends with its ranks, or is killed.

    Whoever stops a whole process group or control group tells the ranks too; an agent that passed it on would tell
    them twice, which means not to wait for storage.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def store_timeout_s(spec: RunSpec) -> float:
    """After which a request to the rendezvous store fails."""
    return JobConfig.model_validate(spec.config).elastic.join_timeout_s


def write_exits(run_dir: Path, exits: dict[int, tuple[int | None, int | None]]) -> None:
    """Says how the ranks ended that did not end well.

    Args:
        run_dir: of the incarnation.
        exits: pid and exit code by rank, the code negative for a signal.
    """
    write_json(run_dir / EXITS_FILE, {rank: {"pid": pid, "exit_code": code} for rank, (pid, code) in exits.items()})


def log_to_file(run_dir: Path) -> None:
    """torch's launcher explains failures at length; the workers' reports say it better. Kept for the curious."""
    handler = logging.FileHandler(run_dir / LOG_DIR / "agent.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger = logging.getLogger("torch.distributed.elastic")
    for present in list(logger.handlers):
        logger.removeHandler(present)
    logger.addHandler(handler)
    logger.propagate = False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
