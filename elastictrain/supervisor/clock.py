"""The present, as events have it."""

from __future__ import annotations

import time
from pathlib import Path

from elastictrain.core.events import Moment


def read_clock() -> Moment:
    """Now."""
    return Moment(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id())


def _boot_id() -> str:
    if not _boot:
        try:
            _boot.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        except OSError:
            _boot.append("")
    return _boot[0]


_boot: list[str] = []
