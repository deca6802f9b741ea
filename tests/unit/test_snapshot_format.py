"""The bytes of a snapshot: readable by the safetensors library, and damage is found wherever it is."""

from __future__ import annotations

import contextlib
import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.format import (
    DTYPE_SIZE_BYTES,
    FileEntry,
    Manifest,
    TensorSpec,
    digest,
    layout,
    parse_name,
    read_layout,
    snapshot_name,
)
from elastictrain.errors import SnapshotDamagedError, SnapshotVersionError

SPECS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.builds(
        TensorSpec, st.sampled_from(sorted(DTYPE_SIZE_BYTES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)
    ),
    max_size=6,
)
MANIFEST = Manifest(
    job="j",
    run_id="0123abcd",
    global_step=7,
    created="2026-01-01T00:00:00+00:00",
    versions={"elastictrain": "0.1.0"},
    files={"model.safetensors": FileEntry(3, digest(b"abc")), "trainer.json": FileEntry(0, digest(b""))},
)


@given(SPECS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_the_library_accepts_every_layout(specs, metadata):
    made = layout(specs, metadata)
    data = made.header + bytes(made.size_bytes - len(made.header))
    opened = dict(safetensors.deserialize(data))
    assert {name: (t["dtype"], tuple(t["shape"])) for name, t in opened.items()} == {
        name: (spec.dtype, spec.shape) for name, spec in specs.items()
    }
    assert len(made.header) % 64 == 0
    for name, spec in specs.items():
        begin, end = made.offsets[name]
        assert end - begin == spec.size_bytes
        assert begin % DTYPE_SIZE_BYTES[spec.dtype] == 0
    assert read_layout(data) == made


def test_numpy_reads_what_was_laid_out(tmp_path):
    arrays = {
        "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array(41, dtype=np.int64),
        "flags": np.array([True, False, True]),
        "empty": np.zeros((0, 4), dtype=np.float64),
    }
    names = {"float32": "F32", "int64": "I64", "bool": "BOOL", "float64": "F64"}
    made = layout({n: TensorSpec(names[str(a.dtype)], a.shape) for n, a in arrays.items()}, {"k": "v"})
    data = bytearray(made.size_bytes)
    data[: len(made.header)] = made.header
    for name, array in arrays.items():
        begin, end = made.offsets[name]
        data[begin:end] = array.tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"k": "v"}


def test_the_same_tensors_give_the_same_bytes_in_any_order():
    one, two = TensorSpec("F32", (2,)), TensorSpec("BF16", (3,))
    assert layout({"x": one, "y": two}).header == layout({"y": two, "x": one}).header
    assert list(layout({"y": two, "b": one, "a": one}).specs) == ["a", "b", "y"]


def test_what_safetensors_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="C128"):
        layout({"x": TensorSpec("C128", (1,))})
    with pytest.raises(ValueError, match="__metadata__"):
        layout({"__metadata__": TensorSpec("F32", (1,))})


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{}x"],
)
def test_a_broken_header_is_named(data):
    with pytest.raises(SnapshotDamagedError):
        read_layout(data)


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_found():
    data = MANIFEST.encoded
    assert Manifest.decode(data) == MANIFEST
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        # White space between the tokens is not content: then, the same manifest is read.
        with contextlib.suppress(SnapshotDamagedError):
            assert Manifest.decode(bytes(changed)) == MANIFEST
    for length in range(len(data) - 1):
        with pytest.raises(SnapshotDamagedError):
            Manifest.decode(data[:length])


def _sealed(**changes) -> bytes:
    fields = {**json.loads(MANIFEST.encoded), **changes}
    del fields["checksum"]
    fields["checksum"] = digest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps(fields).encode()


def test_a_newer_version_is_refused_by_name():
    with pytest.raises(SnapshotVersionError, match=r"version 2 was written by elastictrain 9\.9.*reads version 1"):
        Manifest.decode(_sealed(version=2, versions={"elastictrain": "9.9"}, files="something new"))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"run_id": "../../x"},
        {"model_digest": "0" * 32},
        {"files": {"../model.safetensors": {"size_bytes": 1, "xxh3_128": "0" * 32}}},
        {"global_step": -1},
        {"files": []},
    ],
)
def test_a_manifest_that_is_sealed_but_wrong_is_refused(changes):
    with pytest.raises(SnapshotDamagedError):
        Manifest.decode(_sealed(**changes))


def test_names_sort_by_step_and_parse_back():
    names = [snapshot_name(step, "0123abcd") for step in (9, 10, 11_000_000)]
    assert names == sorted(names)
    assert parse_name(names[1]) == (10, "0123abcd")
    assert parse_name(".tmp-" + names[1]) is None
    assert parse_name("step-10-0123abcd") is None
