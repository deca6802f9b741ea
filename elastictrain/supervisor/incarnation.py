"""One life of a job's worker group: its folder, its agent, its end.

Every restart is a new incarnation, with an agent, a run id and a rendezvous of its own: nothing is shared with the one
before that could be stale or used up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastictrain.core.policy import RankEnd
from elastictrain.procs import all_pids, command_of, environment_of, oom_kills, read_stat, send_signal
from elastictrain.protocol import (
    BOARD_FILE,
    ENV_RUN_DIR,
    EXITS_FILE,
    LOG_DIR,
    OUTCOME_FILE,
    RUNS_DIR,
    ErrorReport,
    StopBoard,
    read_error_reports,
)

LEAVE_POLL_S = 0.05
"""How often to look whether ranks without an agent have left: nothing else tells a process that is not their parent."""
_PERSISTER_MODULE = "elastictrain.checkpoint.persister"


class Incarnation:
    """One life of a job's worker group.

    Args:
        run_dir: its folder.
        number: from 1, never reused within a state directory.
        num_ranks: on this node.
    """

    def __init__(self, run_dir: Path, number: int, num_ranks: int = 1) -> None:
        self.run_dir = run_dir
        self.number = number
        self.num_ranks = num_ranks
        self.board = StopBoard(run_dir / BOARD_FILE)
        self._agent: subprocess.Popen[bytes] | None = None
        self._oom_kills_before = 0

    def command(self) -> list[str]:
        """What starts the agent."""
        return [sys.executable, "-m", "elastictrain.training.agent", str(self.run_dir)]

    def start(self) -> None:
        """Starts the agent. Call it on the main thread: the agent dies with the thread that started it (prctl(2))."""
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # Without a limit every rank of a node would take all its cores; a rank sets its own share of threads.
        env.setdefault("OMP_NUM_THREADS", "1")
        self._oom_kills_before = oom_kills()
        logs = self.run_dir / LOG_DIR
        logs.mkdir(exist_ok=True)
        with (logs / "agent.out").open("wb") as output:
            self._agent = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                # A Ctrl-C is for the supervisor, which has the ranks end in order.
                start_new_session=True,
            )

    @property
    def agent_pid(self) -> int:
        assert self._agent is not None
        return self._agent.pid

    @property
    def has_ended(self) -> bool:
        """The agent is gone."""
        return self._agent is not None and self._agent.poll() is not None

    @property
    def outcome(self) -> dict[str, Any] | None:
        """What rank zero wrote at its end; None if it did not get there."""
        try:
            outcome: dict[str, Any] = json.loads((self.run_dir / OUTCOME_FILE).read_text())
        except (OSError, ValueError):
            return None
        return outcome

    def reports(self) -> list[ErrorReport]:
        """What the ranks said about their end, first causes first."""
        return read_error_reports(self.run_dir)

    def bad_ends(self, killed: dict[int, str], torn_down: set[int], steps: dict[int, int]) -> list[RankEnd]:
        """Everything known about ranks that ended badly, and about the agent.

        Args:
            killed: ranks that were killed as hung, and why.
            torn_down: ranks that were killed since they did not end when another had failed.
            steps: where each rank stood last.
        """
        is_oom = oom_kills() > self._oom_kills_before
        reports = {report.rank: report for report in self.reports()}
        codes = self._exit_codes()
        ends = []
        for rank in sorted({*reports, *codes, *killed}):
            report = reports.get(rank)
            code = codes.get(rank)
            if report is not None:
                ends.append(
                    RankEnd(
                        rank=rank,
                        exit_code=report.exit_code,
                        kind=report.kind,
                        what=report.what,
                        hint=report.hint,
                        step=report.step,
                        secondary=report.secondary,
                        killed_as_hung=killed.get(rank, ""),
                    )
                )
            else:
                ends.append(
                    RankEnd(
                        rank=rank,
                        exit_code=code,
                        step=steps.get(rank, 0),
                        secondary=rank in torn_down and rank not in killed,
                        killed_as_hung=killed.get(rank, ""),
                        oom_killed=is_oom,
                    )
                )
        agent_code = self._agent.poll() if self._agent is not None else None
        if not ends and agent_code:
            ends.append(
                RankEnd(rank=None, exit_code=agent_code, step=max(steps.values(), default=0), oom_killed=is_oom)
            )
        return ends

    def _exit_codes(self) -> dict[int, int]:
        try:
            ends = json.loads((self.run_dir / EXITS_FILE).read_text())
            return {int(rank): int(end["exit_code"]) for rank, end in ends.items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def rank_pids(self) -> dict[int, int]:
        """The agent's children that are ranks, also those that have no heartbeat yet: rank to pid."""
        found = {}
        for pid in all_pids():
            stat = read_stat(pid)
            if stat is None or stat.parent_pid != self.agent_pid:
                continue
            rank = environment_of(pid).get("RANK", "")
            if rank.isdigit():
                found[int(rank)] = pid
        return found

    def is_rank(self, pid: int) -> bool:
        """Whether a process is a child of the agent: a pid alone may be somebody else's by now."""
        stat = read_stat(pid)
        return stat is not None and stat.parent_pid == self.agent_pid and stat.state not in ("Z", "X")

    def kill(self) -> None:
        """Ends the agent, and with it all ranks, at once."""
        if self._agent is not None and self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()

    def num_left(self) -> int:
        """How many of its processes live though the agent is gone."""
        return sum(1 for _ in _left_under(self.run_dir))

    def close(self) -> None:
        self.kill()
        sweep(self.run_dir)
        self.board.close()


def clear_away(state_dir: Path, grace_s: float) -> None:
    """Removes what a supervisor that was killed has left: processes that took no notice, pipes that nobody reads.

    Args:
        state_dir: the job's state directory.
        grace_s: how long ranks that keep their state, since they have lost their agent, may take to leave.
    """
    deadline_s = time.monotonic() + grace_s
    while any(_left_under(state_dir)) and time.monotonic() < deadline_s:
        time.sleep(LEAVE_POLL_S)
    sweep(state_dir)
    for pipe in (state_dir / RUNS_DIR).glob("*/output-*"):
        if pipe.is_fifo():
            pipe.unlink(missing_ok=True)


def sweep(folder: Path) -> int:
    """Kills what is left of the incarnations under a folder; a persister may finish its snapshot.

    Returns:
        how many there were.
    """
    return sum(send_signal(pid, 9, started_ticks=ticks) for pid, ticks in _left_under(folder))


def _left_under(folder: Path) -> Iterator[tuple[int, int]]:
    """Processes that carry the folder in their environment, (pid, start): they are ours to kill. No persister is."""
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is None or stat.state in ("Z", "X") or pid == os.getpid():
            continue
        run_dir = environment_of(pid).get(ENV_RUN_DIR)
        if run_dir and Path(run_dir).is_relative_to(folder) and _PERSISTER_MODULE not in command_of(pid):
            yield pid, stat.started_ticks
