"""Tells systemd how it goes: sd_notify(3), the protocol, in a few lines. Does nothing where systemd did not ask."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"


class Notifier:
    """The service manager's ear.

    Args:
        environment: where it says how to be reached. Read once: a worker must not speak for its supervisor.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = environment.get("WATCHDOG_USEC", "")
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s: float | None = int(usec) / 2e6 if usec.isdigit() and int(usec) and mine else None
        """How often to send `WATCHDOG`: half the limit, as sd_watchdog_enabled(3) advises; None if nobody waits."""

    def send(self, *lines: str) -> bool:
        """Sends assignments, such as READY or `status("…")`. False where nobody listens."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as s:
                s.sendto("\n".join(lines).encode(errors="replace"), self._address)
        except OSError:
            return False
        return True


def status(reason: str) -> str:
    """The line that `systemctl status` shows."""
    return "STATUS=" + " ".join(reason.split())[:1000]
