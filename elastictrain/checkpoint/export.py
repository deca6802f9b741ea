"""Writes a snapshot's model as a plain safetensors file, on raw bytes: any dtype, no torch.

In a snapshot, tied weights are stored once, and `aliases` in trainer.json says which names stand for which; a plain
file holds every name. The averaged weights cover the trainable parameters: whatever else the model has (buffers) is
taken from the model.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from elastictrain.checkpoint.catalog import SnapshotReader
from elastictrain.checkpoint.format import EMA_FILE, MODEL_FILE, TensorSpec, layout
from elastictrain.checkpoint.store import CHUNK_BYTES
from elastictrain.errors import MissingInputError, SnapshotDamagedError


def export_model(reader: SnapshotReader, target: Path, *, use_ema: bool = False) -> int:
    """Writes the model, durably, under `target`; its folder is made if missing.

    Returns:
        the number of tensors written.

    Raises:
        MissingInputError: averaged weights were asked for, and the snapshot has none.
        SnapshotDamagedError: an alias points nowhere.
        OSError: the file cannot be written.
    """
    if use_ema and EMA_FILE not in reader.files:
        raise MissingInputError(
            f"{reader.manifest.name} holds no averaged weights", "The run did not set model.ema_decay; leave out --ema."
        )
    sources = {name: (MODEL_FILE, name) for name in reader.layout(MODEL_FILE).specs}
    if use_ema:
        sources |= {name: (EMA_FILE, name) for name in reader.layout(EMA_FILE).specs}
    for alias, name in reader.trainer.get("aliases", {}).get("model", {}).items():
        if name not in sources:
            raise SnapshotDamagedError(f"trainer.json: {alias} is an alias of {name}, which {MODEL_FILE} does not hold")
        sources[alias] = sources[name]
    layouts = {file: reader.layout(file) for file, _ in set(sources.values())}
    specs: dict[str, TensorSpec] = {name: layouts[file].specs[inner] for name, (file, inner) in sources.items()}
    # `format` tells the libraries that read such files which framework's conventions the names follow.
    out = layout(specs, {"format": "pt"})
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(out.header)
            for name in out.offsets:
                file, inner = sources[name]
                begin, end = layouts[file].offsets[inner]
                for at in range(begin, end, CHUNK_BYTES):
                    stream.write(reader.read(file, at, min(at + CHUNK_BYTES, end)))
            stream.flush()
            os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)
        Path(temporary).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    return len(sources)
