"""What a process keeps of the memory it frees.

A block that is freed at the end of the heap goes back to the kernel where more than 128 KiB lie there, and a
larger one, by glibc's first guess, as soon as it is freed. The next block comes page by page again, each one
zeroed: 25 page faults for a body of a hundred kilobytes, which cost as much as decoding it, and a thousand
for an object of four megabytes, which cost more than reading it. glibc raises these bounds by itself once a
large block was freed, by what was freed; so whether a process suffers is luck. Here they are raised at once,
to where glibc itself would raise them at most.

A process that does one large thing after the other, and has one thread that matters, can go further: no block
is mapped by itself, however large, and all threads share one heap, so that what any of them frees the next
one gets. It then holds as much as it ever needed at once, which suits a worker and not a server.
"""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["keep_free_memory"]

MAPPED_FROM_BYTES: Final = 32 * 1024 * 1024
"""Blocks of this size and more are mapped one by one, and given back as they are freed."""
KEPT_FREE_BYTES: Final = 2 * MAPPED_FROM_BYTES
"""Bytes at the end of the heap that stay with the process when they are free, unless it says otherwise."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8


def keep_free_memory(kept_bytes: int = KEPT_FREE_BYTES, *, one_heap: bool = False) -> bool:
    """For the whole process: call it where the process is ours, never in a library.

    `kept_bytes` stay at the end of the heap when they are free, up to 2 GiB. `one_heap`: for all threads and
    for blocks of every size. Returns whether there was an allocator to tell: other C libraries have none of
    these bounds.
    """
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    told = [
        tell(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        tell(_M_TRIM_THRESHOLD, kept_bytes),
    ]
    if one_heap:
        told += [tell(_M_MMAP_MAX, 0), tell(_M_ARENA_MAX, 1)]
    return all(told)
