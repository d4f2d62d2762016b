"""The memory of a process that does nothing but serve: when to look for garbage, and what to give back.

Requests under way are thousands of small objects that all end by themselves; looking through them for cycles
after every 700 of them costs a sixth of the processor and finds next to nothing. What is there at the start
stays, so it is never looked at again; the rest is looked at less often.

A body of a hundred kilobytes that is freed at the end of the heap is more than glibc keeps there (128 KiB):
by default it goes back to the kernel and comes again, page by page and zeroed, with the next request, 25 page
faults for each, which cost as much as decoding it. glibc raises its bounds by itself once a large block was
freed, so whether a process suffers from it is luck. Here they are raised at the start, to where glibc itself
would raise them at most.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

__all__ = ["calm_collector"]

THRESHOLDS: Final = (20_000, 20, 50)
"""Containers made and not yet gone before the youngest are looked at; how often the older ones are."""
MAPPED_FROM_BYTES: Final = 32 * 1024 * 1024
"""Blocks of this size and more are mapped one by one, and given back as they are freed."""
KEPT_FREE_BYTES: Final = 2 * MAPPED_FROM_BYTES
"""Bytes at the end of the heap that stay with the process when they are free."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def calm_collector() -> None:
    """For the whole process: call it where the process is ours, never in a library."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    _keep_free_memory()


def _keep_free_memory() -> bool:
    """Whether there was an allocator to tell: other C libraries have none of these bounds."""
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    told = [
        tell(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        tell(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES),
    ]
    return all(told)
