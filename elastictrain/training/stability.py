"""Whether tensors were changed in place while they were copied beside a forward pass.

Most parameters change in the optimizer step alone. Some change in a forward pass (an embedding with max_norm, a
momentum encoder); torch counts every change in place, but for those by way of `.data`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor


class Stability:
    """Watches tensors from now on.

    Args:
        sources: the tensors by (file, name).
    """

    def __init__(self, sources: Mapping[tuple[str, str], Tensor]) -> None:
        self._sources = dict(sources)
        self._versions = {key: tensor._version for key, tensor in sources.items()}
        self._lock = threading.Lock()
        self._changed: list[tuple[str, str]] | None = None

    def changed(self) -> list[tuple[str, str]]:
        """Which have been changed by the first time that this was called: call it when the copy is over."""
        with self._lock:
            if self._changed is None:
                self._changed = [key for key, tensor in self._sources.items() if tensor._version != self._versions[key]]
            return self._changed
