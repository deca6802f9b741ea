"""What SIGTERM means to a rank, and the death of its agent, of which it is told by the same signal.

| sent by | known from | meaning |
|---|---|---|
| a user, a scheduler, the supervisor | the agent lives, no rank has failed | finish the step, keep the state durably |
| the agent, which stops the group | another rank of this node has failed | leave: no collective will end any more |
| a thread of its own | the parent is another one | leave: nobody looks after this rank any more |

To leave is to end by `LeftBehind`, as by any other exception: with a snapshot of the last committed step. An exception
out of a signal handler can get lost (in a destructor, say), and a signal just before a system call does not interrupt
it: so the signal is repeated until the rank leaves.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from elastictrain.core.phases import Phase
from elastictrain.heartbeat import heartbeat_paths, read_heartbeat
from elastictrain.procs import ALARM_S, outlive_parent, read_living
from elastictrain.protocol import error_path
from elastictrain.training.peers import hang_up
from elastictrain.training.session import Session

REPEAT_S = 0.2
"""How often a rank is told to leave until it does."""


class Termination:
    """Handles SIGTERM for one rank.

    Args:
        session: of this rank.
        run_dir: folder of the incarnation.
        parent_pid: who started this process.
        grace_s: after which this process is gone once its main thread has noticed that its parent is; unless somebody
            stopped it.
        has_joined: whether this rank is in its process group. Before, nobody can finish a step together: whoever is
            told to stop leaves.
        others: addresses of the other nodes.
    """

    def __init__(
        self,
        session: Session,
        run_dir: Path,
        parent_pid: int,
        grace_s: float,
        has_joined: Callable[[], bool],
        others: frozenset[str] = frozenset(),
    ) -> None:
        self._session = session
        self._run_dir = run_dir
        self._pid = os.getpid()
        self._parent_pid = parent_pid
        self._grace_s = grace_s
        self._has_joined = has_joined
        self._others = others
        self._left = threading.Event()
        self._is_repeated = False
        self._is_limited = False

    def begin(self) -> None:
        """From now on SIGTERM is handled, and the parent's death is one."""
        signal.signal(signal.SIGTERM, self._handle)
        outlive_parent(self._parent_pid, self._lose_parent)

    def end(self) -> None:
        """The rank is leaving already."""
        self._left.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getppid() != self._parent_pid:
            self._limit_time()

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._left.is_set():
            return  # in a loader process that has not got to setting its own handling; or the rank is leaving
        if os.getppid() != self._parent_pid:
            self._limit_time()
            self._session.leave("the agent of this rank ended")
        elif self._a_peer_failed():
            if not self._is_repeated:
                self._is_repeated = True
                threading.Thread(target=self._repeat, name="leave", daemon=True).start()
            self._session.leave("another rank of this node ended")
        elif not self._has_joined():
            self._session.leave("asked to stop before all ranks were there")
        elif self._session.phase is not Phase.EXIT:
            self._session.request_stop("SIGTERM")

    def _lose_parent(self) -> None:
        # Python code can run here. The main thread may wait for a rank in which it cannot: that one is ended by its
        # alarm, and only then can this one keep its state.
        signal.setitimer(signal.ITIMER_REAL, ALARM_S + self._grace_s)
        if self._others:
            hang_up(self._others)  # it may be a rank of a node that is not there any more
        self._repeat()

    def _repeat(self) -> None:
        """Has the main thread told to leave until it does."""
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        while not self._left.is_set():
            signal.pthread_kill(main_thread, signal.SIGTERM)
            self._left.wait(REPEAT_S)

    def _limit_time(self) -> None:
        """The kernel ends this process after the grace, also if Python code does not get to run any more."""
        if not self._is_limited:
            self._is_limited = True
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _a_peer_failed(self) -> bool:
        me = self._session.place.rank
        for rank, path in heartbeat_paths(self._run_dir).items():
            if rank == me:
                continue
            if error_path(self._run_dir, rank).exists():
                return True
            beat = read_heartbeat(path)
            if beat is None or beat.phase is Phase.EXIT:
                continue
            stat = read_living(beat.pid)
            if stat is None or stat.parent_pid != self._parent_pid:
                return True
        return False
