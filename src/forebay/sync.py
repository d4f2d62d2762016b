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

import concurrent.futures
import functools
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from forebay import aio
from forebay._connect import Location, Position
from forebay._loop_thread import LoopThread, close_at_exit
from forebay._outgoing import Outgoing
from forebay._receipts import not_yet
from forebay._sending import Delivery, PartlyDelivered
from forebay._sync_groups import Consumer, Groups
from forebay.aio import TopicDescription
from forebay.errors import Backpressure, Closed, ForebayError, OutcomeUnknown
from forebay.formats.bytes_batch import BytesBatch
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

PULL_BYTES = 4 * 1024 * 1024
"""Bytes of record batches taken from the loop at a time: a hop between threads costs more than a batch."""


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


class Receipt:
    """Becomes a `Delivery` once the records are durable."""

    def __init__(self, seen: Callable[[object], None]) -> None:
        self.future: concurrent.futures.Future[Delivery] = concurrent.futures.Future()
        self._seen = seen

    def result(self, timeout: float | None = None) -> Delivery:
        """The delivery; raises what went wrong, or `OutcomeUnknown` where the time is up."""
        try:
            return self.future.result(timeout)
        except TimeoutError:
            raise not_yet(timeout) from None
        except ForebayError:
            self._seen(self)
            raise

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.future.done()


class Producer:
    """Sends records to any topic. A context manager: leaving it waits until everything is durable."""

    def __init__(self, thread: LoopThread, producer: aio.Producer) -> None:
        self._thread = thread
        self._producer = producer
        self._bytes_max = producer.pending_bytes_max
        self._changed = threading.Condition()
        self._bytes = 0
        self._outbox: deque[Outgoing[Delivery]] = deque()
        """Sent and not yet taken over by the loop. A wake-up is on its way while it is not empty."""
        self._open: set[concurrent.futures.Future[Delivery]] = set()
        """Receipts that are not told yet."""
        self._closed = False

    def send(
        self,
        topic: str,
        records: Sequence[bytes],
        *,
        partition: int | None = None,
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        headers: Sequence[dict[str, bytes | None] | None] | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Send records; returns at once. Without a partition, it is chosen by key or in turn.

        Where too much is not durable yet it waits for room; after `timeout` seconds it raises `Backpressure`.
        """
        batch = BytesBatch.of(records, keys=keys, timestamps_ms=timestamps_ms, headers=headers)
        receipt, size = Receipt(self._producer.saw), batch.size_bytes
        tell = functools.partial(self._tell, receipt.future, size)
        item = Outgoing(topic, partition, batch, size, tell, receipt)
        # Before the lock, which a thread that is not part of a forked child may have held.
        self._thread.check()
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._has_room(size), timeout):
                raise Backpressure(
                    f"{self._bytes:,} bytes are not durable yet", hint="wait for earlier receipts"
                )
            if self._closed:
                raise Closed("the producer is closed", hint="open another one")
            # First the wake-up, which may be refused: what is in the outbox is always on its way.
            if not self._outbox:
                self._thread.call_soon(self._take_over)
            self._bytes += size
            self._open.add(receipt.future)
            self._outbox.append(item)
        return receipt

    def _has_room(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= self._bytes_max

    def _take_over(self) -> None:
        """On the loop: hand everything that was sent to the producer there."""
        with self._changed:
            items = list(self._outbox)
            self._outbox.clear()
        for item in items:
            self._producer.offer(item)

    def _tell(
        self,
        future: concurrent.futures.Future[Delivery],
        size: int,
        outcome: Delivery | ForebayError,
    ) -> None:
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()
            if future not in self._open:
                return
            self._open.discard(future)
        if isinstance(outcome, Delivery):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def shut(self) -> None:
        """Refuse further sends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take_over(self) -> None:
        """Hand on what was sent before `shut`."""
        self._take_over()

    def abandon(self) -> None:
        """The loop has ended: tell those who still wait, as nobody else will."""
        with self._changed:
            left, self._open = self._open, set()
        for future in left:
            future.set_exception(
                OutcomeUnknown("send", reason="the bay was closed meanwhile", hint="read the tail")
            )

    async def _drain(self) -> None:
        self._take_over()
        await self._producer.flush()

    async def _finish(self) -> None:
        self._take_over()
        await self._producer.close()

    def flush(self) -> None:
        """Wait until everything sent before is durable; raises what went wrong."""
        self._thread.run(self._drain())

    def close(self) -> None:
        """Refuse further sends, wait until all is durable; raises what went wrong and nobody asked for."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.run(self._finish())

    def __enter__(self) -> Self:
        self._thread.run(self._producer.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Bay:
    """A deployment, open. Made by `connect`; a context manager, to be shared by any number of threads."""

    def __init__(self, bay: aio.Bay) -> None:
        self._bay = bay
        self._thread = LoopThread("forebay")
        try:
            self._thread.run(bay.open())
        except BaseException:
            self._thread.stop()
            raise
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._topics = Topics(self._thread, bay.topics)
        self._groups = Groups(self._thread, bay.groups)
        close_at_exit(self, self._thread)

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

        producer = Producer(self._thread, self._thread.run(make()))
        self._producers.add(producer)
        return producer

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
        return pa.RecordBatchReader.from_batches(RECORD_SCHEMA, self._pull(stream))

    def _pull(self, stream: aio.RecordStream) -> Iterator[pa.RecordBatch]:
        batches = aiter(stream)
        try:
            while True:
                found, error = self._thread.run(_next(batches))
                yield from found
                if error is not None:
                    raise error
                if not found:
                    return
        finally:
            self._thread.start(_closed(batches))

    def close(self) -> None:
        """Flush and close the producers, then let go of everything. Closing twice is fine."""
        if not self._thread.running:
            return
        producers = list(self._producers)
        try:
            for producer in producers:
                producer.shut()
                self._thread.run(producer.take_over())
            self._thread.run(self._bay.close())
        finally:
            self._thread.stop()
            for producer in producers:
                producer.abandon()

    def __enter__(self) -> Self:
        self._thread.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _next(batches: AsyncIterator[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], ForebayError | None]:
    """The next few batches; none at the end. What went wrong comes with those before it."""
    found: list[pa.RecordBatch] = []
    size = 0
    try:
        while size < PULL_BYTES:
            batch = await anext(batches)
            found.append(batch)
            size += batch.get_total_buffer_size()
    except StopAsyncIteration:
        pass
    except ForebayError as error:
        return found, error
    return found, None


async def _closed(batches: AsyncIterator[pa.RecordBatch]) -> None:
    if isinstance(batches, AsyncGenerator):
        await batches.aclose()


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
