"""The readers' end of the journal, see `journal`."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from elastictrain.core.events import Event
from elastictrain.errors import StorageError
from elastictrain.supervisor.journal_file import event_of


class JournalReader:
    """The readers' end: any number, in any process, with or without a supervisor.

    Args:
        path: the file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, since: int = 0, kinds: Collection[str] = (), last: int | None = None) -> list[Event]:
        """Events after the id `since`, in order; none if there is no journal.

        Args:
            since: an id.
            kinds: only these; empty for all.
            last: only so many, the newest.

        Raises:
            StorageError: the file is there and cannot be read.
        """
        with self._opened() as connection:
            return [] if connection is None else _select(connection, since, kinds, last)

    def follow(self, since: int = 0, kinds: Collection[str] = (), poll_s: float = 0.2) -> Iterator[list[Event]]:
        """Batches of events after `since`, for ever; empty ones while there is nothing new.

        Raises:
            StorageError: as `read`.
        """
        while True:
            batch = self.read(since, kinds)
            if batch:
                since = batch[-1].id
            yield batch
            if not batch:
                time.sleep(poll_s)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        if not self.path.exists():
            yield None
            return
        try:
            connection = self._connect()
            try:
                yield connection
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"the journal {self.path} cannot be read: {error}",
                "A running supervisor sets a damaged journal aside and begins a new one.",
            ) from error

    def _connect(self) -> sqlite3.Connection:
        address = self.path.absolute().as_uri()
        connection = sqlite3.connect(f"{address}?mode=ro", uri=True, timeout=2.0)
        try:
            connection.execute("SELECT id FROM events LIMIT 1").fetchone()
            return connection
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return connection
            connection.close()
            # A reader of a WAL file must be able to make its index. Where the folder is read-only and no writer has
            # made one, there is no writer, and the file can be read as it is.
            if self.path.with_name(self.path.name + "-wal").exists() or "locked" in str(error):
                raise
            return sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True)
        except BaseException:
            connection.close()
            raise


def _select(connection: sqlite3.Connection, since: int, kinds: Collection[str], last: int | None) -> list[Event]:
    where, values = "id > ?", [since, *kinds]
    if kinds:
        where += f" AND kind IN ({', '.join('?' * len(kinds))})"
    limit = -1 if last is None else last
    try:
        rows = connection.execute(f"SELECT * FROM events WHERE {where} ORDER BY id DESC LIMIT ?", (*values, limit))
        return [event_of(row) for row in rows][::-1]
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []  # a file that its writer has only just made
        raise


def as_json(event: Event) -> dict[str, Any]:
    """An event for machines: its own keys first, its fields beside them."""
    own = {"id": event.id, "time_s": round(event.moment.time_s, 6), "event": event.kind}
    return {**own, **{key: value for key, value in event.fields.items() if key not in own}}
