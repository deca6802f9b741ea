"""A black hole between a client and etcd: a TCP proxy on loopback that passes everything on, or falls silent."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class Proxy:
    """In front of one member. While it is silent it takes connections and data, and nothing ever comes back.

    Args:
        url: of the member.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{parts.scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._silent = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """From now on, also on the connections there are."""
        self._silent.set()

    def speak(self) -> None:
        """Passes on again what comes on new connections. Those that were open break, as after a long cut."""
        self._silent.clear()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Closing alone does not wake who accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.speak()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as member:
            self._open.append(member)
            with selectors.DefaultSelector() as selector:
                selector.register(client, selectors.EVENT_READ, member)
                selector.register(member, selectors.EVENT_READ, client)
                while True:
                    for key, _ in selector.select():
                        data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                        if not data:
                            return
                        if not self._silent.is_set():
                            key.data.sendall(data)


@contextmanager
def proxies(urls: list[str]) -> Iterator[list[Proxy]]:
    """One in front of each."""
    made = [Proxy(url) for url in urls]
    try:
        yield made
    finally:
        for proxy in made:
            proxy.close()


@contextmanager
def trickling() -> Iterator[str]:
    """A server that answers each request with one byte every tenth of a second, for ever; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def trickle(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not is_over.wait(0.1):
                client.sendall(b" ")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=trickle, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        is_over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
