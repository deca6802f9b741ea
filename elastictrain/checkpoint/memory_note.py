"""Where the memory tier of a job has been, noted in the state directory: `memory.json`.

`checkpoint.memory_path` may be changed between two starts. What the one before left in the old place can be the newest
snapshot there is, and nobody else would ever give its memory back. So each node notes where it is about to write; a
path, once noted, stays: another node of the same state directory may have left something there.
"""

from __future__ import annotations

import json
from pathlib import Path

from elastictrain.checkpoint.note_lock import alone_with
from elastictrain.errors import StateDirError
from elastictrain.protocol import MEMORY_FILE, write_json


class MemoryNote:
    """The note of one state directory. Any number of processes may write it.

    Args:
        state_dir: the folder.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / MEMORY_FILE

    def paths(self) -> list[Path]:
        """Every `checkpoint.memory_path` there has been, in order.

        Raises:
            StateDirError: the file is there and cannot be read.
        """
        try:
            return [Path(str(path)) for path in json.loads(self.path.read_text())["paths"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateDirError(
                f"{self.path} cannot be read: {error}",
                "It says where snapshots may be in memory. Remove it if checkpoint.memory_path was never changed.",
            ) from error

    def add(self, memory_path: Path) -> None:
        """Snapshots may be there from now on.

        Raises:
            StateDirError: the file is there and cannot be read.
            OSError: that cannot be noted.
        """
        if memory_path in self.paths():
            return
        with alone_with(self.path):
            known = self.paths()
            if memory_path not in known:
                write_json(self.path, {"paths": [str(path) for path in [*known, memory_path]]})
