"""Patience with a store: what fails for want of it is tried again, with growing pauses, for a limited time.

For what somebody waits for: a start, a restore. (What nobody waits for, the persister tries for as long as it takes.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential_jitter

from elastictrain.errors import StorageError

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0

T = TypeVar("T")
OnWait = Callable[[str, float], None]
"""Called before each pause with (what went wrong, seconds of the pause)."""


def patiently(act: Callable[[], T], *, patience_s: float, on_wait: OnWait) -> T:
    """Does `act`, again and again while the store fails.

    Args:
        act: what to do; only a StorageError of it is tried again.
        patience_s: for how long it may fail, counted from its first failure: what the first try did well until then,
            such as a long download, costs no patience. The last try may end later.
        on_wait: see there.

    Raises:
        StorageError: it failed to the end; says for how long it was tried.
    """

    def tell(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        pause_s = state.next_action.sleep if state.next_action is not None else 0.0
        on_wait(error.what if isinstance(error, StorageError) else str(error), pause_s)

    first_failed_s: float | None = None

    def is_over(state: RetryCallState) -> bool:
        # tenacity's own stop_after_delay counts from the start of the first try.
        nonlocal first_failed_s
        failed_s = state.outcome_timestamp
        assert failed_s is not None  # it is set with the outcome
        if first_failed_s is None:
            first_failed_s = failed_s
        return failed_s - first_failed_s >= patience_s

    retrying = Retrying(
        retry=retry_if_exception_type(StorageError),
        stop=is_over,
        wait=wait_exponential_jitter(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
        before_sleep=tell,
        reraise=True,
    )
    try:
        return retrying(act)
    except StorageError as error:
        raise type(error)(
            f"{error.what} (tried for {patience_s:g} s)",
            error.hint or "Start again once the store is back; checkpoint.storage_timeout_s is how long it is tried.",
        ) from error
