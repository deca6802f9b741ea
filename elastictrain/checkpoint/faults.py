"""Named points at which a test can interrupt the write path.

    ELASTICTRAIN_FAULT="memory.manifest:3:kill"

acts when the point `memory.manifest` is passed for the third time: `kill` ends the process as `kill -9` does, `raise`
raises OSError, `stop` freezes it as SIGSTOP does. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import errno
import os
import signal

ENV_FAULT = "ELASTICTRAIN_FAULT"

POINTS = (
    "memory.begin",
    "memory.unpublished",
    "memory.allocated",
    "memory.filled",
    "memory.hashed",
    "memory.trainer",
    "memory.manifest",
    "memory.committed",
    "store.begin",
    "store.file",
    "store.copied",
    "store.files",
    "store.manifest",
    "store.rename",
    "store.renamed",
    "store.committed",
    "store.marked",
    "store.delete",
    "store.unpublished",
    "store.deleted",
)
"""Every point, in the order in which one snapshot passes them."""


def _parse(text: str | None) -> tuple[str, int, str] | None:
    if not text:
        return None
    name, count, action = text.split(":")
    if name not in POINTS or action not in ("kill", "raise", "stop"):
        raise ValueError(f"{ENV_FAULT}={text}: known points: {', '.join(POINTS)}; actions: kill, raise, stop")
    return name, int(count), action


_fault = _parse(os.environ.get(ENV_FAULT))
_passed = 0


def arm(text: str | None) -> None:
    """Takes a fault as if the variable had held `text` when the process began: for processes that are forked."""
    global _fault, _passed
    _fault, _passed = _parse(text), 0


def point(name: str) -> None:
    """Passes the point `name`; does nothing unless a test asked for a fault here."""
    if _fault is None or _fault[0] != name:
        return
    global _passed  # noqa: PLW0603 - how often this process has passed the one point that is watched
    _passed += 1
    if _passed != _fault[1]:
        return
    match _fault[2]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            raise OSError(errno.EIO, f"fault injected at {name}")
