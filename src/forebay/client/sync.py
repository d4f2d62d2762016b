"""The client for everybody else: plain calls, from any thread. `forebay.client.aio` on a loop of its own.

    with forebay.client.connect("http://127.0.0.1:8080") as bay:
        with bay.producer() as out:
            done = out.send("orders", [b"alpha", b"beta"], partition=0).result(timeout=10)
        table = bay.read("orders", partition=0, start=1).read_all()

Sends of one thread to one partition keep their order. Where too much is not durable yet, `send` waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa

from forebay._loop_thread import LoopThread
from forebay._sync_bay import SyncBay
from forebay._sync_producer import SyncReceiptFor, SyncSending
from forebay._sync_reading import pulled
from forebay.client import aio
from forebay.client._config import ClientConfig, ConsumerConfig, ProducerConfig
from forebay.client._places import Position
from forebay.client._reading import TopicPartition
from forebay.client._receipts import Delivery
from forebay.client._topics import TopicDescription
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


class Receipt(SyncReceiptFor[Delivery]):
    """Becomes a `Delivery` once the records are durable."""


class Producer(SyncSending[Delivery, Receipt]):
    """Sends records to any topic. A context manager: leaving it waits until everything is durable."""

    _receipt = Receipt
    _owner = "client"


class Client(SyncBay[aio.Client, Producer]):
    """A broker, at hand. Made by `connect`; a context manager, to be shared by any number of threads."""

    def __init__(self, client: aio.Client) -> None:
        super().__init__(client, "forebay client")
        self._topics = Topics(self._thread, client.topics)
        self._groups = Groups(self._thread, client.groups)

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
        return self._thread.run(self._bay.health())

    def producer(self, config: ProducerConfig | None = None) -> Producer:
        """A producer: `with bay.producer() as out: ...`"""

        async def make() -> aio.Producer:
            return self._bay.producer(config)

        return self._kept(Producer(self._thread, self._thread.run(make())))

    def consumer(
        self,
        topics: Iterable[str] | str,
        *,
        partition: int | None = None,
        start: Position = "latest",
        config: ConsumerConfig | None = None,
    ) -> Consumer:
        """Reads on and on, from one place in every partition."""
        made = self._bay.consumer(topics, partition=partition, start=start, config=config)
        return Consumer(self._thread, made)

    def offsets(self, topic: str, partition: int) -> OffsetsView:
        """Where a partition begins and ends."""
        return self._thread.run(self._bay.offsets(topic, partition))

    def trim(self, topic: str, *, partition: int, offset: int) -> TrimView:
        """Remove every record below `offset`, which becomes the earliest."""
        return self._thread.run(self._bay.trim(topic, partition=partition, offset=offset))

    def read(
        self,
        topic: str,
        *,
        partition: int | None = None,
        start: Position = "earliest",
        end: Position | None = None,
    ) -> pa.RecordBatchReader:
        """The records from `start` to before `end`, or to the end of the log as it is now, as Arrow."""
        stream = self._thread.run(self._bay.read(topic, partition=partition, start=start, end=end))
        return pa.RecordBatchReader.from_batches(RECORD_SCHEMA, pulled(self._thread, stream))


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
