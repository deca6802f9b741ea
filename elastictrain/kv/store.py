"""Keys, values, revisions and leases in memory, with the meaning that etcd's v3 API gives them.

Time is an argument, so leases end when the caller's clock says so; nothing here waits, reads or writes anything.
`gateway` speaks etcd's JSON over it.

Every change takes the next revision, and a key keeps the revision at which it was written last: who knows it may swap
the value, nobody else. An empty store begins at a random revision out of 2^61, so a revision (or a lease) that was seen
in another life of the store is not valid by accident; a clock, which may have been set back, would not do. What a store
takes over from its last life (`restore`) is what has no lease.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_SIZE_BYTES = 64 * 2**20
"""Of all keys and values. The coordination of a job takes a few kilobytes for each node."""
MAX_LEASE_TTL_S = 9_000_000_000
"""As in etcd."""
MAX_LEASES = 100_000

_ENTRY_OVERHEAD_BYTES = 200


class StoreError(Exception):
    """The store will not do what was asked. Nothing was changed."""


class LeaseNotFoundError(StoreError):
    """There is no such lease (any more)."""


class LeaseExistsError(StoreError):
    """A lease with that number is there already."""


class StoreFullError(StoreError):
    """No room: somebody uses the store for more than coordination."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a key holds.

    Args:
        value: any bytes.
        create_revision: at which the key came to be.
        mod_revision: at which it was last written.
        version: how often it was written since it came to be.
        lease: with which it goes; 0: none.
    """

    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(slots=True)
class Lease:
    """Keys hang on it, and go when it ends."""

    ttl_s: int
    ends_s: float
    keys: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Range:
    """A key, or all keys from one up to, and without, another. `end` None: the key alone; b"\\0": no upper end."""

    key: bytes
    end: bytes | None = None

    def holds(self, key: bytes) -> bool:
        if self.end is None:
            return key == self.key
        return key >= self.key and (self.end == b"\0" or key < self.end)


class Store:
    """All keys of one store.

    Args:
        first_revision: before the first change; None takes a random one.
    """

    def __init__(self, first_revision: int | None = None) -> None:
        self.revision = 2**60 + secrets.randbelow(2**61) if first_revision is None else first_revision
        """Of the last change."""
        self.lasting_revision = self.revision
        """Of the last change of keys without a lease."""
        self.size_bytes = 0
        self._entries: dict[bytes, Entry] = {}
        self._keys: list[bytes] = []  # in order
        self._leases: dict[int, Lease] = {}
        self._earliest_end_s = float("inf")  # no lease ends before

    def restore(self, entries: Mapping[bytes, Entry]) -> None:
        """Takes keys without a lease over from another life of the store, into an empty one."""
        self._entries = dict(entries)
        self._keys = sorted(entries)
        self.size_bytes = sum(_size_bytes(key, entry.value) for key, entry in entries.items())

    def lasting(self) -> dict[bytes, Entry]:
        """The keys without a lease."""
        return {key: entry for key, entry in self._entries.items() if not entry.lease}

    def get(self, wanted: Range) -> list[tuple[bytes, Entry]]:
        """The keys of a range and what they hold, in order."""
        return [(key, self._entries[key]) for key in self._select(wanted)]

    def mod_revision(self, key: bytes) -> int:
        """At which the key was last written; 0 if there is no such key."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.mod_revision

    def check_put(self, puts: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Whether these keys, values and leases can be written.

        Raises:
            LeaseNotFoundError: a lease is not 0, and not there.
            StoreFullError: there is no room.
        """
        more_bytes = 0
        for key, value, lease in puts:
            if lease and lease not in self._leases:
                raise LeaseNotFoundError
            old = self._entries.get(key)
            more_bytes += _size_bytes(key, value) - (0 if old is None else _size_bytes(key, old.value))
        if more_bytes > 0 and self.size_bytes + more_bytes > MAX_SIZE_BYTES:
            raise StoreFullError

    def put(self, key: bytes, value: bytes, lease: int, revision: int) -> None:
        """Writes a key at a revision, which is the present one or the next. `check_put` comes before."""
        old = self._entries.get(key)
        if old is None:
            insort(self._keys, key)
            entry = Entry(value, revision, revision, 1, lease)
        else:
            self._unlink(key, old)
            entry = Entry(value, old.create_revision, revision, old.version + 1, lease)
        self._entries[key] = entry
        self.size_bytes += _size_bytes(key, value)
        if lease:
            self._leases[lease].keys.add(key)
        if not lease or (old is not None and not old.lease):
            self.lasting_revision = revision
        self.revision = revision

    def delete(self, wanted: Range, revision: int) -> int:
        """Removes the keys of a range at a revision, which is the present one or the next.

        Returns:
            how many there were; the revision stays as it is if there were none.
        """
        keys = self._select(wanted)
        if any(not self._entries[key].lease for key in keys):
            self.lasting_revision = revision
        for key in keys:
            self._remove(key)
        if keys:
            self.revision = revision
        return len(keys)

    # ---- leases

    def grant(self, ttl_s: int, lease: int, now_s: float) -> tuple[int, int]:
        """A new lease.

        Args:
            ttl_s: how long it lives without being kept alive; at least a second is granted.
            lease: its number; 0 takes a random one.
            now_s: the caller's clock.

        Returns:
            its number, and the time it was granted, in seconds.

        Raises:
            LeaseExistsError: that number is taken.
            StoreFullError: there are too many.
        """
        if lease in self._leases:
            raise LeaseExistsError
        if len(self._leases) >= MAX_LEASES:
            raise StoreFullError
        while not lease or lease in self._leases:
            lease = secrets.randbelow(2**63)
        ttl_s = max(1, ttl_s)
        self._leases[lease] = Lease(ttl_s, now_s + ttl_s)
        self._earliest_end_s = min(self._earliest_end_s, now_s + ttl_s)
        return lease, ttl_s

    def keep_alive(self, lease: int, now_s: float) -> int:
        """Starts a lease's time anew: how long it is, in seconds; 0 if there is no such lease."""
        found = self._leases.get(lease)
        if found is None:
            return 0
        found.ends_s = now_s + found.ttl_s
        return found.ttl_s

    def revoke(self, lease: int) -> None:
        """Ends a lease, and removes its keys, all at one revision.

        Raises:
            LeaseNotFoundError: there is no such lease.
        """
        found = self._leases.pop(lease, None)
        if found is None:
            raise LeaseNotFoundError
        keys = list(found.keys)
        for key in keys:
            self._remove(key)
        if keys:
            self.revision += 1

    def expire(self, now_s: float) -> None:
        """Ends the leases whose time is over."""
        if now_s < self._earliest_end_s:
            return
        for lease in [number for number, found in self._leases.items() if found.ends_s <= now_s]:
            self.revoke(lease)
        self._earliest_end_s = min((found.ends_s for found in self._leases.values()), default=float("inf"))

    # ---- keys, entries and leases are in step

    def _select(self, wanted: Range) -> list[bytes]:
        if wanted.end is None:
            return [wanted.key] if wanted.key in self._entries else []
        begin = bisect_left(self._keys, wanted.key)
        end = len(self._keys) if wanted.end == b"\0" else bisect_left(self._keys, wanted.end)
        return self._keys[begin:end]

    def _remove(self, key: bytes) -> None:
        self._unlink(key, self._entries.pop(key))
        del self._keys[bisect_left(self._keys, key)]

    def _unlink(self, key: bytes, entry: Entry) -> None:
        self.size_bytes -= _size_bytes(key, entry.value)
        if entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(key)


def _size_bytes(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_OVERHEAD_BYTES


class ServingClock:
    """Seconds in which the store could be reached: what leases are measured by.

    A store that stood still (stopped, or its machine suspended) would find all leases over when it goes on, though
    nobody could keep them alive. So of a gap between two looks no more than `longest_gap_s` counts.

    Args:
        now_s: of a monotonic clock.
        longest_gap_s: looks come more often than that while the store serves.
    """

    def __init__(self, now_s: float, longest_gap_s: float) -> None:
        self._seen_s = now_s
        self._served_s = 0.0
        self._longest_gap_s = longest_gap_s

    def look(self, now_s: float) -> float:
        """Seconds served until now."""
        self._served_s += min(now_s - self._seen_s, self._longest_gap_s)
        self._seen_s = now_s
        return self._served_s
