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
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

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
    validate_directory,
    validate_key,
    validate_limit,
    validate_operations,
    validate_partition_key,
    validate_range,
    validate_timeout_ms,
)
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._assignments import Assignments
from forebay.coordination._oxia._batch import Reply, Unit
from forebay.coordination._oxia._calls import Caller
from forebay.coordination._oxia._channels import Channels
from forebay.coordination._oxia._config import OxiaConfig
from forebay.coordination._oxia._deadline import Backoff, Deadline
from forebay.coordination._oxia._notifications import Notifications
from forebay.coordination._oxia._reads import Reader
from forebay.coordination._oxia._sessions import OxiaSession, SessionOwner
from forebay.coordination._oxia._shard import ShardMap
from forebay.coordination._oxia._write_stream import WriteStream
from forebay.errors import Closed, ForebayError, NotDone, OutcomeUnknown, UsageError
from forebay.kit.clock import Clock, SystemClock

__all__ = ["OxiaCoordinator"]


class _Connected:
    """Everything that exists only once the coordinator is in use."""

    def __init__(self, config: OxiaConfig, clock: Clock, randomness: random.Random) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.get_running_loop()
        self.channels = Channels(config.tls)
        self.assignments = Assignments(config, self.channels, clock, Backoff(randomness))
        caller = Caller(self.assignments, self.channels, clock, randomness)
        self.reader = Reader(caller)
        self.sessions = SessionOwner(caller, clock, self.quiet, config.timeout_s)
        self.notifications = Notifications(self.assignments, self.channels, clock, randomness)
        self._config = config
        self._clock = clock
        self._random = randomness
        self._streams: dict[int, WriteStream] = {}

    def stream(self, shard: int) -> WriteStream:
        """The one writer of a shard."""
        stream = self._streams.get(shard)
        if stream is None:
            stream = self._streams[shard] = WriteStream(
                shard, self._config, self.assignments, self.channels, self._clock, Backoff(self._random)
            )
        return stream

    def quiet(self, shard: int, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        """A moment without writes of ours under way on a shard."""
        return self.stream(shard).quiet(deadline)

    async def close(self, deadline: Deadline) -> None:
        """In the order of dependence: keys of sessions go first, connections last."""
        await self.notifications.close()
        await self.sessions.close()
        await asyncio.gather(*[stream.close(deadline) for stream in self._streams.values()])
        await self.assignments.close()
        await self.channels.close()


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
        self._connected: _Connected | None = None
        self._closed = False

    # -- reads

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The record, or None."""
        validate_key(key)
        validate_partition_key(partition_key)
        return await self._use().reader.get(key, partition_key, self._deadline())

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
        self._check_sessions(operations)
        connected = self._use()
        if not operations:
            return []
        deadline = self._deadline()
        try:
            shards = await connected.assignments.current(deadline)
        except NotDone as error:
            return [WriteResult(error=error)] * len(operations)
        parts = _by_shard(operations, shards)
        replies: list[list[Reply]] = [[] for _ in operations]
        for shard, indexes in parts.items():
            failures = await self._extend_sessions(shard, [operations[index] for index in indexes], deadline)
            for index, failure in zip(list(indexes), failures, strict=True):
                if failure is not None:
                    replies[index].append(Reply(error=failure))
                    indexes.remove(index)
        units = {
            shard: Unit(shard, [operations[index] for index in indexes], deadline)
            for shard, indexes in parts.items()
            if indexes
        }
        await self._submit(connected, units)
        for shard, unit in units.items():
            for index, reply in zip(parts[shard], unit.replies, strict=True):
                assert reply is not None
                replies[index].append(reply)
        return [_result(operation, parts) for operation, parts in zip(operations, replies, strict=True)]

    async def _submit(self, connected: _Connected, units: dict[int, Unit]) -> None:
        travelling = [(shard, unit) for shard, unit in units.items() if unit.operations]
        if len(travelling) == 1:
            [(shard, unit)] = travelling
            await connected.stream(shard).submit(unit)
        else:
            await asyncio.gather(*[connected.stream(shard).submit(unit) for shard, unit in travelling])

    async def _extend_sessions(
        self, shard: int, operations: Sequence[Operation], deadline: Deadline
    ) -> list[ForebayError | None]:
        """See that the sessions of these operations exist on the shard; per operation, why that failed."""
        errors: list[ForebayError | None] = []
        for operation in operations:
            error: ForebayError | None = None
            if isinstance(operation, Put) and isinstance(operation.session, OxiaSession):
                try:
                    await operation.session.extend(shard, deadline)
                except NotDone as failure:
                    error = failure
            errors.append(error)
        return errors

    def _check_sessions(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            session = operation.session if isinstance(operation, Put) else None
            if session is None:
                continue
            owner = None if self._connected is None else self._connected.sessions
            if not isinstance(session, OxiaSession) or session.owner is not owner:
                raise UsageError(
                    "the session belongs to another coordinator",
                    hint="open it on the coordinator that writes",
                )

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
        if self._connected is not None:
            self._use()
        self._closed = True
        if self._connected is not None:
            await self._connected.close(self._deadline())

    def _use(self) -> _Connected:
        if self._closed:
            raise Closed(f"the coordinator {self.url} is closed", hint="open a new one")
        connected = self._connected
        if connected is None:
            connected = self._connected = _Connected(self.config, self._clock, self._random)
        if connected.pid != os.getpid():
            raise UsageError(
                f"the coordinator {self.url} was opened in another process",
                hint="connections do not survive a fork: open a new coordinator in the child",
            )
        if connected.loop is not asyncio.get_running_loop():
            raise UsageError(
                f"the coordinator {self.url} is in use on another event loop",
                hint="open one coordinator per event loop",
            )
        return connected

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


def _result(operation: Operation, replies: Sequence[Reply]) -> WriteResult:
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
