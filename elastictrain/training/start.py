"""The first thing a rank does: `python -m elastictrain.training.start`, run by the agent.

Whatever may hang from here on, the import of torch included, is watched: the rank has a heartbeat, its stacks can be
asked for, and what it prints arrives.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TextIO

from elastictrain.heartbeat import my_heartbeat
from elastictrain.procs import die_with_parent
from elastictrain.protocol import ENV_RUN_DIR, output_pipe, rank_log, stacks_path

_stacks: list[TextIO] = []
"""The open file that stacks go to; faulthandler keeps only its descriptor."""


def main() -> int:
    """Runs one rank; returns its exit code."""
    _listen_to_signals()
    die_with_parent(os.getppid())
    run_dir = Path(os.environ[ENV_RUN_DIR])
    _print_into(output_pipe(run_dir, int(os.environ.get("LOCAL_RANK", "0"))))
    be_watched(run_dir)
    from elastictrain.training import worker  # imports torch

    return worker.main()


def _listen_to_signals() -> None:
    """The agent ignores these, and what is ignored is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)


def run_exit_handlers() -> None:
    """What the interpreter does at its end: waits for threads that are not daemons, runs what was registered."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _print_into(pipe: Path) -> None:
    """Sends what this process prints to the supervisor; without a pipe it goes where the agent's goes."""
    with contextlib.suppress(OSError):
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # nobody reads: an error, rather than a wait
        os.set_blocking(fd, True)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)


class LastingOutput:
    """Standard error, for events; once nobody reads it any more, the rank's log.

    A supervisor that dies takes the reading end of the pipe with it. What the rank has to say from then on, as to what
    it has kept, must not fail for that.

    Args:
        run_dir: folder of the incarnation.
        local_rank: on this node.
    """

    def __init__(self, run_dir: Path, local_rank: int) -> None:
        self._log = rank_log(run_dir, local_rank)

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except OSError:
            self._print_into_log()  # what was written stays in the buffer until it gets through
            return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except OSError:
            self._print_into_log()

    def _print_into_log(self) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
            sys.stderr.flush()


def be_watched(run_dir: Path) -> None:
    """Makes the heartbeat, and has SIGUSR1 write all stacks into the incarnation's folder. Idempotent."""
    my_heartbeat()
    if not _stacks:
        _stacks.append(stacks_path(run_dir, int(os.environ.get("RANK", "0"))).open("a"))
        # From C, without the interpreter lock: it works in a rank that is blocked in a collective, or holds the lock.
        faulthandler.register(signal.SIGUSR1, file=_stacks[0], all_threads=True)


if __name__ == "__main__":
    exit_code = main()
    run_exit_handlers()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: threads of torch's that still run when the interpreter is torn down have aborted ranks that were
    # done ("terminate called without an active exception").
    os._exit(exit_code)
