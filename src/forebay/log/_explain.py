"""Where one record lies, who wrote it and when, and what it costs to read.

The way is that of the reader: control, then the index, then a range of an object. It is walked here once with
every request counted, so the answer is what was really asked, not what should be.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from forebay.coordination import Coordinator
from forebay.errors import NotFound
from forebay.formats.bytes_batch import BytesBatch
from forebay.kit.clock import Clock
from forebay.kit.retry import retry
from forebay.log._errors import DataLost, OffsetOutOfRange
from forebay.log._fetch import decode_slice
from forebay.log._keys import PartitionKeys
from forebay.log._meta import PartitionMeta, located, read_meta
from forebay.log._references import READ_POLICY
from forebay.log._resolve import Located, Resolver
from forebay.log._uris import key_of
from forebay.storage import ObjectStore

__all__ = ["Explanation", "explain"]

T = TypeVar("T")

LOOKUP_ENTRIES: Final = 64
"""Index entries one lookup asks for, as a reader does."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything there is to know about one offset."""

    topic: str
    partition: int
    offset: int
    source: str
    """`WAL` or `COMPACTED` entry of the index, or `pending` append."""
    index_key: str | None
    """None while the append is pending."""
    object: str
    """Full URI."""
    byte_offset: int
    """First byte of the batch in the object."""
    byte_length: int
    batch_start: int
    """First offset of the batch."""
    batch_end: int
    batch_records: int
    place: int
    """Which record of the batch it is, from 0."""
    encoding: str
    crc32c: int | None
    writer: str | None
    """Who appended; None after compaction, which joins many."""
    append_id: str | None
    committed_at_ms: int
    """Of a compacted range the last commit in it; `timestamp_ms` is the record's own."""
    timestamp_ms: int | None
    """Time of the record, or None where it has that of its commit."""
    key_bytes: int | None
    value_bytes: int
    earliest: int
    next: int
    cursor: int
    stepped_over: int
    """Stale index entries between the offset and the entry that covers it."""
    requests: dict[str, int]
    """Requests that finding and reading it took, by what was asked: control, index, object."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


async def explain(
    store: ObjectStore,
    coordinator: Coordinator,
    topic: str,
    partition: int,
    offset: int,
    *,
    clock: Clock,
    randomness: random.Random,
) -> Explanation:
    """Find one record. Raises `UnknownTopic`, `OffsetOutOfRange` or `DataLost`."""
    search = _Search(store, coordinator, PartitionKeys(topic, partition), clock, randomness)
    return await search.explain(offset)


class _Search:
    """One search, with its requests counted."""

    def __init__(
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        keys: PartitionKeys,
        clock: Clock,
        randomness: random.Random,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._keys = keys
        self._clock = clock
        self._random = randomness
        self._requests = {"control": 0, "index": 0, "object": 0}
        self._stepped_over = 0

    async def explain(self, offset: int) -> Explanation:
        keys = self._keys
        meta = await self._ask("control", lambda: read_meta(self._coordinator, keys))
        if meta.control is None:
            # Raises where there is no such topic or partition; one that was never written to is empty.
            resolver = Resolver(
                self._coordinator, clock=self._clock, randomness=self._random, policy=READ_POLICY
            )
            view = await resolver.view(keys)
            raise OffsetOutOfRange(str(keys), offset, earliest=view.earliest, next_offset=view.next)
        if not meta.earliest <= offset < meta.next:
            raise OffsetOutOfRange(str(keys), offset, earliest=meta.earliest, next_offset=meta.next)
        found = _pending(meta, offset)
        source = "pending" if found is not None else ""
        if found is None:
            found = await self._find(meta, offset)
        batch, size = await self._fetch(found)
        entry, place = found.entry, offset - found.start_offset
        return Explanation(
            topic=keys.topic,
            partition=keys.partition,
            offset=offset,
            source=source or entry.type,
            index_key=None if source else keys.index(found.end_offset),
            object=entry.data_key,
            byte_offset=entry.byte_offset or 0,
            byte_length=size,
            batch_start=found.start_offset,
            batch_end=found.end_offset,
            batch_records=len(batch),
            place=place,
            encoding=entry.encoding,
            crc32c=entry.crc32c,
            writer=entry.writer,
            append_id=entry.append_id,
            committed_at_ms=entry.created_at_ms,
            timestamp_ms=None if batch.timestamps_ms is None else int(batch.timestamps_ms[place]),
            key_bytes=None if batch.keys is None else _length(batch.keys[place].as_py()),
            value_bytes=len(batch.values[place].as_py()),
            earliest=meta.earliest,
            next=meta.next,
            cursor=meta.cursor,
            stepped_over=self._stepped_over,
            requests=dict(self._requests),
        )

    async def _find(self, meta: PartitionMeta, offset: int) -> Located:
        keys = self._keys
        start, (_, end) = keys.index(offset), keys.index_range()
        while True:
            first = start
            records = await self._ask(
                "index",
                lambda first=first: self._coordinator.range_scan(  # type: ignore[misc]
                    first, end, limit=LOOKUP_ENTRIES, partition_key=keys.partition_key
                ),
            )
            for record in records:
                entry = located(keys, record)
                stale = entry.entry.type == "WAL" and entry.end_offset < meta.cursor
                if not stale and entry.start_offset <= offset:
                    return entry
                self._stepped_over += 1
            if len(records) < LOOKUP_ENTRIES:
                break
            start = records[-1].key + "\0"
        raise DataLost(
            f"{keys}: nothing covers offset {offset}",
            hint=f"`forebay log verify --topic {keys.topic}` shows what is missing",
        )

    async def _fetch(self, found: Located) -> tuple[BytesBatch, int]:
        entry = found.entry
        key = key_of(self._store, entry.data_key)

        async def get() -> bytes:
            if entry.byte_offset is None or entry.byte_length is None:
                return (await self._store.get(key)).data
            return await self._store.get_range(key, entry.byte_offset, entry.byte_length)

        try:
            data = await self._ask("object", get)
        except NotFound as error:
            raise DataLost(
                f"{found.keys}: {entry.data_key} is missing", hint="restore the object from a copy"
            ) from error
        return decode_slice(found, data), len(data)

    async def _ask(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        async def counted() -> T:
            self._requests[what] += 1
            return await request()

        return await retry(counted, policy=READ_POLICY, clock=self._clock, randomness=self._random)


def _pending(meta: PartitionMeta, offset: int) -> Located | None:
    assert meta.control is not None
    pending = meta.control.pending
    if pending is None or offset < pending.start_offset:
        return None
    return Located(meta.keys, pending.start_offset, pending.end_offset, pending.index_entry())


def _length(value: bytes | None) -> int | None:
    return None if value is None else len(value)
