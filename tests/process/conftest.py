"""What the tests with real files and processes share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory_tier import MemoryTier
from tests.process.snapshot_payload import tier_of


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two MiB, to be filled up."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "elastictrain-test", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class DeadDisk:
    """A file system that can die as one on NFS does, whose server is gone: whoever writes is stuck in the kernel.

    A real one, of its own (ext4 on a loop device), frozen by fsfreeze(8): SIGKILL does not reach who waits for it.
    """

    path: Path
    is_dead: bool = False

    def die(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)
        self.is_dead = True

    def come_back(self) -> None:
        if self.is_dead:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], check=True)
            self.is_dead = False


@pytest.fixture
def mortal_disk(tmp_path: Path) -> Iterator[DeadDisk]:
    """A file system of 64 MiB, alive so far."""
    image, folder = tmp_path / "disk.img", tmp_path / "mortal-disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            done = subprocess.run(command, check=False, capture_output=True)
        except FileNotFoundError:
            pytest.skip(f"needs {command[0]}")
        if done.returncode:
            pytest.skip("needs the right to mount a file system, and a loop device")
    disk = DeadDisk(folder)
    try:
        yield disk
    finally:
        disk.come_back()
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[MemoryTier]:
    """The memory tier of a job, in a folder of the test's own."""
    (tmp_path / "shm").mkdir()
    made = tier_of(tmp_path)
    yield made
    made.close()
