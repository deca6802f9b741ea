"""What a job's ranks import, learnt from one worker group, so that the next one need not do it again.

A rank that trains writes down which modules it has (`note`); the launcher, from which the next ranks are forked,
imports them meanwhile. Only modules of the standard library and of installed packages: the user's own code may be
edited between two starts, and is always read afresh.

Not every module may be in a process that forks. One that starts a thread, or opens a GPU, when it is imported would
leave the ranks with half of it. So a child tries them first (`probe`), and such a package is left to the ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

from elastictrain.protocol import write_json

NICENESS = 10
"""Of the child that tries: the ranks train meanwhile."""


def note(path: Path) -> None:
    """Writes down which modules of installed packages this process has imported.

    Args:
        path: file to write to.
    """
    write_json(path, [name for name, module in list(sys.modules.items()) if _is_installed(module)])


def read_noted(path: Path) -> list[str]:
    """Modules that were noted and are not here yet, in the order in which they were imported; empty if there is no
    such file."""
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str) and name not in sys.modules]


def import_quietly(name: str) -> None:
    """Imports a module if that is possible; one that is not belongs to a package that puts it there by other means."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - whatever a module may raise; the ranks will see it, if they still want it
            return


def probe(names: Sequence[str]) -> str | None:
    """Imports modules, in a process that will not be needed any more.

    Returns:
        the package that must not be in a process that forks; None if there is none.
    """
    os.nice(NICENESS)
    for name in names:
        import_quietly(name)
        if spoils_forks():
            return package_of(name)
    return None


def package_of(name: str) -> str:
    return name.partition(".")[0]


def spoils_forks() -> bool:
    """Whether this process has what no child of it could use: a second thread, or an open GPU."""
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - only the number
        return True
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - links to nowhere are no files
        try:
            if str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/dev/nvidia"):
                return True
        except OSError:
            continue
    return False


def _is_installed(module: object) -> bool:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    if not isinstance(origin, str) or not origin.startswith("/"):
        return False
    parts = Path(origin).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return Path(origin).is_relative_to(sysconfig.get_path("stdlib"))
