"""What is trained, and with what: the parts that belong together from the first step to the last."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastictrain.training.ema import Ema
from elastictrain.training.precision import Precision
from elastictrain.training.replica import Replica
from elastictrain.training.update import Updater


@dataclass(frozen=True, slots=True)
class Trainee:
    """What is trained, and with what.

    Args:
        replica: the model on this rank.
        optimizer: over its parameters.
        updater: the end of a step.
        precision: autocast and loss scale.
        scheduler: advanced once per applied update; None for a constant learning rate.
        ema: averaged weights; None for none.
        channels_last: memory format of 4-d inputs.
    """

    replica: Replica
    optimizer: Optimizer
    updater: Updater
    precision: Precision
    scheduler: LRScheduler | None
    ema: Ema | None
    channels_last: bool
