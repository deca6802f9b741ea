"""The rendezvous handler: torch's dynamic rendezvous with its state in etcd and a new store for every round.

A store of its own for each round is the cure for what torch 2.13 does by itself: it makes one worker store and hands it
out again in every later round, where the ranks then read their peers' old addresses. The store is served by the agent
of the round's first node, and its address is in etcd; so the loss of that agent costs one round, not the run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _NodeDesc,
)

from elastictrain.errors import ConfigError
from elastictrain.kv.client import EtcdClient
from elastictrain.kv.settings import parse_settings
from elastictrain.rendezvous.backend import EtcdBackend, RoundStore
from elastictrain.rendezvous.holder import EtcdStateHolder

STORE_TIMEOUT_S = 60.0
"""Within which the first node of a round has to say where its store is, and that store has to answer."""
WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class RoundLostError(RendezvousTimeoutError):
    """The round cannot begin as it is: a node that takes part died, or cannot be reached."""


class EtcdRendezvousHandler(DynamicRendezvousHandler):
    """One node's part in the rendezvous. Made by `create_handler`."""

    def __init__(
        self, node: _NodeDesc, settings: RendezvousSettings, backend: EtcdBackend, holder: EtcdStateHolder
    ) -> None:
        # torch wants a store here; `_get_store` gives another one for each round.
        super().__init__(node, settings, backend.name, HashStore(), holder)
        self._backend = backend
        self._holder = holder
        # The round before may still have ranks, on other nodes, that have not heard of its end.
        self._served: deque[TCPStore] = deque(maxlen=2)
        self._num_waiting = 0
        self._blind_until_s = 0.0
        self._warned_s: float | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Joins the next round, and waits for an etcd that cannot be reached until `join_timeout` is over."""
        join_s = self._settings.timeout.join.total_seconds()
        deadline_s = time.monotonic() + join_s
        with self._holder.patient_for(join_s):
            while True:
                # Of the last round, and torch would hand it out again.
                self._bootstrap_store_info = None
                self._shared_tcp_store_server = None
                self._num_waiting = 0
                try:
                    return super().next_rendezvous()
                except RoundLostError as error:
                    if time.monotonic() >= deadline_s:
                        raise
                    logger.warning("rendezvous begins another round: %s", error)

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round, as far as is known: training goes on without etcd.

        The agent asks ten times a second, and sees nothing of its ranks while it asks. So a heartbeat that is stuck is
        not waited for, and after a failure etcd is left in peace for a while.
        """
        if time.monotonic() < self._blind_until_s or not self._heartbeat_lock.acquire(blocking=False):
            return self._num_waiting
        try:
            self._holder.sync()
            self._num_waiting = len(self._holder.state.wait_list)
            if self._warned_s is not None:
                logger.warning("rendezvous sees again whether nodes wait")
                self._warned_s = None
        except RendezvousError as error:
            now_s = time.monotonic()
            self._blind_until_s = now_s + self._settings.keep_alive_interval.total_seconds()
            if self._warned_s is None or now_s - self._warned_s >= WARN_EVERY_S:
                logger.warning("rendezvous cannot see whether nodes wait; training goes on: %s", error)
                self._warned_s = now_s
        finally:
            self._heartbeat_lock.release()
        return self._num_waiting

    def _close(self) -> None:
        with self._holder.patient_for(self._settings.timeout.close.total_seconds()):
            super()._close()

    def _get_store(self) -> Store:
        state = self._holder.state
        round_number, participants = state.round, dict(state.participants)
        first = min(participants, key=lambda node: participants[node])
        if first == self._this_node:
            store = TCPStore(
                self._this_node.addr,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
            )
            self._served.append(store)
            mine = RoundStore(node=repr(first), host=self._this_node.addr, port=store.port)
            self._holder.with_patience(lambda: self._backend.publish_store(round_number, mine))
        else:
            store = self._store_of(first, round_number)
        self._wait_for_all(store, round_number, participants)
        # The ranks use the same store, and no prefix.
        return PrefixStore(f"elastictrain.agents.{round_number}", store)

    def _wait_for_all(self, store: TCPStore, round_number: int, participants: dict[_NodeDesc, int]) -> None:
        """Until every node of the round is at its store.

        torch's agents exchange their ranks next, and end when one does not come: the loss of a node while a round is
        forming would be the end of all others.
        """
        here = PrefixStore(f"elastictrain.arrived.{round_number}", store)
        deadline_s = time.monotonic() + STORE_TIMEOUT_S
        pause_s = 0.01
        try:
            here.set(str(participants[self._this_node]), "here")
            while not here.check([str(rank) for rank in participants.values()]):
                missing = self._gone(round_number, participants)
                if missing or time.monotonic() >= deadline_s:
                    who = f"node {missing} is gone" if missing else "not all its nodes have come to its store"
                    raise RoundLostError(f"round {round_number} does not begin: {who}")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.2)
        except RuntimeError as error:  # torch's DistError and its kind
            raise RoundLostError(f"the store of round {round_number} does not answer any more: {error}") from error

    def _gone(self, round_number: int, participants: dict[_NodeDesc, int]) -> _NodeDesc | None:
        """A node that does not take part in the round any more, as far as can be seen now."""
        if not self._heartbeat_lock.acquire(blocking=False):
            return None
        try:
            with self._holder.patient_for(0.0):
                self._holder.sync()
        except RendezvousError:
            return None  # not needed, if all come
        finally:
            self._heartbeat_lock.release()
        state = self._holder.state
        present = state.participants if state.round == round_number else {}
        return next((node for node in participants if node not in present), None)

    def _store_of(self, first: _NodeDesc, round_number: int) -> TCPStore:
        deadline_s = time.monotonic() + STORE_TIMEOUT_S
        pause_s = 0.02
        while True:
            found = self._holder.with_patience(lambda: self._backend.find_store(round_number))
            # An address that another life of the run has left is none.
            if found is not None and found.node == repr(first):
                break
            if time.monotonic() >= deadline_s:
                raise RoundLostError(
                    f"node {first}, the first of round {round_number}, has not said where its store is"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
        try:
            return TCPStore(
                found.host,
                found.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
            )
        except RuntimeError as error:  # torch's DistError and its kind
            raise RoundLostError(
                f"the store of round {round_number} at {found.host}:{found.port} (node {first}) does not answer. "
                "If this node cannot reach that address, give torchrun --local-addr there."
            ) from error

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return self._served[-1]  # the one that serves the agents


def create_handler(parameters: RendezvousParameters) -> EtcdRendezvousHandler:
    """The handler for what torchrun was given.

    Raises:
        ConfigError: it was given what cannot be meant.
    """
    settings = parse_settings(parameters.endpoint, parameters.config)
    backend = EtcdBackend(EtcdClient(settings), parameters.run_id, settings.lease_ttl_s)
    torchs = RendezvousSettings(
        run_id=parameters.run_id,
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        timeout=RendezvousTimeout(
            **{
                name: timedelta(seconds=seconds)
                for name in ("join", "last_call", "close", "heartbeat")
                if (seconds := _whole(parameters, f"{name}_timeout")) is not None
            }
        ),
        keep_alive_interval=timedelta(seconds=_whole(parameters, "keep_alive_interval") or 5),
        keep_alive_max_attempt=_whole(parameters, "keep_alive_max_attempt") or 3,
    )
    node = EtcdRendezvousHandler._node_desc_generator.generate(parameters.local_addr)
    return EtcdRendezvousHandler(node, torchs, backend, EtcdStateHolder(backend, torchs, node))


def _whole(parameters: RendezvousParameters, name: str) -> int | None:
    try:
        value = parameters.get_as_int(name)
    except ValueError:
        value = 0
    if value is not None and value < 1:
        raise ConfigError(f"--rdzv-conf {name}={parameters.get(name)}: not a whole number from 1 up")
    return value
