"""What can be asked of a running supervisor; the control socket serves it."""

from __future__ import annotations

from typing import Protocol


class Commands(Protocol):
    """Each returns once what was asked for is done, except where it says otherwise."""

    async def stop(self, reason: str) -> None:
        """Has the ranks finish their step and keep their state; then the supervisor ends. Returns at once. Asked
        again: without waiting for storage."""

    async def checkpoint(self, timeout_s: float) -> int:
        """Takes a snapshot now and waits until it is durable; returns its step.

        Raises:
            BusyError: no rank trains, so there is nothing new to keep.
            StorageError: it was not durable in time, or before the worker group ended.
        """

    async def drain(self) -> None:
        """Has the ranks finish their step, keep their state and end; the supervisor stays, for `resume`."""

    async def resume(self) -> None:
        """Starts the job again after a halt or a drain; forgets the failures so far. Returns at once.

        Raises:
            IllegalTransitionError: it is neither halted nor drained.
        """

    async def restart(self, reason: str) -> None:
        """Has the ranks keep their state and end, and starts a new worker group; one that is put off after a failure
        starts at once. Returns once it was told.

        Raises:
            IllegalTransitionError: there is no worker group.
        """
