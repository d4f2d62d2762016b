"""Reading: everything an answer holds comes from one descriptor.

Each function can run in two ways. With `cached` it takes only what lies in the page cache (RWF_NOWAIT) and
raises `WouldWait` otherwise, so it may run on the event loop; that spares the hop to a thread and back,
which costs more than a small read. Without, it waits for the disk and belongs into a thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from forebay.errors import NotFound, Unavailable
from forebay.storage._api import Range, StoredObject, validate_range
from forebay.storage._local._files import FOREIGN, LocalFiles, OpenObject

__all__ = ["WouldWait", "read_if_changed", "read_object", "read_ranges"]

INLINE_READ_BYTES_MAX = 256 * 1024
"""Largest read that is tried on the event loop: copying it takes no longer than the hop to a thread."""
FOREIGN_READS_MAX = 5
"""How often a file is read again that another tool changes while it is read."""


class WouldWait(Exception):
    """The bytes are not in the page cache, or too many."""


def read_object(files: LocalFiles, key: str, cached: bool) -> StoredObject:
    """The whole object."""
    found = read_if_changed(files, key, cached, version="")
    assert found is not None, "no version is empty"
    return found


def read_if_changed(files: LocalFiles, key: str, cached: bool, *, version: str) -> StoredObject | None:
    """The whole object, or None if it is at `version`."""
    for _ in range(FOREIGN_READS_MAX):
        with files.opened(key) as found:
            if found.version == version:
                return None
            data = _read(found, 0, found.size, cached)
        if not found.version.startswith(FOREIGN) or _version_now(files, key) == found.version:
            return StoredObject(key, data, found.version)
    raise Unavailable(f"{key!r} changes while it is read", hint="another tool writes it; try again later")


def read_ranges(files: LocalFiles, key: str, cached: bool, *, ranges: Sequence[Range]) -> list[bytes]:
    """Several ranges of one object."""
    if cached and sum(length for _, length in ranges) > INLINE_READ_BYTES_MAX:
        raise WouldWait
    with files.opened(key) as found:
        for start, length in ranges:
            validate_range(key, start, length, found.size)
        return [_read(found, start, length, cached) for start, length in ranges]


def _read(found: OpenObject, start: int, length: int, cached: bool) -> bytes:
    if cached:
        return _read_cached(found, start, length)
    pieces: list[bytes] = []
    while length:
        piece = os.pread(found.descriptor, length, start)
        if not piece:
            raise Unavailable(f"{found.key!r} was cut short while it was read", hint="another tool writes it")
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_cached(found: OpenObject, start: int, length: int) -> bytes:
    if length > INLINE_READ_BYTES_MAX:
        raise WouldWait
    piece = bytearray(length)
    try:
        if length and os.preadv(found.descriptor, [piece], start, os.RWF_NOWAIT) != length:
            raise WouldWait
    except OSError:
        raise WouldWait from None  # Not in the cache, or a file system that cannot tell.
    return bytes(piece)


def _version_now(files: LocalFiles, key: str) -> str | None:
    try:
        with files.opened(key) as found:
            return found.version
    except NotFound:
        return None
