"""What a run has given up: snapshots that a start was allowed to pass over though they are not damaged.

That is allowed once. The run goes another way from there, and its later worker groups must neither ask again nor go
over to what was given up, should the store give it after all. It is kept in the note of every node, since any may be
the next rank zero's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

from elastictrain.checkpoint.catalog import Candidate
from elastictrain.checkpoint.durable_note import DurableNote, GivenUp
from elastictrain.checkpoint.format import MANIFEST_FILE, digest, parse_name
from elastictrain.errors import SnapshotDamagedError, StorageError
from elastictrain.training.collectives import broadcast_bytes, gather_ints
from elastictrain.training.device import Place


class GivenUpSnapshots:
    """Those of one run, at one start.

    Args:
        known: from earlier starts.
    """

    def __init__(self, known: Iterable[GivenUp] = ()) -> None:
        self._all = frozenset(known)

    @classmethod
    def gather(cls, note: DurableNote | None, run_id: str, place: Place) -> GivenUpSnapshots:
        """What the note of any node says. Collective. Raises StateDirError where this one's cannot be read."""
        own = note.given_up(run_id) if note is not None else frozenset()
        counts = gather_ints([len(own)], place)
        told = [_told(own, rank, place) for rank, (count,) in enumerate(counts) if count]
        return cls(one for of_rank in told for one in of_rank)

    def holds(self, candidate: Candidate) -> bool:
        """Whether a stored snapshot is the very one that was given up, and not the same step done anew: by another
        node, which has told its own note alone. Nobody waits here for a store that did not give it before."""
        manifests = {one.manifest for one in self._all if one.name == candidate.name}
        if not manifests:
            return False
        found = _manifest_digest(candidate)
        if not found or manifests & {found, ""}:
            return True
        self._all = frozenset(one for one in self._all if one.name != candidate.name)
        return False

    def add(self, candidate: Candidate) -> None:
        """From now on; for one in the durable tier."""
        self._all |= {GivenUp(candidate.name, _manifest_digest(candidate))}

    def holds_slot(self, slot: Path, manifest: bytes) -> bool:
        """Likewise, for a folder of the memory tier."""
        return GivenUp(str(slot), digest(manifest)) in self._all

    def add_slot(self, slot: Path, manifest: bytes) -> None:
        """Likewise."""
        self._all |= {GivenUp(str(slot), digest(manifest))}

    def tell(self, place: Place) -> frozenset[GivenUp]:
        """What this node is to note. Collective."""
        # Rank zero knows what the store gives; of a slot in memory its own node does.
        return _told(self._all, 0, place) | {one for one in self._all if parse_name(one.name) is None}


def _told(given_up: frozenset[GivenUp], source: int, place: Place) -> frozenset[GivenUp]:
    """The source's, on every rank. Collective."""
    told = json.loads(broadcast_bytes(json.dumps([astuple(one) for one in given_up]).encode(), source, place))
    return frozenset(GivenUp(*fields) for fields in told)


def _manifest_digest(candidate: Candidate) -> str:
    """Of a stored snapshot; "" where it cannot be read."""
    assert candidate.store is not None
    try:
        return digest(candidate.store.read_file(candidate.name, MANIFEST_FILE))
    except (SnapshotDamagedError, StorageError):
        return ""
