"""The file that keeps what a rank printed, of bounded size: a task that talks a lot must not fill the disk.

rank-0.log      the newest
rank-0.log.1    what was before it; what was before that is gone
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 16 << 20
"""Of either file, give or take a line."""


def earlier(path: Path) -> Path:
    """The file before this one."""
    return path.with_name(f"{path.name}.1")


class RankLog:
    """Takes output as it comes. Never raises: a disk that is full costs the log, and the log says so afterwards.

    Args:
        path: of the newest file; what is in it already is kept.
        max_bytes: of either file.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._size_bytes = 0
        self._lost_bytes = 0
        self._why = ""

    def write(self, data: bytes) -> None:
        """Keeps output; begins a new file where a line ends, once this one is full."""
        if self._size_bytes + len(data) > self._max_bytes:
            end = data.rfind(b"\n") + 1
            if end or self._size_bytes > 2 * self._max_bytes:  # a line that does not end is cut in the end
                self._append(data[:end])
                self._begin_new_file()
                data = data[end:]
        self._append(data)

    def _append(self, data: bytes) -> None:
        if not data:
            return
        done = 0
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
                self._size_bytes = self._file.tell()
            if self._lost_bytes:
                self._file.write(f"[elastictrain: {self._lost_bytes} bytes are lost: {self._why}]\n".encode())
                self._lost_bytes = 0
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            self._lost_bytes += len(data) - done
            self._why = error.strerror or str(error)
        self._size_bytes += done

    def _begin_new_file(self) -> None:
        self.close()
        with contextlib.suppress(OSError):  # then the old one goes on
            self._path.replace(earlier(self._path))
        self._size_bytes = 0
        self._append(f"[elastictrain: what was before is in {earlier(self._path).name}]\n".encode())

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
