"""When another node than rank zero's may give its memory back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastictrain.checkpoint import node_tiers
from elastictrain.checkpoint.memory_snapshot import OpenSnapshot
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.checkpoint.node_tiers import NodeTiers
from elastictrain.errors import StorageError
from elastictrain.logs import make_logger
from elastictrain.training import memory_return
from elastictrain.training.memory_return import is_stored
from tests.process.snapshot_payload import write

RUN_ID = "0badcafe"


class Stores:
    """What each look into the store finds: steps of the run, or None where it cannot be read."""

    def __init__(self, *looks: list[int] | None) -> None:
        self.looks = list(looks)

    def __call__(self) -> Any:
        return SimpleNamespace(snapshots=self._snapshots)

    def _snapshots(self) -> list[Any]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if look is None:
            raise StorageError("down")
        other = SimpleNamespace(run_id="0000000a", global_step=9)
        return [other, *(SimpleNamespace(run_id=RUN_ID, global_step=step) for step in look)]


@pytest.mark.parametrize(
    ("looks", "patience_s", "stored", "num_beats"),
    [
        ([[8, 9]], 60.0, True, 0),
        ([[7, 8], None, [8, 9]], 60.0, True, 2),
        ([[]], 60.0, False, 0),  # not the store of the others, as seen from here: nothing to wait for
        ([[7, 8]], 0.0, False, 0),
        ([None], 0.0, False, 0),
    ],
)
def test_it_is_when_the_store_itself_shows_the_last_step(
    monkeypatch: pytest.MonkeyPatch, looks: list[Any], patience_s: float, stored: bool, num_beats: int
) -> None:
    monkeypatch.setattr(memory_return, "LOOK_S", 0.0)
    beats: list[None] = []
    found = is_stored(Stores(*looks), RUN_ID, 9, patience_s=patience_s, beat=lambda: beats.append(None))
    assert (found, len(beats)) == (stored, num_beats)


def test_a_slot_that_somebody_still_reads_is_said_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tiers, "CLEAN_TIMEOUT_S", 0.0)
    busy, idle = MemoryTier(tmp_path / "busy"), MemoryTier(tmp_path / "idle")
    snapshot, _ = write(busy, 1), write(idle, 1)
    out = io.StringIO()
    with OpenSnapshot(snapshot.path, snapshot.name):
        NodeTiers((busy, idle), ()).give_back(make_logger(out).warning)
    (said,) = map(json.loads, out.getvalue().splitlines())
    assert (said["event"], said["where"]) == ("memory_not_given_back", str(busy.root))
    assert "still reads" in said["error"]
    assert (busy.root.exists(), idle.root.exists()) == (True, False)
    NodeTiers((busy,), ()).give_back(make_logger(out).warning)
    assert not busy.root.exists()
    assert len(out.getvalue().splitlines()) == 1
