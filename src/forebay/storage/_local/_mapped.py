"""Ranges of an object as views of the page cache: nothing is copied, and nothing is held in memory twice.

Copying a cached range out of the kernel costs as much as checking and handing on what is in it. A mapping
costs next to nothing where the kernel holds files in large pieces, and maps each of them as it is touched; to
have it map all at once (MAP_POPULATE) took four times as long. Two things are given up for it:

* A file that something else than a store cuts short, or a disk that fails after all, does not raise: touching
  the page ends the process (SIGBUS). Objects are replaced by renaming and never changed, so no store does
  that. Still it is for processes that somebody starts again, and only they ask for it.
* Waiting for the disk would happen wherever the bytes are first looked at. So only what lies in the page
  cache is mapped, by samples; everything else is read as ever, and lies in the cache then.

The inode stays for as long as a view of it does, whatever becomes of its name.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from forebay.storage._api import Range
from forebay.storage._local._files import LocalFiles
from forebay.storage._local._reads import WouldWait, open_quickly

__all__ = ["MAPPED_BYTES_MIN", "mapped_ranges"]

MAPPED_BYTES_MIN = 512 * 1024
"""Smallest range that is mapped. Each holds a descriptor, and readers hold some 64 MiB of them."""
SAMPLE_BYTES = 256 * 1024
"""One byte of so many is looked for in the page cache: the kernel reads and forgets in such pieces."""


def mapped_ranges(files: LocalFiles, key: str, ranges: Sequence[Range]) -> list[memoryview]:
    """The ranges as views. Raises `WouldWait` where they are small or not in the page cache."""
    if not ranges or min([length for _, length in ranges]) < MAPPED_BYTES_MIN:
        raise WouldWait
    descriptor = open_quickly(files, key)
    try:
        for start, length in ranges:
            _check_cached(descriptor, start, length)
        return [_mapped(descriptor, start, length) for start, length in ranges]
    except (OSError, OverflowError, ValueError):
        raise WouldWait from None  # Not in the cache, or a file system that cannot tell, or cannot map.
    finally:
        os.close(descriptor)


def _check_cached(descriptor: int, start: int, length: int) -> None:
    """Raise where a sample is missing; the last byte is one, so that the range lies inside of the file."""
    if start < 0:
        raise WouldWait  # To preadv -1 is elsewhere.
    sample = bytearray(1)
    last = start + length - 1
    for place in (*range(start, last, SAMPLE_BYTES), last):
        if os.preadv(descriptor, [sample], place, os.RWF_NOWAIT) != 1:
            raise WouldWait


def _mapped(descriptor: int, start: int, length: int) -> memoryview:
    before = start % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(descriptor, before + length, prot=mmap.PROT_READ, offset=start - before)
    # The view keeps the mapping, and with the last view it goes.
    return memoryview(mapping)[before:]
