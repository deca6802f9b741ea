"""Where the nodes of a job find each other, as `elastic.rendezvous` says it, and where that is seen from here."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from elastictrain.config.schema import ElasticConfig
from elastictrain.errors import ConfigError, RendezvousError
from elastictrain.interfaces import interface_of
from elastictrain.kv.settings import EtcdSettings, Names, parse_settings

JOB_FILE = Names("elastic.rendezvous", "[elastic.etcd]")
_NOWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way to it is the default route."""


@dataclass(frozen=True, slots=True)
class Way:
    """The way from this host to the store.

    Args:
        address: this host's, as the other nodes reach it: the one from which the store is reached.
        is_here: it is this host that should serve the store.
    """

    address: str
    is_here: bool


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The store that the nodes share.

    Args:
        settings: how its client reaches it.
        hosts: of the store, or of etcd's members; not empty.
        port: of the first.
        is_ours: a process of ours serves it, on that host.
    """

    settings: EtcdSettings
    hosts: tuple[str, ...]
    port: int
    is_ours: bool

    @property
    def host(self) -> str:
        """The first."""
        return self.hosts[0]

    def find_way(self) -> Way:
        """The way to the first host there is one to. May take as long as a look-up of each name.

        Raises:
            RendezvousError: there is none at present. A name that is not known may be known soon: that of a pod is in
                the DNS only once the pod runs.
        """
        why: list[str] = []
        for host in self.hosts:
            try:
                addresses = _addresses(host)
            except OSError as error:
                why.append(f"{host} is no host that is known here ({error.strerror or error})")
                continue
            address = _source_of_way_to(addresses[0], self.port)
            if address is None:
                why.append(f"there is no way from this host to {host} ({addresses[0]})")
                continue
            if _is_loopback(address) and not _is_loopback(host) and host != "localhost":
                # Many a distribution has the host's own name lead to a loopback address.
                address = _source_of_way_to(_NOWHERE, 9) or _first_outside_address() or address
            return Way(address, self.is_ours and any(_is_mine(each) for each in addresses))
        raise RendezvousError(
            f"elastic.rendezvous: {'; '.join(why)}", "Use a name that all nodes know, or an IP address."
        )


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
    found = [url.partition("://")[2].rpartition(":") for url in settings.endpoints]
    hosts = tuple(host.strip("[]") for host, _, _ in found)
    for host in hosts:
        if not _can_be_a_host(host):
            raise ConfigError(
                f"elastic.rendezvous names {host!r}, which is neither a host's name nor an IP address",
                "Use a name that all nodes know, or an IP address.",
            )
    return Endpoint(settings, hosts, int(found[0][2]), scheme == "c10d")


def _can_be_a_host(host: str) -> bool:
    """Whether it may be known one day. What ends in a number is an address, or nothing (RFC 1123, section 2.1)."""
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
        elif host.removesuffix(".").rpartition(".")[2].isdigit():
            socket.inet_aton(host)
        else:
            host.encode("idna")  # as the resolver does: labels that are empty or too long
    except (OSError, ValueError):
        return False
    return True


def _addresses(host: str) -> list[str]:
    """Not empty. Raises OSError where the name is not known."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
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
