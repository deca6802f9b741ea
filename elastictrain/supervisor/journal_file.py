"""The journal's file, as its one writer sees it: a SQLite database in WAL mode, so that readers never block the writer.

    table events(id, time_s, boot_s, boot_id, kind, fields)

The size is bounded. Of the kinds that a run repeats for ever (`THINNED`), every second one of the older half goes when
there are too many; of the rest, the oldest.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastictrain.core.events import Event, Kind, Moment

THINNED = frozenset(
    {
        Kind.PROGRESS,
        Kind.SNAPSHOT_TAKEN,
        Kind.SNAPSHOT_DURABLE,
        Kind.SNAPSHOT_LEFT_OUT,
        Kind.SNAPSHOT_FAILED,
        Kind.PERSISTER_RETRYING,
        Kind.PERSISTER_STALLED,
        Kind.PERSISTER_FAILED,
        Kind.STORE_RETRYING,
        Kind.EVALUATED,
    }
)
CHECK_INTERVAL_S = 20.0
"""How long damage may go unseen in a file that is written to."""
SYNC_INTERVAL_S = 5.0
"""How old what a power cut takes may be at most, where nothing but `THINNED` kinds happened."""
_CHECK_EVERY = 500
"""Events written between two looks at the size, and for damage."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    boot_s REAL NOT NULL,
    boot_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    fields TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS events_by_kind ON events (kind, id);
"""


Row = tuple[int, float, float, str, str, str]


class JournalFile:
    """The file, opened when first needed, and again after it was closed.

    Args:
        path: made when first written.
        max_per_thinned_kind: of each kind in `THINNED`.
        max_others: of all other kinds together.
    """

    def __init__(self, path: Path, *, max_per_thinned_kind: int, max_others: int) -> None:
        self._path = path
        self._max_per_thinned_kind = max_per_thinned_kind
        self._max_others = max_others
        self._connection: sqlite3.Connection | None = None
        self._written_since_check = 0
        self._checked_s = time.monotonic()
        self._synced_s = float("-inf")

    def open(self) -> int | None:
        """Opens the file, if it is not open, or was deleted under us.

        Returns:
            the newest id in it, where it was opened just now.
        """
        if self._connection is not None and not self._path.exists():
            self.close()
        if self._connection is not None:
            return None
        connection = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA journal_size_limit=4194304")
            connection.executescript(_SCHEMA)
            newest = connection.execute("SELECT max(id) FROM events").fetchone()[0] or 0
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return int(newest)

    def write(self, rows: Sequence[Row]) -> None:
        """Writes rows, all or none. What the next supervisor decides by is on the disk when this returns: a step that
        takes the whole machine down must not take the memory of it along (SQLite: `synchronous`)."""
        assert self._connection is not None
        now_s = time.monotonic()
        must_sync = now_s - self._synced_s >= SYNC_INTERVAL_S or any(row[4] not in THINNED for row in rows)
        self._connection.execute(f"PRAGMA synchronous={'FULL' if must_sync else 'NORMAL'}")
        with self._connection:
            self._connection.executemany("INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?)", rows)
        if must_sync:
            self._synced_s = now_s
        self._written_since_check += len(rows)

    def tend(self) -> None:
        """Now and then: holds the size within its bounds, and looks for damage."""
        now_s = time.monotonic()
        is_many = self._written_since_check >= min(_CHECK_EVERY, self._max_per_thinned_kind, self._max_others)
        if is_many:
            assert self._connection is not None
            self._written_since_check = 0
            self._thin(self._connection)
        if is_many or now_s - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s = now_s
            self._check()

    def _thin(self, connection: sqlite3.Connection) -> None:
        kinds = ", ".join("?" * len(THINNED))
        with connection:
            for kind in THINNED:
                count = connection.execute("SELECT count(*) FROM events WHERE kind = ?", (kind,)).fetchone()[0]
                if count > self._max_per_thinned_kind:
                    connection.execute(
                        "DELETE FROM events WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER (ORDER BY id) "
                        "AS n FROM events WHERE kind = ?) WHERE n <= ? AND n % 2 = 0)",
                        (kind, count // 2 + 1),
                    )
            others = f"SELECT id FROM events WHERE kind NOT IN ({kinds}) ORDER BY id DESC LIMIT -1 OFFSET ?"
            connection.execute(f"DELETE FROM events WHERE id IN ({others})", (*THINNED, self._max_others))

    def _check(self) -> None:
        """Reads the file as others do. The connection that writes would not notice damage under its cached pages."""
        checker = sqlite3.connect(self._path, timeout=5.0)
        try:
            found = checker.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            checker.close()
        if found != "ok":
            raise _DamageFoundError(found)

    def close(self) -> None:
        """Gives the connection up: after an I/O error, or where the file was replaced under it, it would go on failing,
        or write where nobody reads."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def row_of(event: Event) -> Row:
    m = event.moment
    return event.id, m.time_s, m.boot_s, m.boot_id, event.kind, json.dumps(event.fields, allow_nan=False)


def event_of(row: tuple[Any, ...]) -> Event:
    number, time_s, boot_s, boot_id, kind, text = row
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {}
    return Event(number, Moment(time_s, boot_s, boot_id), kind, fields if isinstance(fields, dict) else {})


class _DamageFoundError(sqlite3.DatabaseError):
    """A check found what no statement has met yet."""


def is_damage(error: Exception) -> bool:
    """Whether the file is no good any more, rather than out of reach."""
    if isinstance(error, _DamageFoundError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    return primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def set_aside(path: Path) -> str:
    """Renames a damaged file, and what belongs to it; returns its new name."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        companion = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            companion.rename(target.with_name(target.name + suffix))
    return target.name
