"""The rendezvous state in etcd: one key per run, read and swapped as one value.

`EtcdBackend` is what torch's elastic package calls a rendezvous backend, with one difference: the state is JSON
(`codec`), checked on the way in and on the way out. Beside it lies the address of each round's store (`RoundStore`),
which the round's first node serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from elastictrain.kv.client import EtcdClient, EtcdError, EtcdLeaseGoneError, EtcdRefusedError, Stored
from elastictrain.rendezvous.codec import decode
from elastictrain.rendezvous.entry import BACKEND

PREFIX = "/elastictrain/rdzv/"

_T = TypeVar("_T")


class EtcdRefusesError(RendezvousConnectionError):
    """etcd answers, and will not do it: waiting does not help."""


class RoundStore(BaseModel):
    """Where a round's store listens, and which node (as torch names it) serves it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    node: str
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(gt=0, lt=2**16)]


class EtcdBackend(RendezvousBackend):
    """The keys of one run.

    Args:
        client: the cluster.
        run_id: of the rendezvous (`--rdzv-id`).
        lease_ttl_s: how long the keys stay after the last write.
        clock: seconds that only go forward.
    """

    def __init__(
        self, client: EtcdClient, run_id: str, lease_ttl_s: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._client = client
        # A run id with a slash must not reach into another run's keys.
        self.key = PREFIX + quote(run_id, safe="")
        self._lease_ttl_s = lease_ttl_s
        self._lease: int | None = None
        self._lease_renewed_s = 0.0
        self._clock = clock

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state as JSON, and the revision at which it was written.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses.
            RendezvousStateError: what the key holds is no state.
        """
        return self._checked(self._try(lambda: self._client.get(self.key)))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Writes the state if the key was last written at revision `token`, or does not exist if that is None.

        Returns:
            What the key holds now, its revision, and whether that is what was to be written; None if a token was
            given and there is no such key any more.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses. It may have been written.
            RendezvousStateError: `state`, or what the key holds, is no state.
        """
        decode(state, "what was to be written")
        revision = 0 if token is None else int(token)
        written, stored = self._leased(lambda lease: self._client.compare_and_swap(self.key, state, revision, lease))
        found = self._checked(stored)
        return None if found is None else (*found, written)

    def publish_store(self, round_number: int, store: RoundStore) -> None:
        """Says where the round's store is.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses.
        """
        value = store.model_dump_json().encode()
        self._leased(lambda lease: self._client.put(self._store_key(round_number), value, lease))

    def find_store(self, round_number: int) -> RoundStore | None:
        """Where the round's store is; None if nobody has said so yet.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses.
            RendezvousStateError: the key holds something else.
        """
        key = self._store_key(round_number)
        stored = self._try(lambda: self._client.get(key))
        if stored is None:
            return None
        try:
            return RoundStore.model_validate_json(stored.value)
        except ValidationError:
            raise RendezvousStateError(f"{key} in etcd ({self._client.where}) holds no store's address") from None

    def _store_key(self, round_number: int) -> str:
        return f"{self.key}/store/{round_number}"

    def _checked(self, stored: Stored | None) -> tuple[bytes, Token] | None:
        if stored is None:
            return None
        decode(stored.value, f"the key {self.key} in etcd ({self._client.where})")
        return stored.value, stored.mod_revision

    def _leased(self, write: Callable[[int], _T]) -> _T:
        try:
            return self._try(lambda: write(self._living_lease()))
        except _LeaseGoneError:
            self._lease = None
            return self._try(lambda: write(self._living_lease()))

    def _living_lease(self) -> int:
        # Heartbeats come from a thread of their own, so the field may change under us; at worst there are two leases.
        lease, now_s = self._lease, self._clock()
        if lease is not None and now_s - self._lease_renewed_s < self._lease_ttl_s / 3:
            return lease
        if lease is None or not self._client.keep_lease_alive(lease):
            lease = self._client.grant_lease(self._lease_ttl_s)
        self._lease, self._lease_renewed_s = lease, now_s
        return lease

    def _try(self, request: Callable[[], _T]) -> _T:
        try:
            return request()
        except EtcdLeaseGoneError as error:
            raise _LeaseGoneError(f"etcd: {error}") from error
        except EtcdRefusedError as error:
            raise EtcdRefusesError(
                f"etcd refuses what the rendezvous asks for the key {self.key}: {error}. "
                "See to the user, the password, and what the user's role may write."
            ) from error
        except EtcdError as error:
            raise RendezvousConnectionError(f"etcd cannot be used for the key {self.key}: {error}") from error


class _LeaseGoneError(EtcdRefusesError):
    """Not refused for good: with a new lease it is done again."""
