"""The store process on loopback, as a supervisor starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-m", "elastictrain.kv.server"]


class Served:
    """A store process that listens."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"


@contextmanager
def store_server(log: Path, port: int = 0, options: Sequence[str] = ()) -> Iterator[Served]:
    """A store that is ready; it is killed at the end, if it still runs."""
    reading, writing = os.pipe()
    command = [*COMMAND, "127.0.0.1", str(port), "--ready-fd", str(writing), *options]
    with log.open("ab") as stderr, os.fdopen(reading) as ready:
        process = subprocess.Popen(command, pass_fds=[writing], stderr=stderr)
        os.close(writing)
        try:
            line = ready.readline()
            assert line, log.read_text()
            yield Served(process, int(line))
        finally:
            process.kill()
            process.wait()
