"""The network interfaces of this host."""

from __future__ import annotations

import psutil


def interface_of(address: str) -> str | None:
    """The interface that has an address; None if none has, as behind a translation of addresses."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return str(name)
    return None
