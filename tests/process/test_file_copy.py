"""Copying a file of a snapshot durably: the same bytes and digest, whatever the file system takes."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
from pathlib import Path

import pytest

from elastictrain.checkpoint import file_copy
from elastictrain.checkpoint.file_copy import BLOCK_BYTES, DIRECT_FROM_BYTES, copy_durably
from elastictrain.checkpoint.format import digest
from elastictrain.checkpoint.store import CHUNK_BYTES

SIZES = [
    0,
    1,
    DIRECT_FROM_BYTES - 1,
    DIRECT_FROM_BYTES,
    DIRECT_FROM_BYTES + 1,
    CHUNK_BYTES + BLOCK_BYTES - 1,
    2 * CHUNK_BYTES + 12_345,
]


def mapping_of(size_bytes: int) -> memoryview:
    """Page-aligned random bytes."""
    if size_bytes == 0:
        return memoryview(b"")
    mapping = mmap.mmap(-1, size_bytes)
    mapping.write(random.Random(size_bytes).randbytes(size_bytes))
    return memoryview(mapping)


def takes_direct_io(folder: Path) -> bool:
    with (folder / "probe").open("wb") as file:
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return False
    return True


def num_cached_pages(path: Path) -> int:
    """How many pages of a file the page cache holds (mincore(2))."""
    size_bytes = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size_bytes) as mapping:
        pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
        first_byte = ctypes.c_char.from_buffer(mapping)
        result = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first_byte)), ctypes.c_size_t(size_bytes), pages
        )
        del first_byte
        assert result == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_copies_are_equal_and_progress_adds_up(tmp_path, size_bytes):
    source, moved = mapping_of(size_bytes), []
    found = copy_durably(source, tmp_path / "copy", moved.append)
    assert (tmp_path / "copy").read_bytes() == bytes(source)
    assert found == digest(source)
    assert sum(moved) == size_bytes


def test_a_large_copy_goes_past_the_page_cache(tmp_path):
    if not takes_direct_io(tmp_path):
        pytest.skip(f"the file system of {tmp_path} takes no direct I/O")
    copy_durably(mapping_of(SIZES[-1]), tmp_path / "copy", lambda _: None)
    assert num_cached_pages(tmp_path / "copy") <= 1  # the end that is no whole block


def test_a_source_that_is_not_aligned_is_copied_the_usual_way(tmp_path):
    # The kernel takes the flag, and refuses the write: what some file systems do with any write.
    source = mapping_of(2 * CHUNK_BYTES + 2)[1:]
    assert copy_durably(source, tmp_path / "copy", lambda _: None) == digest(source)
    assert (tmp_path / "copy").read_bytes() == bytes(source)


def test_a_file_system_without_direct_io_is_written_the_usual_way(tmp_path, monkeypatch):
    monkeypatch.setattr(file_copy, "_set_direct", lambda _fd, on: not on)
    monkeypatch.setattr(file_copy, "FLUSH_BYTES", CHUNK_BYTES)
    source = mapping_of(SIZES[-1])
    assert copy_durably(source, tmp_path / "copy", lambda _: None) == digest(source)
    assert (tmp_path / "copy").read_bytes() == bytes(source)


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "copy").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        copy_durably(mapping_of(SIZES[-1]), tmp_path / "copy", lambda _: None)
    assert (tmp_path / "copy").read_bytes() == b"mine"


def test_a_full_disk_is_told(small_disk):
    with pytest.raises(OSError, match="No space left"):
        copy_durably(mapping_of(SIZES[-1]), small_disk / "copy", lambda _: None)
