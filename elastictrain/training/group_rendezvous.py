"""The rendezvous of a worker group: its supervisors have agreed who takes part, so there is nobody to look for.

torch's c10d rendezvous lets agents find each other, in rounds; a lone node pays for it with a random pause of up to
0.3 s and a store server whose second round hands out stale addresses (torch 2.13). Here a plan says who takes part
(`core.membership`). The agent of node 0 serves one store for one round, and all ranks use that store too. On several
nodes it listens on a socket that its supervisor has opened before the plan was made: others may connect at once, and no
port is looked for, closed and hoped to be free still.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from elastictrain.protocol import ENV_STORE_FD, Group

BACKEND = "elastictrain-group"


class GroupRendezvous(RendezvousHandler):
    """One round of the nodes that were agreed on.

    Args:
        group: this node's view of it; another round is another incarnation, with an agent of its own.
        timeout_s: after which a request to the store fails.
        store_fd: of the listening socket that the store is served on, where this node serves it and there are others.
    """

    def __init__(self, group: Group, timeout_s: float, store_fd: int | None) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._store_fd = store_fd
        self._store: TCPStore | None = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is not None:
            raise RendezvousStateError("a second round on one store would hand out the addresses of the first")
        group = self._group
        if group.node:
            port = group.store_port
            self._store = TCPStore(group.store_host, port, is_master=False, timeout=self._timeout)
        else:
            listener = self._listener()
            port = listener.getsockname()[1]
            self._store = TCPStore(
                group.store_host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=listener.detach(),  # closed with the store
            )
        return RendezvousInfo(self._store, group.node, group.num_nodes, RendezvousStoreInfo(group.store_host, port))

    def _listener(self) -> socket.socket:
        if self._store_fd is not None:
            return socket.socket(fileno=self._store_fd)
        # Left to itself the store would listen on every address of the machine, and it asks nobody who he is.
        return socket.create_server((self._group.store_host, self._group.store_port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0  # it is the supervisors who look out for others

    def get_run_id(self) -> str:
        return self._group.attempt

    def shutdown(self) -> bool:
        self._closed = True
        return True


def store_fd_of_environment() -> int | None:
    """The listening socket that came with the order to start this agent, in an agent that runs as a command."""
    text = os.environ.pop(ENV_STORE_FD, "")
    return int(text) if text else None


def register(group: Group) -> None:
    """Makes it known to torch's launcher as the backend `BACKEND`."""
    store_fd = store_fd_of_environment()

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return GroupRendezvous(group, float(parameters.get("timeout_s")), store_fd)

    rendezvous_handler_registry.register(BACKEND, create)
