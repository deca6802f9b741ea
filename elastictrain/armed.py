"""What a drill and the ranks it drills share: files in `drill/` of a scratch state directory.

    drill/armed.json            faults that are to happen                       the drill, before the start
    drill/fired-<id>            one has happened: when (JSON)                   whoever it happens to, before it does
    drill/released-<id>         a rank that holds may go on                     the drill
    drill/supervisor            pid of the supervisor (text)                   the supervisor, as it starts
    drill/trace-<n>-<rank>      what the rank of incarnation n did (JSON lines) that rank

A state directory without the folder is that of a run that nobody drills. `fired-<id>` is created exclusively: of all
incarnations, and all processes of one, a fault happens to the first that gets there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastictrain.core.faults import REPEATING, Action, Point
from elastictrain.core.phases import Phase

DRILL_DIR = "drill"
CLOCK_JUMPS_S = {Action.CLOCK_BACK: -3600.0, Action.CLOCK_FORWARD: 3600.0}
"""How far the wall clock jumps in these drills."""
_ARMED_FILE = "armed.json"
_SUPERVISOR_FILE = "supervisor"


@dataclass(frozen=True, slots=True)
class ArmedFault:
    """A fault that is to happen.

    Args:
        id: of this one; a soak has several of a kind.
        action: what the rank does.
        rank: which.
        step: after how many committed steps.
        phase: when this phase begins.
        path: what the action needs besides: the memory cgroup of `OOM`; "" for none.
    """

    id: str
    action: Action
    rank: int
    step: int
    phase: Phase
    path: str = ""

    @property
    def repeats(self) -> bool:
        return self.action in REPEATING

    @property
    def point(self) -> Point:
        return Point(self.rank, self.step, self.phase)

    def as_plain(self) -> dict[str, Any]:
        return {**asdict(self), "action": self.action.value, "phase": self.phase.name}

    @classmethod
    def from_plain(cls, fields: dict[str, Any]) -> ArmedFault:
        return cls(**{**fields, "action": Action(fields["action"]), "phase": Phase[fields["phase"]]})


def boot_clock_s() -> float:
    """Seconds since the machine was booted: one clock for all processes of a host, which nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class DrillDir:
    """The folder, for both sides.

    Args:
        state_dir: the scratch state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / DRILL_DIR

    def arm(self, faults: list[ArmedFault]) -> None:
        """Lays the folder out; without faults, the run is only traced."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _ARMED_FILE).write_text(json.dumps([fault.as_plain() for fault in faults], indent=2) + "\n")

    def armed(self) -> list[ArmedFault] | None:
        """What is to happen; None where nobody drills."""
        try:
            text = (self.path / _ARMED_FILE).read_text()
        except FileNotFoundError:
            return None
        return [ArmedFault.from_plain(fields) for fields in json.loads(text)]

    def name_supervisor(self, pid: int) -> None:
        replacement = self.path / f"{_SUPERVISOR_FILE}.new"
        replacement.write_text(str(pid))
        replacement.replace(self.path / _SUPERVISOR_FILE)  # a rank may read it at any time

    def supervisor_pid(self) -> int:
        """Of the supervisor that was started last."""
        return int((self.path / _SUPERVISOR_FILE).read_text())

    # ---- a fault

    def claim(self, fault_id: str) -> bool:
        """True for the first who asks: the fault is the caller's to carry out."""
        try:
            fd = os.open(self._fired(fault_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(fd, "w") as file:
            json.dump({"at_s": boot_clock_s(), "pid": os.getpid()}, file)
        return True

    def fired_at_s(self, fault_id: str) -> float | None:
        """When it happened, of `boot_clock_s`; None while it has not."""
        try:
            return float(json.loads(self._fired(fault_id).read_text())["at_s"])
        except (FileNotFoundError, ValueError):  # or it is being written
            return None

    def release(self, fault_id: str) -> None:
        self._released(fault_id).touch()

    def is_released(self, fault_id: str) -> bool:
        return self._released(fault_id).exists()

    def _fired(self, fault_id: str) -> Path:
        return self.path / f"fired-{fault_id}"

    def _released(self, fault_id: str) -> Path:
        return self.path / f"released-{fault_id}"

    # ---- the trace

    def trace_path(self, incarnation: int, rank: int) -> Path:
        return self.path / f"trace-{incarnation:04d}-{rank}"

    def traces(self) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
        """(incarnation, rank, lines) of all ranks. The last line of a killed rank may be torn, and is left out."""
        for path in sorted(self.path.glob("trace-*")):
            _, incarnation, rank = path.name.split("-")
            lines = []
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    lines.append(json.loads(line))
            yield int(incarnation), int(rank), lines
