"""The rendezvous of a job on one node: there is nobody to wait for.

torch's c10d rendezvous lets nodes find each other, in rounds; a lone node pays for it with a random pause of up to
0.3 s and a store server whose second round hands out stale addresses (torch 2.13). Here the agent hosts one store for
one round, on a port that the system chose, and its ranks use that store too: no port is looked for, closed and hoped to
be free still.
"""

from __future__ import annotations

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

BACKEND = "elastictrain-local"
ADDRESS = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """One round of one node.

    Args:
        run_id: of the round; another round is another incarnation, with an agent of its own.
        timeout_s: after which a request to the store fails.
    """

    def __init__(self, run_id: str, timeout_s: float) -> None:
        self._run_id = run_id
        self._timeout = timedelta(seconds=timeout_s)
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
        # Left to itself the store would listen on every address of the machine, and it asks nobody who he is.
        with socket.create_server((ADDRESS, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = store = TCPStore(
                ADDRESS,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=listener.detach(),  # closed with the store
            )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id, float(parameters.get("timeout_s")))


def register() -> None:
    """Makes it known to torch's launcher as the backend `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _create)
