"""The agent of the fast path: forked from the launcher, which has everything imported, and its ranks from it.

It is torch's own elastic agent; only how it starts its ranks and waits for them is set here. A rank has no more of its
parent's than memory: the agent touches no CUDA and computes nothing.
"""

from __future__ import annotations

import os
import stat
import sys
from multiprocessing.connection import wait
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from elastictrain.procs import EnvironmentSlot, show_as
from elastictrain.protocol import LOG_DIR
from elastictrain.training import start
from elastictrain.training.agent import (
    leave_signals_to_ranks,
    log_to_file,
    prepare,
    store_timeout_s,
    write_exits,
)
from elastictrain.training.group_rendezvous import GroupRendezvous

GLANCE_S = 0.1
"""Longest time until the agent sees that all ranks are done; it sees at once when one dies."""
PAUSE_S = 0.001
"""torch's agent sleeps this long between two looks; the waiting is done in the look."""


class ForkingAgent(LocalElasticAgent):
    """torch's agent, which sees at once that a rank has died, and how all of them did.

    Attributes:
        exits: pid and exit code of every rank that has ended badly.
    """

    exits: dict[int, tuple[int | None, int | None]]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext._pc if isinstance(self._pcontext, MultiprocessContext) else None
        if context is not None:
            wait(list(context.sentinels), GLANCE_S)
        result: RunResult = super()._monitor_workers(worker_group)
        if context is not None and result.is_failed():
            # torch reports the first one that it comes across, which need not be the one that died first.
            ended = {worker.global_rank: context.processes[worker.local_rank] for worker in worker_group.workers}
            self.exits = {rank: (end.pid, end.exitcode) for rank, end in ended.items() if end.exitcode}
        return result


def run_agent(run_dir: Path, ranks: EnvironmentSlot, store_fd: int | None) -> int:
    """Runs one incarnation in this process, a fresh fork of the launcher.

    Args:
        run_dir: its folder.
        ranks: where each rank says which it is.
        store_fd: of the listening socket for the store of a worker group of several nodes, where this agent serves it.

    Returns:
        0 if every rank ended well, else 1.
    """
    spec = prepare(run_dir)
    # Counting devices by way of CUDA itself would leave the ranks without it (torch.cuda, "poisoned fork").
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    log_to_file(run_dir)

    def rank_main() -> int:
        ranks.write(os.environ["RANK"])
        show_as([sys.executable, "-m", "elastictrain.training.start"])
        _leave_agent()
        code = start.main()
        start.run_exit_handlers()  # a forked process ends without (before Python 3.13); a task may have registered some
        return code

    agent = ForkingAgent(
        WorkerSpec(
            role="default",
            local_world_size=int(spec.config["elastic"]["nproc_per_node"]),
            entrypoint=rank_main,
            rdzv_handler=GroupRendezvous(spec.group, store_timeout_s(spec), store_fd),
            max_restarts=0,
            monitor_interval=PAUSE_S,
            local_addr=spec.group.address,
        ),
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / LOG_DIR)),
        start_method="fork",
    )
    agent.exits = {}
    leave_signals_to_ranks()
    try:
        failed: bool = agent.run().is_failed()
    except SignalException:
        failed = bool(list(run_dir.glob("error-*.json")))
    if agent.exits:
        write_exits(run_dir, agent.exits)
    return 1 if failed else 0


def _leave_agent() -> None:
    """In a rank: gives up what it has of the agent's: session, connections."""
    os.setsid()
    for fd in _open_fds():
        if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)  # the rendezvous store's: an agent that is gone must look gone


def _open_fds() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all we want
        try:
            os.fstat(int(name))
        except OSError:
            continue  # that of the listing itself
        found.append(int(name))
    return found
