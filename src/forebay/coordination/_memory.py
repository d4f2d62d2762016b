"""Coordination inside one process: for tests, for the simulated world, and as the model of the contract.

No thread, no file, and no call that waits: each one is done when its coroutine first runs. What takes time is
left to tasks of the caller. A session is renewed by a task that belongs to whoever opened it, so a crashed
actor's session runs out as a killed process's would. A watch sleeps until a change or until the next session
could expire, whichever is first, so an expiry that nobody else would notice still wakes it in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from forebay.coordination._api import (
    SCAN_RECORDS_MAX,
    Coordinator,
    Operation,
    Record,
    Session,
    Watch,
    WriteResult,
    validate_directory,
    validate_key,
    validate_limit,
    validate_operations,
    validate_partition_key,
    validate_range,
    validate_timeout_ms,
)
from forebay.coordination._memory_state import LeaseSession, MemoryState
from forebay.errors import Closed, UsageError
from forebay.kit.clock import Clock, SystemClock

__all__ = ["MemoryCoordinator"]

RENEWALS_PER_TIMEOUT = 3
"""How often a session renews itself within its timeout: two renewals may be late before it is over."""


class MemoryCoordinator(Coordinator):
    """Versioned keys in memory. `state` lets several coordinators, each with its own sessions, share keys."""

    def __init__(
        self,
        clock: Clock | None = None,
        shards: int = 1,
        *,
        state: MemoryState | None = None,
        url: str = "memory://",
    ) -> None:
        self.url = url
        self.state = state or MemoryState(clock or SystemClock(), shards)
        self._sessions: dict[int, MemorySession] = {}
        self._watches: set[_MemoryWatch] = set()
        self._closed = False

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The record, or None."""
        self._check_lookup(key, partition_key)
        return self.state.get(key, partition_key)

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        """Apply many operations in one step."""
        validate_operations(operations)
        session_ids = [self.state.session_of(operation, MemorySession) for operation in operations]
        self._check_open()
        return self.state.write(operations, session_ids)

    async def range_scan(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[Record]:
        """The first `limit` records of one directory with start <= key < end."""
        return self._scan(start, end, limit, partition_key)

    async def ceiling(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record at or above `key` in its directory."""
        self._check_lookup(key, partition_key)
        return self.state.neighbour(key, partition_key, up=True, equal=True)

    async def floor(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record at or below `key` in its directory."""
        self._check_lookup(key, partition_key)
        return self.state.neighbour(key, partition_key, up=False, equal=True)

    async def higher(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record above `key` in its directory."""
        self._check_lookup(key, partition_key)
        return self.state.neighbour(key, partition_key, up=True, equal=False)

    async def lower(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record below `key` in its directory."""
        self._check_lookup(key, partition_key)
        return self.state.neighbour(key, partition_key, up=False, equal=False)

    async def open_session(self, timeout_ms: int = 15_000) -> Session:
        """Begin a session, renewed by a task of the caller's context."""
        validate_timeout_ms(timeout_ms)
        self._check_open()
        session = MemorySession(self, timeout_ms)
        self._sessions[session.id] = session
        return session

    def watch(self, directory: str) -> AbstractAsyncContextManager[Watch]:
        """Watch the leaves of one directory from the moment the block is entered."""
        validate_directory(directory)
        return self._watching(directory)

    @asynccontextmanager
    async def _watching(self, directory: str) -> AsyncIterator[Watch]:
        self._check_open()
        watch = _MemoryWatch(self.state)
        self._watches.add(watch)
        self.state.listen(directory, watch, watch.wake)
        try:
            yield watch
        finally:
            self.state.unlisten(directory, watch)
            self._watches.discard(watch)

    async def close(self) -> None:
        """End the sessions opened here and let go of the watches. The keys stay in `state`."""
        self._closed = True
        for session in list(self._sessions.values()):
            await session.close()
        for watch in list(self._watches):
            watch.close()

    def forget(self, session: MemorySession) -> None:
        """A session that was closed needs no closing any more."""
        self._sessions.pop(session.id, None)

    def _scan(self, start: str, end: str, limit: int, partition_key: str | None) -> list[Record]:
        validate_range(start, end)
        validate_limit(limit)
        validate_partition_key(partition_key)
        self._check_open()
        return self.state.scan(start, end, limit, partition_key)

    def _check_lookup(self, key: str, partition_key: str | None) -> None:
        validate_key(key)
        validate_partition_key(partition_key)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the coordinator {self.url} is closed", hint="open a new one")

    async def list(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[str]:
        """The keys of a range scan."""
        return [record.key for record in self._scan(start, end, limit, partition_key)]


class MemorySession(LeaseSession):
    """A lease in memory."""

    def __init__(self, owner: MemoryCoordinator, timeout_ms: int) -> None:
        self.state = owner.state
        self.timeout_ms = timeout_ms
        self._owner = owner
        self.id = self.state.open_session(timeout_ms / 1000)
        self._renewal = asyncio.get_running_loop().create_task(self._renew(), name=f"session {self.id}")

    @property
    def alive(self) -> bool:
        """Whether its deadline is ahead."""
        return self.state.session_alive(self.id)

    async def close(self) -> None:
        """End it now, with its keys."""
        self._renewal.cancel()
        self._owner.forget(self)
        self.state.end_session(self.id)

    async def _renew(self) -> None:
        while self.state.renew_session(self.id):
            await self.state.clock.sleep(self.timeout_ms / 1000 / RENEWALS_PER_TIMEOUT)


class _MemoryWatch(Watch):
    """One listener. Its future exists only while somebody waits."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state
        self._dirty = False
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    async def changed(self) -> None:
        """Return after a change that was not reported yet."""
        if self._waiter is not None:
            raise UsageError("two tasks wait on one watch", hint="give each task a watch of its own")
        while True:
            self._state.expire()
            if self._closed:
                raise Closed("the coordinator of this watch is closed", hint="open a new one")
            if self._dirty:
                self._dirty = False
                return
            await self._sleep()

    def wake(self, changed: bool) -> None:
        """Called by the state, possibly from the thread of another loop."""
        self._dirty = self._dirty or changed
        waiter = self._waiter
        if waiter is None:
            return
        if _running_loop() is waiter.get_loop():
            _finish(waiter)
        else:
            waiter.get_loop().call_soon_threadsafe(_finish, waiter)

    def close(self) -> None:
        self._closed = True
        self.wake(False)

    async def _sleep(self) -> None:
        """Until somebody wakes us or the next session may have expired."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        if self._dirty or self._closed:  # From another thread, before there was a waiter to wake.
            self._waiter = None
            return
        timer: asyncio.Task[None] | None = None
        deadline = self._state.next_deadline()
        if deadline is not None:
            timer = loop.create_task(
                self._state.clock.sleep(max(0.0, deadline - self._state.clock.monotonic()))
            )
            timer.add_done_callback(lambda _: _finish(waiter))
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
