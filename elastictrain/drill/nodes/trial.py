"""One run of the job on several nodes of the drill's own, each with a scratch state directory; the store is shared."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from elastictrain.armed import ArmedFault, DrillDir
from elastictrain.checkpoint.catalog import Candidate, newest_first
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.core.events import Event
from elastictrain.core.trajectory import RankTrace, read_trace
from elastictrain.drill.launch import CLEAR_TIMEOUT_S
from elastictrain.drill.nodes.cluster import Cluster
from elastictrain.drill.nodes.etcd import EtcdOnNodes
from elastictrain.drill.nodes.node import Node
from elastictrain.drill.nodes.process import NodeProcess
from elastictrain.drill.settings import DrillJob
from elastictrain.drill.trial import POLL_S, STDERR_LINES, Said
from elastictrain.errors import StorageError
from elastictrain.folders import numbered_folders
from elastictrain.procs import command_of
from elastictrain.protocol import BOARD_FILE, JOURNAL_FILE, METRICS_FILE, RUNS_DIR, StopBoard
from elastictrain.supervisor.journal_reader import JournalReader

STORE_PORT = 29400
ETCD_PORT = 2379
MEMORY_PATH = "/dev/shm"
TEMPORARY = "/run/elastictrain-drill"
"""Temporary files of a node, on its own /run: they go with it, however it dies. Paths of sockets are short there."""
FIRST_CALL_S = 3600.0
"""A run begins with all of its nodes: a first worker group of fewer would be another run."""
_OF_ELSEWHERE = ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")


class NodesTrial:
    """A run on several nodes.

    Args:
        job: what to run.
        folder: of its own; made.
        num_nodes: how many there are.
        num_late: how many of them are not there at the start.
        ranks_per_node: on each of them.
        armed: what is to happen to ranks of the first node.
        with_etcd: the nodes find each other by etcd; else by the store that the first one serves.
    """

    def __init__(
        self,
        job: DrillJob,
        folder: Path,
        *,
        num_nodes: int,
        num_late: int = 0,
        ranks_per_node: int,
        armed: Sequence[ArmedFault] = (),
        with_etcd: bool = False,
    ) -> None:
        self.job = job
        self.folder = folder
        self.store_path = folder / "store"
        self.store_path.mkdir(parents=True)
        self.etcd: EtcdOnNodes | None = None
        self._with_etcd = with_etcd
        self._ranks_per_node = ranks_per_node
        self._at_start = num_nodes - num_late
        self._began_s = 0.0
        self._processes: dict[int, NodeProcess] = {}
        # The user's data may be below /tmp; nothing of ours is.
        self.cluster = Cluster(num_nodes, own=("/run",))
        for node in self.cluster:
            self.drill_of(node).arm(list(armed) if node.index == 0 else [])

    # ---- its nodes

    @property
    def first(self) -> Node:
        return self.cluster[0]

    @property
    def last(self) -> Node:
        return self.cluster.nodes[-1]

    def state_dir(self, node: Node) -> Path:
        return self.folder / f"state-{node.name}"

    def drill_of(self, node: Node) -> DrillDir:
        return DrillDir(self.state_dir(node))

    @property
    def drill(self) -> DrillDir:
        """That of the first node, on which ranks hold."""
        return self.drill_of(self.first)

    def start(self) -> None:
        """Boots the nodes, and starts the supervisors of those that are there from the start."""
        self.cluster.__enter__()
        self._began_s = time.monotonic()
        if self._with_etcd:
            members = self.folder / "etcd"
            members.mkdir()
            self.etcd = self.cluster.etcd(len(self.cluster.nodes), members)
        for node in self.cluster.nodes[: self._at_start]:
            self.start_on(node)

    def start_on(self, node: Node) -> None:
        """Starts a node's supervisor."""
        overrides = [
            f"elastic.rendezvous={json.dumps(self._rendezvous())}",
            # A node that comes late is not waited for at the start: there, too, the first worker group is as planned.
            f'elastic.nodes="{self._at_start if self._is_joined else 1}:{len(self.cluster.nodes)}"',
            f"elastic.last_call_s={0.0 if self._is_joined else FIRST_CALL_S}",
            f"elastic.nproc_per_node={self._ranks_per_node}",
            f"checkpoint.memory_path={json.dumps(MEMORY_PATH)}",
        ]
        arguments = self.job.arguments(self.state_dir(node), self.store_path, None, overrides)
        env = {key: value for key, value in os.environ.items() if key not in _OF_ELSEWHERE}
        node.run(["mkdir", "-p", TEMPORARY])
        with self._output(node).open("ab") as output, self._errors(node).open("ab") as errors:
            self._processes[node.index] = node.popen(
                [sys.executable, "-m", "elastictrain.cli.main", *arguments],
                env={**env, "TMPDIR": TEMPORARY},
                cwd=Path.cwd(),
                stdout=output,
                stderr=errors,
            )

    @property
    def _is_joined(self) -> bool:
        return self._at_start < len(self.cluster.nodes)

    def _rendezvous(self) -> str:
        if self._with_etcd:
            return "etcd://" + ",".join(f"{node.address}:{ETCD_PORT}" for node in self.cluster)
        return f"c10d://{self.first.address}:{STORE_PORT}"

    def _output(self, node: Node) -> Path:
        return self.folder / f"output-{node.name}.jsonl"

    def _errors(self, node: Node) -> Path:
        return self.folder / f"stderr-{node.name}.txt"

    @property
    def wall_s(self) -> float:
        """Since the first start."""
        return time.monotonic() - self._began_s

    def living(self) -> list[Node]:
        """The nodes that are up, and had their supervisor started."""
        return [node for node in self.cluster if node.is_up and node.index in self._processes]

    def exit_codes(self) -> list[tuple[str, int | None]]:
        """Of the supervisors on nodes that are up; None of one that runs."""
        return [(node.name, self._processes[node.index].poll()) for node in self.living()]

    def wait_for(self, condition: Callable[[], Any], deadline_s: float) -> bool:
        """Waits until `condition()` is true; False if a supervisor ended first, or `deadline_s` came.

        Args:
            condition: asked again and again.
            deadline_s: of `time.monotonic`.
        """
        while True:
            ended = any(code is not None for _, code in self.exit_codes())
            if condition():
                return True
            if ended or time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)

    def wait_held(self, hold_id: str, deadline_s: float) -> bool:
        """Waits until a rank of the first node holds."""
        return self.wait_for(lambda: self.drill.fired_at_s(hold_id) is not None, deadline_s)

    def wait_end(self, deadline_s: float) -> None:
        """Waits until no supervisor runs any more on a node that is up; a failed one ends it too, after a while."""
        failed_s: float | None = None
        while any(code is None for _, code in self.exit_codes()) and time.monotonic() < deadline_s:
            if failed_s is None and any(code for _, code in self.exit_codes()):
                failed_s = time.monotonic()
            if failed_s is not None and time.monotonic() > failed_s + CLEAR_TIMEOUT_S:
                break
            time.sleep(POLL_S)

    def is_regrouping(self) -> bool:
        """Whether the first node's present worker group has been told to stop at the next step boundary, for another
        to follow."""
        runs = numbered_folders(self.state_dir(self.first) / RUNS_DIR)
        with contextlib.suppress(OSError, ValueError):
            board = StopBoard(runs[-1] / BOARD_FILE)
            try:
                return board.is_passing_on
            finally:
                board.close()
        return False

    # ---- what it left

    def events(self, kinds: Collection[str] = ()) -> list[Event]:
        """The journal of the first node; what it holds back for the moment is missing."""
        with contextlib.suppress(StorageError):
            return JournalReader(self.state_dir(self.first) / JOURNAL_FILE).read(kinds=kinds)
        return []

    def said_named(self, name: str) -> list[Said]:
        """Events that supervisors and ranks printed, by node; when, is not known."""
        found = []
        for node in self.cluster:
            for fields in _json_lines(self._output(node)):
                if fields.get("event") == name:
                    found.append(Said(0.0, name, fields))
        return found

    def traces(self) -> list[RankTrace]:
        return [
            read_trace(incarnation, rank, lines)
            for node in self.cluster
            for incarnation, rank, lines in self.drill_of(node).traces()
        ]

    def world_sizes(self) -> tuple[int, ...]:
        """How many ranks began, in each worker group that did."""
        began = sorted(trace.incarnation for trace in self.traces() if trace.began_step is not None)
        return tuple(len(list(ranks)) for _, ranks in groupby(began))

    def step_lines(self) -> list[dict[str, Any]]:
        """A line of every step of every worker group, of a node that knows the whole loss, where there is one."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for node in self.cluster:
            for line in _json_lines(self.state_dir(node) / METRICS_FILE):
                if line.get("kind") == "step":
                    key = (line["step"], line["incarnation"])
                    if key not in found or (found[key].get("partial") and not line.get("partial")):
                        found[key] = line
        return list(found.values())

    def store(self) -> Store:
        return open_store(str(self.store_path))

    def durable(self) -> list[Candidate]:
        """All complete snapshots in the store, newest first."""
        return newest_first(None, self.store())

    def last_words(self) -> str:
        """What the first node that failed printed last; of the first node where none did."""
        codes = dict(self.exit_codes())
        failed = [node for node in self.living() if codes[node.name]]
        for node in [*failed, self.first]:
            with contextlib.suppress(OSError):
                if lines := self._errors(node).read_text().splitlines():
                    return "\n".join(lines[-STDERR_LINES:])
        return ""

    # ---- the end

    def leftovers(self) -> str:
        """What should be gone by now on nodes that are up and whose supervisor has ended well, in words."""
        found = []
        deadline_s = time.monotonic() + CLEAR_TIMEOUT_S
        for node in self.living():
            if self._processes[node.index].poll() != 0:
                continue
            while (left := self._strangers(node)) and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            found += [f"on {node.name}: process {words}" for words in left]
            found += [f"on {node.name}: {MEMORY_PATH}/{name}" for name in node.run(["ls", "-A", MEMORY_PATH]).split()]
        return ", ".join(found)

    @staticmethod
    def _strangers(node: Node) -> list[str]:
        commands = [command_of(process.pid) for process in node.processes()]
        return [" ".join(command) for command in commands if command and Path(command[0]).name != "etcd"]

    def close(self) -> None:
        """Takes the nodes down, with all that runs there; the folder stays. Idempotent."""
        self.cluster.close()

    def remove(self) -> None:
        """Removes the folder too."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; the last may be torn, and what is none is no line of ours."""
    found = []
    with contextlib.suppress(OSError):
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    found.append(line)
    return found
