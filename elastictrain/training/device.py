"""One process, one device, one process group: set up from torchrun's environment, torn down at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from elastictrain.errors import ConfigError

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is.

    Args:
        rank: number of this process in the job, from 0.
        local_rank: number of this process on its node; picks the device.
        world_size: processes in the job.
        local_world_size: processes on this node.
        device: what it computes on.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = _CPU

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


def choose_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    """The device of a local rank.

    Args:
        wanted: auto, cpu or cuda.
        local_rank: number on the node.
        local_world_size: how many there are on the node.

    Raises:
        ConfigError: CUDA was asked for and there are fewer devices than local ranks.
    """
    num_devices = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and num_devices < local_world_size:
        raise ConfigError(
            f'elastic.device = "cuda", but torch sees {num_devices} CUDA device(s) for {local_world_size} local ranks',
            f"Set elastic.nproc_per_node to {num_devices}." if num_devices else 'Set elastic.device = "cpu".',
        )
    if num_devices >= local_world_size:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def choose_backend(wanted: str, device: torch.device) -> str:
    """nccl for CUDA where torch has it, gloo otherwise, unless one is asked for."""
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def take_place(*, device: str = "auto", num_threads: int | None = None) -> Place:
    """What torchrun's environment makes of this process, and its device; without RANK it is a run of one process.

    Args:
        device: auto, cpu or cuda.
        num_threads: intra-op threads of this process; None leaves torch's choice.
    """
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    chosen = choose_device(device, local_rank, local_world_size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return Place(rank, local_rank, world_size, local_world_size, chosen)


def join_group(place: Place, *, backend: str = "auto", timeout_s: float = 600.0) -> None:
    """Joins the process group that torchrun's environment describes; without RANK no group is made.

    Args:
        place: of this process.
        backend: auto, gloo or nccl.
        timeout_s: after which a collective fails.
    """
    if "RANK" not in os.environ:
        return
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)  # of this thread
    name = choose_backend(backend, place.device)
    dist.init_process_group(
        name,
        timeout=timedelta(seconds=timeout_s),
        # Binding the device makes NCCL connect at once, so that a bad link fails here and not in step one.
        device_id=place.device if name == "nccl" else None,
    )


def leave_group() -> None:
    """Leaves it. After success only: after an error the peers may be blocked in a collective, and a farewell would
    block as well."""
    if "RANK" in os.environ:
        dist.destroy_process_group()


@contextmanager
def process_group(
    *,
    device: str = "auto",
    backend: str = "auto",
    timeout_s: float = 600.0,
    num_threads: int | None = None,
) -> Iterator[Place]:
    """Joins the process group that torchrun's environment describes, and leaves it at the end, after success.

    Without RANK in the environment this is a run of one process and no group is made.

    Args:
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl.
        timeout_s: after which a collective fails.
        num_threads: intra-op threads of this process; None leaves torch's choice.
    """
    place = take_place(device=device, num_threads=num_threads)
    join_group(place, backend=backend, timeout_s=timeout_s)
    yield place
    leave_group()


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory use of this process so far: CUDA's allocated bytes, or resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss survives exec and counts the parent's pages; VmHWM is this process's own (proc(5)).
    with Path("/proc/self/status").open(encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
