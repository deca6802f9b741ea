"""Real etcd on loopback, for tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastictrain.drill.nodes.etcd import Etcd

NEEDS_ETCD = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs the program etcd (Debian package etcd-server)"
)


@contextmanager
def etcd(folder: Path, size: int = 3, server_options: Sequence[str] = (), **settings: Any) -> Iterator[Etcd]:
    """A cluster that is ready; `settings` are what a client of it needs. All members are killed at the end."""
    cluster = Etcd(folder, size, server_options)
    try:
        cluster.start()
        cluster.wait_ready(cluster.settings(**settings))
        yield cluster
    finally:
        cluster.kill()
