"""`elastictrain drill` on whole jobs: every fault really happens, to real processes."""

from __future__ import annotations

from tests.drill.drills import assert_resumed, drill


def test_a_killed_rank(tmp_path):
    drilled = drill(tmp_path, "kill-rank")
    row = drilled.rows["kill-rank"]
    assert_resumed(row)
    assert row["injected_at"] == "rank 1, after step 9, forward"
    assert drilled.finished.code == (0 if row["verdict"] == "holds" else 1)
    assert (tmp_path / "scratch" / "drill.md").read_text().startswith("# Drill of job")
