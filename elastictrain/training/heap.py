"""What the C library does with memory that is freed: by default it gives much of it back to the kernel at once.

A rank that frees a gradient and asks for the next then pays for its pages anew: a fault and a cleared page every 4 KiB,
in every microbatch. DistributedDataParallel keeps its gradients, which lie between the others in the heap and happen to
hold it together. Where gradients come and go, the heap shrinks and grows all the time: a quarter of the time of a step
of a small model.
"""

from __future__ import annotations

import ctypes

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP_BYTES = 32 << 20
"""The most that glibc takes, on 64-bit machines. What is larger is mapped and unmapped one by one as before."""
_KEPT_BYTES = 1 << 30
"""How much may lie free at the heap's end."""


def keep_freed_memory() -> bool:
    """Has this process keep what it frees, for what it asks for next. False where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either one switches off that glibc moves both by itself.
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
