"""The journal: every event of a job, in one SQLite file that others may read at any time.

Written by the supervisor alone, by a thread of its own, so that a slow or dead disk never holds up supervision, let
alone training: `append` only puts the event into memory. What cannot be written stays in memory and is written when it
can be; if that takes too long the oldest is dropped, and the journal says so itself. A file that is damaged is set
aside under another name, and a new one begun with what memory still has.

    journal.db    table events(id, time_s, boot_s, boot_id, kind, fields); WAL, so that readers never block the writer

An event's id is the microsecond at which it was appended, or one more than the id before: ids go on over restarts, and
over a file that was set aside, without asking the file.

The size is bounded. Of the kinds that a run repeats for ever (`THINNED`), every second one of the older half goes when
there are too many; of the rest, the oldest.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastictrain.core.events import Event, Kind, Moment
from elastictrain.core.finite import finite
from elastictrain.core.status import JournalHealth
from elastictrain.errors import StorageError

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
MAX_PER_THINNED_KIND = 2_000
MAX_OTHERS = 5_000
RECENT = 2_048
"""Events kept in memory for readers, whatever becomes of the file."""
MAX_PENDING = 10_000
"""Events kept in memory until they can be written."""
MAX_FIELDS_BYTES = 64 * 1024
"""Longer fields of an event are left out."""
_CHECK_EVERY = 500
"""Events written between two looks at the size."""
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)

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


def read_clock() -> Moment:
    """Now."""
    return Moment(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id())


def _boot_id() -> str:
    if not _boot:
        try:
            _boot.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        except OSError:
            _boot.append("")
    return _boot[0]


_boot: list[str] = []


class Journal:
    """The writer's end. One per job, in its supervisor.

    Args:
        path: the file; made when first written.
        clock: the present.
        max_per_thinned_kind: of each kind in `THINNED`.
        max_others: of all other kinds together.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], Moment] = read_clock,
        max_per_thinned_kind: int = MAX_PER_THINNED_KIND,
        max_others: int = MAX_OTHERS,
    ) -> None:
        self.path = path
        self._clock = clock
        self._max_per_thinned_kind = max_per_thinned_kind
        self._max_others = max_others
        self._changed = threading.Condition()
        self._recent: deque[Event] = deque(maxlen=RECENT)
        self._pending: deque[Event] = deque()
        self._last_id = 0
        self._health = JournalHealth()
        self._dropped = 0
        self._gap = 0
        """Dropped since the last successful write."""
        self._set_aside = ""
        self._closing = False
        self._written_since_check = 0
        self._connection: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def append(self, kind: str, fields: Mapping[str, Any]) -> Event:
        """Takes an event. Never blocks on the disk, never raises."""
        plain = _plain(fields)
        moment = self._clock()
        with self._changed:
            self._last_id = max(self._last_id + 1, int(moment.time_s * 1e6))
            event = Event(self._last_id, moment, str(kind), plain)
            self._recent.append(event)
            self._pending.append(event)
            while len(self._pending) > MAX_PENDING:
                self._pending.popleft()
                self._dropped += 1
                self._gap += 1
            self._changed.notify_all()
        return event

    @property
    def health(self) -> JournalHealth:
        """Whether events are being kept."""
        with self._changed:
            health = self._health
            if health.state == "ok" and self._set_aside:
                return JournalHealth(state="ok", reason=self._set_aside, dropped=self._dropped)
            return JournalHealth(state=health.state, reason=health.reason, dropped=self._dropped)

    def recent(self, since: int = 0) -> list[Event]:
        """Events after `since` of those in memory: the last `RECENT` of this supervisor."""
        with self._changed:
            return [event for event in self._recent if event.id > since]

    def recent_since(self) -> int:
        """Everything after this id is in memory, if anything was appended at all."""
        with self._changed:
            return self._recent[0].id - 1 if self._recent else 0

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything is written; False if it could not be in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is left, if it can, and closes the file."""
        self.flush(timeout_s if self.health.state == "ok" else 0.0)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # ---- the writing thread

    def _write_all(self) -> None:
        failures = 0
        while True:
            with self._changed:
                if failures:
                    delay_s = _RETRY_S[min(failures, len(_RETRY_S)) - 1]
                    self._changed.wait_for(lambda: self._closing, delay_s)
                else:
                    self._changed.wait_for(lambda: self._pending or self._closing)
                if self._closing and (failures or not self._pending):
                    break
            try:
                self._write(self._connect())
                failures = 0
            except (sqlite3.Error, OSError) as error:
                failures += 1
                self._failed(error)
        self._disconnect()

    def _write(self, connection: sqlite3.Connection) -> None:
        with self._changed:
            batch, gap = list(self._pending), self._gap
        rows = [_row(event) for event in batch]
        if gap and rows:
            # The gap is where the oldest that is left begins; its own id must be free.
            rows.insert(0, (batch[0].id - 1, *rows[0][1:4], "journal_gap", json.dumps({"dropped": gap})))
        with connection:
            connection.executemany("INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._written_since_check += len(rows)
        with self._changed:
            last = batch[-1].id if batch else 0
            while self._pending and self._pending[0].id <= last:
                self._pending.popleft()
            self._gap -= gap
            self._health = JournalHealth()
            self._changed.notify_all()
        if self._written_since_check >= min(_CHECK_EVERY, self._max_per_thinned_kind, self._max_others):
            self._written_since_check = 0
            self._thin(connection)
            self._check()

    def _failed(self, error: sqlite3.Error | OSError) -> None:
        reason = f"{self.path}: {error}"
        # The connection is given up in any case: after an I/O error, or where the file was replaced under it, it
        # would go on failing, or write where nobody reads.
        self._disconnect()
        if _is_damage(error):
            with contextlib.suppress(OSError):
                name = _set_aside(self.path)
                self._set_aside = f"a damaged journal was set aside as {name}: {error}"
                with self._changed:
                    if len(self._recent) > len(self._pending):
                        self._pending = deque(self._recent)
                self.append("journal_set_aside", {"name": name, "reason": str(error)})
        with self._changed:
            self._health = JournalHealth(state="degraded", reason=reason)

    def _connect(self) -> sqlite3.Connection:
        if self._connection is not None and not self.path.exists():
            self._disconnect()  # deleted under us
        if self._connection is None:
            connection = sqlite3.connect(self.path, timeout=5.0, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                connection.execute("PRAGMA journal_size_limit=4194304")
                connection.executescript(_SCHEMA)
                newest = connection.execute("SELECT max(id) FROM events").fetchone()[0] or 0
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            self._stay_after(int(newest))
        return self._connection

    def _stay_after(self, newest: int) -> None:
        """Ids go on even where the clock was set back between two supervisors."""
        with self._changed:
            if newest < (self._pending[0].id if self._pending else self._last_id + 1):
                return
            # Only events that this process appended and never wrote: nobody has seen their ids in the file.
            shift = newest + 1 - self._pending[0].id if self._pending else 0
            self._last_id = max(self._last_id + shift, newest)
            pending = {event.id for event in self._pending}
            shifted = [_shifted(event, shift) for event in self._pending]
            kept = [event for event in self._recent if event.id not in pending]
            self._pending = deque(shifted)
            self._recent = deque([*kept, *shifted], maxlen=RECENT)

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
        checker = sqlite3.connect(self.path, timeout=5.0)
        try:
            found = checker.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            checker.close()
        if found != "ok":
            raise _DamageFoundError(found)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


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
        return [_event(row) for row in rows][::-1]
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []  # a file that its writer has only just made
        raise


def _row(event: Event) -> tuple[int, float, float, str, str, str]:
    m = event.moment
    return event.id, m.time_s, m.boot_s, m.boot_id, event.kind, json.dumps(event.fields, allow_nan=False)


def _event(row: tuple[Any, ...]) -> Event:
    number, time_s, boot_s, boot_id, kind, text = row
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {}
    return Event(number, Moment(time_s, boot_s, boot_id), kind, fields if isinstance(fields, dict) else {})


def as_json(event: Event) -> dict[str, Any]:
    """An event for machines: its own keys first, its fields beside them."""
    own = {"id": event.id, "time_s": round(event.moment.time_s, 6), "event": event.kind}
    return {**own, **{key: value for key, value in event.fields.items() if key not in own}}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as JSON has them. What is too long, or cannot be made plain, is left out rather than refused."""
    plain: dict[str, Any] = {}
    for key, value in fields.items():
        try:
            text = json.dumps(finite(value), default=str, allow_nan=False)
        except Exception:  # noqa: BLE001 - `append` never raises, whatever a value does when it is looked at
            text = json.dumps(f"left out: a {type(value).__name__}")
        if len(text) > MAX_FIELDS_BYTES:
            text = json.dumps(f"left out: {len(text)} bytes")
        plain[str(key)] = json.loads(text)
    return plain


def _shifted(event: Event, shift: int) -> Event:
    return Event(event.id + shift, event.moment, event.kind, event.fields)


class _DamageFoundError(sqlite3.DatabaseError):
    """A check found what no statement has met yet."""


def _is_damage(error: Exception) -> bool:
    if isinstance(error, _DamageFoundError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    return primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _set_aside(path: Path) -> str:
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
