"""The newest step known to be durable, noted in the state directory: `durable.json`.

A store that is down cannot say what it holds. Without a word kept elsewhere, a start that finds an older snapshot in
the memory tier would take it for the newest, and silently do again what was safe. So whoever learns of a durable
commit notes it here: the persister that made it, a start that has listed the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from elastictrain.errors import StateDirError
from elastictrain.protocol import DURABLE_FILE, write_json


class DurableNote:
    """The note of one state directory. Any number of processes may write it.

    Args:
        state_dir: the folder.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / DURABLE_FILE

    def read(self, run_id: str) -> int | None:
        """The newest step of this run that is known to be durable; None if none is.

        Raises:
            StateDirError: the file is there and cannot be read.
        """
        try:
            fields = json.loads(self.path.read_text())
            return int(fields["global_step"]) if fields["run_id"] == run_id else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateDirError(
                f"{self.path} cannot be read: {error}",
                "It says what the store must have. Remove it if the store is sure to be reachable: it is made again.",
            ) from error

    def learn(self, run_id: str, global_step: int) -> None:
        """A snapshot of this step is durable. Raises OSError if that cannot be noted."""
        with self._alone():
            known: int | None = None
            with contextlib.suppress(StateDirError):
                known = self.read(run_id)
            if known is None or known < global_step:
                self._write(run_id, global_step)

    def unlearn(self, run_id: str, noted: int, global_step: int) -> None:
        """What was noted is not there any more, or was given up: this older step counts. Unless there is news by now.

        Raises:
            OSError: that cannot be noted.
        """
        with self._alone():
            if self.read(run_id) == noted:
                self._write(run_id, global_step)

    def _write(self, run_id: str, global_step: int) -> None:
        write_json(self.path, {"run_id": run_id, "global_step": global_step})

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
