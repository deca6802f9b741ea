"""Where the nodes of a job find each other, as `elastic.rendezvous` says it, and where that is seen from here."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from elastictrain.config.schema import ElasticConfig
from elastictrain.errors import ConfigError
from elastictrain.interfaces import interface_of
from elastictrain.kv.settings import EtcdSettings, Names, parse_settings

JOB_FILE = Names("elastic.rendezvous", "[elastic.etcd]")
_NOWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way to it is the default route."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The store that the nodes share.

    Args:
        settings: how its client reaches it.
        host: of the store, or of etcd's first member.
        port: likewise.
        is_ours: a process of ours serves it, on that host.
    """

    settings: EtcdSettings
    host: str
    port: int
    is_ours: bool

    @property
    def is_here(self) -> bool:
        """Whether it is this host that should serve it."""
        return self.is_ours and any(_is_mine(address) for address in _addresses(self.host))

    def my_address(self) -> str:
        """This host's address, as the other nodes reach it: the one from which the store is reached.

        Raises:
            ConfigError: the store's host is not known, or there is no way to it.
        """
        found = _addresses(self.host)
        if not found:
            raise ConfigError(
                f"elastic.rendezvous names {self.host}, which is no host that is known here",
                "Use a name that all nodes know, or an IP address.",
            )
        address = _source_of_way_to(found[0], self.port)
        if address is None:
            raise ConfigError(f"there is no way from this host to {self.host} ({found[0]})")
        if _is_loopback(address) and not _is_loopback(self.host) and self.host != "localhost":
            # Many a distribution has the host's own name lead to a loopback address.
            address = _source_of_way_to(_NOWHERE, 9) or _first_outside_address() or address
        return address


def endpoint_of(config: ElasticConfig) -> Endpoint:
    """What `elastic.rendezvous` names.

    Raises:
        ConfigError: it cannot be meant, or a file that is needed for it is not there.
    """
    scheme, _, places = config.rendezvous.partition("://")
    request_s = max(0.5, min(3.0, config.node_timeout_s / 3))
    options = {"request_timeout_s": request_s}
    if scheme == "etcd":
        options |= config.etcd.model_dump(exclude_none=True)
    settings = parse_settings(places, options, names=JOB_FILE)
    first = settings.endpoints[0].partition("://")[2]
    host, _, port = first.rpartition(":")
    return Endpoint(settings, host.strip("[]"), int(port), scheme == "c10d")


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(place[4][0]) for place in sorted(found, key=lambda each: each[0])))


def _is_mine(address: str) -> bool:
    return _is_loopback(address) or interface_of(address) is not None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _source_of_way_to(address: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _first_outside_address() -> str | None:
    for found in psutil.net_if_addrs().values():
        for each in found:
            if each.family == socket.AF_INET and not _is_loopback(each.address):
                return str(each.address)
    return None
