"""Completes a snapshot in a slot of the memory tier, or gives it up. `memory_tier` says which slot may be written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from elastictrain.checkpoint import faults, safefs
from elastictrain.checkpoint.format import MANIFEST_FILE, TRAINER_FILE, FileEntry, Layout, Manifest, digest
from elastictrain.checkpoint.memory_slot import Slot, no_room
from elastictrain.checkpoint.memory_snapshot import MemorySnapshot


class SlotFiles:
    """The mapped files of a slot.

    `buffers` maps each file's name to all its bytes; tensor `name` belongs at `layouts[file].offsets[name]`. A buffer
    is the same object as at an earlier snapshot of the same slot and layout, so views onto it can be kept.

    Args:
        slot: whose files.
    """

    def __init__(self, slot: Slot) -> None:
        self.index = int(slot.path.name.removeprefix("slot-"))
        self.layouts: dict[str, Layout] = dict(slot.layouts)
        self.buffers: dict[str, memoryview] = dict(slot.views)


class SlotWriter(SlotFiles):
    """A slot that is being filled: its files have their headers already. Ends with `commit` or `abort`; forgetting both
    leaves the slot locked.

    Args:
        slot: locked exclusively, its files made and mapped; unlocked at the end.
        on_commit: called with the snapshot once it exists.
    """

    def __init__(self, slot: Slot, on_commit: Callable[[MemorySnapshot], None]) -> None:
        super().__init__(slot)
        self._slot = slot
        self._on_commit = on_commit
        self._ended = False

    def commit(
        self,
        *,
        job: str,
        run_id: str,
        global_step: int,
        versions: Mapping[str, str],
        trainer: Mapping[str, Any],
    ) -> MemorySnapshot:
        """Completes the snapshot: from its return on it exists.

        Args:
            job: name of the job.
            run_id: eight hex digits.
            global_step: windows consumed.
            versions: of elastictrain, torch, python.
            trainer: content of trainer.json, plain JSON.

        Raises:
            MemoryTierError: no room for the small files.
        """
        slot = self._slot
        try:
            faults.point("memory.filled")
            files = {}
            for name, view in self.buffers.items():
                files[name] = FileEntry(len(view), digest(view))
            faults.point("memory.hashed")
            text = (json.dumps(trainer, indent=1, allow_nan=False) + "\n").encode()
            files[TRAINER_FILE] = FileEntry(len(text), digest(text))
            manifest = Manifest(
                job=job,
                run_id=run_id,
                global_step=global_step,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                versions=dict(versions),
                files=dict(sorted(files.items())),
            )
            safefs.replace_file(slot.folder_fd, TRAINER_FILE, slot.path, text)
            faults.point("memory.trainer")
            # A manifest that could not be read again would make the snapshot worthless: better to fail here.
            Manifest.decode(manifest.encoded)
            faults.point("memory.manifest")
            safefs.replace_file(slot.folder_fd, MANIFEST_FILE, slot.path, manifest.encoded)
            faults.point("memory.committed")
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise no_room(error, slot.path) from error
            raise
        self._ended = True
        slot.unlock()
        snapshot = MemorySnapshot(slot.path, manifest)
        self._on_commit(snapshot)
        return snapshot

    def abort(self) -> None:
        """Gives the slot up: it holds nothing. Harmless after `commit`."""
        if not self._ended:
            self._ended = True
            self._slot.give_up()
