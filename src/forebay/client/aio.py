"""The client for asyncio: `async with forebay.client.aio.connect("http://127.0.0.1:8080") as bay: ...`

The same calls as `forebay.aio.connect`, over HTTP: code moves between an embedded log and a broker by
changing that one line. Nothing of the engines is imported; what the broker answers is Arrow here as well.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, SupportsIndex

import pyarrow as pa

from forebay.client._address import parse_address
from forebay.client._config import ClientConfig, ConsumerConfig, ProducerConfig
from forebay.client._consumer import Consumer
from forebay.client._groups import Groups
from forebay.client._places import Places, Position
from forebay.client._producer import Producer
from forebay.client._reading import Fetcher, RecordStream, TopicPartition, scan
from forebay.client._receipts import Delivery, PartlyDelivered, Receipt
from forebay.client._session import Session, path_of
from forebay.client._topics import TopicDescription, Topics
from forebay.errors import Closed, ForebayError, UsageError
from forebay.formats.http_messages import PATHS, HealthResponse, OffsetsView, TrimRequest, TrimView
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource

__all__ = [
    "Client",
    "Consumer",
    "Delivery",
    "Groups",
    "PartlyDelivered",
    "Producer",
    "Receipt",
    "RecordStream",
    "TopicDescription",
    "Topics",
    "connect",
]


class Client:
    """A broker, at hand. Made by `connect`; a context manager that belongs to one event loop."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        self._address = parse_address(url, ca)
        self._token = token
        self._config = config or ClientConfig()
        self._ids = IdSource()
        self._open: Session | None = None
        self._producers: dict[Producer, None] = {}

    async def open(self) -> None:
        """Begin. Nothing is contacted yet; entering the block does it."""
        if self._open is not None:
            raise UsageError("this client is open already", hint="call connect again for another one")
        self._open = Session(
            self._address,
            clock=SystemClock(),
            randomness=random.SystemRandom(),
            config=self._config,
            token=self._token,
        )

    async def close(self) -> None:
        """Flush and close the producers, then the connections. Closing twice is fine."""
        if self._open is None:
            return
        errors: list[ForebayError] = []
        for producer in list(self._producers):
            try:
                await producer.close()
            except ForebayError as error:
                errors.append(error)
        session, self._open = self._open, None
        await session.close()
        if errors:
            raise errors[0]

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def session(self) -> Session:
        """The calls below everything else here."""
        if self._open is None:
            raise Closed("this client is not open", hint="use it inside its with block")
        return self._open

    @property
    def topics(self) -> Topics:
        """The topics."""
        return Topics(self.session)

    @property
    def groups(self) -> Groups:
        """The consumer groups."""
        return Groups(self.session, self._places)

    @property
    def _places(self) -> Places:
        return Places(self.session, self.topics)

    async def health(self) -> HealthResponse:
        """Who answers."""
        return await self.session.get(PATHS.HEALTH, HealthResponse)

    def producer(self, config: ProducerConfig | None = None) -> Producer:
        """A producer: `async with bay.producer() as out: ...`"""
        producer = Producer(
            self.session,
            partition_count=self.topics.count,
            ids=self._ids,
            config=config or ProducerConfig(),
            on_close=lambda closed: self._producers.pop(closed, None),
        )
        self._producers[producer] = None
        return producer

    async def offsets(self, topic: str, partition: int) -> OffsetsView:
        """Where a partition begins and ends."""
        return await self._places.offsets(TopicPartition(topic, partition))

    async def trim(self, topic: str, *, partition: int, offset: int) -> TrimView:
        """Remove every record below `offset`, which becomes the earliest. Offsets go on where they were."""
        path = path_of(PATHS.TRIM, topic=topic, partition=partition)
        return await self.session.call("POST", path, TrimView, TrimRequest(offset), repeatable=True)

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
        places = await self._chosen(topic, partition, start, end)
        last: Position = "latest" if end is None else end
        ends = await asyncio.gather(*(self._places.resolve(place, last) for place in places))
        starts = await asyncio.gather(*(self._places.resolve(place, start) for place in places))
        fetcher = Fetcher(self.session, ConsumerConfig())
        return RecordStream(_scan_all(fetcher, list(zip(places, starts, ends, strict=True))))

    def consumer(
        self,
        topics: Iterable[str] | str,
        *,
        partition: int | None = None,
        start: Position = "latest",
        config: ConsumerConfig | None = None,
    ) -> Consumer:
        """Reads on and on, from one place in every partition: `async with bay.consumer("orders") as c:`"""
        chosen = config or ConsumerConfig()
        names = [topics] if isinstance(topics, str) else list(topics)

        async def begin() -> dict[TopicPartition, int]:
            places = [place for name in names for place in await self._chosen(name, partition, start, None)]
            found = await asyncio.gather(*(self._places.resolve(place, start) for place in places))
            return dict(zip(places, found, strict=True))

        return Consumer(Fetcher(self.session, chosen), begin, max_wait_ms=chosen.max_wait_ms)

    def consumer_at(
        self, topic: str, positions: Mapping[int, int], *, config: ConsumerConfig | None = None
    ) -> Consumer:
        """Reads on from an offset of its own in each of these partitions."""
        chosen = config or ConsumerConfig()
        begin_at = {TopicPartition(topic, partition): offset for partition, offset in positions.items()}

        async def begin() -> dict[TopicPartition, int]:
            return begin_at

        return Consumer(Fetcher(self.session, chosen), begin, max_wait_ms=chosen.max_wait_ms)

    async def offset_for_time(self, topic: str, partition: int, at: datetime) -> int:
        """The first offset from then on; the next offset where there is none."""
        return await self._places.resolve(TopicPartition(topic, partition), at)

    async def _chosen(
        self, topic: str, partition: int | None, start: Position, end: Position | None
    ) -> Sequence[TopicPartition]:
        if partition is not None:
            return [TopicPartition(topic, partition)]
        if isinstance(start, SupportsIndex) or isinstance(end, SupportsIndex):
            raise UsageError("an offset belongs to one partition", hint="name the partition as well")
        return await self._places.of_topic(topic)


async def _scan_all(
    fetcher: Fetcher, ranges: Sequence[tuple[TopicPartition, int, int]]
) -> AsyncIterator[pa.RecordBatch]:
    for place, start, end in ranges:
        async for batch in scan(fetcher, place, start, end):
            yield batch


def connect(
    url: str,
    *,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    config: ClientConfig | None = None,
) -> Client:
    """A broker by its URL: `async with connect("http://127.0.0.1:8080") as bay`.

    `token` is sent with every request; `ca` is a file of certificates to trust with `https://`.
    """
    return Client(url, token=token, ca=ca, config=config)
