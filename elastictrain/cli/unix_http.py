"""HTTP over a Unix socket. A module of its own, since `http.client` loads slowly and `status` often needs none."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

from elastictrain.supervisor.address import connect

HTTPException = http.client.HTTPException


class UnixConnection(http.client.HTTPConnection):
    """A connection to whoever listens.

    Args:
        path: of the socket.
        connect_timeout_s: to be heard at all.
        timeout_s: of every read and write after that; None waits for ever.
    """

    def __init__(self, path: Path, connect_timeout_s: float, timeout_s: float | None) -> None:
        super().__init__("localhost")
        self._path = path
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock: socket.socket = connect(self._path, self._connect_timeout_s)
        self.sock.settimeout(self._timeout_s)
