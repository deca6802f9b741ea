"""Real etcd with as many members as asked for: they die, stand still and start again, alone or with their nodes."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import urllib3

from elastictrain.drill.nodes.node import Node
from elastictrain.drill.nodes.process import NodeProcess, wait_until
from elastictrain.kv.client import EtcdClient, EtcdError
from elastictrain.kv.settings import EtcdSettings

T = TypeVar("T")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


class Process(Protocol):
    """What a member is to us: a `subprocess.Popen`, or something like it."""

    def poll(self) -> int | None: ...

    def send_signal(self, number: signal.Signals, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class Etcd:
    """Members are numbered from 0.

    Args:
        folder: for their data and logs.
        size: how many members.
        server_options: for each of them; with `--cert-file` among them they serve TLS.
        hosts: address of each; default: all on loopback, on ports that are free.
    """

    def __init__(
        self, folder: Path, size: int, server_options: Sequence[str] = (), hosts: Sequence[str] | None = None
    ) -> None:
        ports = free_ports(2 * size) if hosts is None else [2379] * size + [2380] * size
        hosts = hosts or ["127.0.0.1"] * size
        self.scheme = "https" if "--cert-file" in server_options else "http"
        self.urls = [f"{self.scheme}://{host}:{port}" for host, port in zip(hosts, ports[:size], strict=True)]
        self._peers = [f"http://{host}:{port}" for host, port in zip(hosts, ports[size:], strict=True)]
        self._folder = folder
        self._options = list(server_options)
        self._processes: list[Process | None] = [None] * size
        self._token = folder.name

    @property
    def endpoint(self) -> str:
        """As for `--rdzv-endpoint`."""
        return ",".join(self.urls)

    def settings(self, **changes: Any) -> EtcdSettings:
        return EtcdSettings(**{"endpoints": tuple(self.urls), **changes})

    def start(self, *members: int) -> None:
        """Starts these members, or all that do not run."""
        for member in members or range(len(self.urls)):
            if (process := self._processes[member]) is None or process.poll() is not None:
                name, url, peer = f"m{member}", self.urls[member], self._peers[member]
                initial = ",".join(f"m{place}={address}" for place, address in enumerate(self._peers))
                with (self._folder / f"{name}.log").open("ab") as log:
                    self._processes[member] = self._spawn(
                        member,
                        [
                            *("etcd", "--name", name, "--data-dir", str(self._folder / name)),
                            *("--listen-client-urls", url, "--advertise-client-urls", url),
                            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                            *("--initial-cluster", initial, "--initial-cluster-token", self._token),
                            *("--logger", "zap", "--log-outputs", "stderr", "--unsafe-no-fsync"),
                            *self._options,
                        ],
                        log,
                    )

    def _spawn(self, member: int, command: list[str], log: IO[bytes]) -> Process:
        return subprocess.Popen(command, stdout=log, stderr=log)

    def _ask(self, member: int, question: Callable[[], T]) -> T:
        """Calls a function that speaks to members, from where this one runs."""
        return question()

    def wait_ready(self, settings: EtcdSettings | None = None) -> None:
        """Until a read goes through: there is a leader."""
        client = EtcdClient(settings or self.settings())

        def reads() -> bool:
            try:
                client.get("/")
            except EtcdError:
                return False
            return True

        wait_until(lambda: self._ask(0, reads))

    def kill(self, *members: int) -> None:
        """Kills these members, or all, with SIGKILL; their data stays."""
        for member in members or range(len(self.urls)):
            process, self._processes[member] = self._processes[member], None
            if process is not None:
                process.kill()
                process.wait()

    def signal(self, member: int, number: signal.Signals) -> None:
        process = self._processes[member]
        assert process is not None
        process.send_signal(number)

    def leader(self) -> int:
        """The member that leads now."""

        # 0 is a member too, so a tuple.
        everybody = range(len(self.urls))
        found: tuple[int] = wait_until(lambda: None if (member := self.leader_of(everybody)) is None else (member,))
        return found[0]

    def leader_of(self, members: Iterable[int]) -> int | None:
        """Which of these members says that it leads; None if none does now."""
        for member in members:
            status = self._ask(member, partial(_status, self.urls[member]))
            if status.get("leader") and status["leader"] == status["header"]["member_id"]:
                return member
        return None


def _status(url: str) -> dict[str, Any]:
    """What a member says of itself; empty if it says nothing."""
    try:
        answer = urllib3.request("POST", f"{url}/v3/maintenance/status", body=b"{}", timeout=5, retries=False)
        status: dict[str, Any] = answer.json()
    except (urllib3.exceptions.HTTPError, ValueError):
        return {}
    return status


class EtcdOnNodes(Etcd):
    """Member i is on the i-th of these nodes.

    Args:
        nodes: a node for each member.
        folder: for the members' data and logs.
    """

    def __init__(self, nodes: Sequence[Node], folder: Path) -> None:
        self._nodes = list(nodes)
        super().__init__(folder, len(nodes), hosts=[node.address for node in nodes])

    def pause_leader(self) -> int:
        """SIGSTOP to the member that leads; returns its number, for `resume`."""
        member = self.leader()
        self.signal(member, signal.SIGSTOP)
        return member

    def resume(self, member: int) -> None:
        self.signal(member, signal.SIGCONT)

    def _spawn(self, member: int, command: list[str], log: IO[bytes]) -> NodeProcess:
        return self._nodes[member].popen(command, stdout=log, stderr=log)

    def _ask(self, member: int, question: Callable[[], T]) -> T:
        return self._nodes[member].call(question)
