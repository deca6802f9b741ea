"""One job on several nodes, started on each of them as a user does, and what it has left at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastictrain.checkpoint.store import open_store
from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.node import Node
from elastictrain.drill.nodes.process import NodeProcess
from tests.nodes.tasks import HURRY_FILE
from tests.process.helpers import ROOT, read_metrics, train, wait_until, write_job
from tests.process.resume_helpers import kept, store_of

TASK = "tests.nodes.tasks:Paced"
STEPS = 600
PORT = 29400
DEADLINE_S = 120.0
LIMITS = {"step_timeout_s": 5.0}
"""Of a job whose ranks are to wait for a lost node, while the store cannot be asked, for less than the usual 30 s."""
_SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"max_steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "clip_norm": 0.5},
    "metrics": {"every_steps": 1},
}


class Job:
    """A job with the same job.toml on all nodes. Its state directories and snapshots are on the shared folder, its
    memory tier in each node's own /dev/shm.

    Args:
        cluster: the nodes.
        folder: which all of them see.
        rendezvous: default: the store is on the first node.
        nodes: how many may take part.
        elastic: more of that section.
        supervisor: that section.
        checkpoint: more of that section.
        max_steps: how many.
        pause_s: of each microbatch.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        rendezvous: str | None = None,
        nodes: str = "1:4",
        elastic: Mapping[str, Any] | None = None,
        supervisor: Mapping[str, Any] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        max_steps: int = STEPS,
        pause_s: float = 0.05,
    ) -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        self.store = self.folder / "snapshots"
        self.processes: dict[int, NodeProcess] = {}
        self.max_steps = max_steps
        self.file = write_job(
            self.folder,
            TASK,
            params={"folder": str(self.folder), "pause_s": pause_s},
            elastic={
                "reduction": "tree",
                "nodes": nodes,
                "rendezvous": rendezvous or f"c10d://{cluster[0].address}:{PORT}",
                **(elastic or {}),
            },
            checkpoint={"memory_path": "/dev/shm", "url": str(self.store), **(checkpoint or {})},
            supervisor=dict(supervisor or {}),
            **(_SECTIONS | {"train": _SECTIONS["train"] | {"max_steps": max_steps}}),
        )

    def state_dir(self, node: Node) -> Path:
        return self.folder / f"state-{node.name}"

    def start(
        self,
        *nodes: Node,
        options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`elastictrain run` on these nodes, of their own job file or the one that all have; what it says goes to a
        file for each. Packages in the folder where it is started come first."""
        for node in nodes:
            with self.output(node).open("a") as output:
                self.processes[node.index] = node.popen(
                    [
                        *_COMMAND,
                        "run",
                        file or self.file,
                        "--state-dir",
                        self.state_dir(node),
                        "--output",
                        "json",
                        *options,
                    ],
                    env={**_environment(), **(environment or {})},
                    cwd=cwd or self.folder,
                    stdout=output,
                    stderr=output,
                )

    def train_on(self, *nodes: Node) -> None:
        """Starts it on these nodes, and waits until they have done some steps together."""
        self.start(*nodes)
        self.wait_world_size(nodes[0], len(nodes))
        self.wait_steps(3)

    def output(self, node: Node) -> Path:
        return self.folder / f"output-{node.name}.txt"

    def tell(self, node: Node, command: str, *options: str) -> str:
        """`elastictrain COMMAND` about the job, on a node."""
        arguments = ["env", f"PYTHONPATH={ROOT}", *_COMMAND, command, "--state-dir", str(self.state_dir(node))]
        return node.run([*arguments, *options], check=command != "status")

    def status(self, node: Node) -> dict[str, Any]:
        """What `status` on this node says; empty before there is anything to say."""
        text = self.tell(node, "status", "--json") if self.state_dir(node).exists() else ""
        status: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
        return status

    def world_size(self, node: Node) -> int:
        """Ranks that train now, as this node knows it; 0 while none do."""
        status = self.status(node)
        return status["world_size"] or 0 if status.get("state") == "training" else 0

    def wait_world_size(self, node: Node, world_size: int) -> None:
        wait_until(lambda: self.world_size(node) == world_size, DEADLINE_S)

    def own_ranks(self, node: Node) -> list[dict[str, Any]]:
        """Of the ranks that its status shows, those that are there."""
        return [rank for rank in self.status(node).get("ranks", []) if rank["host"] == node.name]

    def misses_the_store(self, node: Node) -> bool:
        """Whether its status says that the node waits for a store that it does not reach."""
        return "the store of the rendezvous cannot be reached" in self.status(node).get("reason", "")

    def wait_without_store(self, node: Node) -> None:
        """Until its ranks have let go, and it says what it waits for."""
        wait_until(lambda: self.misses_the_store(node), DEADLINE_S)
        assert self.own_ranks(node) == [], "nobody goes on alone"

    @property
    def step(self) -> int:
        """The last step that any node has reported; 0 before the first."""
        return max((line["step"] for line in self.lines()), default=0)

    def durable_steps(self) -> list[int]:
        """Steps of the snapshots in the store, newest first."""
        return [snapshot.global_step for snapshot in open_store(self.store).snapshots()]

    def wait_steps(self, count: int) -> None:
        """Until so many more are done."""
        before = self.step
        assert before + count < self.max_steps, "the job is too short for this test"
        wait_until(lambda: self.step >= before + count, DEADLINE_S)

    def lines(self) -> list[dict[str, Any]]:
        """The steps that the nodes have reported, those that were done twice among them. Every node has a line of every
        step that it took part in: one of each worker group is enough, and one that knows the whole loss is better."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for folder in sorted(self.folder.glob("state-*")):
            for line in read_metrics(folder):
                known = found.setdefault((line["step"], line["incarnation"]), line)
                if known.get("partial") and not line.get("partial"):
                    found[line["step"], line["incarnation"]] = line
        return list(found.values())

    def finish(self, *nodes: Node) -> None:
        """Has the job hurry, and waits until all these nodes have ended well."""
        (self.folder / HURRY_FILE).touch()
        for node in nodes:
            code = self.processes[node.index].wait(DEADLINE_S)
            assert code == 0, f"{node.name} ended with {code}: {self.output(node).read_text()[-3000:]}"

    def assert_exact(self, folder: Path, num_again: int = 0) -> None:
        """Nothing of what happened is to be seen in the numbers: neither in those of any step, nor at the end.

        Args:
            folder: for the run on one rank to compare with.
            num_again: how many steps may have been done twice: one for each that was in flight.
        """
        write_job(
            folder / "alone",
            TASK,
            params={"folder": str(self.folder), "pause_s": 0.0},
            elastic={"reduction": "tree"},
            **_SECTIONS,
        )
        alone = train(folder / "alone")
        assert kept(self.folder, open_store(self.store)) == kept(folder / "alone", store_of(folder / "alone"))
        expected = {line["step"]: numbers(line) for line in alone.metrics()}
        found = [(line["step"], numbers(line)) for line in self.lines() if not line.get("partial")]
        assert {step: values for step, values in found if values != expected[step]} == {}
        assert len(self.lines()) - STEPS <= num_again
        assert {line["step"] for line in self.lines()} == set(range(1, STEPS + 1))


_COMMAND = [sys.executable, "-m", "elastictrain.cli.main"]


def _environment() -> dict[str, str]:
    dropped = ("COV_", "PYTEST_", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # as in `tests.process.helpers`
    env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {**env, "PYTHONPATH": str(ROOT)}


def numbers(line: dict[str, Any]) -> tuple[str, ...]:
    """What a step's line says of its numbers, to the last bit."""
    return tuple(repr(line[key]) for key in ("loss", "grad_norm", "lr", "applied"))
