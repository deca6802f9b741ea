"""The newest step known to be durable, noted in the state directory: `durable.json`.

A store that is down cannot say what it holds. Without a word kept elsewhere, a start that finds an older snapshot in
the memory tier would take it for the newest, and silently do again what was safe. So whoever learns of a durable
commit notes it here: the persister that made it, a start that has listed the store.

So is what a start was allowed to give up, which is allowed once: the run has gone another way since, and its later
worker groups neither ask again nor go over to what was given up should the store give it after all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from elastictrain.checkpoint.format import snapshot_name
from elastictrain.checkpoint.note_lock import alone_with
from elastictrain.errors import StateDirError
from elastictrain.protocol import DURABLE_FILE, write_json


@dataclass(frozen=True, slots=True, order=True)
class GivenUp:
    """A snapshot that a start has given up.

    Args:
        name: of the snapshot in the store, or its folder in the memory tier.
        manifest: digest of its manifest: done anew, its step has another. "" where that could not be read.
    """

    name: str
    manifest: str


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
        return self._read(run_id)[0]

    def given_up(self, run_id: str) -> frozenset[GivenUp]:
        """What this run has given up. Raises as `read`."""
        return self._read(run_id)[1]

    def learn(self, run_id: str, global_step: int) -> None:
        """A snapshot of this step is durable. Raises OSError if that cannot be noted."""
        with alone_with(self.path):
            known: int | None = None
            given_up: frozenset[GivenUp] = frozenset()
            with contextlib.suppress(StateDirError):
                known, given_up = self._read(run_id)
            name = snapshot_name(global_step, run_id)
            left = frozenset(one for one in given_up if one.name != name)
            if known is None or known < global_step or left != given_up:
                self._write(run_id, max(global_step, known or 0), left)

    def unlearn(self, run_id: str, noted: int, global_step: int) -> None:
        """What was noted is not there any more, or was given up: this older step counts. Unless there is news by now.

        Raises:
            OSError: that cannot be noted.
        """
        with alone_with(self.path):
            known, given_up = self._read(run_id)
            if known == noted:
                self._write(run_id, global_step, given_up)

    def give_up(self, run_id: str, snapshots: Iterable[GivenUp]) -> None:
        """What this run has given up, from now on. Raises OSError if that cannot be noted."""
        with alone_with(self.path):
            known, given_up = self._read(run_id)
            if (wanted := frozenset(snapshots)) != given_up:
                self._write(run_id, known, wanted)

    def _read(self, run_id: str) -> tuple[int | None, frozenset[GivenUp]]:
        try:
            fields = json.loads(self.path.read_text())
            if fields["run_id"] != run_id:
                return None, frozenset()
            step = fields["global_step"]
            given_up = frozenset(GivenUp(str(name), str(manifest)) for name, manifest in fields.get("given_up", []))
            return int(step) if step is not None else None, given_up
        except FileNotFoundError:
            return None, frozenset()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateDirError(
                f"{self.path} cannot be read: {error}",
                "It says what the store must have. Remove it if the store is sure to be reachable: it is made again.",
            ) from error

    def _write(self, run_id: str, global_step: int | None, given_up: frozenset[GivenUp]) -> None:
        fields: dict[str, Any] = {"run_id": run_id, "global_step": global_step}
        if given_up:
            fields["given_up"] = [list(astuple(one)) for one in sorted(given_up)]
        write_json(self.path, fields)
