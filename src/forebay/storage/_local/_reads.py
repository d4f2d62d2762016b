"""Reading: everything an answer holds comes from one descriptor.

Each function can run in two ways. With `cached` it takes only what lies in the page cache (RWF_NOWAIT) and
raises `WouldWait` otherwise, so it may run on the event loop; that spares the hop to a thread and back,
which costs more than a small read. Without, it waits for the disk and belongs into a thread.

Ranges out of the cache need neither version nor size: open, read, close. Whatever is not as expected, from a
range that ends early to an error, raises `WouldWait`; the thread looks again and finds the words for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from forebay.errors import NotFound, Unavailable
from forebay.storage._api import Range, StoredObject, validate_range
from forebay.storage._local._files import FOREIGN, NOT_THERE, READ_FLAGS, LocalFiles, OpenObject

__all__ = ["WouldWait", "cached_range", "open_quickly", "read_if_changed", "read_object", "read_ranges"]

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
    if cached:
        return _cached_ranges(files, key, ranges)
    with files.opened(key) as found:
        for start, length in ranges:
            validate_range(key, start, length, found.size)
        return [_read(found, start, length, cached) for start, length in ranges]


def cached_range(files: LocalFiles, key: str, start: int, length: int) -> bytes:
    """One range, if it is cached."""
    descriptor = open_quickly(files, key)
    try:
        return _read_cached(descriptor, start, length)
    finally:
        os.close(descriptor)


def _cached_ranges(files: LocalFiles, key: str, ranges: Sequence[Range]) -> list[bytes]:
    if sum(length for _, length in ranges) > INLINE_READ_BYTES_MAX:
        raise WouldWait
    descriptor = open_quickly(files, key)
    try:
        return [_read_cached(descriptor, start, length) for start, length in ranges]
    finally:
        os.close(descriptor)


def open_quickly(files: LocalFiles, key: str) -> int:
    """A descriptor of the object. Raises `NotFound`, or `WouldWait` where there is more to say than that."""
    try:
        return os.open(files.path(key), READ_FLAGS)
    except NOT_THERE:
        raise NotFound(key) from None
    except OSError:
        raise WouldWait from None


def _read(found: OpenObject, start: int, length: int, cached: bool) -> bytes:
    if cached:
        return _read_cached(found.descriptor, start, length) if length else b""
    pieces: list[bytes] = []
    while length:
        piece = os.pread(found.descriptor, length, start)
        if not piece:
            raise Unavailable(f"{found.key!r} was cut short while it was read", hint="another tool writes it")
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_cached(descriptor: int, start: int, length: int) -> bytes:
    # Reading nothing would not show whether the range lies inside; an offset of -1 means elsewhere to preadv.
    if start < 0 or not 0 < length <= INLINE_READ_BYTES_MAX:
        raise WouldWait
    piece = bytearray(length)
    try:
        if os.preadv(descriptor, [piece], start, os.RWF_NOWAIT) != length:
            raise WouldWait
    except (OSError, OverflowError):
        raise WouldWait from None  # Not in the cache, or a file system that cannot tell, or no such offset.
    return bytes(piece)


def _version_now(files: LocalFiles, key: str) -> str | None:
    try:
        with files.opened(key) as found:
            return found.version
    except NotFound:
        return None
