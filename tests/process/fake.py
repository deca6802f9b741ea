"""Starts the fake supervisor as a process of its own, and talks to it over its socket."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastictrain.supervisor.address import connect, find_address
from tests.process.helpers import ROOT, wait_until


def socket_of(state_dir: Path) -> Path:
    """Where it listens. Waits for it."""
    address = wait_until(lambda: find_address(state_dir))
    return address.socket


def request(
    path: Path, method: str, target: str, body: Any = None, timeout_s: float = 20.0
) -> tuple[int, Mapping[str, str], bytes]:
    """(status, headers, body) of one request."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = connect(path, timeout_s)
    try:
        connection.request(method, target, json.dumps(body) if body is not None else None)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def status_of(state_dir: Path) -> dict[str, Any]:
    code, _, body = request(socket_of(state_dir), "GET", "/status")
    assert code == 200, body
    decoded: dict[str, Any] = json.loads(body)
    return decoded


def _listener(state_dir: Path) -> int | None:
    address = find_address(state_dir)
    return address.pid if address is not None else None


@contextmanager
def fake_supervisor(
    state_dir: Path, *args: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Runs one until the end of the block; returns when it trains."""
    process = subprocess.Popen(
        [sys.executable, "-m", "elastictrain.testing.fake_supervisor", str(state_dir), *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: process.poll() is not None or _listener(state_dir) == process.pid)
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        yield process
    finally:
        with process:
            if process.poll() is None:
                process.kill()
