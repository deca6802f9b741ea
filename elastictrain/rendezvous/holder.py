"""One node's copy of the rendezvous state, and its judgement of which other nodes still live.

It differs from torch's `_BackendRendezvousStateHolder` in five things:

- The state is JSON in the store (`codec`), never pickle.
- torch calls a node dead when its last heartbeat, by the node's clock, is too old by ours. So clocks that differ kill
  nodes, and after an outage of etcd every node finds all others *and itself* dead, forgets that it takes part, and
  never again hears of a node that waits. Here a node is dead when its heartbeat has stood still while we looked, for
  as long as torch allows; time in which we could not look does not count; and we are never dead to ourselves.
- torch compares moments that other nodes, or an earlier setting of our own clock, have written with what our clock says
  now. Here a moment counts from when it was first seen here (`Moments`): clocks may be wrong, and be set.
- While a round is being joined or closed, an etcd that cannot be reached is waited for.
- A key that is gone (etcd came back without its data) is written again from the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _NodeDesc,
    _remove_participant_epilogue,
    _RendezvousState,
    _RendezvousStateHolder,
)

from elastictrain.rendezvous.backend import EtcdBackend, EtcdRefusesError
from elastictrain.rendezvous.codec import decode, encode

CACHE_S = 1.0
"""As in torch: the agent asks ten times a second how many nodes wait."""
RETRY_S = 0.5
WARN_EVERY_S = 10.0

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Silence:
    """For how long each node's heartbeat has stood still under our eyes.

    Args:
        limit_s: at which a node is dead.
        gap_s: between two looks, above which the time between them proves nothing.
    """

    def __init__(self, *, limit_s: float, gap_s: float) -> None:
        self._limit_s = limit_s
        self._gap_s = gap_s
        self._seen: dict[_NodeDesc, tuple[datetime, float]] = {}
        self._looked_s: float | None = None

    def forget(self) -> None:
        """We could not look: whatever has stood still so far may have moved."""
        self._looked_s = None

    def look(self, heartbeats: Mapping[_NodeDesc, datetime], now_s: float) -> list[_NodeDesc]:
        """The nodes that are dead, in order."""
        gap_s = float("inf") if self._looked_s is None else now_s - self._looked_s
        known = self._seen if gap_s <= self._gap_s else {}
        self._seen = {
            node: known[node] if node in known and known[node][0] == beat else (beat, now_s)
            for node, beat in heartbeats.items()
        }
        self._looked_s = now_s
        return sorted(node for node, (_, since_s) in self._seen.items() if now_s - since_s >= self._limit_s)


class Moments:
    """What the moments in the state are by this node's clock, for torch's code to compare with it.

    Two of them are compared: the deadline of a round, which the node that made it complete enough has set, and our own
    last heartbeat, after which the next is due. Both are measured by a clock that nobody sets, from the first look at
    them. A node that comes later counts the whole last call anew; whoever has set the deadline does not, and ends it.

    Args:
        last_call_s: between setting a deadline and the deadline.
        node: this node.
    """

    def __init__(self, *, last_call_s: float, node: _NodeDesc) -> None:
        self._last_call_s = last_call_s
        self._node = node
        self._deadline = _Moment()
        self._heartbeat = _Moment()

    def take_in(self, state: _RendezvousState, now_s: float, now: datetime) -> None:
        """The stored moments become ours."""
        if state.deadline is not None:
            state.deadline = self._deadline.take_in(state.deadline, now_s + self._last_call_s, now_s, now)
        if self._node in state.last_heartbeats:
            stored = state.last_heartbeats[self._node]
            state.last_heartbeats[self._node] = self._heartbeat.take_in(stored, now_s, now_s, now)

    def give_out(self, state: _RendezvousState) -> None:
        """Those that torch did not change since become what they were in the store: others count from that."""
        if state.deadline is not None:
            state.deadline = self._deadline.give_out(state.deadline)
        if self._node in state.last_heartbeats:
            state.last_heartbeats[self._node] = self._heartbeat.give_out(state.last_heartbeats[self._node])


class _Moment:
    """One of them: as stored, as ours, and when that is by the clock that nobody sets."""

    def __init__(self) -> None:
        self._stored: datetime | None = None
        self._ours: datetime | None = None
        self._at_s = 0.0

    def take_in(self, stored: datetime, at_s: float, now_s: float, now: datetime) -> datetime:
        if stored != self._stored:
            self._stored, self._at_s = stored, at_s
        self._ours = now + timedelta(seconds=self._at_s - now_s)
        return self._ours

    def give_out(self, moment: datetime) -> datetime:
        return self._stored if self._stored is not None and moment == self._ours else moment


class EtcdStateHolder(_RendezvousStateHolder):
    """What torch's rendezvous operations read and change, kept in step with etcd.

    Args:
        backend: where the state is.
        settings: torch's, for the keep-alive limits and the last call.
        node: this node.
        clock: seconds that only go forward.
        wall: what torch's code takes for the time.
    """

    def __init__(
        self,
        backend: EtcdBackend,
        settings: RendezvousSettings,
        node: _NodeDesc,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        interval_s = settings.keep_alive_interval.total_seconds()
        self._backend = backend
        self._settings = settings
        self._node = node
        self._clock = clock
        self._wall = wall
        self._moments = Moments(last_call_s=settings.timeout.last_call.total_seconds(), node=node)
        self._state = _RendezvousState()
        self._token: int | None = None
        self._dirty = False
        self._synced_s: float | None = None
        # We look every CACHE_S or every interval, whichever is longer, and a little later on a busy machine.
        self._silence = Silence(
            limit_s=interval_s * settings.keep_alive_max_attempt, gap_s=max(interval_s, CACHE_S) + CACHE_S
        )
        self._patience = threading.local()

    @property
    def state(self) -> _RendezvousState:
        return self._state

    def mark_dirty(self) -> None:
        self._dirty = True

    @contextmanager
    def patient_for(self, duration_s: float) -> Iterator[None]:
        """Within it, `sync` in this thread waits so long for an etcd that cannot be reached."""
        before = getattr(self._patience, "until_s", None)
        self._patience.until_s = self._clock() + duration_s
        try:
            yield
        finally:
            self._patience.until_s = before

    def sync(self) -> bool | None:
        """Writes the copy if it was changed, or reads it anew.

        Returns:
            Whether a changed copy was written; None if it was not changed.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses.
            RendezvousStateError: the key holds something else.
        """
        if not self._dirty and self._synced_s is not None and self._clock() - self._synced_s < CACHE_S:
            # The clock may have been set since the last look.
            self._moments.give_out(self._state)
            self._moments.take_in(self._state, self._clock(), self._wall())
            return None
        return self.with_patience(self._sync)

    def with_patience(self, request: Callable[[], _T]) -> _T:
        """Carries the request out; within `patient_for`, again and again while etcd cannot be reached.

        Raises:
            RendezvousConnectionError: etcd cannot be reached, or refuses.
        """
        warned_s: float | None = None
        while True:
            try:
                return request()
            except EtcdRefusesError:
                raise
            except RendezvousConnectionError as error:
                self._silence.forget()
                until_s = getattr(self._patience, "until_s", None)
                now_s = self._clock()
                if until_s is None or now_s >= until_s:
                    raise
                if warned_s is None or now_s - warned_s >= WARN_EVERY_S:
                    logger.warning("rendezvous waits for etcd, %.0f s more at most: %s", until_s - now_s, error)
                    warned_s = now_s
                time.sleep(RETRY_S)

    def _sync(self) -> bool | None:
        has_set: bool | None = None
        found: tuple[bytes, int] | None
        self._moments.give_out(self._state)
        if self._dirty:
            mine = encode(self._state)
            answer = self._backend.set_state(mine, self._token)
            if answer is None:  # the key is gone: make it anew, unless another node has done so
                answer = self._backend.set_state(mine, None)
            assert answer is not None, "a swap against no key finds one or makes one"
            found, has_set = answer[:2], answer[2]
        else:
            found = self._backend.get_state()
        if found is None:
            self._token = None  # our copy stands, and the next change writes it
        else:
            self._state = decode(found[0], self._backend.key)
            self._token = found[1]
        self._dirty = False
        self._synced_s = self._clock()
        self._moments.take_in(self._state, self._synced_s, self._wall())
        self._drop_the_dead()
        return has_set

    def _drop_the_dead(self) -> None:
        state = self._state
        dropped_participant = False
        for node in self._silence.look(state.last_heartbeats, self._clock()):
            if node == self._node:
                continue
            del state.last_heartbeats[node]
            dropped_participant |= state.participants.pop(node, None) is not None
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
        if dropped_participant:
            _remove_participant_epilogue(state, self._settings)
