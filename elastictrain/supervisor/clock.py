"""The present, as events have it."""

from __future__ import annotations

import time
from functools import cache

from elastictrain.core.events import Moment
from elastictrain.procs import boot_id


def read_clock() -> Moment:
    """Now."""
    return Moment(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id())


_boot_id = cache(boot_id)
