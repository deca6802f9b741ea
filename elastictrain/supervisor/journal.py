"""The journal: every event of a job, in one SQLite file that others may read at any time.

Written by the supervisor alone, by a thread of its own, so that a slow or dead disk never holds up supervision, let
alone training: `append` only puts the event into memory. What cannot be written stays in memory and is written when it
can be; if that takes too long the oldest is dropped, and the journal says so itself. A file that is damaged is set
aside under another name, and a new one begun with what memory still has.

An event's id is the microsecond at which it was appended, or one more than the id before: ids go on over restarts, and
over a file that was set aside, without asking the file.

What the file holds is in `journal_file`, how others read it in `journal_reader`.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastictrain.core.events import Event, Moment
from elastictrain.core.finite import finite
from elastictrain.core.status import JournalHealth
from elastictrain.supervisor.clock import read_clock
from elastictrain.supervisor.journal_file import JournalFile, is_damage, row_of, set_aside

MAX_PER_THINNED_KIND = 2_000
MAX_OTHERS = 5_000
RECENT = 2_048
"""Events kept in memory for readers, whatever becomes of the file."""
MAX_PENDING = 10_000
"""Events kept in memory until they can be written."""
MAX_FIELDS_BYTES = 64 * 1024
"""Longer fields of an event are left out."""
_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)


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
        self._file = JournalFile(path, max_per_thinned_kind=max_per_thinned_kind, max_others=max_others)
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
                self._write()
                failures = 0
            except (sqlite3.Error, OSError) as error:
                failures += 1
                self._failed(error)
        self._file.close()

    def _write(self) -> None:
        newest = self._file.open()
        if newest is not None:
            self._stay_after(newest)
        with self._changed:
            batch, gap = list(self._pending), self._gap
        rows = [row_of(event) for event in batch]
        if gap and rows:
            # The gap is where the oldest that is left begins; its own id must be free.
            rows.insert(0, (batch[0].id - 1, *rows[0][1:4], "journal_gap", json.dumps({"dropped": gap})))
        self._file.write(rows)
        with self._changed:
            last = batch[-1].id if batch else 0
            while self._pending and self._pending[0].id <= last:
                self._pending.popleft()
            self._gap -= gap
            self._health = JournalHealth()
            self._changed.notify_all()
        self._file.tend()

    def _failed(self, error: sqlite3.Error | OSError) -> None:
        reason = f"{self.path}: {error}"
        self._file.close()
        if is_damage(error):
            with contextlib.suppress(OSError):
                name = set_aside(self.path)
                self._set_aside = f"a damaged journal was set aside as {name}: {error}"
                with self._changed:
                    if len(self._recent) > len(self._pending):
                        self._pending = deque(self._recent)
                self.append("journal_set_aside", {"name": name, "reason": str(error)})
        with self._changed:
            self._health = JournalHealth(state="degraded", reason=reason)

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
