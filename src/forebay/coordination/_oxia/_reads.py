"""Reads: one key, the nearest key, a range. Of one shard, or of all of them merged.

A server's order goes on past the end of a directory, and 0.14 even shows its own records there: a lookup
may come back with a key of another directory, or fail because it ran into a record that is none. Both mean
that there is nothing in this directory. Within one directory all servers order by bytes, as Python orders
text.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import TypeVar

from forebay.coordination._api import Record, directory_of
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._calls import Caller
from forebay.coordination._oxia._channels import Service, finish
from forebay.coordination._oxia._deadline import Deadline
from forebay.coordination._oxia._errors import Trouble, TroubleKind

__all__ = ["Reader", "session_identity"]

T = TypeVar("T")
_IDENTITY = "forebay-session-"
GETS_PER_REQUEST_MAX = 4_000
"""Most keys of one request: the answers together stay below what one message may hold."""
_DOWN = (pb.FLOOR, pb.LOWER)


async def gathered(works: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all; where one fails the others are ended before the error goes on."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def session_identity(session_id: int) -> str:
    """What an ephemeral record carries to name its session, which has another id on every shard."""
    return f"{_IDENTITY}{session_id}"


class Reader:
    """All reads of one coordinator."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def get(self, key: str, partition_key: str | None, deadline: Deadline) -> Record | None:
        """The record of exactly this key."""
        shards = await self._caller.assignments.current(deadline)
        shard = shards.of(partition_key if partition_key is not None else key)
        return await self._lookup(shard, key, pb.EQUAL, deadline)

    async def get_many(
        self, keys: Sequence[tuple[str, str | None]], deadline: Deadline
    ) -> list[Record | None]:
        """The records of exactly these keys: one request per shard, or a few where there are very many."""
        shards = await self._caller.assignments.current(deadline)
        by_shard: dict[int, list[int]] = {}
        for place, (key, partition_key) in enumerate(keys):
            shard = shards.of(partition_key if partition_key is not None else key)
            by_shard.setdefault(shard, []).append(place)
        parts = [
            (shard, places[first : first + GETS_PER_REQUEST_MAX])
            for shard, places in by_shard.items()
            for first in range(0, len(places), GETS_PER_REQUEST_MAX)
        ]
        answers = await gathered(
            [self._get_part(shard, [keys[place][0] for place in places], deadline) for shard, places in parts]
        )
        found: list[Record | None] = [None] * len(keys)
        for (_, places), records in zip(parts, answers, strict=True):
            for place, record in zip(places, records, strict=True):
                found[place] = record
        return found

    async def _get_part(self, shard: int, keys: Sequence[str], deadline: Deadline) -> list[Record | None]:
        gets = [pb.GetRequest(key=key, include_value=True, comparison=pb.EQUAL) for key in keys]
        try:
            answers = await self._read(shard, gets, deadline)
        except Trouble as trouble:
            raise trouble.error(f"reading {len(keys)} keys from {keys[0]!r} on") from None
        return [
            _record(answer, key) if answer.status == pb.OK else None
            for key, answer in zip(keys, answers, strict=True)
        ]

    async def get_and_ceiling(
        self, key: str, start: str, partition_key: str, deadline: Deadline
    ) -> tuple[Record | None, Record | None]:
        """One record, and the nearest at or above another key: the server answers them in this order."""
        shard = (await self._caller.assignments.current(deadline)).of(partition_key)
        gets = [
            pb.GetRequest(key=key, include_value=True, comparison=pb.EQUAL),
            pb.GetRequest(key=start, include_value=True, comparison=pb.CEILING),
        ]
        try:
            exact, above = await self._read(shard, gets, deadline)
        except Trouble as trouble:
            if trouble.kind is TroubleKind.INTERNAL_ENTRY:
                # Nothing lies above `start` but an entry of the server itself, which spoilt both answers.
                return await self._lookup(shard, key, pb.EQUAL, deadline), None
            raise trouble.error(f"reading {key!r}") from None
        return _in_directory(exact, key), _in_directory(above, start)

    async def nearest(
        self, key: str, comparison: pb.Comparison, partition_key: str | None, deadline: Deadline
    ) -> Record | None:
        """The nearest record in the directory of `key`, from whichever shard has it."""
        found = await self._on_shards(
            partition_key, deadline, lambda shard: self._lookup(shard, key, comparison, deadline)
        )
        records = [record for record in found if record is not None]
        choose = max if comparison in _DOWN else min
        return choose(records, key=attrgetter("key"), default=None)

    async def range_scan(
        self, start: str, end: str, limit: int, partition_key: str | None, deadline: Deadline
    ) -> list[Record]:
        """The first records of a range."""
        parts = await self._on_shards(
            partition_key, deadline, lambda shard: self._scan(shard, start, end, limit, deadline)
        )
        return list(heapq.merge(*parts, key=attrgetter("key")))[:limit]

    async def keys(
        self, start: str, end: str, limit: int, partition_key: str | None, deadline: Deadline
    ) -> list[str]:
        """The first keys of a range."""
        parts = await self._on_shards(
            partition_key, deadline, lambda shard: self._list(shard, start, end, limit, deadline)
        )
        return list(heapq.merge(*parts))[:limit]

    async def _on_shards(
        self, partition_key: str | None, deadline: Deadline, read: Callable[[int], Awaitable[T]]
    ) -> list[T]:
        shards = await self._caller.assignments.current(deadline)
        ids = shards.ids if partition_key is None else [shards.of(partition_key)]
        return await gathered([read(shard) for shard in ids])

    async def _read(
        self, shard: int, gets: Sequence[pb.GetRequest], deadline: Deadline
    ) -> list[pb.GetResponse]:
        request = pb.ReadRequest(shard=shard, gets=gets)

        async def call(service: Service, left_s: float) -> list[pb.GetResponse]:
            answers: list[pb.GetResponse] = []
            stream = service.read(request, timeout=left_s)
            try:
                async for response in stream:
                    answers.extend(response.gets)
            finally:
                await finish(stream)
            if len(answers) != len(gets):
                raise Trouble(TroubleKind.OTHER, f"{len(answers)} answers to {len(gets)} questions")
            return answers

        return await self._caller.on_leader(shard, deadline, call)

    async def _lookup(
        self, shard: int, key: str, comparison: pb.Comparison, deadline: Deadline
    ) -> Record | None:
        get = pb.GetRequest(key=key, include_value=True, comparison=comparison)
        try:
            [answer] = await self._read(shard, [get], deadline)
        except Trouble as trouble:
            if trouble.kind is TroubleKind.INTERNAL_ENTRY:
                return None
            raise trouble.error(f"reading {key!r}") from None
        return _in_directory(answer, key)

    async def _scan(self, shard: int, start: str, end: str, limit: int, deadline: Deadline) -> list[Record]:
        request = pb.RangeRequest(shard=shard, start_inclusive=start, end_exclusive=end)
        directory = directory_of(start)

        async def call(service: Service, left_s: float) -> list[Record]:
            records: list[Record] = []
            stream = service.range_scan(request, timeout=left_s)
            try:
                async for response in stream:
                    for item in response.records:
                        record = _record(item, "")
                        if directory_of(record.key) != directory or len(records) == limit:
                            return records
                        records.append(record)
                    if len(records) == limit:
                        return records
            finally:
                await finish(stream)
            return records

        return await self._ranged(shard, f"scanning {start!r}", deadline, call)

    async def _list(self, shard: int, start: str, end: str, limit: int, deadline: Deadline) -> list[str]:
        request = pb.RangeRequest(shard=shard, start_inclusive=start, end_exclusive=end)
        directory = directory_of(start)

        async def call(service: Service, left_s: float) -> list[str]:
            keys: list[str] = []
            stream = service.list(request, timeout=left_s)
            try:
                async for response in stream:
                    for key in response.keys:
                        if directory_of(key) != directory or len(keys) == limit:
                            return keys
                        keys.append(key)
            finally:
                await finish(stream)
            return keys

        return await self._ranged(shard, f"listing {start!r}", deadline, call)

    async def _ranged(
        self, shard: int, doing: str, deadline: Deadline, call: Callable[[Service, float], Awaitable[T]]
    ) -> T:
        try:
            return await self._caller.on_leader(shard, deadline, call)
        except Trouble as trouble:
            raise trouble.error(doing) from None


def _in_directory(answer: pb.GetResponse, key: str) -> Record | None:
    if answer.status != pb.OK:
        return None
    record = _record(answer, key)
    return record if directory_of(record.key) == directory_of(key) else None


def _record(answer: pb.GetResponse, key: str) -> Record:
    """The record of an answer, in which the key asked for and an empty value are left out."""
    version = answer.version
    return Record(
        answer.key if answer.HasField("key") else key,
        answer.value if answer.HasField("value") else b"",
        version.version_id,
        _session_id(version),
    )


def _session_id(version: pb.Version) -> int | None:
    if not version.HasField("session_id"):
        return None
    identity = version.client_identity
    if identity.startswith(_IDENTITY) and identity.removeprefix(_IDENTITY).isdecimal():
        return int(identity.removeprefix(_IDENTITY))
    return version.session_id
