"""How ranks on several nodes agree after which step to stop, with nothing that they have in common but messages.

At the beginning of a step every rank says whether somebody on its node wants to stop; the sum is there long before the
step's reduction is, so it costs no time of its own. It is read when the reduction is over and before the update: then
all ranks know, in the same step, and whoever finds instead that the others are gone has a state that can be kept.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from elastictrain.training.device import Place


class StopVote:
    """One rank's part in the votes.

    Args:
        place: this rank's.
        timeout_s: after which a vote fails that a rank has not cast; that of the other collectives.
    """

    def __init__(self, place: Place, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._on_device = place.device.type != "cpu"
        self._group: dist.ProcessGroup | None = None
        self._votes = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def begin(self, wants_to_stop: bool) -> None:
        """Casts this rank's vote; does not wait for the others'. Collective."""
        if self._on_device and self._group is None:
            # NCCL sums on the device only: to read the result would wait for all that the device has to do.
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._votes.fill_(int(wants_to_stop))
        self._work = dist.all_reduce(self._votes, group=self._group, async_op=True)

    def end(self) -> bool:
        """Whether anybody wants to stop. Waits for the votes that are missing; False if no vote was begun.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._work is None:
            return False
        work, self._work = self._work, None
        work.wait()
        return bool(self._votes.item())
