"""A rank's place for what it must download."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(state_dir: Path) -> Iterator[Path]:
    """A folder for downloads, gone at the end; what a killed process left goes with the next."""
    root = state_dir / "scratch"
    root.mkdir(exist_ok=True)
    host = socket.gethostname()
    for left in root.iterdir():
        owner, _, pid = left.name.rpartition("@")[0].rpartition("-")
        if owner == host and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    prefix = f"{host}-{os.getpid()}@"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
