"""What the operating system said, in the words of the error tree.

Used only where it is certain that no object changed: before the rename, or on a read. Where the effect is
unknown the caller raises `OutcomeUnknown` itself.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from forebay.errors import (
    AccessDenied,
    ForebayError,
    StorageDamaged,
    StorageFull,
    Unavailable,
    Unsupported,
)

__all__ = ["EFFECT_UNKNOWN", "from_os_error", "reported"]

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DAMAGED = frozenset({errno.EIO, errno.EUCLEAN, errno.ESTALE})
EFFECT_UNKNOWN = _DAMAGED | {errno.ETIMEDOUT}
"""Errors of a rename or an unlink after which the change may be there or not."""


def from_os_error(error: OSError, operation: str) -> ForebayError:
    """The error to raise instead of `error`."""
    message = f"{operation}: {error.strerror or error}"
    if error.errno in _DENIED:
        return AccessDenied(message, hint="check owner, mode and mount options of the directory")
    if error.errno in _FULL:
        return StorageFull(message, hint="free space or raise the quota, then try again; nothing was written")
    if error.errno in _DAMAGED:
        return StorageDamaged(message, hint="check the disk and the kernel log")
    if error.errno == errno.ENOTSUP:
        return Unsupported(
            f"{operation}: this file system keeps no extended attributes",
            hint="put the directory on ext4, xfs or btrfs, or on tmpfs of Linux 6.6 or newer",
        )
    if error.errno == errno.EXDEV:
        return Unsupported(
            f"{operation}: a directory of the store is a mount of its own",
            hint="keep the whole store on one file system",
        )
    if error.errno == errno.ENAMETOOLONG:
        return Unsupported(f"{operation}: too long a name for this file system", hint="use shorter keys")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Unavailable(message, hint="raise the limit of open files (ulimit -n)")
    return Unavailable(message, hint="look at the directory, then try again")


@contextmanager
def reported(operation: str) -> Iterator[None]:
    """Raise what `from_os_error` makes of an OSError inside the block."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, operation) from error
