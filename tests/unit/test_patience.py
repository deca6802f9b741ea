"""How long a store that fails is tried."""

from __future__ import annotations

import time

import pytest

from elastictrain.checkpoint import patience
from elastictrain.checkpoint.patience import patiently
from elastictrain.errors import SnapshotDamagedError, StorageError

PATIENCE_S = 0.01
PAUSE_S = 0.02
"""Longer than the patience: after one pause there is none left."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", PAUSE_S)


class Store:
    """Something that fails so and so often.

    Args:
        num_failures: how often it fails before it answers.
        works_s: for how long each try works well before it fails.
    """

    def __init__(self, num_failures: int, works_s: float = 0.0) -> None:
        self.num_failures = num_failures
        self.num_tries = 0
        self._works_s = works_s

    def read(self) -> str:
        self.num_tries += 1
        until_s = time.monotonic() + self._works_s
        while time.monotonic() < until_s:
            time.sleep(0.001)
        if self.num_tries <= self.num_failures:
            raise StorageError(f"down, try {self.num_tries}")
        return "read"


def test_good_work_before_the_first_failure_costs_no_patience() -> None:
    """A download that breaks off after more than all of the patience is tried again."""
    store = Store(num_failures=1, works_s=3 * PATIENCE_S)
    waits: list[tuple[str, float]] = []
    assert patiently(store.read, patience_s=PATIENCE_S, on_wait=lambda *told: waits.append(told)) == "read"
    assert waits == [("down, try 1", PAUSE_S)]


def test_what_goes_on_failing_is_given_up() -> None:
    store = Store(num_failures=1000)
    with pytest.raises(StorageError, match=r"down, try 2 \(tried for 0\.01 s\)") as caught:
        patiently(store.read, patience_s=PATIENCE_S, on_wait=lambda _error, _pause_s: None)
    assert store.num_tries == 2
    assert "storage_timeout_s" in caught.value.hint


def test_without_patience_it_is_tried_once() -> None:
    store = Store(num_failures=1)
    with pytest.raises(StorageError, match="try 1"):
        patiently(store.read, patience_s=0.0, on_wait=lambda _error, _pause_s: None)


def test_only_a_failing_store_is_tried_again() -> None:
    def read() -> None:
        raise SnapshotDamagedError("damaged")

    with pytest.raises(SnapshotDamagedError, match=r"^damaged$"):
        patiently(read, patience_s=60.0, on_wait=lambda *_: pytest.fail("waited"))
