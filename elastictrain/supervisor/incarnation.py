"""One life of a job's worker group: its folder, its agent, its end.

Every restart is a new incarnation, with an agent, a run id and a rendezvous of its own: nothing is shared with the one
before that could be stale or used up.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastictrain.core.policy import RankEnd
from elastictrain.folders import numbered_folders
from elastictrain.leftovers import LOOK_S, Farewell, sweep
from elastictrain.procs import all_pids, environment_of, oom_kills, read_living, read_stat
from elastictrain.protocol import (
    BOARD_FILE,
    EXITS_FILE,
    OUTCOME_FILE,
    RUNS_DIR,
    ErrorReport,
    Group,
    StopBoard,
    read_error_reports,
)
from elastictrain.supervisor.launcher import AgentProcess, Launcher


class Incarnation:
    """One life of a job's worker group.

    Args:
        run_dir: its folder.
        number: from 1, never reused within a state directory.
        num_ranks: on this node.
        group: over all nodes; default: there is no other node.
        listener: where the agent serves the store of a worker group of several nodes.
    """

    def __init__(
        self,
        run_dir: Path,
        number: int,
        num_ranks: int = 1,
        group: Group | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.number = number
        self.num_ranks = num_ranks
        self.group = group if group is not None else Group(f"{number}", world_size=num_ranks)
        self._listener = listener
        self.board = StopBoard(run_dir / BOARD_FILE)
        self._agent: AgentProcess | None = None
        self._launcher: Launcher | None = None
        self._oom_kills_before = 0

    def command(self) -> list[str] | None:
        """What starts the agent; None for the usual one."""
        return None

    def start(self, launcher: Launcher, on_change: Callable[[], None]) -> None:
        """Has the agent started.

        Args:
            launcher: starts it.
            on_change: called when it has started, and when it has ended.
        """
        self._oom_kills_before = oom_kills()
        self._launcher = launcher
        self._agent = launcher.launch(self.run_dir, self.command(), on_change, self._listener)
        self._give_up_listener()  # the agent has it

    def _give_up_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @property
    def agent_pid(self) -> int | None:
        """None until the agent is there."""
        return self._agent.pid if self._agent is not None else None

    @property
    def has_ended(self) -> bool:
        """The agent is gone."""
        return self._agent is not None and self._agent.has_ended

    @property
    def lost_agent(self) -> bool:
        """The agent did not end by itself: its ranks have been told by the kernel."""
        return self.has_ended and self._agent is not None and (self._agent.exit_code or 0) < 0

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
        agent = self._agent
        if not ends and agent is not None and (agent.exit_code or agent.error):
            ends.append(
                RankEnd(
                    rank=None,
                    exit_code=agent.exit_code,
                    what=agent.error,
                    step=max(steps.values(), default=0),
                    oom_killed=is_oom,
                )
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
        found: dict[int, int] = {}
        if self.agent_pid is None:
            return found
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
        stat = read_living(pid)
        return stat is not None and stat.parent_pid == self.agent_pid

    def kill(self) -> None:
        """Ends the agent and all ranks, at once; where no agent has come up, what was to start it."""
        if self._agent is not None and self._agent.pid is None and not self._agent.has_ended:
            assert self._launcher is not None
            self._launcher.kill()
        elif self._agent is not None:
            self._agent.kill()
        sweep(self.run_dir)

    def lose_agent(self) -> None:
        """Ends the agent alone: the kernel tells its ranks, which keep their state and go."""
        if self._agent is not None:
            self._agent.kill()

    def close(self) -> None:
        self.kill()
        self._give_up_listener()
        self.board.close()


async def see_off(run_dir: Path, grace_s: float) -> None:
    """Waits until the ranks of an incarnation that has lost its agent have kept their state and gone.

    Args:
        run_dir: its folder.
        grace_s: how long a rank may take to keep its state.
    """
    farewell = Farewell(run_dir, grace_s, time.monotonic())
    while not farewell.look(time.monotonic()):
        await asyncio.sleep(LOOK_S)


async def clear_away(state_dir: Path, *, grace_s: float) -> None:
    """Sees to what a supervisor that was killed has left: ranks that keep their state, processes that take no notice,
    pipes that nobody reads.

    Args:
        state_dir: of the job.
        grace_s: how long a rank may take to keep its state.
    """
    runs = numbered_folders(state_dir / RUNS_DIR)
    if runs:
        await see_off(runs[-1], grace_s)
    sweep(state_dir)
    for pipe in (state_dir / RUNS_DIR).glob("*/output-*"):
        if pipe.is_fifo():
            pipe.unlink(missing_ok=True)
