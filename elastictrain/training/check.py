"""Imports a task and compares it to the contract, without making one: for `elastictrain config check`.

    python -m elastictrain.training.check

Standard input: `{"task": ..., "module_dir": ..., "params": ...}`. Standard output: `{}`, or what is wrong, as
`{"what": ..., "hint": ...}`. What the user's modules print goes to standard error. No answer at all means that the
import ended the process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from elastictrain.errors import TaskError
from elastictrain.training.task import check_task, import_task


def main() -> None:
    """Answers one request."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    module_dir = Path(request["module_dir"]) if request["module_dir"] is not None else None
    found: dict[str, str] = {}
    try:
        check_task(import_task(request["task"], module_dir), request["params"])
    except TaskError as error:
        found = {"what": error.what, "hint": error.hint}
    with answer:
        json.dump(found, answer)


if __name__ == "__main__":
    main()
