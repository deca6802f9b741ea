"""Measures how long a job on several nodes stands still when one is killed, cut off, or joins.

The nodes are network namespaces on this machine, as those of `elastictrain drill kill-node`: needs root and iproute2,
and etcd-server for `--store etcd`. Every round is a new job, of one rank on each node. The store is a process of ours
on the first node, or an etcd of three members on hosts of their own. It happens to the last node:

- kill: the whole node dies, in silence; until the survivors' next step. With our own store, also under plain torchrun
  with a good script (`recovery_script.py`) in the same namespaces, as it comes and with its rendezvous tuned.
- cut: its link; until the one side has done its next step, and the other has let its ranks go.
- join: until the next step of the larger world, from the moment at which the node has everything loaded and says so;
  and how long the training stood still for it.

The goals are for the worst of all rounds.

    sudo .venv/bin/python benchmarks/nodes.py [--nodes 2] [--store c10d] [--faults kill cut join] [--rounds 5]
                                              [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from goals import Goal, judge  # noqa: E402
from recovery_progress import Progress, read_progress  # noqa: E402

from elastictrain.drill.nodes.cluster import Cluster, why_impossible  # noqa: E402
from elastictrain.drill.nodes.etcd import EtcdOnNodes  # noqa: E402
from elastictrain.drill.nodes.node import Node  # noqa: E402
from elastictrain.heartbeat import Heartbeat, heartbeat_paths, read_heartbeat  # noqa: E402
from elastictrain.kv.client import EtcdClient, EtcdError  # noqa: E402
from elastictrain.kv.settings import EtcdSettings  # noqa: E402
from elastictrain.supervisor.shared_keys import PREFIX  # noqa: E402
from tests.nodes.job import PORT, Job  # noqa: E402

STEPS = 10**6
PAUSE_S = 0.005
"""Of each microbatch: a step has four of them, on however many ranks."""
LIMIT_S = 5.0
"""Heartbeat limit of our job (`supervisor.step_timeout_s`), timeout of the script's collectives."""
KILL_GOAL_S = 5.0
JOIN_GOAL_S = 3.0
CUT_GOAL_S = LIMIT_S + 5.0
NUM_MEMBERS = 3
"""Of etcd."""
START_S = 180.0
RECOVER_S = 300.0
POLL_S = 0.005
NUM_STEPS = 20
"""To be done before the fault."""
OURS = "elastictrain"
TORCHRUN = {
    "torchrun": "",
    "torchrun, tuned": "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
}
"""What plain torchrun is told of its rendezvous; the second is as short as it goes (whole seconds)."""

T = TypeVar("T")
Figures = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Of one round.

    Args:
        cluster: all there are.
        nodes: those of the job; the last one is the one that something happens to.
        rendezvous: as the job file says it.
        endpoints: URLs of the store.
    """

    cluster: Cluster
    nodes: list[Node]
    rendezvous: str
    endpoints: tuple[str, ...]

    @property
    def survivors(self) -> list[Node]:
        return self.nodes[:-1]

    def start(self, folder: Path) -> Job:
        """The job, on no node so far."""
        folder.mkdir()
        limits = {"step_timeout_s": LIMIT_S}
        return Job(
            self.cluster, folder, rendezvous=self.rendezvous, supervisor=limits, max_steps=STEPS, pause_s=PAUSE_S
        )

    def start_all(self, folder: Path) -> tuple[Job, int]:
        """A job that trains on all nodes; and the number of its worker group."""
        job = self.start(folder)
        return job, train_on(job, self.nodes)


@contextmanager
def made_hosts(folder: Path, num_nodes: int, store: str) -> Iterator[Hosts]:
    """Nodes that are up, and the store if it is etcd."""
    with Cluster(num_nodes + (NUM_MEMBERS if store == "etcd" else 0), shared=[folder]) as cluster:
        nodes, others = cluster.nodes[:num_nodes], cluster.nodes[num_nodes:]
        if store == "etcd":
            (folder / "etcd").mkdir(exist_ok=True)
            etcd = EtcdOnNodes(others, folder / "etcd")
            etcd.start()
            etcd.wait_ready()
            members = ",".join(f"{node.address}:2379" for node in others)
            yield Hosts(cluster, nodes, f"etcd://{members}", tuple(etcd.urls))
        else:
            endpoint = f"{nodes[0].address}:{PORT}"
            yield Hosts(cluster, nodes, f"c10d://{endpoint}", (f"http://{endpoint}",))


def until(look: Callable[[], T | None], deadline_s: float, what: str) -> T:
    """What `look` returns, as soon as it returns something.

    Raises:
        TimeoutError: it did not.
    """
    end_s = time.monotonic() + deadline_s
    while not (found := look()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not within {deadline_s:g} s")
        time.sleep(POLL_S)
    return found


def beat_of(job: Job, node: Node) -> Heartbeat | None:
    """What the node's rank in the newest worker group says; None while it has not begun a step."""
    runs = sorted((job.state_dir(node) / "runs").glob("[0-9]*"), key=lambda path: int(path.name))
    beats = [read_heartbeat(path) for path in heartbeat_paths(runs[-1]).values()] if runs else []
    return next((beat for beat in beats if beat is not None and beat.first_step >= 0), None)


def trains(job: Job, node: Node, *, after: int = 0, num_steps: int = 1) -> Heartbeat | None:
    """The same, once so many steps are done, in a worker group after this one."""
    beat = beat_of(job, node)
    return beat if beat is not None and beat.incarnation > after and beat.steps_done >= num_steps else None


def train_on(job: Job, nodes: list[Node]) -> int:
    """Starts the job on these nodes, waits for its first steps there, and returns the number of the worker group."""
    job.start(*nodes)
    until(lambda: job.world_size(nodes[0]) == len(nodes), START_S, f"training on {len(nodes)} node(s)")
    return until(lambda: trains(job, nodes[0], num_steps=NUM_STEPS), START_S, "the first steps").incarnation


def kill(hosts: Hosts, folder: Path, figures: Figures) -> None:
    job, number = hosts.start_all(folder)
    began_s = time.monotonic()
    hosts.nodes[-1].kill()
    until(lambda: trains(job, hosts.nodes[0], after=number), RECOVER_S, "the survivors' next step")
    figures[OURS].append(time.monotonic() - began_s)


def cut(hosts: Hosts, folder: Path, figures: Figures) -> None:
    job, number = hosts.start_all(folder)
    alone = hosts.nodes[-1]
    num_said = len(job.output(alone).read_text())
    decided_s: dict[str, float] = {}
    sides: Mapping[str, Callable[[], object]] = {
        "next step": lambda: trains(job, hosts.nodes[0], after=number),
        "let go": lambda: '"restart_planned"' in job.output(alone).read_text()[num_said:],
    }

    def look() -> bool:
        for side, has_decided in sides.items():
            if side not in decided_s and has_decided():
                decided_s[side] = time.monotonic() - began_s
        return len(decided_s) == len(sides)

    began_s = time.monotonic()
    alone.cut()
    until(look, RECOVER_S, "both sides' decision")
    figures["the side with the store: next step"].append(decided_s["next step"])
    figures["the other side: its ranks are gone"].append(decided_s["let go"])
    figures[OURS].append(max(decided_s.values()))


def join(hosts: Hosts, folder: Path, figures: Figures) -> None:
    job = hosts.start(folder)
    first, newcomer = hosts.nodes[0], hosts.nodes[-1]
    number = train_on(job, hosts.survivors)
    job.start(newcomer)
    client = EtcdClient(EtcdSettings(endpoints=hosts.endpoints))
    ready_s = first.call(lambda: until(lambda: _when_ready(client, newcomer.name), START_S, "the node that joins"))
    last = (-1, time.monotonic())

    def look() -> Heartbeat | None:
        nonlocal last
        beat = beat_of(job, first)
        if beat is not None and beat.incarnation == number and beat.step != last[0]:
            last = (beat.step, time.monotonic())
        return beat if beat is not None and beat.incarnation > number and beat.steps_done >= 1 else None

    until(look, RECOVER_S, "the next step of the larger world")
    now_s = time.monotonic()
    figures[OURS].append(now_s - ready_s)
    figures["the training stood still"].append(now_s - last[1])


def _when_ready(client: EtcdClient, host: str) -> float | None:
    """Now, if the node's record says that it can take part at once, or does."""
    try:
        found = client.get_prefix(PREFIX)
    except EtcdError:
        return None
    records = [json.loads(stored.value) for key, stored in found.items() if "/node/" in key]
    is_there = any(r["about"]["host"] == host and r["about"]["standing"] in ("ready", "running") for r in records)
    return time.monotonic() if is_there else None


def kill_under_torchrun(hosts: Hosts, folder: Path, figures: Figures, name: str) -> None:
    """The same with torchrun: the store is in a survivor's agent, or it could not go on at all."""
    nodes = hosts.nodes
    folder.mkdir()
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    for node in nodes:
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes=1:{len(nodes)}",
            "--nproc-per-node=1",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes[0].address}:{PORT}", "--rdzv-id=nodes"]
        command += [f"--rdzv-conf={TORCHRUN[name]}"] if TORCHRUN[name] else []
        command += [f"--local-addr={node.address}", "--max-restarts=100000", "--monitor-interval=0.1"]
        command += [ROOT / "benchmarks" / "recovery_script.py", folder, str(STEPS), "50", str(LIMIT_S)]
        with (folder / f"output-{node.name}").open("wb") as output:
            node.popen(command, env=environment, cwd=folder, stdout=output, stderr=output)

    def ranks() -> list[Progress]:
        found = [read_progress(folder, rank) for rank in range(len(nodes))]
        return [one for one in found if one is not None and one.step > one.first_step + NUM_STEPS]

    until(lambda: len(ranks()) == len(nodes), START_S, f"training under {name}")
    begun = {(one.pid, one.first_step) for one in ranks()}

    def next_step() -> bool:
        found = [read_progress(folder, rank) for rank in range(len(nodes))]
        return any(f is not None and (f.pid, f.first_step) not in begun and f.step > f.first_step for f in found)

    began_s = time.monotonic()
    nodes[-1].kill()
    until(next_step, RECOVER_S, f"the survivors' next step under {name}")
    figures[name].append(time.monotonic() - began_s)


GOALS = {"kill": KILL_GOAL_S, "cut": CUT_GOAL_S, "join": JOIN_GOAL_S}
MEASURE: dict[str, Callable[[Hosts, Path, Figures], None]] = {"kill": kill, "cut": cut, "join": join}


def measure_round(fault: str, folder: Path, figures: Figures, num_nodes: int, store: str, contenders: list[str]) -> int:
    """One job of each contender, each on nodes of its own; returns how often ours did not come to its end."""
    failed = 0
    for number, name in enumerate([OURS, *(contenders if fault == "kill" and store == "c10d" else [])]):
        print(f"{fault}: {name}", file=sys.stderr, flush=True)
        try:
            with made_hosts(folder, num_nodes, store) as these:
                if name == OURS:
                    MEASURE[fault](these, folder / str(number), figures)
                else:
                    kill_under_torchrun(these, folder / str(number), figures, name)
        except TimeoutError as error:
            print(f"    {name}: {error}", file=sys.stderr, flush=True)
            failed += name == OURS
    return failed


def show(fault: str, figures: Figures) -> None:
    ours = statistics.median(figures[OURS]) if figures[OURS] else None
    print(f"\n{fault:<36} {'median s':>9} {'worst':>7} {'it / elastictrain':>18}")
    for name, seconds in figures.items():
        if not seconds:
            print(f"  {name:<34} {'-':>9}")
            continue
        middle = statistics.median(seconds)
        ratio = f"{middle / ours:>18.1f}" if ours is not None and name in TORCHRUN else f"{'-':>18}"
        print(f"  {name:<34} {middle:>9.3f} {max(seconds):>7.3f} {ratio}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", nargs="+", default=list(MEASURE), choices=list(MEASURE))
    parser.add_argument("--contenders", nargs="*", default=list(TORCHRUN), choices=list(TORCHRUN))
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 3, 4), help="once all are there")
    parser.add_argument("--store", default="c10d", choices=("c10d", "etcd"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if why := why_impossible():
        print(f"nothing can be measured here: {why}", file=sys.stderr)
        return 69
    if chosen.store == "etcd" and shutil.which("etcd") is None:
        print("nothing can be measured here: etcd is not here: apt-get install etcd-server", file=sys.stderr)
        return 69
    all_figures: dict[str, Any] = {}
    goals = []
    for fault in chosen.faults:
        figures: Figures = defaultdict(list)
        failed = 0
        with tempfile.TemporaryDirectory(prefix="elastictrain-benchmark-") as folder:
            for number in range(chosen.rounds):
                path = Path(folder) / str(number)
                path.mkdir()
                failed += measure_round(fault, path, figures, chosen.nodes, chosen.store, chosen.contenders)
        show(fault, figures)
        all_figures[fault] = dict(figures)
        where = f"{fault}, {chosen.nodes} nodes, {chosen.store}"
        worst = max(figures[OURS], default=None)
        goals += [
            Goal(f"{where}: worst of {len(figures[OURS])}", worst, GOALS[fault], "s"),
            Goal(f"{where}: not recovered", failed, 0),
        ]
    if chosen.json:
        chosen.json.write_text(json.dumps(all_figures, indent=2) + "\n")
    return judge(goals)


if __name__ == "__main__":
    sys.exit(main())
