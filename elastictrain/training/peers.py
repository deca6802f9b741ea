"""The other ranks, as this process's operating system sees them: connections to those on other nodes, processes of
those on this one.

A node that loses its power says no farewell: whoever waits for its ranks waits until the collective's own time-out,
inside a library that no signal gets through to. Its supervisor knows better. So a rank that is told to leave breaks its
connections to the other nodes itself; the collective fails, and the rank can keep its state.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Collection
from pathlib import Path

from elastictrain.heartbeat import heartbeat_paths, read_heartbeat
from elastictrain.procs import read_living
from elastictrain.protocol import error_path

GOING_S = 1.0
"""How long a rank that others have lost may take to be gone, or to say that it lives and has failed as well."""
_LOOK_S = 0.005


def hang_up(addresses: Collection[str]) -> int:
    """Shuts down every TCP connection of this process to one of the addresses; returns how many there were.

    Safe beside a thread that waits on one: it sees the end of the connection.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all we want
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A descriptor of our own: closing it must not close theirs.
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if _plain(str(connection.getpeername()[0])) in addresses:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]


def has_gone(run_dir: Path, rank: int) -> bool:
    """Whether a rank of this node, in a worker group that has failed, has ended without a word.

    A process that is killed closes its connections before it is gone; one that lives says at once that it has failed.

    Args:
        run_dir: folder of the incarnation.
        rank: global rank.
    """
    path = heartbeat_paths(run_dir).get(rank)
    beat = read_heartbeat(path) if path is not None else None
    if beat is None:
        return False
    deadline_s = time.monotonic() + GOING_S
    while not error_path(run_dir, rank).exists():
        if read_living(beat.pid) is None:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    return False
