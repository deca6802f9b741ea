"""Where the store listens: sockets on an address of this host, or the reason why there can be none."""

from __future__ import annotations

import errno
import ipaddress
import socket

import psutil

from elastictrain.errors import BusyError, ConfigError, NoPermissionError
from elastictrain.procs import command_of

_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 30, 10, 3
"""A peer that went without a word is noticed within a minute (tcp(7))."""


def listen(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen on a port: one for each address that the name has on this host.

    A port in use a moment ago by a process that is gone is free (SO_REUSEADDR); one on which a process listens is not.

    Args:
        address: name or IP address of this host; `0.0.0.0` (IPv4) or `::` (IPv6) for all. A name that leads to a
            loopback address alone, as many a distribution has it for the host's own name, stands for all as well: the
            other nodes, to which it leads elsewhere, could not reach the store otherwise. `localhost` stays what it is.
        port: 0 lets the system choose.

    Raises:
        BusyError: somebody listens there.
        ConfigError: there is no such address, or it is not this host's.
        NoPermissionError: the system does not allow it.
    """
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, place in _resolve(address, port):
            chosen = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound(family, (place[0], chosen, *place[2:])))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if not sockets:
            raise ConfigError(
                f"the store cannot listen on {address}: that is no address of this host"
                f" ({missing.strerror if missing else 'no address'})",
                "It listens on the host that the rendezvous endpoint names.",
            )
    except OSError as error:
        _close(sockets)
        raise _explained(error, address, port) from error
    return sockets


def holder_of(port: int) -> str:
    """Who has a port, as far as this user may know: for an error's text; empty if that cannot be known."""
    try:
        found = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port]
    except (psutil.Error, OSError):
        return ""
    # A connection to elsewhere that got the port by chance is in the way too; one that was accepted here is not.
    listeners = [one for one in found if one.status == psutil.CONN_LISTEN]
    pids = sorted({one.pid for one in listeners or found if one.pid is not None})
    return ", ".join(f"process {pid} ({' '.join(command_of(pid))[:200]})" for pid in pids)


def _resolve(address: str, port: int) -> list[tuple[int, tuple[str, int, *tuple[int, ...]]]]:
    if not 0 <= port < 2**16:
        raise ConfigError(f"the store's port is {port}", "It must be from 1 to 65535, or 0 for a free one.")
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no host can have that name"
        raise ConfigError(
            f"the store cannot listen on {address!r}: {reason}", "Give a name or an address of this host."
        ) from error
    if _is_name(address) and all(ipaddress.ip_address(place[0]).is_loopback for *_, place in found):
        found = socket.getaddrinfo(None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, place) for family, _, _, _, place in found))  # type: ignore[misc]


def _is_name(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.rstrip(".").rpartition(".")[2] != "localhost"
    return False


def _bound(family: int, place: tuple[str | int, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Else `::` takes the port of IPv4 as well, which has a socket of its own.
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Accepted connections inherit these.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
        listening.bind(place)
        # Two that share a port by SO_REUSEADDR are told apart only when they begin to listen.
        listening.listen(1024)
    except BaseException:
        listening.close()
        raise
    return listening


def _close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _explained(error: OSError, address: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        return BusyError(
            f"the store cannot listen on {address}:{port}: {holder or 'another process'} has that port",
            "End it, or take another port in the rendezvous endpoint, on all nodes.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return NoPermissionError(
            f"the store cannot listen on {address}:{port}: {error.strerror}", "Ports from 1024 up are free to all."
        )
    return ConfigError(f"the store cannot listen on {address}:{port}: {error.strerror or error}")
