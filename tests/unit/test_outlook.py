"""What a node makes of the others' records."""

from __future__ import annotations

from dataclasses import replace

from elastictrain.core.membership import Lineage, Member, Node, Plan, Standing
from elastictrain.supervisor.outlook import Outlook
from elastictrain.supervisor.shared_keys import Record

LINEAGE = Lineage("0" * 8, 8)
ME, OTHER = (Node(name, name, name, 1, Standing.READY, 1, 0, LINEAGE, {}) for name in "ab")
PLAN = Plan(1, "job-1-x", (Member("b", "b", "b", 1, 0),), LINEAGE)


def test_a_record_whose_lease_has_ended_is_no_sign_of_life() -> None:
    """A member has been silent since its record stood still, not since that was taken away."""
    seen = Outlook(timeout_s=3.0, gap_s=2.0)
    record = Record("life", 7, OTHER, (), {})
    for now_s in range(31):
        seen.take_in(ME, {"b": record}, PLAN, float(now_s))
    assert seen.living == [ME]
    for now_s in range(31, 41):
        seen.take_in(ME, {}, PLAN, float(now_s))
    assert seen.unheard_s(PLAN, 40.0) == 40.0
    seen.take_in(ME, {"b": replace(record, turn=8)}, PLAN, 41.0)
    assert seen.living == [ME, OTHER]
    assert seen.unheard_s(replace(PLAN, attempt="job-2-y"), 41.0) == 41.0
