"""Where a run's numbers go: metrics.jsonl always, TensorBoard where installed.

Files are written by a thread of their own: a slow or full disk costs lines, never steps. One JSON object a line; its
`kind` is `step`, `report`, `eval` or `summary`; `docs/metrics.md` lists the keys. Numbers that JSON does not know are
strings: "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastictrain.logs import Logger, finite

Record = Mapping[str, Any]

_SETTLE_S = 1.0
"""How long a snapshot waits at most for the lines of its steps."""


def json_line(record: Record) -> str:
    """One line of metrics.jsonl, with its line feed."""
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(finite(record), allow_nan=False) + "\n"


class MetricsWriter:
    """Writes records in order, in the background.

    Args:
        path: the JSON lines file, appended to.
        tensorboard_dir: folder of event files; None writes none.
        log: where a failure to write is reported, once per file.
        after_first: called once the first records are written, in the background too.
    """

    def __init__(
        self,
        path: Path,
        tensorboard_dir: Path | None,
        log: Logger,
        after_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._tensorboard_dir = tensorboard_dir
        self._log = log
        self._after_first: Callable[[], None] | None = after_first
        self._queue: queue.SimpleQueue[list[Record] | None] = queue.SimpleQueue()
        self._num_queued = 0
        self._num_written = 0
        self._stuck_at = -1
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="metrics-writer", daemon=True)
        self._thread.start()

    def write(self, records: list[Record]) -> None:
        """Queues records; returns at once."""
        with self._progress:
            self._num_queued += 1
        self._queue.put(records)

    def settle(self) -> None:
        """Waits for what is queued to be written; not for long, and not again while a disk that was too slow has not
        moved since."""
        with self._progress:
            if self._num_written != self._stuck_at and not self._progress.wait_for(
                lambda: self._num_written == self._num_queued, _SETTLE_S
            ):
                self._stuck_at = self._num_written

    def close(self) -> None:
        """Writes what is queued and closes the files."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        board: Any = None
        failed = False
        while (records := self._queue.get()) is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.writelines(map(json_line, records))
                failed = False
            except OSError as error:
                if not failed:
                    self._log.warning("metrics_not_written", path=str(self._path), error=str(error))
                failed = True
            with self._progress:
                self._num_written += 1
                self._progress.notify_all()
            if self._tensorboard_dir is not None:  # not sooner: this takes its time, and the first lines are waited for
                board, self._tensorboard_dir = self._open_tensorboard(self._tensorboard_dir), None
            if board is not None:
                try:
                    for record in records:
                        _to_tensorboard(board, record)
                    board.flush()
                except Exception as error:  # noqa: BLE001 - metrics must never stop a run
                    self._log.warning("tensorboard_not_written", error=f"{type(error).__name__}: {error}")
                    board = None
            if self._after_first is not None:
                with contextlib.suppress(OSError):
                    self._after_first()
                self._after_first = None
        if board is not None:
            board.close()

    def _open_tensorboard(self, folder: Path) -> Any:
        try:
            from torch.utils.tensorboard import FileWriter
        except ImportError:
            return None
        try:
            return FileWriter(str(folder))
        except OSError as error:
            self._log.warning("tensorboard_not_written", error=str(error))
            return None


_TENSORBOARD_KEYS = (
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "skipped",
    "samples_per_s",
    "tokens_per_s",
    "steps_per_s",
    "peak_memory_bytes",
)


def _to_tensorboard(board: Any, record: Record) -> None:
    """One event per report or evaluation; single steps are in metrics.jsonl. An event a step would cost a fast loop a
    tenth of its speed, since writing one holds the interpreter lock."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    match record["kind"]:
        case "eval":
            values = dict(record["values"])
        case "report":
            values = {f"train/{key}": record[key] for key in _TENSORBOARD_KEYS if record.get(key) is not None}
            values |= {f"time/{name}": share for name, share in record["time_shares"].items()}
        case _:
            return
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    board.add_summary(summary, record["step"])
