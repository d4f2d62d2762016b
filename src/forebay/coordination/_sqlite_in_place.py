"""Writes done by the event loop itself, without the hop to the writer's thread and back.

The two hops cost more than the statements of a small transaction do, and on a good disk nearly as much as the
sync: a loop that hands a lone write to a thread is busy with handing over for about as long as it would be
blocked. So a small write is done in place, on the connection the loop reads with (whose pages are then the
present ones for the next read), as long as nothing else would have to wait for it:

* nobody else holds the turn, or it is being kept for this very process; the loop never waits for a lock;
* the loop has nothing else to run at this moment. Tasks that write at the same time share one commit in the
  thread instead, which no sequence of commits in place could make good;
* the last ones were fast. Two in a row that take longer than a thread may hold the interpreter anyway send
  those after them to the thread for `SLOW_REST` times as long, so a slow disk blocks the loop for a small
  share of the time at most. One alone may have been the scheduler, and says nothing of the disk.

Neither a write in place nor a read gives the loop a chance to run, so to a caller with one after the other
they would be a way to keep everybody else waiting: timers, sockets and sessions to be renewed do not show in
the queue before the loop looks at them. `Breath` tells when it is time to let it.

Whether the loop has nothing else to run is read from the queue of the standard library's event loops. Other
loops do not show theirs; on those every write goes to the thread.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sized

from forebay.coordination._sqlite_commit import Committer, Request

__all__ = ["Breath", "InPlace"]

IN_PLACE_OPERATIONS_MAX = 128
"""Most operations of a write that is done in place: a millisecond. Larger ones go to the thread."""
SLOW_S = 0.005
"""How long a commit in place may block the loop without consequences."""
SLOW_REST = 20
"""How many times its duration a slow commit sends the following ones to the thread."""

BREATH_S = 0.005
"""How long a caller who never has to wait may keep the loop from running."""


class Breath:
    """Whether the loop has run of late. Belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since = 0.0
        self.callbacks = 0
        """How many of the loop's callbacks are ours, to see it run: one or none."""

    def is_due(self) -> bool:
        """Whether the caller should let the loop run before it goes on."""
        now = time.monotonic()
        if self.callbacks:
            return now - self._since >= BREATH_S
        self.callbacks, self._since = 1, now
        self._loop.call_soon(self._ran)
        return False

    def _ran(self) -> None:
        self.callbacks = 0


class InPlace:
    """Decides, and does. Belongs to one event loop."""

    def __init__(self, committer: Committer, loop: asyncio.AbstractEventLoop) -> None:
        self.committer = committer
        self.breath = Breath(loop)
        self._ready: Sized | None = getattr(loop, "_ready", None)
        self._not_before = 0.0
        self._was_slow = False

    def allows(self, request: Request, *, own_callbacks: int = 0) -> bool:
        """Whether the loop has the time for this one. `own_callbacks` of ours may wait beside it."""
        return (
            request.operations <= IN_PLACE_OPERATIONS_MAX
            and self._ready is not None
            and len(self._ready) <= own_callbacks + self.breath.callbacks
            and time.monotonic() >= self._not_before
        )

    def commit(self, request: Request) -> bool:
        """Do it, within a turn. False: something is in the way, and nothing was done."""
        began = time.monotonic()
        try:
            # It waits for nobody: a foreign program that holds the database is left to the thread.
            self.committer.begin()
        except sqlite3.Error:
            return False
        self.committer.finish([request])
        now = time.monotonic()
        slow = now - began > SLOW_S
        if slow and self._was_slow:
            self._not_before = now + (now - began) * SLOW_REST
        self._was_slow = slow
        return True
