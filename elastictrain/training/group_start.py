"""The process group, joined while the task and its data are made.

Joining takes until every rank is there, and with NCCL until all their links are up; importing the task and making its
dataset takes whatever it takes. Neither needs the other. So a thread joins, while the main thread, on which signals and
the user's code belong, goes on.

A task may ask torch.distributed for its rank all the same, or have a collective in `train_data()`: whoever asks for
the group waits for it, and gets the answer that there would be without a thread. torch keeps the default group in one
object (`_world`, by its source an "experimental extension point"), which until then is one that waits.

Not done in a rank that has not imported torch._dynamo yet: torch looks into that module when it makes a group, and the
main thread might be half-way through importing it. Ranks that are forked have it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import distributed_c10d as c10d

_NEEDED_MODULE = "torch._dynamo"


class GroupStart:
    """Joins the process group on a thread.

    Args:
        join: does it.
    """

    def __init__(self, join: Callable[[], None]) -> None:
        self._join = join
        self._failure: BaseException | None = None
        self._has_said = False
        self._thread: threading.Thread | None = None

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def reported(self) -> BaseException | None:
        """What joining failed with, where somebody has been told; the user's code may have made another error of it."""
        return self._failure if self._has_said else None

    def begin(self) -> None:
        """From now on whoever asks for the default group waits for it.

        Raises:
            BaseException: whatever joining raised, where it was done at once.
        """
        if _NEEDED_MODULE not in sys.modules:
            self._join()
            return
        _AwaitedWorld.start = self
        c10d._world.__class__ = _AwaitedWorld
        self._thread = threading.Thread(target=self._run, name="process-group", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until this rank has joined. In the main thread, signals are handled meanwhile.

        Raises:
            BaseException: whatever joining raised.
        """
        if self._thread is None:
            return
        self._thread.join()
        c10d._world.__class__ = c10d._World
        if self._failure is not None:
            self._has_said = True
            raise self._failure

    def wait_if_other(self) -> None:
        """As `wait`, but for the thread that joins."""
        if threading.current_thread() is not self._thread:
            self.wait()

    def _run(self) -> None:
        try:
            self._join()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self._failure = error


class _AwaitedWorld(c10d._World):
    """torch's record of process groups, while the default one is being joined."""

    start: GroupStart
    """Of the process: it has one default group."""

    @property
    def default_pg(self) -> c10d.ProcessGroup | None:
        self.start.wait_if_other()
        return self._default_pg

    @default_pg.setter
    def default_pg(self, group: c10d.ProcessGroup | None) -> None:
        self._default_pg = group  # type: ignore[assignment]  # torch's first value is None


@contextmanager
def joining(join: Callable[[], None]) -> Iterator[GroupStart]:
    """Joins beside the body, or before it where that is not safe. The body waits before it needs the group; left by an
    exception, nobody waits: the process ends.

    Raises:
        BaseException: whatever joining raised, also where the body turned it into an error of its own.
    """
    start = GroupStart(join)
    start.begin()
    try:
        yield start
    except BaseException as error:
        if start.reported is not None and error is not start.reported:
            raise start.reported from error
        raise
