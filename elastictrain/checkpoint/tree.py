"""Nested state as plain JSON, with its tensors taken out.

None, booleans, strings, finite floats, integers of 64 bits, lists and dictionaries with string keys are themselves
in JSON. Whatever JSON has no word for is an object with one key that begins with `$`:

    {"$tensor": key}          a tensor, in a tensor file under that key
    {"$tuple": [...]}         {"$float": "nan" | "inf" | "-inf"}
    {"$bytes": base64}        {"$int": "0x..."} for integers beyond 64 bits
    {"$dict": [[k, v], ...]}  a dictionary with other keys than strings, or with keys that begin with `$`
    {"$ordered": [...]}, {"$counter": [...]}   collections.OrderedDict and Counter, likewise: torch's own state
                              dictionaries hold them

Anything else is refused with its path: what cannot be written exactly would come back as something else.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from elastictrain.errors import SnapshotDamagedError, StateValueError

Json = Any
"""A value that `json.dumps(value, allow_nan=False)` takes; order of keys matters, do not sort them."""

_HINT = (
    "Snapshots hold tensors, None, bool, int, float, str, bytes, list, tuple and dict, so that they can be read "
    "without running code. Convert the value (float(x), list(x), torch.from_numpy(x)), or leave it out of the state."
)
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_MAPPING_OF_TAG: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}


def encode(value: object, is_tensor: Callable[[object], bool], path: str = "state") -> tuple[Json, dict[str, Any]]:
    """Splits state into JSON and tensors.

    Args:
        value: the state.
        is_tensor: which objects are tensors.
        path: name of the state, for messages and for the tensors' keys, such as "task.state".

    Returns:
        (plain JSON, tensors by key). One tensor object that occurs twice is stored once.

    Raises:
        StateValueError: something that is neither tensor nor plain data; its path and type are named.
    """
    encoder = _Encoder(is_tensor)
    return encoder.encode(value, path), encoder.tensors


class _Encoder:
    def __init__(self, is_tensor: Callable[[object], bool]) -> None:
        self.tensors: dict[str, Any] = {}
        self._is_tensor = is_tensor
        self._key_of_id: dict[int, str] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Json:
        if self._is_tensor(value):
            return {"$tensor": self._key_of(value, path)}
        # Exact types: a subclass (numpy.float64 is a float, an IntEnum an int) would come back as something else.
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is not list and kind is not tuple and kind not in _MAPPINGS:
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise StateValueError(f"{path} is of type {module}{kind.__qualname__}, which a snapshot cannot hold", _HINT)
        if id(value) in self._open:
            raise StateValueError(f"{path} contains itself ({kind.__qualname__})", _HINT)
        self._open.add(id(value))
        try:
            if kind in _MAPPINGS:
                return self._encode_mapping(value, path)
            items = [self.encode(item, f"{path}[{place}]") for place, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        finally:
            self._open.discard(id(value))

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Json:
        for key in value:
            _check_key(key, path)
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        return {
            _MAPPINGS[type(value)]: [
                [self.encode(key, path), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()
            ]
        }

    def _key_of(self, tensor: Any, path: str) -> str:
        known = self._key_of_id.get(id(tensor))
        if known is not None:
            return known
        key, number = path, 1
        while key in self.tensors:  # only where a dictionary has two NaN as keys
            number += 1
            key = f"{path}#{number}"
        self.tensors[key] = tensor
        self._key_of_id[id(tensor)] = key
        return key


def _check_key(key: object, path: str) -> None:
    if key is None or type(key) in (bool, int, float, str, bytes):
        return
    if type(key) is tuple:
        for part in key:
            _check_key(part, path)
        return
    raise StateValueError(f"{path} has a key of type {type(key).__qualname__}: {key!r:.80}", _HINT)


def decode(value: Json, tensors: Mapping[str, Any]) -> Any:
    """The state that `encode` took apart.

    Raises:
        SnapshotDamagedError: a tensor is missing, or a tag unknown.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not (len(value) == 1 and tag.startswith("$")):
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value[tag]
    match tag:
        case "$tensor":
            if content not in tensors:
                raise SnapshotDamagedError(f"the tensor {content} is missing")
            return tensors[content]
        case "$tuple":
            return tuple(decode(item, tensors) for item in content)
        case "$float":
            return float(content)
        case "$int":
            return int(content, 16)
        case "$bytes":
            return base64.b64decode(content)
        case "$dict" | "$ordered" | "$counter":
            return _MAPPING_OF_TAG[tag]([(decode(key, tensors), decode(item, tensors)) for key, item in content])
        case _:
            raise SnapshotDamagedError(f"the state has a value of unknown kind {tag}")
