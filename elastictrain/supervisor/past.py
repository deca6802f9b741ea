"""Finds out, at a supervisor's start, what became of the worker groups before: by the journal, and by the records that
the ranks of the last one have left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elastictrain.core.events import Moment
from elastictrain.core.past import RECALLED, OpenLife, Past, recall
from elastictrain.errors import StorageError
from elastictrain.heartbeat import heartbeat_paths, read_heartbeat
from elastictrain.protocol import JOURNAL_FILE, RUNS_DIR
from elastictrain.supervisor.clock import read_clock
from elastictrain.supervisor.journal_reader import JournalReader


def read_past(state_dir: Path, *, report_steps: int, clock: Callable[[], Moment] = read_clock) -> Past:
    """What is known of earlier worker groups; nothing where the journal cannot be read.

    Args:
        state_dir: of the job.
        report_steps: steps between two reports of progress.
        clock: the present.
    """
    try:
        events = JournalReader(state_dir / JOURNAL_FILE).read(kinds=RECALLED)
    except StorageError:
        return Past()  # the journal's writer finds out for itself, and says so
    now = clock()
    past = recall(events, now=now, now_s=time.monotonic(), report_steps=report_steps)
    left = past.left
    # The records were in the machine's memory: after a reboot they may be older than what they say.
    if left is None or not now.boot_id or left.began.boot_id != now.boot_id or left.incarnation is None:
        return past
    return replace(past, left=_by_records(left, state_dir / RUNS_DIR / f"{left.incarnation:04d}"))


def _by_records(left: OpenLife, run_dir: Path) -> OpenLife:
    """As the ranks' own records have it. Some may have come one step further before they heard of the end: that is
    chance, and must not make two failures of the same step look like two."""
    beats = [beat for path in heartbeat_paths(run_dir).values() if (beat := read_heartbeat(path)) is not None]
    if not beats:
        return left
    steps = [beat.step for beat in beats if beat.first_step >= 0]
    if not steps:
        return replace(left, began_step=False, uncertain_steps=0)
    return replace(left, step=min(steps), uncertain_steps=max(steps) - min(steps) + 1, began_step=True)
