"""Who may write a run's snapshots, where worker groups on several nodes follow one another.

A node that was cut off may still have a persister at work for a worker group that the others have gone on without. So
each worker group that begins leaves its number in the store, and whoever finds a newer number there than its own
writes nothing and deletes nothing any more.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from elastictrain.errors import FencedError

FENCES_DIR: Final = "fences"


@dataclass(frozen=True, slots=True)
class Fence:
    """A worker group that has begun.

    Args:
        run_id: the run whose snapshots it writes.
        incarnation: its number; numbers of a run only grow.
        attempt: its name in all logs.
    """

    run_id: str
    incarnation: int
    attempt: str

    @property
    def file(self) -> str:
        """Name of its file in `FENCES_DIR`."""
        return f"{self.run_id}.json"

    def encode(self) -> bytes:
        """As it is stored."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Fence | None:
        """None for what is no fence: it stands in nobody's way, and is written again."""
        try:
            plain = json.loads(data)
            return cls(str(plain["run_id"]), int(plain["incarnation"]), str(plain["attempt"]))
        except (ValueError, KeyError, TypeError):
            return None

    def check(self, found: Fence | None) -> bool:
        """Whether what was found in the store is this very fence.

        Raises:
            FencedError: it is that of a worker group that began later.
        """
        if found is None or found.incarnation < self.incarnation:
            return False
        if found.attempt != self.attempt:
            raise FencedError(
                f"{self.attempt} may write nothing more: {found.attempt} has begun since",
                "Nothing is lost that counts: the other nodes have gone on without this one.",
            )
        return True
