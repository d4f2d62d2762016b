"""The front door for asyncio: `async with forebay.aio.connect("./data") as bay: ...`

The same names as `forebay.connect`, with `await` in front of what takes time. Everything behind it belongs to
the event loop that entered the block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, SupportsIndex

import pyarrow as pa

from forebay._connect import Location, Parts, Position, open_parts, resolve_position
from forebay._sending import Delivery, PartlyDelivered, Producer, Receipt
from forebay.errors import Closed, ForebayError, UsageError
from forebay.log import (
    RECORD_SCHEMA,
    Catalog,
    GroupConfig,
    Groups,
    LogReader,
    LogWriter,
    PartitionOffsets,
    ProducerConfig,
    ReaderConfig,
    Topic,
    TopicSettings,
    Trimmed,
    Trimmer,
    WriterConfig,
)

__all__ = [
    "Bay",
    "Delivery",
    "PartlyDelivered",
    "Producer",
    "Receipt",
    "RecordStream",
    "TopicDescription",
    "Topics",
    "connect",
]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic and where each of its partitions stands."""

    topic: Topic
    partitions: tuple[PartitionOffsets, ...]

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self.topic.topic

    @property
    def records(self) -> int:
        """Records that can be read, in all partitions."""
        return sum(each.records for each in self.partitions)


class Topics:
    """Creates, lists, describes and deletes topics."""

    def __init__(self, catalog: Catalog, reader: LogReader) -> None:
        self._catalog = catalog
        self._reader = reader

    async def create(self, name: str, *, partitions: int = 1, settings: TopicSettings | None = None) -> Topic:
        """Create a topic; raises `TopicExists`."""
        return await self._catalog.create(name, partitions=partitions, settings=settings)

    async def describe(self, name: str) -> TopicDescription:
        """The topic with the ends of its partitions; raises `UnknownTopic`."""
        topic = await self._catalog.describe(name)
        offsets = await self._reader.offsets_many([(name, number) for number in range(topic.partitions)])
        return TopicDescription(topic, tuple(offsets))

    async def alter(
        self, name: str, *, partitions: int | None = None, settings: TopicSettings | None = None
    ) -> Topic:
        """Add partitions, or replace the settings."""
        return await self._catalog.alter(name, partitions=partitions, settings=settings)

    async def delete(self, name: str) -> None:
        """Remove a topic with its records; raises `UnknownTopic`."""
        await self._catalog.delete(name)

    async def list(self) -> list[Topic]:
        """Every topic, by name. (Last in the class: its name hides the builtin from annotations.)"""
        return await self._catalog.list()


class RecordStream:
    """Record batches in order. Iterate it once, or take all of it with `read_all`."""

    def __init__(self, batches: AsyncIterator[pa.RecordBatch]) -> None:
        self.schema: pa.Schema = RECORD_SCHEMA
        self._batches = batches

    def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        return self._batches

    async def read_all(self) -> pa.Table:
        """Everything that is left, as one table."""
        return pa.Table.from_batches([batch async for batch in self._batches], RECORD_SCHEMA)


class Bay:
    """A deployment, open. Made by `connect`; a context manager."""

    def __init__(
        self,
        location: Location,
        coordinator: Location | None = None,
        *,
        writer_config: WriterConfig | None = None,
        reader_config: ReaderConfig | None = None,
        group_config: GroupConfig | None = None,
    ) -> None:
        self._location = location
        self._coordinator = coordinator
        self._configs = (writer_config, reader_config, group_config)
        self._open: _Open | None = None

    async def open(self) -> None:
        """Open the store and the coordinator. Entering the block does it."""
        if self._open is not None:
            raise UsageError("this bay is open already", hint="call connect again for another one")
        parts = open_parts(self._location, self._coordinator)
        self._open = _Open(parts, *self._configs)

    async def close(self) -> None:
        """Flush and close the producers, then let go of everything. Closing twice is fine."""
        opened, self._open = self._open, None
        if opened is not None:
            await opened.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def topics(self) -> Topics:
        """The topics."""
        return Topics(self._opened.writer.catalog, self._opened.reader)

    @property
    def groups(self) -> Groups:
        """The consumer groups: `async with bay.groups.consumer("billing", ["orders"]) as consumer: ...`"""
        return self._opened.groups

    @property
    def parts(self) -> Parts:
        """The store, the coordinator and what engines need beside them."""
        return self._opened.parts

    @property
    def reader(self) -> LogReader:
        """The reader of this bay, for reads by offset, by time, and for waiting."""
        return self._opened.reader

    @property
    def writer(self) -> LogWriter:
        """The writer of this bay, for appends with an answer per partition."""
        return self._opened.writer

    def producer(self, config: ProducerConfig | None = None) -> Producer:
        """A producer: `async with bay.producer() as out: ...`"""
        return self._opened.producer(config or ProducerConfig())

    async def offsets(self, topic: str, partition: int) -> PartitionOffsets:
        """Where a partition begins and ends."""
        return await self._opened.reader.offsets(topic, partition)

    async def trim(self, topic: str, *, partition: int, offset: int) -> Trimmed:
        """Remove every record below `offset`, which becomes the earliest. Offsets go on where they were."""
        return await self._opened.trimmer.trim(topic, partition, offset)

    async def read(
        self,
        topic: str,
        *,
        partition: int | None = None,
        start: Position = "earliest",
        end: Position | None = None,
    ) -> RecordStream:
        """The records from `start` to before `end`, or to the end of the log as it is now, as Arrow.

        Without a partition all of them are read, one after the other; `start` and `end` are then no offsets.
        """
        opened = self._opened
        partitions = await self._partitions(topic, partition, start, end)
        ranges = await asyncio.gather(*(opened.range(topic, number, start, end) for number in partitions))
        return RecordStream(_scan_all(opened.reader, topic, list(zip(partitions, ranges, strict=True))))

    async def _partitions(
        self, topic: str, partition: int | None, start: Position, end: Position | None
    ) -> Sequence[int]:
        if partition is not None:
            return [partition]
        if isinstance(start, SupportsIndex) or isinstance(end, SupportsIndex):
            raise UsageError("an offset belongs to one partition", hint="name the partition as well")
        return range((await self._opened.writer.catalog.describe(topic)).partitions)

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            raise Closed("this bay is not open", hint="use it inside its with block")
        return self._open


class _Open:
    """What exists while a bay is open."""

    def __init__(
        self,
        parts: Parts,
        writer_config: WriterConfig | None,
        reader_config: ReaderConfig | None,
        group_config: GroupConfig | None,
    ) -> None:
        self.parts = parts
        self.reader = LogReader(
            parts.store,
            parts.coordinator,
            clock=parts.clock,
            randomness=parts.randomness,
            config=reader_config,
            metrics=parts.metrics,
        )
        self.writer = LogWriter(
            parts.store,
            parts.coordinator,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
            config=writer_config,
            metrics=parts.metrics,
            name=parts.name,
        )
        self.trimmer = Trimmer(parts.coordinator, clock=parts.clock, randomness=parts.randomness)
        self.groups = Groups(
            parts.coordinator,
            self.reader,
            self.writer.catalog,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
            config=group_config,
        )
        self._producers: dict[Producer, None] = {}

    def producer(self, config: ProducerConfig) -> Producer:
        producer = Producer(
            self.writer,
            self.writer.catalog,
            clock=self.parts.clock,
            config=config,
            on_close=self._forget,
        )
        self._producers[producer] = None
        return producer

    def _forget(self, producer: Producer) -> None:
        self._producers.pop(producer, None)

    async def range(
        self, topic: str, partition: int, start: Position, end: Position | None
    ) -> tuple[int, int]:
        """First offset and the one to stop before."""
        last = await resolve_position(self.reader, topic, partition, "latest" if end is None else end)
        first = await resolve_position(self.reader, topic, partition, start)
        # A trim or an append in between, or an end before the start, leaves nothing to read.
        return first, max(first, last)

    async def close(self) -> None:
        errors: list[ForebayError] = []
        for producer in list(self._producers):
            try:
                await producer.close()
            except ForebayError as error:
                errors.append(error)
        try:
            await self.writer.close()
        finally:
            await self.parts.close()
        if errors:
            raise errors[0]


async def _scan_all(
    reader: LogReader, topic: str, ranges: Sequence[tuple[int, tuple[int, int]]]
) -> AsyncIterator[pa.RecordBatch]:
    for partition, (start, end) in ranges:
        async for batch in reader.scan(topic, partition, start, end):
            yield batch


def connect(
    location: Location,
    coordinator: Location | None = None,
    *,
    writer_config: WriterConfig | None = None,
    reader_config: ReaderConfig | None = None,
    group_config: GroupConfig | None = None,
) -> Bay:
    """Open a deployment: `async with connect("./data") as bay`.

    `location` is a directory, which holds store and coordinator, or the URL of a store; `coordinator` is then
    the URL of the coordinator.
    """
    return Bay(
        location,
        coordinator,
        writer_config=writer_config,
        reader_config=reader_config,
        group_config=group_config,
    )
