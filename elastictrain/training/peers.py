"""The connections to ranks on other nodes, as this process's operating system sees them.

A node that loses its power says no farewell: whoever waits for its ranks waits until the collective's own time-out,
inside a library that no signal gets through to. Its supervisor knows better. So a rank that is told to leave breaks its
connections to the other nodes itself; the collective fails, and the rank can keep its state.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection


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
