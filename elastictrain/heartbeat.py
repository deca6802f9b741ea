"""A rank's heartbeat: a small memory-mapped record that says what the rank does, written by it, read by the supervisor.

    runs/0001/heartbeat-<rank>      256 bytes, in the machine's byte order; one writer: that rank

| offset | what | written |
|---|---|---|
| 0 | magic, version, rank, local rank, incarnation, pid, ident of the main thread, start | once |
| 64 | serial, phase, step, microbatch, since when, last move, serial | at every move |
| 120 | first step, applied, skipped, longest step | between steps, a word at a time |
| 160 | tick: count, when, resident bytes, device bytes | by a thread, every `TICK_INTERVAL_S` |
| 208 | loss of the last reported step | when it is known |

Times are CLOCK_MONOTONIC in nanoseconds: comparable between the processes of one boot, and no clock that anybody sets.

The second part is a sequence lock in one call: `pack_into` writes front to back, so the serial at the front is the new
one as long as that at the end is the old. A reader takes the end first and the front last, and reads again if they
differ. A rank that was stopped in the middle of a write leaves a record that never agrees: the reader then keeps what
it read last. (The order of stores is that of x86-64; on a machine with weaker order a torn read would need a move in
the same nanoseconds and would heal with the next.)

The tick shows that Python code can run in the process: a rank that waits in a collective ticks, one whose C code
holds the interpreter lock does not.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

from elastictrain.core.phases import Phase
from elastictrain.protocol import ENV_RUN_DIR

SIZE_BYTES = 256
VERSION = 1
TICK_INTERVAL_S = 0.25
READ_TRIES = 8
DECAY_SHIFT = 6
"""The longest step fades by a 64th with every step, so that one slow step is not remembered for ever."""

_MAGIC = b"etHB"
# Native sizes and alignment: struct's portable formats take twice as long.
_FIXED = struct.Struct("=4sIiiqqQq")
_MOVING = struct.Struct("@QqqqqqQ")
_MOVING_AT = 64
_END_AT = _MOVING_AT + _MOVING.size - 8
_COUNTS = struct.Struct("@qqqq")
_COUNTS_AT = 120
_TICK = struct.Struct("@qqqq")
_TICK_AT = 160
_LOSS = struct.Struct("@d")
_LOSS_AT = 208
_WORD = struct.Struct("@Q")
_WHOLE = struct.Struct("@QqqqqqQ qqqq 8x qqqq 16x d")
"""All of the record that changes, from `_MOVING_AT` on: one call where many ranks are read."""
_TICK_NS = 5
"""Place of the tick's time in what follows the moving part."""

_FIRST_WORD, _APPLIED_WORD, _SKIPPED_WORD, _LONGEST_WORD = range(_COUNTS_AT // 8, _COUNTS_AT // 8 + 4)
_write_move = _MOVING.pack_into
_READY = Phase.READY

_PREFIX = "heartbeat-"


class Heartbeat(NamedTuple):
    """What a rank's record says.

    Args:
        rank: in the job.
        local_rank: on its node.
        incarnation: which life of the worker group it belongs to.
        pid: of the rank.
        main_thread: ident of its main thread, as faulthandler prints it.
        started_ns: when the record was made.
        step: windows consumed.
        microbatch: index in the window of the microbatch it is at, or of the batch of an evaluation.
        phase: what it does.
        phase_since_ns: since when.
        moved_ns: when it last moved: entered a phase, or got on within one.
        first_step: the step this process began with; -1 before its first step.
        applied: updates applied.
        skipped: updates left out.
        longest_step_ns: of the last steps of this process, its first left out; 0 before its second. Evaluation and
            snapshots between steps do not count.
        tick: counts while Python code can run.
        tick_ns: when it last did.
        memory_bytes: resident memory.
        device_bytes: memory allocated on the device, 0 where there is none.
        loss: of the last reported step; NaN before the first report.
    """

    rank: int
    local_rank: int
    incarnation: int
    pid: int
    main_thread: int
    started_ns: int
    step: int
    microbatch: int
    phase: Phase
    phase_since_ns: int
    moved_ns: int
    first_step: int
    applied: int
    skipped: int
    longest_step_ns: int
    tick: int
    tick_ns: int
    memory_bytes: int
    device_bytes: int
    loss: float

    @property
    def steps_done(self) -> int:
        """Steps that this process has committed."""
        return max(0, self.step - self.first_step) if self.first_step >= 0 else 0


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"{_PREFIX}{rank}"


def heartbeat_paths(run_dir: Path) -> dict[int, Path]:
    """The records that are there, by rank."""
    found = {}
    for path in run_dir.glob(f"{_PREFIX}*"):
        with contextlib.suppress(ValueError):
            found[int(path.name.removeprefix(_PREFIX))] = path
    return found


class HeartbeatWriter:
    """Writes this process's record.

    Args:
        run_dir: folder of the incarnation.
        rank: in the job.
        local_rank: on its node.
        incarnation: which life of the worker group this is.
    """

    def __init__(self, run_dir: Path, rank: int, local_rank: int, incarnation: int) -> None:
        now_ns = time.monotonic_ns()
        record = bytearray(SIZE_BYTES)
        main = threading.main_thread().ident or 0
        _FIXED.pack_into(record, 0, _MAGIC, VERSION, rank, local_rank, incarnation, os.getpid(), main, now_ns)
        _MOVING.pack_into(record, _MOVING_AT, 1, Phase.INIT, 0, 0, now_ns, now_ns, 1)
        _COUNTS.pack_into(record, _COUNTS_AT, -1, 0, 0, 0)
        _TICK.pack_into(record, _TICK_AT, 0, now_ns, _resident_bytes(), 0)
        _LOSS.pack_into(record, _LOSS_AT, float("nan"))
        path = heartbeat_path(run_dir, rank)
        # Under another name first: whoever sees the record sees a whole one.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(record)
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
        temporary.replace(path)
        self.path = path
        self._words = memoryview(self._map).cast("q")
        self._serial = 1
        self._step = 0
        self._first_step = -1
        self._step_began_ns = now_ns
        self._closing = threading.Event()
        self.device_bytes = 0
        """Shown with the next tick."""
        self._ticker = threading.Thread(target=self._tick, name="heartbeat", daemon=True)
        self._ticker.start()

    def enter(self, phase: Phase, step: int, microbatch: int, applied: int = 0, skipped: int = 0) -> None:
        """Says that the rank is in `phase` from now on. `applied` and `skipped` are looked at in `READY` only."""
        now_ns = time.monotonic_ns()
        if phase is _READY:
            self._between_steps(step, applied, skipped, now_ns)
        self._serial = serial = self._serial + 1
        _write_move(self._map, _MOVING_AT, serial, phase, step, microbatch, now_ns, now_ns, serial)

    def _between_steps(self, step: int, applied: int, skipped: int, now_ns: int) -> None:
        # The first step holds compilation, allocation and connecting: it tells nothing about the others.
        if self._first_step >= 0 and step > max(self._step, self._first_step + 1):
            longest_ns = self._words[_LONGEST_WORD]
            self._words[_LONGEST_WORD] = max(now_ns - self._step_began_ns, longest_ns - (longest_ns >> DECAY_SHIFT))
        self._step = step
        self._step_began_ns = now_ns
        self._words[_APPLIED_WORD] = applied
        self._words[_SKIPPED_WORD] = skipped

    def beat(self, microbatch: int = 0) -> None:
        """Says that the rank gets on within its phase."""
        _, phase, step, _, since_ns, _, _ = _MOVING.unpack_from(self._map, _MOVING_AT)
        self._serial = serial = self._serial + 1
        _write_move(self._map, _MOVING_AT, serial, phase, step, microbatch, since_ns, time.monotonic_ns(), serial)

    def begin_with(self, step: int) -> None:
        """Says which step this process begins with."""
        self._first_step = self._step = step
        self._words[_FIRST_WORD] = step

    @property
    def has_begun(self) -> bool:
        return self._first_step >= 0

    def tell_loss(self, loss: float) -> None:
        """Notes the loss of the last reported step."""
        _LOSS.pack_into(self._map, _LOSS_AT, loss)

    def close(self) -> None:
        """Stops ticking; the record stays. For tests: a rank's own ends with its process."""
        self._closing.set()
        self._ticker.join()

    def _tick(self) -> None:
        count = 0
        while not self._closing.wait(TICK_INTERVAL_S):
            count += 1
            _TICK.pack_into(self._map, _TICK_AT, count, time.monotonic_ns(), _resident_bytes(), self.device_bytes)


_mine: HeartbeatWriter | None = None


def my_heartbeat() -> HeartbeatWriter | None:
    """This process's record, made at the first call; None outside an incarnation.

    A process is one rank, so it has one record, whoever asks first: the start of the worker, before torch is there, or
    the session of a loop that somebody else started.
    """
    global _mine  # noqa: PLW0603 - one record per process, as there is one rank
    run_dir = os.environ.get(ENV_RUN_DIR)
    if not run_dir or not Path(run_dir).is_dir():
        return None
    rank = int(os.environ.get("RANK", "0"))
    path = heartbeat_path(Path(run_dir), rank)
    if _mine is None or _mine.path != path:
        incarnation = Path(run_dir).name
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        _mine = HeartbeatWriter(Path(run_dir), rank, local_rank, int(incarnation) if incarnation.isdigit() else 0)
    return _mine


def _resident_bytes() -> int:
    """Resident memory of this process (proc(5), statm)."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - in every tick, and Path costs as much again
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


class HeartbeatReader:
    """Reads a rank's record again and again.

    Args:
        path: may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._fixed: tuple[int, ...] = ()
        self.last: Heartbeat | None = None
        """What was read last."""

    def read(self) -> Heartbeat | None:
        """The record, or None while there is none that we understand."""
        if self._map is None and not self._open():
            return None
        record = self._map
        assert record is not None
        read_whole, read_word = _WHOLE.unpack_from, _WORD.unpack_from
        for _ in range(READ_TRIES):
            (end,) = read_word(record, _END_AT)
            whole = read_whole(record, _MOVING_AT)
            (begin,) = read_word(record, _MOVING_AT)
            serial, phase, step, microbatch, since_ns, moved_ns, serial_again, *counts = whole
            # pack_into clears what it is about to write: zeros are a write in progress.
            if begin == end == serial == serial_again and begin and counts[_TICK_NS]:
                break
        else:
            return self.last
        fields = (*self._fixed, step, microbatch, _PHASES[phase], since_ns, moved_ns, *counts)
        self.last = Heartbeat._make(fields)
        return self.last

    def _open(self) -> bool:
        try:
            with self._path.open("rb") as file:
                record = mmap.mmap(file.fileno(), SIZE_BYTES, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return False
        magic, version, *fixed = _FIXED.unpack_from(record, 0)
        if magic != _MAGIC or version != VERSION:
            record.close()
            return False
        self._map = record
        self._fixed = tuple(fixed)
        return True

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


_PHASES = {int(phase): phase for phase in Phase}


def read_heartbeat(path: Path) -> Heartbeat | None:
    """A record, read once; None if there is none that we understand."""
    reader = HeartbeatReader(path)
    try:
        return reader.read()
    finally:
        reader.close()
