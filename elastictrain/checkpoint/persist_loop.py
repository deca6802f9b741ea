"""Moves snapshots from the memory tier to the durable tier, one at a time, until it has worked.

At most one snapshot waits: a newer one takes its place. A store that fails is tried again, with growing pauses, until
the snapshot is stored or a newer one is there to be stored instead. After each success the store is tidied.

This is the work itself; `persister` runs it in a process of its own, `persister_client` is what training talks to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_when_event_set,
    wait_exponential,
    wait_random,
)
from tenacity.nap import sleep_using_event

from elastictrain.checkpoint.durable_note import DurableNote
from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.format import parse_name
from elastictrain.checkpoint.memory_snapshot import Mappings, OpenSnapshot
from elastictrain.checkpoint.store import Store, open_store
from elastictrain.core.retention import Condition, Kept, superfluous
from elastictrain.errors import BusyError, ElasticTrainError, FencedError, SnapshotError, StorageError
from elastictrain.protocol import SNAPSHOTS_DIR

if TYPE_CHECKING:
    from elastictrain.config.schema import CheckpointConfig

PROGRESS_INTERVAL_S = 5.0
"""Between two words about a snapshot that takes long to be written."""


@dataclass(frozen=True, slots=True)
class PersisterSettings:
    """What the persister is told once, at its start.

    Args:
        url: the store.
        storage_options: passed to fsspec; may hold secrets.
        verify_uploads: read back what was uploaded; else only what older ones are to be deleted for.
        keep_last: retention, see `core.retention`.
        keep_every: likewise, in steps.
        storage_timeout_s: a store that moves nothing for so long is given up, and tried afresh.
        grace_s: how long to go on after the training process is gone.
        fence: fields of the `Fence` of this worker group, where others on other nodes may follow it.
        lock_path: file that one persister of a job and node holds; "" for none.
        state_dir: of the job: there it notes what is durable; "" for none.
        first_pause_s: pause after the first failure; it doubles with each.
        longest_pause_s: limit of that.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    verify_uploads: bool = True
    keep_last: int = 3
    keep_every: int | None = None
    storage_timeout_s: float = 60.0
    grace_s: float = 300.0
    fence: Mapping[str, Any] | None = None
    lock_path: str = ""
    state_dir: str = ""
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0

    @classmethod
    def of_job(cls, config: CheckpointConfig, state_dir: Path, fence: Fence | None) -> PersisterSettings:
        """Those of a job.

        Args:
            config: of its snapshots.
            state_dir: of the job, absolute.
            fence: of the worker group, where others on other nodes may follow it.
        """
        return cls(
            url=config.url or str(state_dir / SNAPSHOTS_DIR),
            storage_options=config.storage_options,
            verify_uploads=config.verify_uploads,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            storage_timeout_s=config.storage_timeout_s,
            lock_path=str(state_dir / "persister.lock"),
            state_dir=str(state_dir),
            fence=asdict(fence) if fence is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A snapshot to be made durable.

    Args:
        path: folder of its slot.
        name: its name; if the slot holds another by then, that one was superseded.
    """

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Report:
    """What the persister says.

    Args:
        kind: started, progress, retrying, persisted, not_noted, superseded, failed, fenced, tidied, tidying_failed,
            uploads_aborted, waiting_for_other, stalled, abandoned; from the client also: restarting.
        name: the snapshot's name; "" where it is about none.
        fields: numbers and texts, without secrets.
    """

    kind: str
    name: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def global_step(self) -> int | None:
        parsed = parse_name(self.name)
        return parsed[0] if parsed else None

    @property
    def event(self) -> tuple[str, bool] | None:
        """Name of the event that tells of it, and whether it is a warning; None for what is no news."""
        match self.kind:
            case "persisted":
                return "snapshot_durable", False
            case "tidied":
                return "snapshots_deleted", False
            case "uploads_aborted":
                return "uploads_aborted", False
            case "progress":  # of one that takes long: the persister says so once in a while
                return "snapshot_on_its_way", False
            case "superseded" if "error" not in self.fields:
                return None
            case "started":
                return None
            case kind:
                return f"persister_{kind}", True

    @property
    def event_fields(self) -> dict[str, Any]:
        return (
            self.fields if self.kind in ("tidied", "uploads_aborted") else {"at_step": self.global_step, **self.fields}
        )


class PersistLoop:
    """The loop. `submit` and `finish` may be called from any thread, `run` is called once.

    Args:
        settings: see there.
        report: gets every report, on the thread of `run` (of `submit`, for what is superseded there).
    """

    def __init__(self, settings: PersisterSettings, report: Callable[[Report], None]) -> None:
        self._settings = settings
        self._report = report
        self._changed = threading.Condition()
        self._waiting: Request | None = None
        self._finishing = False
        self._newer = threading.Event()
        self._mappings = Mappings()
        self._store: Store | None = None
        self._conditions: dict[str, Condition] = {}
        """What is known of snapshots in the store; of others, that they were committed."""
        self._cleaned = False
        self._uploads_looked_for = False
        self._is_claimed = False
        self._lock_fd: int | None = None
        self._moved_at_s: float | None = None

    def submit(self, request: Request) -> None:
        """Hands over a snapshot; one that waited is superseded."""
        with self._changed:
            before, self._waiting = self._waiting, request
            self._newer.set()
            self._changed.notify_all()
        if before is not None:
            self._report(Report("superseded", before.name))

    def finish(self) -> None:
        """No more will come: `run` returns when what was handed over is done."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Gives up what waits, and what is being retried: `run` returns once the present try has ended."""
        with self._changed:
            self._waiting, self._finishing = None, True
            self._newer.set()
            self._changed.notify_all()

    def stalled_s(self, now_s: float) -> float:
        """Seconds since the store last moved anything, of `time.monotonic`; 0 while nothing is asked of it."""
        moved_at_s = self._moved_at_s
        return 0.0 if moved_at_s is None else max(0.0, now_s - moved_at_s)

    def run(self) -> None:
        """Works until finished."""
        try:
            self._claim_first()
            while (request := self._next()) is not None:
                self._persist(request)
        finally:
            if self._lock_fd is not None:
                os.close(self._lock_fd)

    def _claim_first(self) -> None:
        """Tells other nodes' persisters of this worker group before it has anything to write."""
        if self._settings.fence is None:
            return
        self._take_turn()
        try:
            with self._watched():
                self._claimed_store()
        except FencedError as error:
            self._report_fenced("", error)
        except ElasticTrainError:
            pass  # it is tried again with the first snapshot, and reported then

    def _report_fenced(self, name: str, error: FencedError) -> None:
        assert self._settings.fence is not None
        fields = {"error": error.what, "hint": error.hint, "refused_attempt": self._settings.fence["attempt"]}
        self._report(Report("fenced", name, fields))

    def _next(self) -> Request | None:
        with self._changed:
            while self._waiting is None and not self._finishing:
                self._changed.wait()
            request, self._waiting = self._waiting, None
            self._newer.clear()
            return request

    def _persist(self, request: Request) -> None:
        self._take_turn()
        settings = self._settings
        begun_s = time.monotonic()
        retrying = Retrying(
            retry=retry_if_exception_type(StorageError),
            wait=wait_exponential(multiplier=settings.first_pause_s, max=settings.longest_pause_s)
            + wait_random(0, settings.first_pause_s),
            stop=stop_when_event_set(self._newer),
            sleep=sleep_using_event(self._newer),
            before_sleep=lambda state: self._report_retry(request, state),
            reraise=True,
        )
        try:
            with OpenSnapshot(Path(request.path), request.name, self._mappings) as source:
                size_bytes = source.manifest.size_bytes
                self._report(Report("started", request.name, {"size_bytes": size_bytes}))
                retrying(self._put, source)
        except BusyError:
            self._report(Report("superseded", request.name))
            return
        except StorageError as error:
            self._report(Report("superseded", request.name, {"error": error.what}))
            return
        except FencedError as error:
            self._report_fenced(request.name, error)
            return
        except SnapshotError as error:
            # Overwritten by a newer one before its turn came, or truly damaged: the text says which.
            self._report(Report("failed", request.name, {"error": error.what}))
            return
        except ElasticTrainError as error:
            self._report(Report("failed", request.name, {"error": str(error)}))
            return
        if self._open_store().verifies_puts:
            self._conditions[request.name] = Condition.VERIFIED
        self._note(request.name)
        seconds = time.monotonic() - begun_s
        self._report(Report("persisted", request.name, {"seconds": round(seconds, 3), "size_bytes": size_bytes}))
        self._tidy(request.name)

    def _note(self, name: str) -> None:
        """Before anybody is told: from then on a start must not do with less."""
        parsed = parse_name(name)
        if not self._settings.state_dir or parsed is None:
            return
        try:
            DurableNote(Path(self._settings.state_dir)).learn(parsed[1], parsed[0])
        except OSError as error:
            self._report(Report("not_noted", name, {"error": str(error)}))

    def _put(self, source: OpenSnapshot) -> None:
        total_bytes = source.manifest.size_bytes
        done_bytes, reported_at_s = 0, time.monotonic()

        def progress(num_bytes: int) -> None:
            nonlocal done_bytes, reported_at_s
            done_bytes += num_bytes
            self._moved_at_s = now_s = time.monotonic()
            if now_s - reported_at_s >= PROGRESS_INTERVAL_S:
                reported_at_s = now_s
                fields = {"done_bytes": done_bytes, "total_bytes": total_bytes}
                self._report(Report("progress", source.manifest.name, fields))

        with self._watched():
            store = self._claimed_store()
            if not self._cleaned:
                store.clean_leftovers()
                self._cleaned = True
            store.put(source, progress)

    def _open_store(self) -> Store:
        if self._store is None:
            settings = self._settings
            self._store = open_store(settings.url, settings.storage_options, verify_uploads=settings.verify_uploads)
        return self._store

    def _claimed_store(self) -> Store:
        store, fence = self._open_store(), self._settings.fence
        if fence is not None and not self._is_claimed:
            store.claim(Fence(**fence))
            self._is_claimed = True
        return store

    def _tidy(self, newest: str) -> None:
        """Deletes what retention lets go of this run's snapshots."""
        parsed = parse_name(newest)
        assert parsed is not None
        deleted: list[str] = []
        aborted: list[str] = []
        try:
            with self._watched():
                store = self._open_store()
                found = {s.global_step: s.name for s in store.snapshots() if s.run_id == parsed[1]}
                doomed = self._superfluous(parsed[1], found)
                if newest not in self._conditions and doomed != self._superfluous(parsed[1], found, sound=newest):
                    self._read_back(store, newest)
                    doomed = self._superfluous(parsed[1], found)
                for name in (found[snapshot.global_step] for snapshot in doomed):
                    self._moved_at_s = time.monotonic()
                    if store.delete_unless_pinned(name):
                        deleted.append(name)
                if not self._uploads_looked_for:
                    self._uploads_looked_for = True
                    for upload in store.abort_dead_uploads():
                        aborted.append(upload)
        except FencedError as error:
            self._report_fenced(newest, error)
        except StorageError as error:
            self._report(Report("tidying_failed", newest, {"error": error.what}))
        if deleted:
            self._report(Report("tidied", newest, {"deleted": deleted}))
        if aborted:
            self._report(Report("uploads_aborted", newest, {"aborted": aborted}))

    def _superfluous(self, run_id: str, found: Mapping[int, str], *, sound: str = "") -> list[Kept]:
        """What may go of a run's snapshots, given by step; if `sound` were known to be so."""
        verified = {sound: Condition.VERIFIED}
        kept = [
            Kept(run_id, step, verified.get(name) or self._conditions.get(name, Condition.COMMITTED))
            for step, name in found.items()
        ]
        return superfluous(kept, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)

    def _read_back(self, store: Store, name: str) -> None:
        """Of what was put without being read back: before anything older goes for it. That is one of `keep_last`."""

        def progress(_num_bytes: int) -> None:
            self._moved_at_s = time.monotonic()

        damages = store.verify(name, progress)
        self._conditions[name] = Condition.DAMAGED if damages else Condition.VERIFIED
        if damages:
            error = f"{store.where}/{name}: was stored wrongly: {'; '.join(map(str, damages))}; nothing goes for it"
            self._report(Report("tidying_failed", name, {"error": error}))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._moved_at_s = time.monotonic()
        try:
            yield
        finally:
            self._moved_at_s = None

    def _report_retry(self, request: Request, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        pause_s = round(state.next_action.sleep, 3) if state.next_action is not None else 0.0
        what = error.what if isinstance(error, ElasticTrainError) else str(error)
        fields = {"error": what, "tries": state.attempt_number, "pause_s": pause_s}
        self._report(Report("retrying", request.name, fields))

    def _take_turn(self) -> None:
        """Waits for the persister of a worker that died before us: two at once would clean up after each other."""
        if self._lock_fd is not None or not self._settings.lock_path:
            return
        fd = os.open(self._settings.lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._report(Report("waiting_for_other"))
            fcntl.flock(fd, fcntl.LOCK_EX)
        self._lock_fd = fd
