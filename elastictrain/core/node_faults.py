"""The faults of `elastictrain drill` that happen to one node of several, and whether a run that had one holds.

The nodes are the drill's own (`drill.nodes`): the fault comes from outside, while a rank of the first node holds after
a certain step. A run without a fault, on as many nodes, is the reference. With `elastic.reduction = "tree"` the numbers
do not depend on the world size, and both must be equal to the last bit; else they may be compared only where the world
size stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class NodeFault:
    """One row of the table.

    Args:
        name: on the command line.
        explanation: what happens, and what it stands for.
        expect: what must follow, in words.
        num_nodes: how many there are, and must be at least.
        changes: in the number of nodes that train, one after the other; none where the same worker group goes on.
        num_late: nodes that are not there at the start.
        needs_etcd: the nodes find each other by etcd, with a member on each of them.
    """

    name: str
    explanation: str
    expect: str
    num_nodes: int = 2
    changes: tuple[int, ...] = ()
    num_late: int = 0
    needs_etcd: bool = False

    @property
    def room_steps(self) -> int:
        """How many steps there must be after the fault."""
        return 2 + (1 if len(self.changes) > 1 else 0)

    def due_world_sizes(self, num_nodes: int, ranks_per_node: int) -> tuple[int, ...]:
        """The sizes that the world must have, one after the other."""
        sizes = [(num_nodes - self.num_late) * ranks_per_node]
        for change in self.changes:
            sizes.append(sizes[-1] + change * ranks_per_node)
        return tuple(sizes)


NODE_TABLE: tuple[NodeFault, ...] = (
    NodeFault(
        "kill-node",
        "The last node dies as a whole, without a word: nobody gets a FIN or RST, only silence. Stands for a power "
        "failure or a kernel that is stuck.",
        "goes on with the others",
        changes=(-1,),
    ),
    NodeFault(
        "cut-link",
        "The link of the last node is cut, and healed once the others have done a step without it. It must not train "
        "by itself meanwhile, and be taken in again.",
        "goes on with the others, and takes the node in again",
        changes=(-1, 1),
    ),
    NodeFault(
        "join-node",
        "The job begins with a node less; that node is started, and must be taken in at a step boundary.",
        "takes the node in",
        changes=(1,),
        num_late=1,
    ),
    NodeFault(
        "kill-store",
        "The process that serves the rendezvous store on the first node is killed (SIGKILL). Training must not notice, "
        "and the store must be there again.",
        "goes on undisturbed",
    ),
    NodeFault(
        "pause-etcd-leader",
        "The nodes find each other by a real etcd, with a member on each; the one that leads is stopped (SIGSTOP) "
        "until another leads. Training must not notice. Needs the program etcd (Debian package etcd-server).",
        "goes on undisturbed",
        num_nodes=3,
        needs_etcd=True,
    ),
)
"""In the order in which `drill all --nodes N` goes, after all others."""

NODE_FAULTS: dict[str, NodeFault] = {fault.name: fault for fault in NODE_TABLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    """What a drilled run on several nodes did.

    Args:
        fired: the fault happened.
        undone: what the drill waited for after the fault and did not see, in words; "" for nothing.
        exit_codes: of the supervisors that should end well, by node; None of one that had not ended in time.
        error: what the first of them that failed said last.
        complete: all steps are done.
        is_comparable: to the last bit, with the reference.
        difference: first differing step and tensor; "" for none; None where nothing could be compared.
        steps_lost: committed steps that were done again.
        samples_repeated: consumed more than once in what survived.
        samples_skipped: not consumed at all in what survived.
        world_sizes: of the worker groups, in order.
        due_world_sizes: those that are due.
        num_incidents: hangs found.
        leftovers: what was still there at the end, in words.
    """

    fired: bool
    undone: str
    exit_codes: Sequence[tuple[str, int | None]]
    error: str
    complete: bool
    is_comparable: bool
    difference: str | None
    steps_lost: int
    samples_repeated: int
    samples_skipped: int
    world_sizes: tuple[int, ...]
    due_world_sizes: tuple[int, ...]
    num_incidents: int
    leftovers: str


def node_objections(fault: NodeFault, seen: NodesSeen) -> list[str]:
    """Everything that is wrong; nothing if the drill holds."""
    words = f": {seen.error}" if seen.error else ""
    if not seen.fired:
        return [f"the fault did not happen: the run never came to its point{words}"]
    found = [seen.undone] if seen.undone else []
    if late := [node for node, code in seen.exit_codes if code is None]:
        found.append(f"the run had not ended in time on {', '.join(late)}")
    found += [f"the run on {node} ended with exit code {code}{words}" for node, code in seen.exit_codes if code]
    if not seen.complete:
        found.append("not all steps are done")
    sizes = tuple(size for size, _ in groupby(seen.world_sizes))
    if sizes != seen.due_world_sizes:
        found.append(f"the world had the sizes {_arrows(sizes) or 'none'}, {_arrows(seen.due_world_sizes)} expected")
    if not fault.changes and (len(seen.world_sizes) > 1 or seen.num_incidents):
        found.append(f"{len(seen.world_sizes) - 1} restart(s) and {seen.num_incidents} incident(s), none expected")
    if seen.is_comparable and seen.difference is None:
        found.append("nothing could be compared")
    elif seen.is_comparable and seen.difference:
        found.append(f"differs first at {seen.difference}")
    if seen.samples_repeated:
        found.append(f"{seen.samples_repeated} samples consumed twice")
    if seen.samples_skipped:
        found.append(f"{seen.samples_skipped} samples left out")
    if seen.steps_lost:
        found.append(f"{seen.steps_lost} step(s) done again, none allowed")
    if seen.leftovers:
        found.append(f"left behind: {seen.leftovers}")
    return found


def node_remark(seen: NodesSeen) -> str:
    """What there is to say where nothing is wrong."""
    sizes = f"world size {_arrows(seen.due_world_sizes)}"
    if seen.is_comparable:
        return sizes
    return f'{sizes}; bits may differ between world sizes, but for elastic.reduction = "tree": not compared'


def _arrows(sizes: Sequence[int]) -> str:
    return " → ".join(map(str, sizes))
