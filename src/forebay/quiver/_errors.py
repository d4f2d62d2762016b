"""What only Quiver can say.

DirectoryInUse    NotDone          another process, or another instance, has the directory
QuiverFailed      NotDone          a sync failed earlier; reopen to find out what is durable
QuiverFull        Backpressure     the size cap is reached and subscribers have not caught up
UnknownSubscriber NotFound         no such subscriber is registered
"""

from __future__ import annotations

import errno
import os

from forebay.errors import (
    AccessDenied,
    Backpressure,
    ForebayError,
    NotDone,
    NotFound,
    StorageFull,
    Unavailable,
)

__all__ = [
    "DirectoryInUse",
    "QuiverFailed",
    "QuiverFull",
    "UnknownSubscriber",
    "from_os_error",
]


class DirectoryInUse(NotDone):
    """Another process or instance has the directory open."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is in use", hint="close the other instance, or use a directory of your own")


class QuiverFailed(NotDone):
    """A sync failed, so nobody knows what the disk holds. Nothing was done now."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the store stopped after a failed sync: {reason}",
            hint="see to the disk, then close and open the store again: it reads what is really there",
        )
        self.reason = reason


class QuiverFull(Backpressure):
    """The size cap is reached, and nothing may be dropped."""

    def __init__(self, *, used: int, cap: int, needed: int) -> None:
        super().__init__(
            f"{needed:,} bytes do not fit: {used:,} of {cap:,} are in use",
            hint="let subscribers catch up, raise size_cap_bytes, or allow drop_oldest",
        )
        self.used = used
        self.cap = cap
        self.needed = needed


class UnknownSubscriber(NotFound):
    """No such subscriber is registered."""

    def __init__(self, subscriber: str, hint: str = "register it first") -> None:
        super().__init__(f"subscriber {subscriber}", hint=hint)
        self.subscriber = subscriber


def from_os_error(what: str, error: OSError) -> ForebayError:
    """An error of the file system in the words of the tree. It certainly did not happen."""
    where = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    text = f"{what}{where}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(text, hint="free space on the disk; the store goes on by itself")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied(text, hint="the directory must be readable and writable")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Unavailable(text, hint="raise the limit on open files (ulimit -n)")
    if error.errno == errno.ENOENT:
        return Unavailable(text, hint="make the directory above it first, or see who removed it")
    return Unavailable(text, hint="see to the disk")
