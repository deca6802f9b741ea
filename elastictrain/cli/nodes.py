"""Puts a node among the others: what `elastictrain run` needs for a job on several nodes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastictrain.cli.agreement import must_agree, node_name
from elastictrain.core.membership import Bounds, Lineage, Plan
from elastictrain.kv.client import EtcdClient
from elastictrain.protocol import write_atomically
from elastictrain.supervisor.arrival import Arrival
from elastictrain.supervisor.endpoint import Way, endpoint_of
from elastictrain.supervisor.muster import STOPPING_S, Muster, Self
from elastictrain.supervisor.shared_keys import decode_plan, encode_plan
from elastictrain.supervisor.store_process import StoreProcess

if TYPE_CHECKING:
    from elastictrain.cli.state_dir import StateDir
    from elastictrain.config import LoadedJob
    from elastictrain.supervisor.events import EventSink

PLAN_FILE = "plan.json"
"""The newest plan that this node has seen: a store may lose its data, and numbers must not be used again."""

STORE_FILE = "store.json"
"""What the nodes have agreed on, where this one serves their store: also what only a node knows that is cut off."""


def make_team(
    job: LoadedJob, state: StateDir, lineage: Lineage, sink: EventSink, warn: Callable[[str], None]
) -> Arrival:
    """This node's place among those of the job.

    Args:
        job: as it was loaded.
        state: of this node.
        lineage: the run that this node would go on with.
        sink: takes events.
        warn: takes what whoever started this node should see.

    Raises:
        ConfigError: the rendezvous cannot be used as it is configured.
    """

    def emit(kind: str, /, **fields: Any) -> None:
        sink.append(kind, fields)
        if kind == "rendezvous_unknown":
            warn(f"{fields['why']}; waits for it")

    config = job.config
    endpoint = endpoint_of(config.elastic)
    agreed = must_agree(job, state.path)
    client = EtcdClient(endpoint.settings)

    def make(way: Way) -> Muster:
        host = socket.gethostname()
        store = StoreProcess(endpoint.host, endpoint.port, sink, keep=state.path / STORE_FILE) if way.is_here else None
        return Muster(
            Self(
                job=config.name,
                node=node_name(host, state.path),
                host=host,
                address=way.address,
                num_ranks=config.elastic.nproc_per_node,
                must_agree=agreed,
            ),
            client,
            Bounds(
                min_nodes=config.elastic.min_nodes,
                max_nodes=config.elastic.max_nodes,
                last_call_s=config.elastic.last_call_s,
                micro_batch_size=config.train.micro_batch_size,
                global_batch_size=config.train.global_batch_size,
                samples_per_rank=config.train.micro_batch_size * (config.train.accumulation_steps or 1),
                takeover_s=config.elastic.store_timeout_s + STOPPING_S,
            ),
            node_timeout_s=config.elastic.node_timeout_s,
            store_timeout_s=config.elastic.store_timeout_s,
            lineage=lineage,
            last_number=state.last_number,
            store=store,
            emit=emit,
            remembered=_read_plan(state.path / PLAN_FILE),
            remember=lambda plan: _write_plan(state.path / PLAN_FILE, plan),
        )

    return Arrival(endpoint, make, patience_s=config.elastic.join_timeout_s, emit=emit)


def _read_plan(path: Path) -> Plan | None:
    try:
        return decode_plan(path.read_bytes())
    except OSError:
        return None


def _write_plan(path: Path, plan: Plan) -> None:
    with contextlib.suppress(OSError):  # a full disk costs the memory of it, never the training
        write_atomically(path, encode_plan(plan))
