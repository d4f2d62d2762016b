"""Whether a handle may still be used: not after close, and not in a forked child.

Locks, threads and connections do not survive a fork: a child that went on with them would hang, or hold the
lock that its parent let go.
"""

from __future__ import annotations

import os

from forebay.errors import Closed, UsageError

__all__ = ["Handle"]


class Handle:
    """The life of one open store."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process = os.getpid()
        self._closed = False

    def check(self) -> None:
        """Raise where the store may not be used any more."""
        if self._closed:
            raise Closed(f"the store {self._url!r} was closed", hint="open it again with open_store")
        if os.getpid() != self._process:
            raise UsageError(
                f"the store {self._url!r} was opened before this process was forked",
                hint="open it again in the child, or start workers by spawn",
            )

    def close(self) -> None:
        """No further use."""
        self._closed = True
