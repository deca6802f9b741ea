"""The persister: a process that makes snapshots durable while training goes on, and after training has died.

    python -m elastictrain.checkpoint.persister

Standard input, a JSON object a line: first `{"configure": {...}}` (`PersisterSettings`; secrets come this way, not on
the command line), then any number of `{"persist": {"path": ..., "name": ...}}`. End of file means that no more will
come: what was asked for is finished, within `grace_s`. Standard output: `Report`s, a JSON object a line.

SIGTERM, SIGINT and SIGHUP end nothing: whoever stops the job sends them to everybody, and the last snapshot is wanted
most then. But after a SIGTERM, once nobody waits for it any more, the persister does not stand in the way of the next
start for long: what is not durable by then is in memory still. A store that moves nothing for `storage_timeout_s` ends
the process; the client starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict

import psutil

from elastictrain.checkpoint.persist_loop import PersisterSettings, PersistLoop, Report, Request

STALLED_EXIT_CODE = 75  # EX_TEMPFAIL
NICENESS = 10
"""A tenth of the weight of training where there are no idle cores: little, but never nothing. (SCHED_IDLE would be
nothing on a machine that computes without a pause, and without privileges there is no way back from it.)"""
IO_PRIORITY = 7
"""The lowest of the best-effort class: who reads training data from the same disk comes first. Not the idle class,
which a busy disk would starve."""

TOLD_GRACE_S = 3.0
"""How long to go on after the training process is gone, where somebody has told all processes to end."""

_output = threading.Lock()
_told_to_end = threading.Event()


def _print_report(report: Report) -> None:
    """One line; once nobody listens any more, nothing."""
    with _output, contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
        sys.stdout.flush()


def _leave(code: int) -> None:
    """Ends the process from any thread, whatever the others are stuck in."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _watch(loop: PersistLoop, timeout_s: float) -> None:
    while True:
        time.sleep(min(0.2, timeout_s / 4))
        stalled_s = loop.stalled_s(time.monotonic())
        if stalled_s > timeout_s:
            _print_report(Report("stalled", fields={"seconds": round(stalled_s, 1)}))
            _leave(STALLED_EXIT_CODE)


def _read_requests(loop: PersistLoop, grace_s: float) -> None:
    for line in sys.stdin:
        loop.submit(Request(**json.loads(line)["persist"]))
    loop.finish()
    if _told_to_end.wait(grace_s):
        grace_s = min(grace_s, TOLD_GRACE_S)
        time.sleep(grace_s)
    _print_report(Report("abandoned", fields={"grace_s": grace_s}))
    _leave(STALLED_EXIT_CODE)


def _give_way() -> None:
    """Training comes first: by weight, and at wake-ups, where a batch task preempts nobody (sched(7))."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a sandbox may forbid either
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, IO_PRIORITY)


def main() -> None:
    """Runs until standard input ends and the work is done."""
    signal.signal(signal.SIGTERM, lambda _signum, _frame: _told_to_end.set())
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    first = sys.stdin.readline()
    if not first:
        return
    _give_way()
    settings = PersisterSettings(**json.loads(first)["configure"])
    loop = PersistLoop(settings, _print_report)
    for target, argument in ((_read_requests, settings.grace_s), (_watch, settings.storage_timeout_s)):
        threading.Thread(target=target, args=(loop, argument), daemon=True).start()
    loop.run()
    # A client's own threads (fsspec's event loop) must not keep a finished persister alive.
    _leave(0)


if __name__ == "__main__":
    main()
