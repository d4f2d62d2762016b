"""One actor's view of the simulated coordinator.

Keys, leases and listeners are those of the real memory tenant, shared by all actors; this module puts the
actor's wire before them. Two things are its own. A session is renewed over the wire by a task of the actor,
so a crash, a pause or a partition lets it run out, and its `alive` is judged by the actor's clock from the
moment the last successful renewal was *sent*. A watch is woken after a latency, and not through a partition.

A `write` is one request per shard, each with its own fate, as on a sharded server: with several shards a
write may be done in part, refused in part and unknown in part. A range delete without a partition key goes to
every shard; where it was done in some and not in others, its outcome is unknown.

Operations, as faults, latencies and counters name them: `get`, `write`, `range_scan`, `list`, `lookup`
(ceiling, floor, higher, lower), `open_session`, `renew_session`, `close_session`, `watch`.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace

from forebay.coordination import Coordinator, Operation, Put, Record, Session, Watch, WriteResult
from forebay.coordination._api import (
    SCAN_RECORDS_MAX,
    DeleteRange,
    validate_directory,
    validate_key,
    validate_limit,
    validate_operations,
    validate_partition_key,
    validate_range,
    validate_timeout_ms,
)
from forebay.coordination._memory_state import LeaseSession, MemoryState
from forebay.errors import Closed, ForebayError, OutcomeUnknown
from forebay.kit.clock import Clock
from forebay.testing.sim_link import Link

__all__ = ["SimCoordinator", "SimSession"]

RENEWALS_PER_TIMEOUT = 3
"""How often a session is renewed within its timeout."""


class SimCoordinator(Coordinator):
    """A `Coordinator` over a shared `MemoryState` and the wire of one actor."""

    def __init__(self, state: MemoryState, link: Link, clock: Clock, shards: int = 1) -> None:
        self.url = f"sim://{link.actor}"
        self.state = state
        self.link = link
        """The wire: its faults, latencies and partitions."""
        self.clock = clock
        self._shards = shards
        self._shard_names = [_name_in(shard, shards) for shard in range(shards)]
        self._sessions: dict[int, SimSession] = {}
        self._watches: dict[_SimWatch, str] = {}
        self.closed = False
        """Whether it refuses further use."""

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The record, or None."""
        self._check_lookup(key, partition_key)
        found = await self.link.call("get", key, lambda: self.state.get(key, partition_key), write=False)
        self._received("get", found)
        return found

    async def get_many(self, keys: Sequence[tuple[str, str | None]]) -> Sequence[Record | None]:
        """The records of many keys: one request, which all shards answer alike."""
        for key, partition_key in keys:
            self._check_lookup(key, partition_key)
        if not keys:
            return []
        subject = " ".join(key for key, _ in keys)
        found = await self.link.call(
            "get", subject, lambda: [self.state.get(key, home) for key, home in keys], write=False
        )
        for record in found:
            self._received("get", record)
        return found

    async def get_and_ceiling(
        self, key: str, start: str, *, partition_key: str
    ) -> tuple[Record | None, Record | None]:
        """`get` of `key`, and after it `ceiling` of `start`: one request."""
        self._check_lookup(key, partition_key)
        self._check_lookup(start, partition_key)
        found = await self.link.call(
            "get_and_ceiling",
            f"{key} {start}",
            lambda: (
                self.state.get(key, partition_key),
                self.state.neighbour(start, partition_key, up=True, equal=True),
            ),
            write=False,
        )
        for record in found:
            self._received("get_and_ceiling", record)
        return found

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        """One request per shard. A result may be `OutcomeUnknown` whether it was done or not."""
        validate_operations(operations)
        session_ids = [self.state.session_of(operation, SimSession) for operation in operations]
        self._check_open()
        groups: dict[int, list[int]] = {}
        for index, operation in enumerate(operations):
            for shard in self._homes(operation):
                groups.setdefault(shard, []).append(index)
        sending = [
            self._write_group(
                [self._at_home(operations[index], shard) for index in indexes],
                [session_ids[index] for index in indexes],
            )
            for shard, indexes in groups.items()
        ]
        answers = [await sending[0]] if len(sending) == 1 else await asyncio.gather(*sending)
        results: list[WriteResult | None] = [None] * len(operations)
        for indexes, group in zip(groups.values(), answers, strict=True):
            for index, result in zip(indexes, group, strict=True):
                results[index] = _merged(results[index], result)
        return [result or WriteResult() for result in results]

    async def _write_group(
        self, operations: Sequence[Operation], session_ids: Sequence[int | None]
    ) -> Sequence[WriteResult]:
        subject = " ".join(_subject(operation) for operation in operations)
        sent = sum(len(operation.value) for operation in operations if isinstance(operation, Put))
        try:
            return await self.link.call(
                "write", subject, lambda: self.state.write(operations, session_ids), write=True, sent=sent
            )
        except ForebayError as error:
            return [WriteResult(error=error)] * len(operations)

    async def range_scan(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[Record]:
        """The first `limit` records of one directory with start <= key < end."""
        return await self._scan("range_scan", start, end, limit, partition_key)

    async def ceiling(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record at or above `key` in its directory."""
        return await self._lookup(key, partition_key, up=True, equal=True)

    async def floor(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record at or below `key` in its directory."""
        return await self._lookup(key, partition_key, up=False, equal=True)

    async def higher(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record above `key` in its directory."""
        return await self._lookup(key, partition_key, up=True, equal=False)

    async def lower(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record below `key` in its directory."""
        return await self._lookup(key, partition_key, up=False, equal=False)

    async def open_session(self, timeout_ms: int = 15_000) -> Session:
        """Begin a session, renewed by a task of the caller."""
        validate_timeout_ms(timeout_ms)
        self._check_open()
        sent_at = self.clock.monotonic()
        session_id = await self.link.call(
            "open_session", str(timeout_ms), lambda: self._begin(timeout_ms), write=True
        )
        session = SimSession(self, session_id, timeout_ms, sent_at)
        self._sessions[session_id] = session
        return session

    def _begin(self, timeout_ms: int) -> int:
        session_id = self.state.open_session(timeout_ms / 1000)
        self._expire_in(timeout_ms / 1000)
        return session_id

    def _expire_in(self, seconds: float) -> None:
        """Sessions end in time even where no call comes by to notice."""
        self.link.loop.call_later(seconds, self.state.expire, context=self.link.context)

    async def renew(self, session_id: int, timeout_ms: int) -> bool:
        """Whether the session lives; if so, for its full timeout again."""

        def effect() -> bool:
            lives = self.state.renew_session(session_id)
            if lives:
                self._expire_in(timeout_ms / 1000)
            return lives

        return await self.link.call("renew_session", str(session_id), effect, write=True)

    async def end(self, session_id: int) -> None:
        """Drop a session and its keys."""
        self._sessions.pop(session_id, None)
        await self.link.call(
            "close_session", str(session_id), lambda: self.state.end_session(session_id), write=True
        )

    def watch(self, directory: str) -> AbstractAsyncContextManager[Watch]:
        """Watch the leaves of one directory from the moment the block is entered."""
        validate_directory(directory)
        return self._watching(directory)

    @asynccontextmanager
    async def _watching(self, directory: str) -> AsyncIterator[Watch]:
        self._check_open()
        watch = _SimWatch(self.link)
        await self.link.call(
            "watch", directory, lambda: self.state.listen(directory, watch, watch.notice), write=False
        )
        self._watches[watch] = directory
        try:
            yield watch
        finally:
            self.state.unlisten(directory, watch)
            self._watches.pop(watch, None)

    async def close(self) -> None:
        """End the sessions opened here and let go of the watches."""
        if self.closed:
            return
        self.closed = True
        for session in list(self._sessions.values()):
            with suppress(ForebayError):  # Where the service cannot be told, the lease runs out by itself.
                await session.close()
        for watch in list(self._watches):
            watch.close()

    async def _lookup(self, key: str, partition_key: str | None, *, up: bool, equal: bool) -> Record | None:
        self._check_lookup(key, partition_key)
        found = await self.link.call(
            "lookup", key, lambda: self.state.neighbour(key, partition_key, up=up, equal=equal), write=False
        )
        self._received("lookup", found)
        return found

    async def _scan(
        self, operation: str, start: str, end: str, limit: int, partition_key: str | None
    ) -> list[Record]:
        validate_range(start, end)
        validate_limit(limit)
        validate_partition_key(partition_key)
        self._check_open()
        found = await self.link.call(
            operation, start, lambda: self.state.scan(start, end, limit, partition_key), write=False
        )
        self._received(operation, *(found if operation == "range_scan" else ()))
        return found

    def _homes(self, operation: Operation) -> Sequence[int]:
        """The shards that an operation concerns."""
        if self._shards == 1:
            return (0,)
        if isinstance(operation, DeleteRange):
            home = operation.partition_key
        else:
            home = operation.partition_key or operation.key
        return range(self._shards) if home is None else (_shard_of(home, self._shards),)

    def _at_home(self, operation: Operation, shard: int) -> Operation:
        """The part of an operation that concerns one shard."""
        if isinstance(operation, DeleteRange) and operation.partition_key is None and self._shards > 1:
            return replace(operation, partition_key=self._shard_names[shard])
        return operation

    def _check_lookup(self, key: str, partition_key: str | None) -> None:
        validate_key(key)
        validate_partition_key(partition_key)
        self._check_open()

    def _check_open(self) -> None:
        if self.closed:
            raise Closed(f"the coordinator {self.url} is closed", hint="ask the world for a new view")

    def _received(self, operation: str, *records: Record | None) -> None:
        self.link.counter(operation)[2] += sum(len(record.value) for record in records if record)

    async def list(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[str]:
        """The keys of a range scan."""
        return [record.key for record in await self._scan("list", start, end, limit, partition_key)]


class SimSession(LeaseSession):
    """A lease that a task of its actor renews over the wire."""

    def __init__(self, owner: SimCoordinator, session_id: int, timeout_ms: int, sent_at: float) -> None:
        self.id = session_id
        self.timeout_ms = timeout_ms
        self.state = owner.state
        self._owner = owner
        self._valid_until = sent_at + timeout_ms / 1000
        self._over = False
        self._renewal = asyncio.get_running_loop().create_task(
            self._renew(), name=f"{owner.link.actor}/session {session_id}"
        )

    @property
    def alive(self) -> bool:
        """Whether the lease holds for certain, by the actor's own clock."""
        return not self._over and self._owner.clock.monotonic() < self._valid_until

    async def close(self) -> None:
        """End it now, with its keys. Where the service cannot be told, the lease runs out by itself."""
        self._renewal.cancel()
        if not self._over:
            self._over = True
            await self._owner.end(self.id)

    async def _renew(self) -> None:
        clock = self._owner.clock
        while not self._over:
            await clock.sleep(self.timeout_ms / 1000 / RENEWALS_PER_TIMEOUT)
            sent_at = clock.monotonic()
            try:
                lives = await self._owner.renew(self.id, self.timeout_ms)
            except ForebayError:
                continue  # Unknown counts as not renewed: the lease is judged shorter than it may be.
            if not lives:
                self._over = True
            self._valid_until = max(self._valid_until, sent_at + self.timeout_ms / 1000)


class _SimWatch(Watch):
    """One listener, woken over the wire."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._woken = asyncio.Event()
        self.closed = False

    async def changed(self) -> None:
        """Return after a change that was not reported yet."""
        await self._woken.wait()
        if self.closed:
            raise Closed("the coordinator of this watch is closed", hint="ask the world for a new view")
        self._woken.clear()

    def notice(self, changed: bool) -> None:
        """Called by the state at the moment of a change."""
        if changed:
            link = self._link
            delay = link.latencies.of("watch").sample(link.random)
            link.loop.call_later(delay, self._deliver, context=link.context)

    def _deliver(self) -> None:
        if self._link.cut:  # A watch never sleeps through a change: it is told once the partition ends.
            self._link.loop.call_later(self._link.timeout_s, self._deliver, context=self._link.context)
        else:
            self._woken.set()

    def close(self) -> None:
        self.closed = True
        self._woken.set()


def _shard_of(text: str, shards: int) -> int:
    """As the memory tenant does it."""
    return zlib.crc32(text.encode()) % shards


def _name_in(shard: int, shards: int) -> str:
    """A partition key that lives in a shard."""
    return next(name for name in map(str, itertools.count()) if _shard_of(name, shards) == shard)


def _merged(one: WriteResult | None, two: WriteResult) -> WriteResult:
    """The result of an operation that concerned several shards."""
    if one is None or (one.error is None and two.error is None):
        return two
    if one.error is not None and two.error is not None and not isinstance(two.error, OutcomeUnknown):
        return one
    return WriteResult(error=OutcomeUnknown("coordinator.write", reason="done in some shards, not in others"))


def _subject(operation: Operation) -> str:
    return operation.start if isinstance(operation, DeleteRange) else operation.key
