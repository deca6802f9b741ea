"""What is known about a job, for whoever asks: the journal, and the history folded from it as it grows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastictrain.core.events import Event, Moment
from elastictrain.core.history import History
from elastictrain.core.status import JournalHealth, Status, SupervisorView
from elastictrain.core.summary import advance, describe, fold
from elastictrain.errors import StorageError
from elastictrain.protocol import JOURNAL_FILE
from elastictrain.supervisor.clock import read_clock
from elastictrain.supervisor.journal import Journal
from elastictrain.supervisor.journal_reader import JournalReader


class Record:
    """The supervisor's sink of events. Takes up the history where an earlier supervisor left it.

    Args:
        state_dir: the job's state directory.
        job: its name.
        clock: the present.
    """

    def __init__(self, state_dir: Path, job: str, *, clock: Callable[[], Moment] = read_clock) -> None:
        self.state_dir = state_dir
        self.job = job
        self._clock = clock
        self._lock = threading.Lock()
        self._reader = JournalReader(state_dir / JOURNAL_FILE)
        self.history = History()
        """All events so far, folded; those that could be read, of earlier supervisors."""
        with contextlib.suppress(StorageError):  # the journal finds out for itself, and says so
            self.history = fold(self._reader.read())
        self.journal = Journal(state_dir / JOURNAL_FILE, clock=clock)

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes an event. Never blocks on the disk, never raises."""
        with self._lock:
            self.history = advance(self.history, self.journal.append(kind, fields))

    def status(self, view: SupervisorView | None, *, socket: str | None = None) -> Status:
        """The status document, with what the living supervisor knows."""
        return describe(
            self.history,
            job=self.job,
            state_dir=str(self.state_dir),
            now=self._clock(),
            view=view,
            daemon_running=True,
            socket=socket,
            journal=self.journal.health,
        )

    def events(self, since: int = 0) -> list[Event]:
        """Events after an id: from memory where it has them all, else from the file. Blocks on the disk then."""
        recent = self.journal.recent(since)
        if since >= self.journal.recent_since() > 0:
            return recent
        try:
            older = self._reader.read(since)
        except StorageError:
            return recent
        known = {event.id for event in older}
        return sorted([*older, *(e for e in recent if e.id not in known)], key=lambda event: event.id)

    def close(self) -> None:
        """Writes what is left."""
        self.journal.close()


def read_status(
    state_dir: Path,
    job: str,
    *,
    daemon_running: bool = False,
    socket: str | None = None,
    clock: Callable[[], Moment] = read_clock,
) -> Status:
    """The status document from the journal alone, for when no supervisor answers."""
    path = state_dir / JOURNAL_FILE
    health = JournalHealth() if path.exists() else JournalHealth(state="missing", reason=f"there is no {path}")
    history = History()
    try:
        history = fold(JournalReader(path).read())
    except StorageError as error:
        health = JournalHealth(state="unreadable", reason=error.what)
        history = History(reason="nothing is known: its journal cannot be read")
    return describe(
        history,
        job=job,
        state_dir=str(state_dir),
        now=clock(),
        daemon_running=daemon_running,
        socket=socket,
        journal=health,
    )
