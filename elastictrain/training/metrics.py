"""Where a run's numbers go: metrics.jsonl always, TensorBoard where installed.

Files are written by a thread of their own: a slow or full disk costs lines, never steps. One JSON object a line; its
`kind` is `step`, `report`, `eval` or `summary`; `docs/metrics.md` lists the keys. Numbers that JSON does not know are
strings: "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastictrain.logs import Logger, finite

Record = Mapping[str, Any]


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
    """

    def __init__(self, path: Path, tensorboard_dir: Path | None, log: Logger) -> None:
        self._path = path
        self._tensorboard_dir = tensorboard_dir
        self._log = log
        self._queue: queue.SimpleQueue[list[Record] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics-writer", daemon=True)
        self._thread.start()

    def write(self, records: list[Record]) -> None:
        """Queues records; returns at once."""
        self._queue.put(records)

    def close(self) -> None:
        """Writes what is queued and closes the files."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        board: Any = None
        failed = False
        if self._tensorboard_dir is not None:
            board = self._open_tensorboard(self._tensorboard_dir)
        while (records := self._queue.get()) is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.writelines(map(json_line, records))
                failed = False
            except OSError as error:
                if not failed:
                    self._log.warning("metrics_not_written", path=str(self._path), error=str(error))
                failed = True
            if board is not None:
                try:
                    for record in records:
                        _to_tensorboard(board, record)
                    board.flush()
                except Exception as error:  # noqa: BLE001 - metrics must never stop a run
                    self._log.warning("tensorboard_not_written", error=f"{type(error).__name__}: {error}")
                    board = None
        if board is not None:
            board.close()

    def _open_tensorboard(self, folder: Path) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        try:
            return SummaryWriter(log_dir=str(folder))
        except OSError as error:
            self._log.warning("tensorboard_not_written", error=str(error))
            return None


_TENSORBOARD_KEYS = {
    "step": ("loss", "grad_norm", "lr", "loss_scale"),
    "report": ("samples_per_s", "tokens_per_s", "steps_per_s", "peak_memory_bytes", "skipped"),
}


def _to_tensorboard(board: Any, record: Record) -> None:
    step = record["step"]
    if record["kind"] == "eval":
        for name, value in record["values"].items():
            board.add_scalar(name, value, step)
        return
    for key in _TENSORBOARD_KEYS.get(record["kind"], ()):
        if record.get(key) is not None:
            board.add_scalar(f"train/{key}", record[key], step)
    for name, share in record.get("time_shares", {}).items():
        board.add_scalar(f"time/{name}", share, step)
