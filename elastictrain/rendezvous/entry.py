"""The entry point in the group `torchrun.handlers`.

torch loads every entry point of the group whenever its elastic package is imported, whoever uses it. So this module
imports nothing of weight before a handler is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "elastictrain-etcd"
"""The value of `--rdzv-backend`, the name of the entry point, and what the handler says of itself."""


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch calls once, to learn how to make a handler."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from elastictrain.rendezvous.handler import create_handler

    return create_handler(parameters)
