"""A store that fails on purpose: an fsspec file system whose n-th call errs, cuts off, or hangs.

    open_store("faulty://job", {"target": "memory", "faults": {"write:2": "fail", "read:1": "truncate"}})

Calls are counted by kind, over all files: `write` (a chunk handed to an open file), `close` (of a written file),
`put` (a small file in one go), `read`, `get` (a small file in one go), `info`, `ls`, `mkdir`, `delete`. A fault is
named by kind and number, from 1: `fail` raises OSError, `truncate` loses the second half of the data and says nothing,
`stall` sleeps for an hour, `fail+` fails from there on. Only kinds that carry data can be cut; what names no fault is
refused when the file system is made. Counters live in the process, per `counter` name; `reset` zeroes them. What it is
given as `secret` it says in every error, as a careless client would. With `once`, the path of a file that is made at
the first fault, no process has a fault once that file is there. Like the least of clients it makes no folder by itself,
and has the `exists` of the base class, which takes every error for "no".

`target` is `memory` (default) or `file`; a path `faulty://p` is `p` in memory, or `/p` in the file system.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

KINDS = ("write", "close", "put", "read", "get", "info", "ls", "mkdir", "delete")
WITH_DATA = ("write", "put", "read", "get")
"""Kinds whose data can be cut."""
ACTIONS = ("fail", "fail+", "truncate", "stall")
STALL_S = 3600.0

_counters: dict[str, Counter[str]] = {}


def counts(counter: str = "default") -> Counter[str]:
    """How often each kind of call was made."""
    return _counters.setdefault(counter, Counter())


def reset(counter: str = "default") -> None:
    """Starts counting anew."""
    _counters.pop(counter, None)


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """See the module.

    Args:
        target: `memory` or `file`.
        faults: kind and number to what happens there.
        counter: name of the counters.
        once: file that says that the one fault there is to be has been.
        secret: said in every error.

    Raises:
        ValueError: a fault is none that can be.
    """

    protocol = "faulty"
    cachable = False

    def __init__(
        self,
        target: str = "memory",
        faults: Mapping[str, str] | None = None,
        counter: str = "default",
        once: str = "",
        secret: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._target = MemoryFileSystem() if target == "memory" else LocalFileSystem()
        self._faults = dict(faults or {})
        for name, action in self._faults.items():
            _check(name, action)
        self._counts = counts(counter)
        self._once = Path(once) if once else None
        self._said = f" (secret={secret})" if secret else ""

    def fault(self, kind: str) -> bool:
        """Counts a call; fails or stalls if it is time to. Returns whether its data are to be cut."""
        self._counts[kind] += 1
        number = self._counts[kind]
        action = self._faults.get(f"{kind}:{number}")
        for name, repeated in self._faults.items():
            wanted, _, start = name.partition(":")
            if repeated == "fail+" and wanted == kind and number >= int(start):
                action = "fail"
        if action is not None and self._once is not None:
            if self._once.exists():
                return False
            self._once.touch()
        if action == "fail":
            raise OSError(f"{kind} number {number} failed, as it was told{self._said}")
        if action == "stall":
            time.sleep(STALL_S)
        return action == "truncate"

    def _path(self, path: str) -> str:
        return "/" + str(self._strip_protocol(path)).lstrip("/")

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" in mode:
            return _FaultyReader(self, self._target.open(self._path(path), mode))
        return _FaultyWriter(self, self._target.open(self._path(path), mode))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        cut = self.fault("put")
        self._target.pipe_file(self._path(path), value[: len(value) // 2] if cut else value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        cut = self.fault("get")
        data: bytes = self._target.cat_file(self._path(path), start, end)
        return data[: len(data) // 2] if cut else data

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self.fault("info")
        found: dict[str, Any] = self._target.info(self._path(path))
        return found

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self.fault("ls")
        found: list[Any] = self._target.ls(self._path(path), detail=detail)
        return found

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.fault("mkdir")
        self._target.makedirs(self._path(path), exist_ok=exist_ok)

    def rm_file(self, path: str) -> None:
        self.fault("delete")
        self._target.rm_file(self._path(path))

    def rmdir(self, path: str) -> None:
        self.fault("delete")
        self._target.rmdir(self._path(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        self._target.invalidate_cache(path)


def _check(name: str, action: str) -> None:
    """Raises ValueError for a fault that would never happen: a test with it could not fail."""
    kind, _, number = name.partition(":")
    if kind not in KINDS:
        raise ValueError(f"fault {name!r}: there is no call {kind!r}; there are {', '.join(KINDS)}")
    if not (number.isdecimal() and int(number) >= 1):
        raise ValueError(f"fault {name!r}: needs the number of the call, from 1, as in '{kind}:1'")
    if action not in ACTIONS:
        raise ValueError(f"fault {name!r}: there is no {action!r}; there are {', '.join(ACTIONS)}")
    if action == "truncate" and kind not in WITH_DATA:
        raise ValueError(f"fault {name!r}: {kind} carries no data to cut; {', '.join(WITH_DATA)} do")


class _FaultyWriter:
    """An open file that is written; nothing appears before `close`, as with object stores."""

    def __init__(self, fs: FaultyFileSystem, file: Any) -> None:
        self._fs = fs
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data)
        cut = self._fs.fault("write")
        self._file.write(bytes(view[: len(view) // 2] if cut else view))
        return len(view)

    def close(self) -> None:
        self._fs.fault("close")
        self._file.close()

    def discard(self) -> None:
        self._file.close()


class _FaultyReader:
    def __init__(self, fs: FaultyFileSystem, file: Any) -> None:
        self._fs = fs
        self._file = file

    def read(self, size: int = -1) -> bytes:
        cut = self._fs.fault("read")
        data: bytes = self._file.read(size)
        return data[: len(data) // 2] if cut else data

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _FaultyReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
