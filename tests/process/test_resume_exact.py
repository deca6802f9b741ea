"""Places where a resumed run could quietly go another way than one that nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.resume_helpers import assert_same_future, go

TASKS = "tests.process.fresh_tasks"


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        # The first reduction of a process went through other buckets than all later ones.
        ("Plain", 3),
        ("Plain", 4),
        # What collate drew depended on whether a sample had drawn before it, in this process.
        ("RandomCollate", 1),
        ("RandomCollate", 2),
        # Weights that a forward pass changes were copied beside it.
        ("Renormalised", 1),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str, world_size: int) -> None:
    section = {"global_batch_size": 8, "micro_batch_size": 2}
    task = f"{TASKS}:{name}"
    whole = go(tmp_path / "whole", world_size, train_section={**section, "max_steps": 9}, task=task)
    for last_step in (2, 3, 7, 9):
        run = go(tmp_path / "parts", world_size, train_section={**section, "max_steps": last_step}, task=task)
    assert_same_future(run, tmp_path / "parts", whole, tmp_path / "whole")


def test_collate_draws_differ_from_batch_to_batch(tmp_path: Path) -> None:
    """Left at the start of one sequence, every batch would get the same numbers."""
    run = go(tmp_path, train_section={"max_steps": 6}, task=f"{TASKS}:RandomCollate")
    assert len(set(run.losses)) == 6


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("OutsideModel", 78, "not of the model it was given"),
        ("BytesFingerprint", 78, "fingerprint of type bytes"),
        ("Unkeepable", 78, "set"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_the_start(tmp_path: Path, name: str, code: int, words: str) -> None:
    failed = go(tmp_path, task=f"{TASKS}:{name}", expect_success=False)
    assert failed.codes == [code]
    assert words in failed.errors[0].what
    assert failed.errors[0].step == 0
    assert failed.metrics() == []


def test_a_memory_tier_that_cannot_be_had_is_staged(tmp_path: Path) -> None:
    """A folder that does not exist once meant no snapshot at all, and exit code 0."""
    run = go(tmp_path, task=f"{TASKS}:Plain", checkpoint={"memory_path": str(tmp_path / "nowhere")})
    assert run.events("memory_tier_given_up")
    assert run.outcome is not None
    assert run.outcome["summary"]["snapshot"]["durable"] is True
