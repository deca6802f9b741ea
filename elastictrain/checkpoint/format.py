"""The bytes of a snapshot: the layout of a tensor file, the manifest, and how to tell that either is damaged.

`docs/snapshot-format.md` says the same in prose. Tensor files are plain safetensors
(https://github.com/huggingface/safetensors, section "Format"): eight bytes of header length, a JSON header that may
end in spaces, then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import xxhash

from elastictrain.errors import ElasticTrainError, SnapshotDamagedError, SnapshotVersionError, UnreadableFileError

FORMAT: Final = "elastictrain-snapshot"
VERSION: Final = 1

MANIFEST_FILE: Final = "manifest.json"
TRAINER_FILE: Final = "trainer.json"
MODEL_FILE: Final = "model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.safetensors"
EMA_FILE: Final = "ema.safetensors"
STATE_FILE: Final = "state.safetensors"

DATA_ALIGNMENT_BYTES: Final = 64
"""Tensor data begins at a multiple of this: a cache line, and the widest vector register."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""

DTYPE_SIZE_BYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Size of one element, by safetensors' names."""

_NAME = re.compile(r"step-(\d{12})-([0-9a-f]{8})")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def snapshot_name(global_step: int, run_id: str) -> str:
    """Folder name of a snapshot; names of one run sort by step."""
    return f"step-{global_step:012d}-{run_id}"


def parse_name(name: str) -> tuple[int, str] | None:
    """(global step, run id) of a folder name; None if it is not that of a snapshot."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def digest(data: Any) -> str:
    """xxh3-128 of a buffer, in hex. Releases the GIL."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its values.

    Args:
        dtype: safetensors' name, such as "F32" or "BF16"; a key of `DTYPE_SIZE_BYTES`.
        shape: its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_SIZE_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Where everything is in a tensor file.

    Args:
        header: the first bytes of the file, up to the first tensor.
        specs: the tensors by name, in the order of the file.
        offsets: name to (begin, end) in the file.
        size_bytes: of the whole file.
        metadata: texts in the header.
    """

    header: bytes
    specs: dict[str, TensorSpec] = field(repr=False)
    offsets: dict[str, tuple[int, int]] = field(repr=False)
    size_bytes: int
    metadata: dict[str, str]


def layout(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> Layout:
    """Lays out a tensor file. The same specs and metadata always give the same bytes.

    Tensors go by element size, widest first, then by name: each is aligned to its elements without padding between
    them, which safetensors does not allow.

    Raises:
        ValueError: a dtype that safetensors does not have, or a name it reserves.
    """
    for name, spec in specs.items():
        if spec.dtype not in DTYPE_SIZE_BYTES:
            raise ValueError(f"{name}: safetensors has no dtype {spec.dtype}")
        if name == "__metadata__":
            raise ValueError("__metadata__ cannot be the name of a tensor: safetensors reserves it")
    ordered = sorted(specs, key=lambda name: (-DTYPE_SIZE_BYTES[specs[name].dtype], name))
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    position = 0
    relative = {}
    for name in ordered:
        spec = specs[name]
        relative[name] = (position, position + spec.size_bytes)
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": list(relative[name])}
        position += spec.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {len(specs)} tensors has {length} bytes; safetensors reads {MAX_HEADER_BYTES}")
    return Layout(
        header=(length - 8).to_bytes(8, "little") + text.ljust(length - 8),
        specs={name: specs[name] for name in ordered},
        offsets={name: (length + begin, length + end) for name, (begin, end) in relative.items()},
        size_bytes=length + position,
        metadata=dict(sorted(metadata.items())) if metadata else {},
    )


def read_layout(buffer: Any, size_bytes: int | None = None) -> Layout:
    """The layout of a tensor file.

    Args:
        buffer: its bytes, or as many of the first as its header takes.
        size_bytes: of the whole file, where `buffer` is not all of it.

    Raises:
        SnapshotDamagedError: this is not a safetensors file, or not all of one.
    """
    view = memoryview(buffer).cast("B")
    if size_bytes is None:
        size_bytes = len(view)
    if len(view) < 8:
        raise SnapshotDamagedError(f"too short for a tensor file: {size_bytes} bytes")
    length = 8 + int.from_bytes(view[:8], "little")
    if length > min(len(view), MAX_HEADER_BYTES):
        raise SnapshotDamagedError(f"its header would have {length} bytes, the file has {size_bytes}")
    try:
        decoded = json.loads(bytes(view[8:length]))
        metadata = decoded.pop("__metadata__", {})
        entries = sorted(decoded.items(), key=lambda item: item[1]["data_offsets"])
        specs = {name: TensorSpec(entry["dtype"], tuple(entry["shape"])) for name, entry in entries}
        offsets = {name: (length + e["data_offsets"][0], length + e["data_offsets"][1]) for name, e in entries}
        position = length
        for name, spec in specs.items():
            begin, end = offsets[name]
            if begin != position or end - begin != spec.size_bytes:
                raise SnapshotDamagedError(f"its header gives {name} the wrong place or size")
            position = end
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SnapshotDamagedError(f"its header is not that of a tensor file: {error!r}") from error
    if position != size_bytes:
        raise SnapshotDamagedError(f"it has {size_bytes} bytes; its header speaks of {position}")
    return Layout(bytes(view[:length]), specs, offsets, position, metadata)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file of a snapshot must be.

    Args:
        size_bytes: its size.
        xxh3_128: digest of its content, 32 hex digits.
    """

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a snapshot.

    Args:
        file: the file's name within the snapshot.
        reason: what is wrong with it.
    """

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Manifest:
    """The list of a snapshot's files: its presence says that the snapshot is complete.

    Args:
        job: name of the job.
        run_id: eight hex digits: the lineage of the run.
        global_step: windows consumed.
        created: when, ISO 8601 in UTC; for people, nothing is decided by it within a run.
        versions: of elastictrain, torch, python.
        files: all other files by name.
    """

    job: str
    run_id: str
    global_step: int
    created: str
    versions: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def name(self) -> str:
        return snapshot_name(self.global_step, self.run_id)

    @property
    def model_digest(self) -> str:
        """Digest of the model's tensors: equal models have equal files."""
        return self.files[MODEL_FILE].xxh3_128

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())

    @cached_property
    def encoded(self) -> bytes:
        """The content of manifest.json."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "job": self.job,
            "run_id": self.run_id,
            "global_step": self.global_step,
            "created": self.created,
            "versions": self.versions,
            "files": {
                name: {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128} for name, entry in self.files.items()
            },
            "model_digest": self.model_digest,
        }
        fields["checksum"] = _checksum(fields)
        return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Reads manifest.json.

        Raises:
            SnapshotDamagedError: it is not what was written.
            SnapshotVersionError: it is sound, and newer than this program.
        """
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise SnapshotDamagedError(f"{MANIFEST_FILE}: not JSON: {error}") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise SnapshotDamagedError(f"{MANIFEST_FILE}: not the manifest of a snapshot (format is not {FORMAT!r})")
        version = fields.get("version")
        if fields.get("checksum") != _checksum(fields):
            newer = f" (it says version {version}; this program reads {VERSION})" if version != VERSION else ""
            raise SnapshotDamagedError(f"{MANIFEST_FILE}: its checksum does not hold{newer}")
        if version != VERSION:
            versions = fields.get("versions")
            by = versions.get("elastictrain", "unknown") if isinstance(versions, dict) else "unknown"
            raise SnapshotVersionError(
                f"{MANIFEST_FILE}: snapshot format version {version} was written by elastictrain {by}; "
                f"this program reads version {VERSION}",
                "Use that elastictrain or a newer one.",
            )
        try:
            manifest = cls(
                job=fields["job"],
                run_id=fields["run_id"],
                global_step=fields["global_step"],
                created=fields["created"],
                versions=fields["versions"],
                files={name: FileEntry(e["size_bytes"], e["xxh3_128"]) for name, e in fields["files"].items()},
            )
            sound = parse_name(manifest.name) is not None and manifest.model_digest == fields["model_digest"]
            sound = sound and all(_is_sound(name, entry) for name, entry in manifest.files.items())
        except (KeyError, TypeError, AttributeError) as error:
            raise SnapshotDamagedError(f"{MANIFEST_FILE}: incomplete: {error!r}") from error
        if not sound:
            raise SnapshotDamagedError(f"{MANIFEST_FILE}: its values contradict each other")
        return manifest


def _checksum(fields: Mapping[str, Any]) -> str:
    """xxh3-128 of the canonical JSON (keys sorted, no spaces, ASCII) of everything but the checksum itself."""
    rest = {key: value for key, value in fields.items() if key != "checksum"}
    return digest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _is_sound(name: str, entry: FileEntry) -> bool:
    """A name that stays within its folder, and a digest that is one."""
    return (
        bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name))
        and name != MANIFEST_FILE
        and entry.size_bytes >= 0
        and _DIGEST.fullmatch(entry.xxh3_128) is not None
    )


def damage_of(file: str, error: ElasticTrainError) -> Damage:
    """What is wrong with a file, from the error that reading it has raised."""
    if isinstance(error, UnreadableFileError):
        return Damage(file, f"cannot be read: {error.what.rpartition(': ')[2]}")
    return Damage(file, error.what.removeprefix(f"{file}: "))


def check_content(name: str, entry: FileEntry, size_bytes: int, found_digest: str) -> Damage | None:
    """Compares what was read of a file to what the manifest says."""
    if size_bytes != entry.size_bytes:
        return Damage(name, f"has {size_bytes} bytes instead of {entry.size_bytes}")
    if found_digest != entry.xxh3_128:
        return Damage(name, f"its content changed: xxh3-128 is {found_digest}, was {entry.xxh3_128}")
    return None
