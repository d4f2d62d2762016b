"""What can be exported, as lanes: a sequence of positions that only grows, and the records between them.

    log       a lane per partition, `orders:3`; positions are offsets
    buffer    one lane, `buffer:ingest/manifest`; positions are sequences, so a record's `_offset` is the
              sequence of its batch
    stream    one lane, `stream:orders`; positions are offsets

A read of a range is a function of the range alone. Whatever compaction, tiering or garbage collection does
meanwhile, the records between two positions are the same, so a task that is run twice reads the same twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay._connect import check_there
from forebay.buffer import BufferConfig, Consumer, Reader, ResumeRefused
from forebay.coordination import SCAN_RECORDS_MAX
from forebay.errors import NotFound
from forebay.formats.osiris_entry import decode_records
from forebay.log import RECORD_SCHEMA, Catalog, OffsetOutOfRange, ReaderConfig
from forebay.log._keys import PartitionKeys
from forebay.log._resolve import Resolver
from forebay.spark.export._clients import Clients
from forebay.spark.export._config import SourceSpec
from forebay.spark.export._errors import RecordsTrimmed
from forebay.spark.export._facts import Span
from forebay.stream import Overtaken, Spec, StreamReader, find_stream
from forebay.stream import ReaderConfig as StreamReaderConfig
from forebay.stream._calls import Calls

__all__ = ["SOURCE_SCHEMA", "Lane", "Source", "open_source"]

SOURCE_SCHEMA: Final = pa.schema([field for field in RECORD_SCHEMA if field.name != "headers"])
"""Columns of what a source yields."""
BUFFER_BATCH_BYTES: Final = 1024 * 1024
"""Guess at the size of a buffer's batch where its entry does not tell."""
STREAM_SPAN_RECORDS: Final = 200_000
"""Records of a stream in one span: its index does not tell bytes."""
STREAM_RECORD_BYTES: Final = 128
"""Guess at the size of a stream's record."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a lane begins and ends now."""

    name: str
    earliest: int
    next: int


class Source(Protocol):
    """A source, opened in this process."""

    gapless: bool
    """Whether there is exactly one record, or batch, for every position."""

    def lanes(self) -> list[Lane]:
        """Every lane as it is now."""

    def spans(self, lane: str, start: int, end: int) -> list[Span]:
        """The range in pieces that can be read one by one, in order, without touching objects. Positions that
        the source is known not to have are in none."""

    def read(self, span: Span) -> Iterator[list[pa.RecordBatch]]:
        """The records of a range, with the columns of `SOURCE_SCHEMA`."""

    def committed(self, lane: str, position: int) -> None:
        """Everything below `position` is in the table."""


def open_source(spec: SourceSpec, clients: Clients) -> Source:
    """Open what `spec` names."""
    if spec.kind == "log":
        return LogSource(spec, clients)
    return BufferSource(spec, clients) if spec.kind == "buffer" else StreamSource(spec, clients)


class LogSource:
    """Topics of a log."""

    gapless = True

    def __init__(self, spec: SourceSpec, clients: Clients) -> None:
        self._spec = spec
        self._clients = clients
        check_there(spec.store, spec.coordinator)
        self._reader = clients.reader(spec.store, spec.coordinator)
        self._parts = clients.parts(spec.store, spec.coordinator)

    def lanes(self) -> list[Lane]:
        """Every partition of every topic."""
        return self._clients.run(self._lanes())

    async def _lanes(self) -> list[Lane]:
        parts = self._parts
        catalog = Catalog(
            parts.store, parts.coordinator, clock=parts.clock, ids=parts.ids, randomness=parts.randomness
        )
        topics = [await catalog.describe(name) for name in self._spec.names]
        places = [(each.topic, number) for each in topics for number in range(each.partitions)]
        found = await self._reader.offsets_many(places)
        return [Lane(f"{each.topic}:{each.partition}", each.earliest, each.next) for each in found]

    def spans(self, lane: str, start: int, end: int) -> list[Span]:
        """A span per entry of the index: no object is asked for by two tasks."""
        return self._clients.run(self._spans(lane, start, end))

    async def _spans(self, lane: str, start: int, end: int) -> list[Span]:
        parts, keys = self._parts, _keys(lane)
        policy = ReaderConfig().retry
        resolver = Resolver(parts.coordinator, clock=parts.clock, randomness=parts.randomness, policy=policy)
        cursor = await resolver.cursor(keys)
        found: list[Span] = []
        position = start
        while position < end:
            page = await resolver.scan_entries(keys, position, SCAN_RECORDS_MAX)
            for entry in page:
                stale = entry.entry.type == "WAL" and entry.end_offset < cursor
                if stale or entry.end_offset < position or position >= end:
                    continue
                last = min(entry.end_offset + 1, end)
                found.append(Span(lane, position, last, entry.stored_bytes))
                position = last
            if len(page) < SCAN_RECORDS_MAX:
                break
        if position < end:  # The pending append, or an index that is just being rewritten.
            found.append(Span(lane, position, end, 0))
        return found

    def read(self, span: Span) -> Iterator[list[pa.RecordBatch]]:
        """A scan, without the headers."""
        keys = _keys(span.lane)
        scan = self._reader.scan(keys.topic, keys.partition, span.start, span.end)
        try:
            for some in self._clients.pull(scan):
                yield [batch.drop_columns(["headers"]) for batch in some]
        except OffsetOutOfRange as error:
            if error.offset >= error.earliest:
                raise
            raise RecordsTrimmed(span.lane, position=error.offset, earliest=error.earliest) from error

    def committed(self, lane: str, position: int) -> None:
        """Nothing to do: retention is the topic's own."""


class BufferSource:
    """The queue of a buffer, looked at without taking part in it unless it is to be acknowledged."""

    gapless = True

    def __init__(self, spec: SourceSpec, clients: Clients) -> None:
        self._clients = clients
        [manifest] = spec.names
        self._lane = f"buffer:{manifest}"
        prefix = manifest.rpartition("/")[0] or "ingest"
        self._config = BufferConfig(data_path_prefix=prefix, manifest_path=manifest)
        self._store = clients.store(spec.store)
        self._reader = Reader(self._config, clients.clock, store=self._store)

    def lanes(self) -> list[Lane]:
        """The one queue."""
        manifest = self._clients.run(self._reader.manifest())
        if not manifest.next_sequence and not self._clients.run(self._reader.stats()).exists:
            raise NotFound(self._config.manifest_path, hint="there is no queue at this path")
        return [Lane(self._lane, manifest.first_sequence, manifest.next_sequence)]

    def spans(self, lane: str, start: int, end: int) -> list[Span]:
        """A span per batch; its size where the entry tells."""
        manifest = self._clients.run(self._reader.manifest())
        spans = []
        for sequence in range(start, end):
            entry = manifest.entry(sequence)
            told = None if entry is None else entry.extension()
            size = None if told is None else told.object_bytes
            spans.append(Span(lane, sequence, sequence + 1, size or BUFFER_BATCH_BYTES))
        return spans

    def read(self, span: Span) -> Iterator[list[pa.RecordBatch]]:
        """Batch by batch."""
        for sequence in range(span.start, span.end):
            try:
                batch = self._clients.run(self._reader.read(sequence))
            except NotFound as error:
                raise RecordsTrimmed(span.lane, position=sequence, earliest=sequence + 1) from error
            count = len(batch)
            times = np.zeros(count, np.int64)
            for item in batch.metadata:
                times[item.start_index :] = item.ingestion_time_ms
            offsets = np.full(count, sequence, np.int64)
            yield [_source_batch(span.lane, offsets, times, batch.to_arrow())]

    def committed(self, lane: str, position: int) -> None:
        """Acknowledge everything below `position`, which shuts out every earlier consumer."""

        async def is_done() -> bool:
            return (await self._reader.manifest()).first_sequence >= position

        async def acknowledge() -> None:
            # Another exporter of the same table may be further, before or after the first look.
            if await is_done():
                return
            async with Consumer(self._config, self._clients.clock, store=self._store) as consumer:
                try:
                    await consumer.initialize(position - 1)
                except ResumeRefused:
                    if not await is_done():
                        raise

        self._clients.run(acknowledge())


class StreamSource:
    """A stream's remote tier."""

    gapless = False
    """Tracking chunks take offsets too."""

    def __init__(self, spec: SourceSpec, clients: Clients) -> None:
        self._clients = clients
        [name] = spec.names
        store = clients.store(spec.store)
        calls = Calls(
            store, clock=clients.clock, randomness=clients.randomness, policy=StreamReaderConfig().retry
        )

        async def attach() -> StreamReader:
            stream = await find_stream(calls, name)
            return StreamReader(stream, store, clock=clients.clock, randomness=clients.randomness)

        self._reader = clients.run(attach())
        self._lane = f"stream:{self._reader.stream}"

    def lanes(self) -> list[Lane]:
        """The one stream."""
        self._clients.run(self._reader.refresh())
        return [Lane(self._lane, self._reader.first_offset, self._reader.next_offset)]

    def spans(self, lane: str, start: int, end: int) -> list[Span]:
        """Equal pieces: chunks are found by offset. What never reached the bucket is in none."""
        held = self._reader.remote.held
        spans = []
        for gap, following in [*sorted(held.head.gaps if held is not None else ()), (end, end)]:
            cuts = [*range(start, min(gap, end), STREAM_SPAN_RECORDS), min(gap, end)]
            spans += [
                Span(lane, low, high, (high - low) * STREAM_RECORD_BYTES) for low, high in pairwise(cuts)
            ]
            start = max(start, following)
        return spans

    def read(self, span: Span) -> Iterator[list[pa.RecordBatch]]:
        """Chunks from the one that holds the start on, cut to the range."""
        yield from self._clients.pull(self._scan(span))

    async def _scan(self, span: Span) -> AsyncIterator[pa.RecordBatch]:
        """Whoever asks a stream for what is gone gets what is left, so it is looked at what is."""
        try:
            place = await self._reader.attach(Spec("offset", span.start))
            if place > span.start:
                raise Overtaken(span.lane, offset=span.start, resume_offset=place)
            async for batch in self._chunks(place, span):
                yield batch
        except Overtaken as error:
            # The chunk behind the range is looked at, too, and a gap may come before it.
            if error.offset < span.end:
                raise RecordsTrimmed(
                    span.lane, position=error.offset, earliest=error.resume_offset
                ) from error

    async def _chunks(self, place: int, span: Span) -> AsyncIterator[pa.RecordBatch]:
        async for chunk in self._reader.chunks(place):
            header = chunk.header
            if header.chunk_id >= span.end:
                return
            low = max(span.start - header.chunk_id, 0)
            high = min(span.end - header.chunk_id, header.records)
            if low >= high:
                continue
            records = decode_records(chunk.data, entries=header.entries, records=header.records)
            values = pa.array(records[low:high], pa.binary())
            offsets = np.arange(header.chunk_id + low, header.chunk_id + high, dtype=np.int64)
            times = np.full(high - low, header.timestamp, np.int64)
            yield _source_batch(span.lane, offsets, times, values)

    def committed(self, lane: str, position: int) -> None:
        """Nothing to do: retention is the stream's own."""


def _keys(lane: str) -> PartitionKeys:
    topic, _, number = lane.rpartition(":")
    return PartitionKeys(topic, int(number))


def _source_batch(
    lane: str, offsets: npt.NDArray[np.int64], times_ms: npt.NDArray[np.int64], values: pa.Array
) -> pa.RecordBatch:
    count = len(values)
    columns = [
        pa.repeat(pa.scalar(lane.partition(":")[2], pa.string()), count),
        pa.repeat(pa.scalar(0, pa.int32()), count),
        pa.array(offsets),
        pa.array(times_ms).cast(pa.timestamp("ms", tz="UTC")),
        pa.nulls(count, pa.binary()),
        values,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SOURCE_SCHEMA)
