"""Agents under plain `torchrun` that meet over etcd, and their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastictrain.rendezvous.entry import BACKEND
from tests.process.helpers import ROOT, all_gone, descendants, wait_until

QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8,close_timeout=20,request_timeout_s=2"
"""Options for a rendezvous that does not take long."""


@dataclass(frozen=True)
class Rank:
    """What one rank said last."""

    restarts: int
    rank: int
    pid: int
    step: int
    world: int


class Run:
    """Agents of one run, as `torchrun` starts them."""

    def __init__(self, folder: Path, endpoint: str, nodes: str, conf: str) -> None:
        self._folder = folder
        self._endpoint = endpoint
        self._nodes = nodes
        self._conf = conf
        self.agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        name = f"agent{len(self.agents)}"
        with (self._folder / f"{name}.log").open("wb") as log:
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", self._nodes, "--nproc-per-node", "1"),
                    *("--max-restarts", "5", "--rdzv-backend", BACKEND, "--rdzv-endpoint", self._endpoint),
                    *("--rdzv-id", self._folder.name, "--rdzv-conf", self._conf, "--local-addr", "127.0.0.1"),
                    *("--log-dir", str(self._folder / f"{name}.ranks")),
                    *(str(ROOT / "tests/process/rendezvous_payload.py"), str(self._folder)),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdout=log,
                stderr=log,
            )
        self.agents.append(agent)
        return agent

    def ranks(self) -> dict[int, Rank]:
        """By pid, all that ever took a step."""
        found = {}
        for path in self._folder.glob("*.rank"):
            restarts, rank, pid = map(int, path.stem.split("-"))
            step, world = map(int, path.read_text().split())
            found[pid] = Rank(restarts, rank, pid, step, world)
        return found

    def wait_group(self, size: int, known: set[int]) -> dict[int, Rank]:
        """Until `size` ranks that are not in `known` take steps together."""

        def group() -> dict[int, Rank] | None:
            for agent in self.agents:
                assert agent.poll() is None or agent.returncode == -signal.SIGKILL, self.logs()
            new = {pid: rank for pid, rank in self.ranks().items() if pid not in known and rank.world == size}
            return new if {rank.rank for rank in new.values()} == set(range(size)) else None

        try:
            found: dict[int, Rank] = wait_until(group)
        except TimeoutError:
            raise AssertionError(self.logs()) from None
        return found

    def wait_steps(self, group: dict[int, Rank], count: int) -> None:
        """Until each rank of the group took `count` steps more than it has now."""
        before = self.ranks()
        try:
            wait_until(lambda: all(self.ranks()[pid].step >= before[pid].step + count for pid in group))
        except TimeoutError:
            raise AssertionError(self.logs()) from None

    def finish(self, *agents: subprocess.Popen[bytes]) -> None:
        """Lets the ranks come to their end, and the agents with them."""
        (self._folder / "stop").touch()
        for agent in agents:
            assert agent.wait(90) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(f"---- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("agent*.log")))


@contextmanager
def runs(folder: Path, endpoint: str, nodes: str, conf: str = QUICK) -> Iterator[Run]:
    """A run without agents so far; whatever is left of it at the end is killed."""
    run = Run(folder, endpoint, nodes, conf)
    ranks = []
    try:
        yield run
    finally:
        for agent in run.agents:
            if agent.poll() is None:
                ranks += descendants(agent.pid)
                agent.kill()
                agent.wait()
        for rank in ranks:
            rank.kill()
        wait_until(lambda: all_gone(ranks))
