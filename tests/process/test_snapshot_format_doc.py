"""The example in docs/snapshot-format.md reads a snapshot, as a stranger would."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from elastictrain.checkpoint.memory_snapshot import OpenSnapshot
from tests.process.snapshot_payload import arrays, store_of, tier_of, trainer, write

DOC = Path(__file__).parents[2] / "docs" / "snapshot-format.md"


def test_the_documented_way_to_read_a_snapshot_works(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    tier = tier_of(tmp_path)
    snapshot = write(tier, 1200, run_id="3f9a01bc")
    with OpenSnapshot(snapshot.path, snapshot.name) as source:
        store_of(tmp_path).put(source)
    tier.close()
    monkeypatch.chdir(tmp_path / "snapshots")
    code = re.search(r"```python\n(.*?)```", DOC.read_text(), re.S)
    assert code is not None
    names: dict = {}
    exec(code[1], names)
    np.testing.assert_array_equal(names["weights"]["weight"], arrays(1200)["model.safetensors"]["weight"])
    assert names["counters"] == trainer(1200)["counters"]
