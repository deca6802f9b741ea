"""Keeps what has no lease in a file while the store is served; `kept` knows the file.

Who changes such a key has its answer once the change is on the disk, if the disk answers: one that is full, or stands
still, costs the memory of it, and holds up nobody for long.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from elastictrain.kv import kept
from elastictrain.kv.store import Store
from elastictrain.logs import Logger

PATIENCE_S = 1.0
"""How long who changes something waits for the disk. A node's request may take about as long as a whole."""
WARN_EVERY_S = 60.0
"""And tries again, where nothing has changed since a try that failed."""


class Keeping:
    """One store and its file. Belongs to the event loop that serves it.

    Args:
        store: what is kept.
        path: the file.
        logger: hears what cannot be kept, and why.
    """

    def __init__(self, store: Store, path: Path, logger: Logger) -> None:
        self._store = store
        self._path = path
        self._logger = logger
        self._kept = self._seen = store.lasting_revision
        self._failed: tuple[int, float] | None = None
        """At which revision the last try failed, and when."""
        self._warned_s = float("-inf")
        self._writing: asyncio.Task[None] | None = None

    async def keep(self) -> None:
        """After a request: what it has changed is on the disk when this returns, or the disk does not answer."""
        has_changed, self._seen = self._seen != self._store.lasting_revision, self._store.lasting_revision
        if self._writing is None and self._is_to_be_written():
            self._writing = asyncio.create_task(self._write_all())
        if has_changed and self._writing is not None:
            await asyncio.wait({self._writing}, timeout=PATIENCE_S)
            if self._writing is not None:
                self._warn(f"the disk has not answered for {PATIENCE_S:g} s")

    def _is_to_be_written(self) -> bool:
        revision = self._store.lasting_revision
        if revision == self._kept:
            return False
        now_s = asyncio.get_running_loop().time()
        return self._failed is None or self._failed[0] != revision or now_s - self._failed[1] >= WARN_EVERY_S

    async def _write_all(self) -> None:
        """Until nothing has changed meanwhile."""
        try:
            while self._is_to_be_written():
                revision = self._store.lasting_revision
                try:
                    await asyncio.to_thread(kept.write, self._path, self._store.lasting(), self._store.revision)
                except OSError as error:
                    # Nodes remember it as well: only who has not heard of it, and is alone then, is worse off.
                    self._failed = revision, asyncio.get_running_loop().time()
                    self._warn(error.strerror or str(error))
                else:
                    self._kept, self._failed = revision, None
        finally:
            self._writing = None

    def _warn(self, error: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            self._logger.warning("store_keep_failed", path=str(self._path), error=error)


def read_kept(path: Path | None, logger: Logger) -> Store:
    """A store with what an earlier process has kept. What cannot be read is said, and the store begins empty.

    Args:
        path: the file; None where nothing is kept.
        logger: hears of it.
    """
    if path is None:
        return Store()
    try:
        return kept.read(path)
    except (OSError, kept.KeptError) as error:
        # Nodes remember what was agreed on, and write it again.
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        logger.warning("store_begins_empty", path=str(path), error=why)
        return Store()
