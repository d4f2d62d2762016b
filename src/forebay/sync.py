"""The front door for everybody else: plain calls, from any thread.

    with forebay.connect("./data") as bay:
        bay.topics.create("orders", partitions=4)
        with bay.producer() as out:
            receipt = out.send("orders", [b"alpha", b"beta"], partition=0)
            done = receipt.result(timeout=10)
        table = bay.read("orders", partition=0, start=1).read_all()

It is `forebay.aio` on an event loop of its own, in a thread of its own. A bay may be shared by any number of
threads; records that one thread sends to one partition keep their order.
"""

from __future__ import annotations

import pyarrow as pa

from forebay import aio
from forebay._connect import Location, Position
from forebay._loop_thread import LoopThread
from forebay._sending import Delivery, PartlyDelivered
from forebay._sync_bay import SyncBay
from forebay._sync_groups import Consumer, Groups
from forebay._sync_producer import SyncReceiptFor, SyncSending
from forebay._sync_reading import pulled
from forebay.aio import TopicDescription
from forebay.log import (
    RECORD_SCHEMA,
    GroupConfig,
    PartitionOffsets,
    ProducerConfig,
    ReaderConfig,
    Topic,
    TopicSettings,
    Trimmed,
    WriterConfig,
)

__all__ = [
    "Bay",
    "Consumer",
    "Delivery",
    "Groups",
    "PartlyDelivered",
    "Producer",
    "Receipt",
    "TopicDescription",
    "Topics",
    "connect",
]


class Topics:
    """Creates, lists, describes and deletes topics."""

    def __init__(self, thread: LoopThread, topics: aio.Topics) -> None:
        self._thread = thread
        self._topics = topics

    def create(self, name: str, *, partitions: int = 1, settings: TopicSettings | None = None) -> Topic:
        """Create a topic; raises `TopicExists`."""
        return self._thread.run(self._topics.create(name, partitions=partitions, settings=settings))

    def describe(self, name: str) -> TopicDescription:
        """The topic with the ends of its partitions; raises `UnknownTopic`."""
        return self._thread.run(self._topics.describe(name))

    def alter(
        self, name: str, *, partitions: int | None = None, settings: TopicSettings | None = None
    ) -> Topic:
        """Add partitions, or replace the settings."""
        return self._thread.run(self._topics.alter(name, partitions=partitions, settings=settings))

    def delete(self, name: str) -> None:
        """Remove a topic with its records; raises `UnknownTopic`."""
        self._thread.run(self._topics.delete(name))

    def list(self) -> list[Topic]:
        """Every topic, by name. (Last in the class: its name hides the builtin from annotations.)"""
        return self._thread.run(self._topics.list())


class Receipt(SyncReceiptFor[Delivery]):
    """Becomes a `Delivery` once the records are durable."""


class Producer(SyncSending[Delivery, Receipt]):
    """Sends records to any topic. A context manager: leaving it waits until everything is durable."""

    _receipt = Receipt
    _owner = "bay"


class Bay(SyncBay[aio.Bay, Producer]):
    """A deployment, open. Made by `connect`; a context manager, to be shared by any number of threads."""

    def __init__(self, bay: aio.Bay) -> None:
        super().__init__(bay, "forebay")
        self._topics = Topics(self._thread, bay.topics)
        self._groups = Groups(self._thread, bay.groups)

    @property
    def topics(self) -> Topics:
        """The topics."""
        return self._topics

    @property
    def groups(self) -> Groups:
        """The consumer groups."""
        return self._groups

    def producer(self, config: ProducerConfig | None = None) -> Producer:
        """A producer: `with bay.producer() as out: ...`"""

        async def make() -> aio.Producer:
            return self._bay.producer(config)

        return self._kept(Producer(self._thread, self._thread.run(make())))

    def offsets(self, topic: str, partition: int) -> PartitionOffsets:
        """Where a partition begins and ends."""
        return self._thread.run(self._bay.offsets(topic, partition))

    def trim(self, topic: str, *, partition: int, offset: int) -> Trimmed:
        """Remove every record below `offset`, which becomes the earliest. Offsets go on where they were."""
        return self._thread.run(self._bay.trim(topic, partition=partition, offset=offset))

    def read(
        self,
        topic: str,
        *,
        partition: int | None = None,
        start: Position = "earliest",
        end: Position | None = None,
    ) -> pa.RecordBatchReader:
        """The records from `start` to before `end`, or to the end of the log as it is now, as Arrow.

        Without a partition all of them are read, one after the other; `start` and `end` are then no offsets.
        """
        stream = self._thread.run(self._bay.read(topic, partition=partition, start=start, end=end))
        return pa.RecordBatchReader.from_batches(RECORD_SCHEMA, pulled(self._thread, stream))


def connect(
    location: Location,
    coordinator: Location | None = None,
    *,
    writer_config: WriterConfig | None = None,
    reader_config: ReaderConfig | None = None,
    group_config: GroupConfig | None = None,
) -> Bay:
    """Open a deployment: `with connect("./data") as bay`.

    `location` is a directory, which holds store and coordinator, or the URL of a store; `coordinator` is then
    the URL of the coordinator.
    """
    bay = aio.connect(
        location,
        coordinator,
        writer_config=writer_config,
        reader_config=reader_config,
        group_config=group_config,
    )
    return Bay(bay)
