"""An agent and ranks without torch: real processes, heartbeats, pipes and signals, up in a fraction of a second.

    python -m tests.process.played RUN_DIR NUM_RANKS         the agent
    python -m tests.process.played RUN_DIR                   a rank, started by it

The ranks wait for each other as in a reduction, by their heartbeats, and rank zero keeps the last step. `plan.json` in
the state directory says how many steps there are and what happens where, each once: `[rank, step, what]`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elastictrain import cgroups
from elastictrain.core.phases import Phase
from elastictrain.heartbeat import heartbeat_path, my_heartbeat, read_heartbeat
from elastictrain.procs import die_with_parent
from elastictrain.protocol import (
    BOARD_FILE,
    ENV_RUN_DIR,
    EXITS_FILE,
    OUTCOME_FILE,
    ErrorReport,
    StopBoard,
    output_pipe,
    write_json,
)
from elastictrain.training import start

STEP_S = 0.01


def agent(run_dir: Path, num_ranks: int) -> int:
    die_with_parent(os.getppid())
    cgroups.enter(run_dir)
    ranks = []
    for rank in range(num_ranks):
        env = {**os.environ, ENV_RUN_DIR: str(run_dir), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        env["WORLD_SIZE"] = str(num_ranks)
        command = [sys.executable, "-m", "tests.process.played", str(run_dir)]
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.02)
        failed = {i: r for i, r in enumerate(ranks) if r.poll()}
        if failed:
            exits = {i: {"pid": r.pid, "exit_code": r.returncode} for i, r in failed.items()}
            write_json(run_dir / EXITS_FILE, exits)
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.wait()
            return 1
    return 0


def rank_main(run_dir: Path) -> int:
    die_with_parent(os.getppid())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start._print_into(output_pipe(run_dir, rank))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state = run_dir.parents[1]
    plan = json.loads((state / "plan.json").read_text())
    strike(plan, state, rank, -2)
    start.be_watched(run_dir)
    heart = my_heartbeat()
    assert heart is not None
    strike(plan, state, rank, -1)
    kept = state / "played-step"
    step = int(kept.read_text()) if kept.exists() else 0
    board = StopBoard(run_dir / BOARD_FILE)
    snapshots = board.snapshots_asked
    say("training_started", rank, samples=1000, global_batch_size=4, max_steps=plan["steps"], device="played")
    heart.begin_with(step)
    while step < plan["steps"]:
        heart.enter(Phase.READY, step, 0, step, 0)
        if board.asked and rank == 0 and board.last_step is None:
            board.stop_after(step + 1)
        if board.last_step is not None and step >= board.last_step:
            break
        heart.enter(Phase.FORWARD, step, 0)
        time.sleep(plan.get("step_s", STEP_S))
        strike(plan, state, rank, step)
        heart.enter(Phase.REDUCE, step, 0)
        wait_for_peers(run_dir, rank, world_size, step)
        heart.enter(Phase.COMMIT, step, 0)
        step += 1
        if rank == 0:
            kept.write_text(str(step))
            if board.snapshots_asked != snapshots and plan.get("keeps", True):
                snapshots = board.snapshots_asked
                say("snapshot_durable", rank, at_step=step)
    heart.enter(Phase.EXIT, step, 0)
    if rank == 0:
        complete = step >= plan["steps"]
        reason = "complete" if complete else "preempted"
        write_json(run_dir / OUTCOME_FILE, {"complete": complete, "reason": reason, "summary": {}})
    strike(plan, state, rank, -3)
    return 0


def say(event: str, rank: int, **fields: Any) -> None:
    print(json.dumps({"event": event, "rank": rank, **fields}), flush=True)


def wait_for_peers(run_dir: Path, rank: int, world_size: int, step: int) -> None:
    """As in a collective: until all are there, or one is gone."""
    for peer in range(world_size):
        while True:
            beat = read_heartbeat(heartbeat_path(run_dir, peer))
            if beat is not None and (beat.step, beat.phase) >= (step, Phase.REDUCE) and beat.first_step >= 0:
                break
            if beat is not None and not is_there(beat.pid):
                what = "a collective failed"
                ErrorReport(rank, "WorkerFailedError", what, "", 70, step, secondary=True).write(run_dir)
                os._exit(70)
            time.sleep(0.001)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def strike(plan: dict[str, Any], state: Path, rank: int, step: int) -> None:
    """Places: -2 before the heartbeat, -1 after it, -3 at the end, else a step."""
    for number, (who, when, what) in enumerate(plan["faults"]):
        mark = state / f"struck-{number}"
        if who != rank or when != step or (mark.exists() and not plan.get("always")):
            continue
        mark.touch()
        match what:
            case "sleep":
                time.sleep(10**6)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stop agent":
                os.kill(os.getppid(), signal.SIGSTOP)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "child":  # one that takes no notice of its parent's end
                subprocess.Popen(["sleep", "1000"], start_new_session=True)
            case "stranger":  # one that also says nowhere whose it is
                hidden = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
                (state / "stranger").write_text(str(hidden.pid))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.exit(agent(folder, int(sys.argv[2])) if len(sys.argv) > 2 else rank_main(folder))
