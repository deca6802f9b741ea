"""Processes of an incarnation that its agent has left behind: found, given the time to keep their state, and ended.

A process is ours if it is in the incarnation's control group (`cgroups`), where there is one, or if the incarnation's
folder stands in its environment (proc(5)): pids and names are anybody's. The persister is spared: it finishes the
snapshot it was asked for, within a time of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastictrain.cgroups import CGROUP_FILE
from elastictrain.cgroups import end as end_group
from elastictrain.heartbeat import Heartbeat, heartbeat_paths, read_heartbeat
from elastictrain.procs import all_pids, command_of, environment_of, read_living, read_stat, send_signal
from elastictrain.protocol import ENV_RUN_DIR, RUNS_DIR

LEAVE_S = 1.5
"""How long a rank that is stopped, or runs no Python code, may stay once its agent is gone."""
LOOK_S = 0.02
"""How often to look whether the last ranks have left."""
TICK_S = 2.0
"""A rank whose tick is older than this runs no Python code."""
_PERSISTER_MODULE = "elastictrain.checkpoint.persister"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that belongs to an incarnation.

    Args:
        pid: of the process.
        started_ticks: when it was started: with the pid, its identity.
    """

    pid: int
    started_ticks: int


def leftovers(folder: Path) -> Iterator[Leftover]:
    """The processes of the incarnations under a folder, or of the one that it is; not this one, nor persisters."""
    for pid in all_pids():
        stat = read_living(pid)
        if stat is None or pid == os.getpid():
            continue
        run_dir = environment_of(pid).get(ENV_RUN_DIR)
        if run_dir and Path(run_dir).is_relative_to(folder) and _PERSISTER_MODULE not in command_of(pid):
            yield Leftover(pid, stat.started_ticks)


def sweep(folder: Path) -> int:
    """Kills what is left of the incarnations under a folder, or of the one that it is.

    Returns:
        how many there were that could be found by their environment.
    """
    for name in [folder / CGROUP_FILE, *folder.glob(f"{RUNS_DIR}/*/{CGROUP_FILE}")]:
        end_group(name.parent)
    return sum(send_signal(found.pid, signal.SIGKILL, started_ticks=found.started_ticks) for found in leftovers(folder))


class Farewell:
    """The ranks of an incarnation that have lost their agent, until the last has gone.

    They have been told of its death, and each that can keeps its state and leaves, within `grace_s`: one in the middle
    of a long call, a forward pass say, hears of it when the call returns, and one that waits for that one, when its
    collective fails. Those that will not hear of it are ended after `LEAVE_S`.

    Args:
        run_dir: the incarnation.
        grace_s: the longest time for everybody.
        began_s: when their agent died, of `time.monotonic`.
    """

    def __init__(self, run_dir: Path, grace_s: float, began_s: float) -> None:
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._began_s = began_s

    def look(self, now_s: float) -> bool:
        """Ends whoever has had his time; call it again and again until all are gone.

        Returns:
            whether nobody is left.
        """
        passed_s = now_s - self._began_s
        waiting = False
        for path in heartbeat_paths(self._run_dir).values():
            beat = read_heartbeat(path)
            if beat is None or not self._is_there(beat.pid):
                continue
            if passed_s > self._time_s(beat, now_s):
                send_signal(beat.pid, signal.SIGKILL)
            waiting = True
        if not waiting:
            sweep(self._run_dir)
        return not waiting

    def _time_s(self, beat: Heartbeat, now_s: float) -> float:
        stat = read_stat(beat.pid)
        is_stuck = stat is None or stat.state in ("T", "t") or now_s - beat.tick_ns / 1e9 > TICK_S
        return min(self._grace_s, LEAVE_S) if is_stuck else self._grace_s

    def _is_there(self, pid: int) -> bool:
        if read_living(pid) is None:
            return False
        return environment_of(pid).get(ENV_RUN_DIR) == str(self._run_dir)
