"""Whether another supervisor goes by this node's name: two hosts called alike, with state directories of one path.

Both write the same record. So each finds there, just before it writes its own, what the other has written. An earlier
life of this node's own supervisor has left a record as well, but that one does not go on.
"""

from __future__ import annotations

from elastictrain.core.membership import Node, Standing
from elastictrain.errors import ConfigError
from elastictrain.supervisor.shared_keys import Record

NUM_TURNS = 3
"""Records that another life must have written under our eyes to be alive. One that ended may have left a record, and
a request on its way, but no more: each waits for the answer to the one before."""

_RUNS = (Standing.RUNNING, Standing.LEAVING, Standing.DONE)


class Namesake:
    """What is seen of another supervisor with this node's name.

    Args:
        life: of this supervisor's process.
        address: of this node. Only one supervisor at a time has a state directory open, so who had this name here as
            well was most likely an earlier life of this one: nobody waits to see whether it goes on.
        timeout_s: after which a record that has not been written again is one of a life that is over.
    """

    def __init__(self, life: str, address: str, timeout_s: float) -> None:
        self._life = life
        self._address = address
        self._timeout_s = timeout_s
        self._other: Record | None = None
        self._turns: set[int] = set()
        self._seen_s = 0.0

    def look(self, own: Record | None, now_s: float) -> None:
        """Takes note of what was in this node's record before it was written.

        Args:
            own: None if there was none.
            now_s: on a clock that only goes forward.
        """
        if own is not None and own.life != self._life:
            if self._other is None or self._other.life != own.life:
                self._turns.clear()
            self._other, self._seen_s = own, now_s
            self._turns.add(own.turn)
        elif self._other is not None and now_s - self._seen_s >= self._timeout_s:
            self._other = None
            self._turns.clear()

    @property
    def may_live(self) -> bool:
        """Whether there is one, as far as is known yet."""
        return self._other is not None and (self._other.about.address != self._address or self.lives)

    @property
    def lives(self) -> bool:
        """Whether there is one for sure."""
        return self._other is not None and len(self._turns) >= NUM_TURNS

    def refusal(self, me: Node) -> ConfigError | None:
        """What to say where this supervisor is the one that has to go: the one whose ranks run stays, else the one that
        took part last. None where it is the other, or nobody knows yet."""
        other = self._other
        if other is None or not self.lives or _claim(me, self._life) > _claim(other.about, other.life):
            return None
        return ConfigError(
            f"this node cannot take part as {me.node}: another supervisor does, on {other.about.host} at "
            f"{other.about.address}",
            "A node's name is that of its host, and the path of its state directory: let one of them differ.",
        )


def _claim(node: Node, life: str) -> tuple[bool, int, str]:
    return node.standing in _RUNS, node.number, life
