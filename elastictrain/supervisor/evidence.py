"""What is kept of a hang before anybody is killed, and what the ranks' stacks say about who waits for whom.

    incidents/0001/incident.json       what was judged, and why
    incidents/0001/stacks-<rank>.txt   Python stacks of all threads, loader processes included
    incidents/0001/process-<rank>.txt  /proc: status, where in the kernel, open files' count
    incidents/0001/last-lines-<n>.txt  the last lines that local rank n printed
    incidents/0001/nccl-*              NCCL's flight records, where there are any

Stacks come from faulthandler: from C and without the interpreter lock, so also from a rank that is blocked in a
collective or holds the lock. Only a process that has a handler for the signal is sent it: it would end the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastictrain.core.phases import Phase
from elastictrain.folders import last_number
from elastictrain.procs import catches, children_of, read_stat, send_signal
from elastictrain.protocol import INCIDENT_FILE, INCIDENTS_DIR, stacks_path, write_json

STACKS_WAIT_S = 0.4
"""A dump takes a millisecond; a busy machine may need a while to get to it."""
LOOK_INTERVAL_S = 0.02
NUM_TOP_FRAMES = 3

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str


def parse_stacks(text: str) -> dict[int, list[Frame]]:
    """faulthandler's dump: the frames of every thread by its ident, innermost first. The last dump counts."""
    threads: dict[int, list[Frame]] = {}
    current: list[Frame] | None = None
    for line in text.splitlines():
        if match := _THREAD.match(line):
            current = threads[int(match[1], 16)] = []
        elif current is not None and (match := _FRAME.match(line)):
            current.append(Frame(match[1], int(match[2]), match[3]))
    return threads


def is_in_collective(stack: Iterable[Frame], phase: Phase | None) -> bool | None:
    """Whether the innermost frames of a rank's main thread are those of a collective.

    In `REDUCE` the wait is inside C++, in the backward pass, so the stack says nothing and the phase must.

    Returns:
        None if the stack does not tell.
    """
    top = list(stack)[:NUM_TOP_FRAMES]
    if not top:
        return None
    if any("/torch/distributed/" in frame.file for frame in top):
        return True
    if top[0].file.endswith("/torch/nn/parallel/distributed.py"):
        return True  # DistributedDataParallel brings buffers together before the forward pass
    return None if phase is Phase.REDUCE else False


@dataclass(frozen=True, slots=True)
class Stacks:
    """What a rank's stacks say.

    Args:
        text: the dump; "" if the rank did not answer.
        main: the main thread's frames, innermost first.
    """

    text: str
    main: tuple[Frame, ...]


async def take_stacks(run_dir: Path, pids: Mapping[int, int], main_threads: Mapping[int, int]) -> dict[int, Stacks]:
    """Asks ranks, and their loader processes, for their stacks.

    Args:
        run_dir: folder of the incarnation.
        pids: of the ranks to ask, by rank.
        main_threads: ident of each rank's main thread.
    """
    sizes = {rank: _size(stacks_path(run_dir, rank)) for rank in pids}
    asked = []
    for rank, pid in pids.items():
        if catches(pid, signal.SIGUSR1) and send_signal(pid, signal.SIGUSR1):
            asked.append(rank)
    await _settled([stacks_path(run_dir, rank) for rank in asked], [sizes[rank] for rank in asked])
    found = {}
    for rank in pids:
        text = _read_from(stacks_path(run_dir, rank), sizes[rank])
        main = parse_stacks(text).get(main_threads.get(rank, 0), [])
        found[rank] = Stacks(text, tuple(main))
    return found


async def take_loader_stacks(run_dir: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """Asks the loader processes of ranks, which share their rank's handler and file."""
    found = {}
    for rank, pid in pids.items():
        path = stacks_path(run_dir, rank)
        size = _size(path)
        loaders = [child for child in children_of(pid) if catches(child, signal.SIGUSR1)]
        for loader in loaders:
            send_signal(loader, signal.SIGUSR1)
        if loaders:
            await _settled([path], [size])
            found[rank] = _read_from(path, size)
    return found


async def _settled(paths: list[Path], before: list[int]) -> None:
    """Waits until each file has grown and stopped growing, or for `STACKS_WAIT_S`."""
    last = list(before)
    waited_s = 0.0
    while waited_s < STACKS_WAIT_S:
        await asyncio.sleep(LOOK_INTERVAL_S)
        waited_s += LOOK_INTERVAL_S
        sizes = [_size(path) for path in paths]
        if sizes == last and all(size > begin for size, begin in zip(sizes, before, strict=True)):
            return
        last = sizes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def describe_process(pid: int) -> str:
    """What /proc says about a process, as text."""
    stat = read_stat(pid)
    if stat is None:
        return f"process {pid} is gone\n"
    parts = [f"pid {pid}, state {stat.state}, parent {stat.parent_pid}, {stat.cpu_s:.2f} s of processor time\n"]
    for name in ("wchan", "syscall", "stack", "status"):
        with contextlib.suppress(OSError):
            parts.append(f"\n== /proc/{pid}/{name}\n{Path(f'/proc/{pid}/{name}').read_text(errors='replace')}\n")
    return "".join(parts)


def next_incident(state_dir: Path) -> int:
    """The number of the next incident, from 1."""
    return last_number(state_dir / INCIDENTS_DIR) + 1


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is kept of an incident.

    Args:
        summary: what was judged, as plain data.
        stacks: dump of every rank.
        loader_stacks: of the loader processes, by rank.
        pids: of the ranks.
        last_lines: printed by each local rank.
    """

    summary: dict[str, Any]
    stacks: Mapping[int, Stacks]
    loader_stacks: Mapping[int, str]
    pids: Mapping[int, int]
    last_lines: Mapping[int, list[str]]

    def write(self, state_dir: Path, run_dir: Path, number: int) -> Path:
        """Writes the incident's folder. A full disk costs evidence, and nothing else."""
        folder = state_dir / INCIDENTS_DIR / f"{number:04d}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        for rank, pid in self.pids.items():
            _write(folder / f"process-{rank}.txt", describe_process(pid))
        for rank, stacks in self.stacks.items():
            text = stacks.text or "the rank did not answer: it is stopped, gone, or had not come far enough\n"
            if self.loader_stacks.get(rank):
                text += f"\n== its loader processes\n{self.loader_stacks[rank]}"
            _write(folder / f"stacks-{rank}.txt", text)
        for rank, lines in self.last_lines.items():
            _write(folder / f"last-lines-{rank}.txt", "".join(line + "\n" for line in lines))
        for record in run_dir.glob("nccl-*"):
            with contextlib.suppress(OSError):
                shutil.copy(record, folder / record.name)
        with contextlib.suppress(OSError):
            write_json(folder / INCIDENT_FILE, self.summary)
        return folder


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text)
