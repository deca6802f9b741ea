"""The agent: torch's elastic launcher in a process of our own. `python -m elastictrain.training.agent RUN_DIR`.

It starts one worker group on this node and waits for it. What went wrong in a worker is in the workers' own reports,
or in the exit codes that the agent leaves in exits.json; the agent's own exit code says only whether all went well, and
its log is in the incarnation's folder.

It never restarts a group: torch's budget of restarts counts per agent, for ever, and exhausting it closes the run id
for every node. A restart is a new incarnation, with an agent and a run id of its own.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from elastictrain.config.schema import JobConfig
from elastictrain.procs import die_with_parent
from elastictrain.protocol import ENV_RUN_DIR, EXITS_FILE, LOG_DIR, RunSpec, write_json


def main(run_dir: Path) -> int:
    """Runs one incarnation; returns 0 if every rank ended well, else 1."""
    die_with_parent(os.getppid())
    spec = RunSpec.read(run_dir)
    log_dir = run_dir / LOG_DIR
    log_dir.mkdir(exist_ok=True)
    # A worker TCPStore that outlives a rendezvous round serves stale addresses after a restart (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[ENV_RUN_DIR] = str(run_dir)
    # Where NCCL keeps its flight record, and that it writes it when a collective times out; nothing without NCCL.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run_dir / "nccl-record-"))

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _log_to_file(log_dir / "agent.log")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(spec.config["elastic"]["nproc_per_node"]),
        run_id=f"{spec.config['name']}-{spec.incarnation}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"join_timeout": int(JobConfig.model_validate(spec.config).elastic.join_timeout_s)},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir)),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "elastictrain.training.start")
    except ChildFailedError as error:
        write_json(
            run_dir / EXITS_FILE,
            {rank: {"pid": end.pid, "exit_code": end.exitcode} for rank, end in error.failures.items()},
        )
        return 1
    except SignalException:
        return 0 if not list(run_dir.glob("error-*.json")) else 1
    return 0


def _log_to_file(path: Path) -> None:
    """torch's launcher explains failures at length; the workers' reports say it better. Kept for the curious."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger = logging.getLogger("torch.distributed.elastic")
    for present in list(logger.handlers):
        logger.removeHandler(present)
    logger.addHandler(handler)
    logger.propagate = False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
