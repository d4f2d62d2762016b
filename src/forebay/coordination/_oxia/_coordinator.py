"""The Oxia tenant of the seam: routes operations to shards and puts the answers together.

It is opened without touching the network and connects at the first call, which also binds it to that
process and event loop: connections do not survive a fork, and belong to one loop. Used elsewhere it says
so.

With several shards a range without a partition key may span all of them. Scans and lookups then ask every
shard and merge; each shard answers from one moment, all of them together do not. The same holds for a range
delete: atomic on each shard, and where some shards did it and others did not, its outcome is called
unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from forebay.coordination._api import (
    SCAN_RECORDS_MAX,
    Coordinator,
    DeleteRange,
    Operation,
    Put,
    Record,
    Session,
    Watch,
    WriteResult,
    foreign_session,
    validate_directory,
    validate_key,
    validate_limit,
    validate_operations,
    validate_partition_key,
    validate_range,
    validate_timeout_ms,
)
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._batch import Unit
from forebay.coordination._oxia._config import OxiaConfig
from forebay.coordination._oxia._deadline import Deadline
from forebay.coordination._oxia._link import Link
from forebay.coordination._oxia._notifications import Notifications
from forebay.coordination._oxia._reads import Reader
from forebay.coordination._oxia._sessions import OxiaSession, SessionOwner
from forebay.coordination._oxia._shard import ShardMap
from forebay.errors import Closed, ForebayError, NotDone, OutcomeUnknown, UsageError
from forebay.kit.clock import Clock, SystemClock

__all__ = ["OxiaCoordinator"]


class _InUse:
    """What exists only once the coordinator is in use."""

    def __init__(self, config: OxiaConfig, clock: Clock, randomness: random.Random) -> None:
        self.link = Link.join(config, clock, randomness)
        self.reader = Reader(self.link.caller)
        self.sessions = SessionOwner(self.link.caller, clock, self.link.quiet, config.timeout_s)
        self.notifications = Notifications(self.link.assignments, self.link.channels, clock, randomness)
        self.writes = 0
        """Calls of `write` that have not returned."""
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around every `write`, so that a close can wait for it."""
        self.writes += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.writes -= 1
            if not self.writes:
                self.idle.set()

    async def close(self, deadline: Deadline) -> None:
        """In the order of dependence: what was accepted, the sessions and their keys, the connections."""
        await self.notifications.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline.at):
                await self.idle.wait()
        await self.sessions.close()
        await self.link.leave(deadline)


class OxiaCoordinator(Coordinator):
    """Versioned keys in a namespace of an Oxia cluster."""

    def __init__(
        self,
        config: OxiaConfig,
        *,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        url: str | None = None,
    ) -> None:
        self.config = config
        self.url = url or f"oxia://{config.address}/{config.namespace}"
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._in_use: _InUse | None = None
        self._closed = False

    # -- reads

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The record, or None."""
        validate_key(key)
        validate_partition_key(partition_key)
        return await self._use().reader.get(key, partition_key, self._deadline())

    async def get_many(self, keys: Sequence[tuple[str, str | None]]) -> Sequence[Record | None]:
        """The records of many keys, in one request per shard."""
        for key, partition_key in keys:
            validate_key(key)
            validate_partition_key(partition_key)
        return await self._use().reader.get_many(keys, self._deadline())

    async def get_and_ceiling(
        self, key: str, start: str, *, partition_key: str
    ) -> tuple[Record | None, Record | None]:
        """`get` of `key`, and after it `ceiling` of `start`, in one request."""
        validate_key(key)
        validate_key(start)
        validate_partition_key(partition_key)
        return await self._use().reader.get_and_ceiling(key, start, partition_key, self._deadline())

    async def range_scan(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[Record]:
        """The first `limit` records of one directory with start <= key < end."""
        _validate_scan(start, end, limit, partition_key)
        return await self._use().reader.range_scan(start, end, limit, partition_key, self._deadline())

    async def ceiling(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record at or above `key` in its directory."""
        return await self._nearest(key, pb.CEILING, partition_key)

    async def floor(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record at or below `key` in its directory."""
        return await self._nearest(key, pb.FLOOR, partition_key)

    async def higher(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record above `key` in its directory."""
        return await self._nearest(key, pb.HIGHER, partition_key)

    async def lower(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record below `key` in its directory."""
        return await self._nearest(key, pb.LOWER, partition_key)

    async def _nearest(self, key: str, comparison: pb.Comparison, partition_key: str | None) -> Record | None:
        validate_key(key)
        validate_partition_key(partition_key)
        return await self._use().reader.nearest(key, comparison, partition_key, self._deadline())

    # -- writes

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        """Apply many operations, in one round trip per shard."""
        operations = list(operations)
        validate_operations(operations)
        ephemeral = [place for place, each in enumerate(operations) if _is_ephemeral(each)]
        self._check_sessions([operations[place] for place in ephemeral])
        in_use = self._use()
        if not operations:
            return []
        with in_use.writing():
            return await self._write(in_use.link, operations, ephemeral)

    async def _write(
        self, link: Link, operations: Sequence[Operation], ephemeral: Sequence[int]
    ) -> list[WriteResult]:
        """`ephemeral`: the places of puts with a session."""
        deadline = self._deadline()
        try:
            shards = await link.assignments.current(deadline)
        except NotDone as error:
            return [WriteResult(error=error)] * len(operations)
        if len(shards.ids) == 1 and not ephemeral:
            # The common case: the replies of the one shard are the results.
            [shard] = shards.ids
            unit = Unit(shard, operations, deadline)
            await _submit(link, {shard: unit})
            return unit.results()
        return await self._write_parts(link, operations, _by_shard(operations, shards), deadline)

    async def _write_parts(
        self, link: Link, operations: Sequence[Operation], parts: dict[int, list[int]], deadline: Deadline
    ) -> list[WriteResult]:
        """Where it has several parts, or some of it may be refused before it is sent."""
        results: list[WriteResult | None] = [None] * len(operations)
        for shard, indexes in parts.items():
            for index in [index for index in indexes if _is_ephemeral(operations[index])]:
                failure = await self._extend_session(shard, operations[index], deadline)
                if failure is not None:
                    results[index] = WriteResult(error=failure)
                    indexes.remove(index)
        units = {
            shard: Unit(shard, [operations[index] for index in indexes], deadline)
            for shard, indexes in parts.items()
            if indexes
        }
        await _submit(link, units)
        on_many: dict[int, list[WriteResult]] = {}
        for shard, unit in units.items():
            for index, reply in zip(parts[shard], unit.results(), strict=True):
                first = results[index]
                if first is None:
                    results[index] = reply
                else:
                    on_many.setdefault(index, [first]).append(reply)
        for index, replies in on_many.items():
            results[index] = _result(operations[index], replies)
        return [result for result in results if result is not None]

    async def _extend_session(
        self, shard: int, operation: Operation, deadline: Deadline
    ) -> ForebayError | None:
        """See that the session of an ephemeral put exists on the shard; why that failed."""
        assert isinstance(operation, Put) and isinstance(operation.session, OxiaSession)
        try:
            await operation.session.extend(shard, deadline)
        except NotDone as failure:
            return failure
        return None

    def _check_sessions(self, operations: Sequence[Operation]) -> None:
        owner = None if self._in_use is None else self._in_use.sessions
        for operation in operations:
            session = operation.session if isinstance(operation, Put) else None
            if not isinstance(session, OxiaSession) or session.owner is not owner:
                raise foreign_session()

    # -- sessions and watches

    async def open_session(self, timeout_ms: int = 15_000) -> Session:
        """Begin a session."""
        validate_timeout_ms(timeout_ms)
        return await self._use().sessions.open(timeout_ms)

    def watch(self, directory: str) -> AbstractAsyncContextManager[Watch]:
        """Watch the leaves of one directory from the moment the block is entered."""
        validate_directory(directory)
        return self._watching(directory)

    @asynccontextmanager
    async def _watching(self, directory: str) -> AsyncIterator[Watch]:
        notifications = self._use().notifications
        watch = await notifications.begin(directory, self._deadline())
        try:
            yield watch
        finally:
            await notifications.end(watch)

    # -- life

    async def close(self) -> None:
        """Finish what was accepted, end the sessions, let go of connections. At most two timeouts long."""
        if self._closed:
            return
        if self._in_use is not None:
            self._use()
        self._closed = True
        if self._in_use is not None:
            await self._in_use.close(self._deadline())

    def _use(self) -> _InUse:
        if self._closed:
            raise Closed(f"the coordinator {self.url} is closed", hint="open a new one")
        if self._in_use is None:
            self._in_use = _InUse(self.config, self._clock, self._random)
        link = self._in_use.link
        if link.pid != os.getpid():
            raise UsageError(
                f"the coordinator {self.url} was opened in another process",
                hint="connections do not survive a fork: open a new coordinator in the child",
            )
        if link.loop is not asyncio.get_running_loop():
            raise UsageError(
                f"the coordinator {self.url} is in use on another event loop",
                hint="open one coordinator per event loop",
            )
        return self._in_use

    def _deadline(self) -> Deadline:
        return Deadline(self.config.timeout_s)

    async def list(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[str]:
        """The keys of a range scan."""
        _validate_scan(start, end, limit, partition_key)
        return await self._use().reader.keys(start, end, limit, partition_key, self._deadline())


def _validate_scan(start: str, end: str, limit: int, partition_key: str | None) -> None:
    validate_range(start, end)
    validate_limit(limit)
    validate_partition_key(partition_key)


async def _submit(link: Link, units: dict[int, Unit]) -> None:
    """Send the units of all shards at once. A unit of which everything was refused is not sent."""
    travelling = [(shard, unit) for shard, unit in units.items() if unit.operations]
    if len(travelling) == 1:
        [(shard, unit)] = travelling
        await link.stream(shard).submit(unit)
    else:
        await asyncio.gather(*[link.stream(shard).submit(unit) for shard, unit in travelling])


def _by_shard(operations: Sequence[Operation], shards: ShardMap) -> dict[int, list[int]]:
    """The indexes of the operations of each shard. A range without a partition key is on all of them."""
    parts: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        if operation.partition_key is not None:
            targets = [shards.of(operation.partition_key)]
        elif isinstance(operation, DeleteRange):
            targets = shards.ids
        else:
            targets = [shards.of(operation.key)]
        for shard in targets:
            parts.setdefault(shard, []).append(index)
    return parts


def _is_ephemeral(operation: Operation) -> bool:
    return isinstance(operation, Put) and operation.session is not None


def _result(operation: Operation, replies: Sequence[WriteResult]) -> WriteResult:
    """One result from the replies of all shards an operation went to."""
    errors = [reply.error for reply in replies if reply.error is not None]
    if not errors:
        return WriteResult(version=replies[0].version)
    if len(errors) == len(replies) and all(isinstance(error, NotDone) for error in errors):
        return WriteResult(error=errors[0])
    unknown = [error for error in errors if isinstance(error, OutcomeUnknown)]
    if unknown:
        return WriteResult(error=unknown[0])
    assert isinstance(operation, DeleteRange)
    return WriteResult(
        error=OutcomeUnknown(
            f"removing {operation.start!r} to {operation.end!r}",
            reason=f"{len(errors)} of {len(replies)} shards did not do it: {errors[0].message}",
        )
    )
