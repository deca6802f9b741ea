"""`elastictrain run`, as a drill starts it:
`python -m elastictrain.drill.launch PARENT_PID STATE_DIR JOB MEMORY_PATH ARGUMENTS...`.

The same program, which ends when the drill does, however that ends, and then gives back the memory that the drill
cannot give back any more; and whose wall clock jumps once a drill of that kind has happened to a rank.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from elastictrain.armed import CLOCK_JUMPS_S, DrillDir
from elastictrain.checkpoint.memory_tier import MemoryTier
from elastictrain.errors import ElasticTrainError
from elastictrain.procs import die_with_parent

CLEAR_TIMEOUT_S = 20.0
"""How long to wait for killed processes to be gone, and for readers of the memory tier."""


def main(parent_pid: int, state_dir: Path, job: str, memory_path: Path, arguments: list[str]) -> None:
    """Becomes `elastictrain ARGUMENTS`."""
    die_with_parent(parent_pid, signal.SIGTERM)
    folder = DrillDir(state_dir)
    folder.name_supervisor(os.getpid())
    for fault in folder.armed() or []:
        if fault.action in CLOCK_JUMPS_S:
            _shift_clock_after(folder, fault.id, CLOCK_JUMPS_S[fault.action])
    sys.argv = ["elastictrain", *arguments]
    try:
        runpy.run_module("elastictrain.cli.main", run_name="__main__", alter_sys=True)
    finally:
        if os.getppid() != parent_pid:
            with contextlib.suppress(OSError, ElasticTrainError):
                MemoryTier.for_job(memory_path, job=job, state_dir=state_dir).clean(CLEAR_TIMEOUT_S)


def _shift_clock_after(folder: DrillDir, fault_id: str, jump_s: float) -> None:
    """This process's time.time(), from the moment at which a rank claims the fault."""
    real, has_jumped = time.time, False

    def shifted() -> float:
        nonlocal has_jumped
        has_jumped = has_jumped or folder.fired_at_s(fault_id) is not None
        return real() + (jump_s if has_jumped else 0.0)

    time.time = shifted


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
