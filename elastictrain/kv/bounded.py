"""Requests that end in time, whatever becomes of them.

A socket's time-outs bound neither the look-up of a name nor an answer that trickles. So each request has a thread of
its own, which is left behind if it does not come back in time: whoever asks has others to look after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

MAX_LEFT_BEHIND = 4
"""Requests to one member that have not come back; while there are so many, it is not asked again."""
THREAD_NAME = "etcd request"
_RETURN_S = 0.1
"""What a request gets beyond its time-out to end by itself, and say why."""

_T = TypeVar("_T")


class Bounded:
    """Requests to one member, none of which is waited for longer than its time."""

    def __init__(self) -> None:
        self._left_behind: list[threading.Thread] = []

    def carry_out(self, request: Callable[[], _T], timeout_s: float) -> _T:
        """What the request returns, or raises.

        Args:
            request: which ends by itself within `timeout_s`, as a rule.
            timeout_s: for it.

        Raises:
            TimeoutError: it has not come back, or too many before it have not.
        """
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= MAX_LEFT_BEHIND:
            raise TimeoutError
        returned: list[_T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                returned.append(request())
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                raised.append(error)

        thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        thread.start()
        thread.join(timeout_s + _RETURN_S)
        if raised:
            raise raised[0]
        if not returned:
            self._left_behind.append(thread)
            raise TimeoutError
        return returned[0]
