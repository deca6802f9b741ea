"""When the memory of the memory tier may be given back at the end of a run: once it holds nothing but what is durable.

Rank zero knows when that is, since it has made it so. The other nodes hold what their ranks kept at a failure, if
anything: they see in the store itself that the last step is there. While they wait they tell nobody, and nobody waits
for them but the end of the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastictrain.checkpoint.store import Store
from elastictrain.errors import StorageError

LOOK_S = 0.5
"""How often another node looks into the store."""


def is_stored(
    open_it: Callable[[], Store], run_id: str, global_step: int, *, patience_s: float, beat: Callable[[], None]
) -> bool:
    """Waits until the snapshot of a step is durable, which another node sees to.

    Args:
        open_it: opens the store.
        run_id: of the snapshot.
        global_step: likewise.
        patience_s: how long to wait.
        beat: called while waiting.

    Returns:
        whether it is; False at once where the store holds nothing of the run, as seen from here: a folder that the
        nodes do not share.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            steps = {s.global_step for s in open_it().snapshots() if s.run_id == run_id}
        except StorageError:
            steps = None
        if steps is not None and (not steps or global_step in steps):
            return bool(steps)
        if time.monotonic() >= deadline_s:
            return False
        beat()
        time.sleep(LOOK_S)
