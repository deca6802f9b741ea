"""Small facts about processes that the operating system offers and Python does not."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends, however it ends (prctl(2), PR_SET_PDEATHSIG).

    Args:
        parent_pid: who the parent was when this process was started: if it is another one by now, the parent died
            before we could ask, and the signal is sent at once.
        signum: what to be sent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)
