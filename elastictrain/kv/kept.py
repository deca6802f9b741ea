"""What outlives a store's process: its keys without a lease, in one JSON file.

Keys with a lease say who lives, and are written again by whoever does. What has no lease was agreed on, and nobody
could tell from an empty store that something else had been agreed on since they looked last.
"""

from __future__ import annotations

import json
import secrets
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

from elastictrain.kv.store import Entry, Store
from elastictrain.protocol import write_atomically

FORMAT = 1
MAX_LOST_CHANGES = 2**40
"""So many changes of keys with a lease, which leave no trace in the file, may have come after the last one that did."""


class KeptError(Exception):
    """The file is not what was written. The text says why, without its name."""


def read(path: Path) -> Store:
    """A store that goes on from the file. Without a file it begins empty.

    Its revision is above all that an earlier process can have given: nothing that was read from that one is valid by
    accident.

    Raises:
        KeptError: the file is damaged, or of another version.
        OSError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Store()
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise KeptError(f"its format is {content['format']!r}, and {FORMAT} is known here")
        entries = {b64decode(key, validate=True): _entry(said) for key, said in content["keys"].items()}
        revision = int(content["revision"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KeptError(f"it is damaged ({type(error).__name__}: {error})") from error
    store = Store(revision + 1 + secrets.randbelow(MAX_LOST_CHANGES))
    store.restore(entries)
    return store


def write(path: Path, entries: dict[bytes, Entry], revision: int) -> None:
    """Replaces the file, durably.

    Args:
        path: of the file, mode 0600.
        entries: the store's keys without a lease.
        revision: of the store.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    keys = {
        b64encode(key).decode(): {
            "value": b64encode(entry.value).decode(),
            "create_revision": entry.create_revision,
            "mod_revision": entry.mod_revision,
            "version": entry.version,
        }
        for key, entry in entries.items()
    }
    write_atomically(path, json.dumps({"format": FORMAT, "revision": revision, "keys": keys}).encode())


def _entry(said: dict[str, Any]) -> Entry:
    value = b64decode(said["value"], validate=True)
    return Entry(value, int(said["create_revision"]), int(said["mod_revision"]), int(said["version"]), lease=0)
