"""Have the disk write what the kernel holds, before a sync asks for it: sync_file_range(2).

A sync waits for all of its file at once. Of a large file that is too late: the disk rests while the bytes are
copied, and then everybody waits for it. Neither function makes anything durable, which only a sync does;
where the system has no such call they do nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

__all__ = ["begin_write_out", "write_out"]

_BEGIN: Final = 2
_WAIT: Final = 1 | 2 | 4
"""Wait for writes under way, begin those of the range, wait for them."""

_system: Final = ctypes.CDLL(None, use_errno=True)
_sync_file_range: Final = getattr(_system, "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def begin_write_out(descriptor: int, offset: int, size: int) -> None:
    """Begin to write a range, and go on. What goes wrong is told by the next sync of this descriptor."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, size, _BEGIN)


def write_out(descriptor: int, offset: int, size: int) -> None:
    """Write a range, and wait for it. Raises the disk's `OSError`, which the next sync may not tell again."""
    if _sync_file_range is None or _sync_file_range(descriptor, offset, size, _WAIT) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        raise OSError(number, os.strerror(number))
