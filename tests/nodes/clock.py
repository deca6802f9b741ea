"""A wrong clock for the programs of a node.

No namespace has a wall clock of its own (time_namespaces(7)): so a library is put between each program and the C
library. Waits until a time of the wall clock, inside the C library, are not shifted; Python and torch wait by the
monotonic clock.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("clock.c")


def shifted_clock(folder: Path, shift_s: int) -> dict[str, str]:
    """Environment of a program whose clock is wrong by so much.

    Args:
        folder: for the library, which the node must see.
        shift_s: ahead if positive.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a wrong clock needs a C compiler")
    library = folder / "clock.so"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT_S": str(shift_s)}
