"""Where one record lies, who wrote it and when, and what it costs to read.

The way is that of the reader: control, then the index, then a range of an object. It is walked here once with
every request counted, so the answer is what was really asked, not what should be.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from forebay.coordination import Coordinator
from forebay.errors import NotFound
from forebay.formats.bytes_batch import BytesBatch
from forebay.kit.clock import Clock
from forebay.log._compaction_run import entries_from
from forebay.log._errors import DataLost, OffsetOutOfRange, UnknownTopic
from forebay.log._fetch import decode_slice
from forebay.log._keys import PartitionKeys
from forebay.log._meta import PartitionMeta, read_meta
from forebay.log._references import READ_POLICY
from forebay.log._resolve import Located
from forebay.log._uris import key_of
from forebay.storage import ObjectStore

__all__ = ["Explanation", "explain"]


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
    """Requests that reading it cold costs: index lookups and object ranges."""

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
    keys = PartitionKeys(topic, partition)
    meta = await read_meta(coordinator, keys)
    if meta.control is None:
        raise UnknownTopic(
            str(keys), hint="nothing was ever written to it; forebay topics list shows what there is"
        )
    if not meta.earliest <= offset < meta.next:
        raise OffsetOutOfRange(str(keys), offset, earliest=meta.earliest, next_offset=meta.next)
    found, stepped_over, lookups = await _find(coordinator, keys, meta, offset, clock, randomness)
    batch, size = await _fetch(store, found)
    entry, place = found.entry, offset - found.start_offset
    pending = meta.control.pending is not None and offset >= meta.control.pending.start_offset
    key_array = batch.keys
    return Explanation(
        topic=topic,
        partition=partition,
        offset=offset,
        source="pending" if pending else entry.type,
        index_key=None if pending else keys.index(found.end_offset),
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
        key_bytes=_length(None if key_array is None else key_array[place].as_py()),
        value_bytes=len(batch.values[place].as_py()),
        earliest=meta.earliest,
        next=meta.next,
        cursor=meta.cursor,
        stepped_over=stepped_over,
        requests={"control": 1, "index": lookups, "object": 1},
    )


async def _find(
    coordinator: Coordinator,
    keys: PartitionKeys,
    meta: PartitionMeta,
    offset: int,
    clock: Clock,
    randomness: random.Random,
) -> tuple[Located, int, int]:
    """The entry that covers the offset, entries stepped over on the way, index lookups."""
    assert meta.control is not None
    pending = meta.control.pending
    if pending is not None and offset >= pending.start_offset:
        return Located(keys, pending.start_offset, pending.end_offset, pending.index_entry()), 0, 0
    stepped_over = 0
    async for entry in entries_from(
        coordinator, keys, offset, clock=clock, randomness=randomness, policy=READ_POLICY
    ):
        stale = entry.entry.type == "WAL" and entry.end_offset < meta.cursor
        if not stale and entry.start_offset <= offset:
            return entry, stepped_over, 1
        stepped_over += 1
    raise DataLost(
        f"{keys}: nothing covers offset {offset}",
        hint=f"`forebay log verify --topic {keys.topic}` shows what is missing",
    )


async def _fetch(store: ObjectStore, found: Located) -> tuple[BytesBatch, int]:
    entry = found.entry
    key = key_of(store, entry.data_key)
    try:
        if entry.byte_offset is None or entry.byte_length is None:
            data = (await store.get(key)).data
        else:
            data = await store.get_range(key, entry.byte_offset, entry.byte_length)
    except NotFound as error:
        raise DataLost(
            f"{found.keys}: {entry.data_key} is missing", hint="restore the object from a copy"
        ) from error
    return decode_slice(found, data), len(data)


def _length(value: bytes | None) -> int | None:
    return None if value is None else len(value)
