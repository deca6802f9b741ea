"""The rendezvous state as JSON text, and back.

torch pickles its `_RendezvousState` into the store and loads what it finds there: whoever may write the key may then
run code in every agent. Here the store holds JSON of one strict form, and whatever is not of that form is refused.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

FORMAT: Literal[1] = 1
MAX_SIZE_BYTES = 1 << 20
"""etcd's own default for a request is 1.5 MiB; a node takes about 150 bytes."""

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Node(_Strict):
    addr: Annotated[str, Field(min_length=1, max_length=1024)]
    pid: _Count
    local_id: _Count
    rank: _Count | None = None
    """Among the participants; None for a node that is not one."""
    waiting: bool = False
    redundant: bool = False
    last_heartbeat: AwareDatetime | None = None
    """By the node's own clock."""


class _State(_Strict):
    format: Literal[1]
    round: _Count
    complete: bool
    closed: bool
    deadline: AwareDatetime | None
    nodes: tuple[_Node, ...]


def encode(state: _RendezvousState) -> bytes:
    """The state as JSON, nodes in order: equal states are equal bytes."""
    nodes = {*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats}
    stored = _State(
        format=FORMAT,
        round=state.round,
        complete=state.complete,
        closed=state.closed,
        deadline=_utc(state.deadline),
        nodes=tuple(
            _Node(
                addr=node.addr,
                pid=node.pid,
                local_id=node.local_id,
                rank=state.participants.get(node),
                waiting=node in state.wait_list,
                redundant=node in state.redundancy_list,
                last_heartbeat=_utc(state.last_heartbeats.get(node)),
            )
            for node in sorted(nodes)
        ),
    )
    return stored.model_dump_json().encode()


def decode(value: bytes, where: str) -> _RendezvousState:
    """The state that `encode` made `value` from.

    Args:
        where: the key and the store, for the error.

    Raises:
        RendezvousStateError: it was not `encode` that made it.
    """
    if len(value) > MAX_SIZE_BYTES:
        raise _refused(where, f"{len(value)} bytes are more than a state can have")
    try:
        stored = _State.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _refused(where, f"{'.'.join(map(str, first['loc'])) or 'the value'}: {first['msg']}") from None
    state = _RendezvousState()
    state.round, state.complete, state.closed = stored.round, stored.complete, stored.closed
    state.deadline = _utc(stored.deadline)
    seen: set[_NodeDesc] = set()
    for entry in stored.nodes:
        node = _NodeDesc(entry.addr, entry.pid, entry.local_id)
        if node in seen:
            raise _refused(where, f"node {node} is there twice")
        seen.add(node)
        if entry.rank is not None:
            state.participants[node] = entry.rank
        if entry.waiting:
            state.wait_list.add(node)
        if entry.redundant:
            state.redundancy_list.add(node)
        if entry.last_heartbeat is not None:
            state.last_heartbeats[node] = entry.last_heartbeat.astimezone(UTC)
    # A node that left or was dropped leaves a gap; before the round is complete all ranks are 0.
    if state.complete and len(set(state.participants.values())) < len(state.participants):
        raise _refused(where, "two participants have the same rank")
    return state


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)


def _refused(where: str, why: str) -> RendezvousStateError:
    return RendezvousStateError(
        f"{where} holds no rendezvous state of elastictrain ({why}). Nothing was loaded from it. If nothing else "
        "should use this key, delete it, or start with another --rdzv-id."
    )
