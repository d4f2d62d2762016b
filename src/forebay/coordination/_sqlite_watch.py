"""Watches of the embedded coordinator: one poll for all of them.

sqlite has no notifications between processes. It has `pragma data_version`, which differs after any commit of
another connection and costs microseconds; one task per coordinator asks every few milliseconds, and only
while somebody watches. A watch itself goes by the counter of the store, which moves with every change of a
key: it compares what it has seen with what is there now, so nothing can fall between two polls. The price is
that a change in one directory wakes the watches of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forebay.coordination._api import Watch
from forebay.errors import ForebayError, UsageError

__all__ = ["Poller", "SqliteWatch"]

POLL_INTERVAL_S = 0.015
"""How long a change by another process may go unnoticed."""


class Poller:
    """Wakes the waiting watches when `token` changes. Runs only while there are some."""

    def __init__(self, token: Callable[[], int]) -> None:
        self._token = token
        self._watches: set[SqliteWatch] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, watch: SqliteWatch) -> None:
        """Begin to wake `watch`."""
        self._watches.add(watch)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll(), name="forebay watch poll")

    def discard(self, watch: SqliteWatch) -> None:
        """Stop waking `watch`."""
        self._watches.discard(watch)
        if not self._watches and self._task is not None:
            self._task.cancel()
            self._task = None

    def wake(self) -> None:
        """Let every watch look for itself."""
        for watch in self._watches:
            watch.wake()

    async def _poll(self) -> None:
        seen = None
        while True:
            try:
                token = self._token()
            except ForebayError:
                # The watches meet the same error when they look, and raise it to their owners.
                self.wake()
            else:
                if token != seen:
                    self.wake()
                seen = token
            await asyncio.sleep(POLL_INTERVAL_S)


class SqliteWatch(Watch):
    """Compares the counter with the value it has seen."""

    def __init__(self, counter: Callable[[], int]) -> None:
        self._counter = counter
        self._seen = counter()
        self._event = asyncio.Event()
        self._waiting = False

    async def changed(self) -> None:
        """Return after a change anywhere in the store that was not reported yet."""
        if self._waiting:
            raise UsageError("two tasks wait on one watch", hint="give each task a watch of its own")
        self._waiting = True
        try:
            while True:
                self._event.clear()
                current = self._counter()
                if current != self._seen:
                    self._seen = current
                    return
                await self._event.wait()
        finally:
            self._waiting = False

    def wake(self) -> None:
        """Look again."""
        self._event.set()
