"""The client for everybody else: plain calls, from any thread. `forebay.client.aio` on a loop of its own.

    with forebay.client.connect("http://127.0.0.1:8080") as bay:
        with bay.producer() as out:
            done = out.send("orders", [b"alpha", b"beta"], partition=0).result(timeout=10)
        table = bay.read("orders", partition=0, start=1).read_all()

Sends of one thread to one partition keep their order. Where too much is not durable yet, `send` waits.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa

from forebay._loop_thread import LoopThread, close_at_exit
from forebay._outgoing import Outgoing
from forebay._receipts import not_yet
from forebay.client import aio
from forebay.client._config import ClientConfig, ConsumerConfig, ProducerConfig
from forebay.client._places import Position
from forebay.client._reading import TopicPartition
from forebay.client._receipts import Delivery
from forebay.client._topics import TopicDescription
from forebay.errors import Backpressure, Closed, ForebayError, OutcomeUnknown
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.http_messages import (
    GroupView,
    HealthResponse,
    OffsetsView,
    ResetResult,
    TopicView,
    TrimView,
)
from forebay.formats.record_columns import RECORD_SCHEMA

__all__ = ["Client", "Consumer", "Groups", "Producer", "Receipt", "Topics", "connect"]

PULL_BYTES = 4 * 1024 * 1024
"""Bytes of record batches taken from the loop at a time: a hop between threads costs more than a batch."""


class Topics:
    """Creates, lists, describes and deletes topics."""

    def __init__(self, thread: LoopThread, topics: aio.Topics) -> None:
        self._thread = thread
        self._topics = topics

    def create(self, name: str, *, partitions: int = 1, settings: Any = None) -> TopicView:
        """Create a topic."""
        return self._thread.run(self._topics.create(name, partitions=partitions, settings=settings))

    def describe(self, name: str) -> TopicDescription:
        """The topic with the ends of its partitions; raises `NotFound`."""
        return self._thread.run(self._topics.describe(name))

    def alter(self, name: str, *, partitions: int | None = None, settings: Any = None) -> TopicView:
        """Add partitions, or replace the settings."""
        return self._thread.run(self._topics.alter(name, partitions=partitions, settings=settings))

    def delete(self, name: str) -> None:
        """Remove a topic with its records; raises `NotFound`."""
        self._thread.run(self._topics.delete(name))

    def list(self) -> list[TopicView]:
        """Every topic, by name. (Last in the class: its name hides the builtin from annotations.)"""
        return self._thread.run(self._topics.list())


class Consumer:
    """Reads on and on. A context manager, for one thread at a time."""

    def __init__(self, thread: LoopThread, consumer: aio.Consumer) -> None:
        self._thread = thread
        self._consumer = consumer

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """Next offset to be handed out, by partition."""
        return self._consumer.positions

    @property
    def at_end(self) -> bool:
        """Whether the last poll saw the end of every partition."""
        return self._consumer.at_end

    def poll(self, *, timeout_s: float = 1.0, max_bytes: int | None = None) -> list[pa.RecordBatch]:
        """Records of any of its partitions, as Arrow; empty where none came within the timeout."""
        return self._thread.run(self._consumer.poll(timeout_s=timeout_s, max_bytes=max_bytes))

    def commit(self) -> None:
        """Commit everything that was handed out."""
        self._thread.run(self._consumer.commit())

    def close(self) -> None:
        """Nothing is open; here so that code for the embedded consumer works unchanged."""

    def __enter__(self) -> Self:
        self._thread.run(self._consumer.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Groups:
    """Lists, describes, commits, resets and deletes groups, and makes consumers."""

    def __init__(self, thread: LoopThread, groups: aio.Groups) -> None:
        self._thread = thread
        self._groups = groups

    def consumer(
        self,
        group: str,
        topics: Iterable[str],
        *,
        start_at: Literal["earliest", "latest"] = "earliest",
        config: ConsumerConfig | None = None,
    ) -> Consumer:
        """Reads from what the group committed."""
        return Consumer(self._thread, self._groups.consumer(group, topics, start_at=start_at, config=config))

    def committed(self, group: str) -> dict[TopicPartition, int]:
        """Next offset to be read, by partition."""
        return self._thread.run(self._groups.committed(group))

    def commit(self, group: str, offsets: Mapping[TopicPartition, int], *, generation: int = 0) -> None:
        """Commit next offsets to be read."""
        self._thread.run(self._groups.commit(group, offsets, generation=generation))

    def describe(self, group: str) -> GroupView:
        """Members and lag."""
        return self._thread.run(self._groups.describe(group))

    def reset(
        self,
        group: str,
        *,
        to: Position,
        topic: str | None = None,
        partition: int | None = None,
        dry_run: bool = False,
        force: bool = False,
    ) -> list[ResetResult]:
        """Move a group to one end, an offset or a time; with `dry_run` only say what would change."""
        return self._thread.run(
            self._groups.reset(group, to=to, topic=topic, partition=partition, dry_run=dry_run, force=force)
        )

    def delete(self, group: str, *, force: bool = False) -> None:
        """Forget a group and its offsets."""
        self._thread.run(self._groups.delete(group, force=force))

    def list(self) -> list[str]:
        """Every group, by name. (Last in the class: its name hides the builtin from annotations.)"""
        return self._thread.run(self._groups.list())


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
        batch = self._producer.checked(
            BytesBatch.of(records, keys=keys, timestamps_ms=timestamps_ms, headers=headers)
        )
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
                OutcomeUnknown("send", reason="the client was closed meanwhile", hint="read the tail")
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
        self._thread.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A broker, at hand. Made by `connect`; a context manager, to be shared by any number of threads."""

    def __init__(self, client: aio.Client) -> None:
        self._client = client
        self._thread = LoopThread("forebay client")
        try:
            self._thread.run(client.open())
        except BaseException:
            self._thread.stop()
            raise
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._topics = Topics(self._thread, client.topics)
        self._groups = Groups(self._thread, client.groups)
        close_at_exit(self, self._thread)

    @property
    def topics(self) -> Topics:
        """The topics."""
        return self._topics

    @property
    def groups(self) -> Groups:
        """The consumer groups."""
        return self._groups

    def health(self) -> HealthResponse:
        """Who answers."""
        return self._thread.run(self._client.health())

    def producer(self, config: ProducerConfig | None = None) -> Producer:
        """A producer: `with bay.producer() as out: ...`"""

        async def make() -> aio.Producer:
            return self._client.producer(config)

        producer = Producer(self._thread, self._thread.run(make()))
        self._producers.add(producer)
        return producer

    def consumer(
        self,
        topics: Iterable[str] | str,
        *,
        partition: int | None = None,
        start: Position = "latest",
        config: ConsumerConfig | None = None,
    ) -> Consumer:
        """Reads on and on, from one place in every partition."""
        made = self._client.consumer(topics, partition=partition, start=start, config=config)
        return Consumer(self._thread, made)

    def offsets(self, topic: str, partition: int) -> OffsetsView:
        """Where a partition begins and ends."""
        return self._thread.run(self._client.offsets(topic, partition))

    def trim(self, topic: str, *, partition: int, offset: int) -> TrimView:
        """Remove every record below `offset`, which becomes the earliest."""
        return self._thread.run(self._client.trim(topic, partition=partition, offset=offset))

    def read(
        self,
        topic: str,
        *,
        partition: int | None = None,
        start: Position = "earliest",
        end: Position | None = None,
    ) -> pa.RecordBatchReader:
        """The records from `start` to before `end`, or to the end of the log as it is now, as Arrow."""
        stream = self._thread.run(self._client.read(topic, partition=partition, start=start, end=end))
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
            self._thread.run(self._client.close())
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
    url: str,
    *,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    config: ClientConfig | None = None,
) -> Client:
    """A broker by its URL: `with connect("http://127.0.0.1:8080") as bay`.

    `token` is sent with every request; `ca` is a file of certificates to trust with `https://`.
    """
    return Client(aio.connect(url, token=token, ca=ca, config=config))
