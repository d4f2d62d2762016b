"""Two ways to the same log: a broker by its URL, or the deployment itself.

The pipe commands take either, with the same options otherwise. What they need is little: partitions and their
ends, a producer, and something that reads on; both ways give Arrow, so the rest of a command does not know
which one it took.

Command line beats environment as a whole: `--url` silences FOREBAY_DATA, and `--data` silences FOREBAY_URL.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import typer

from forebay.cli._deployment import _OPTIONS as DEPLOYMENT_OPTIONS
from forebay.cli._deployment import ENVIRONMENT, Deployment
from forebay.cli._options import add_parameters, option
from forebay.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from forebay import aio
    from forebay.client import aio as client_aio
    from forebay.log import GroupConsumer

__all__ = ["Door", "DoorChoice", "Follower", "door_options"]

URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE = "FOREBAY_URL", "FOREBAY_TOKEN", "FOREBAY_CA"


class Follower(Protocol):
    """Reads on and on."""

    async def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        """Records of any partition; empty where none came within the timeout."""

    def positions(self) -> dict[int, int]:
        """Next offset to be handed out, by partition."""

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """Commit next offsets by partition, for a group."""


class Door(Protocol):
    """An open way to a log."""

    async def partitions(self, topic: str) -> int:
        """How many partitions the topic has."""

    async def ends(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset, and the next to be written."""

    async def at_time(self, topic: str, partition: int, time_ms: int) -> int:
        """The first offset from then on."""

    def producer(self, linger_ms: int) -> Any:
        """A context manager with `send`, `room` and `flush`."""

    def follow(self, topic: str, positions: Mapping[int, int]) -> Follower:
        """Read these partitions from these offsets on."""

    def group(self, group: str, topic: str, start_at: Any) -> Any:
        """A context manager that gives a follower: a consumer of a group."""


@dataclass(frozen=True, slots=True)
class DoorChoice:
    """Which way the command line and the environment ask for."""

    url: str | None = None
    token: str | None = None
    ca: str | None = None
    deployment: Deployment = field(default_factory=Deployment)

    @classmethod
    def choose(cls, given: Mapping[str, str | None], environment: Mapping[str, str]) -> DoorChoice:
        """The way of the command line, or else the one of the environment."""
        places = {name: given.get(name) for name in ENVIRONMENT}
        url = given.get("url")
        if url and any(places.values()):
            raise UsageError(
                "--url excludes --data, --store and --coordinator", hint="a broker knows where its log is"
            )
        if not url and not any(places.values()):
            url = environment.get(URL_VARIABLE)
        token = given.get("token") or environment.get(TOKEN_VARIABLE)
        ca = given.get("ca") or environment.get(CA_VARIABLE)
        if url:
            return cls(url, token, ca if url.startswith("https") else None)
        return cls(deployment=Deployment.choose(places, environment))

    @asynccontextmanager
    async def open(self, *, create: bool = False) -> AsyncIterator[Door]:
        """Open it. Only with `create` a data directory that is not there is made."""
        if self.url is not None:
            from forebay.client import aio as client

            async with client.connect(self.url, token=self.token, ca=self.ca) as connected:
                yield _Remote(connected)
            return
        from forebay import aio

        async with aio.connect(*await self._locations(create)) as bay:
            yield _Embedded(bay)

    async def _locations(self, create: bool) -> tuple[Any, Any]:
        place = self.deployment
        if place.data is None:
            if place.store is None:
                raise UsageError("no log was named", hint="give --url URL, --data DIR, or --store URL")
            return place.store, place.coordinator
        there = await asyncio.to_thread(place.data.is_dir)
        if not there and not create:
            raise UsageError(f"{place.data}: there is no such directory", hint="check --data")
        return place.data.absolute(), None


class _Remote:
    """A broker."""

    def __init__(self, client: client_aio.Client) -> None:
        self._client = client

    async def partitions(self, topic: str) -> int:
        return (await self._client.topics.describe(topic)).topic.partitions

    async def ends(self, topic: str, partition: int) -> tuple[int, int]:
        found = await self._client.offsets(topic, partition)
        return found.earliest, found.next

    async def at_time(self, topic: str, partition: int, time_ms: int) -> int:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
        return await self._client.offset_for_time(topic, partition, moment)

    def producer(self, linger_ms: int) -> Any:
        from forebay.client import ProducerConfig

        return self._client.producer(ProducerConfig(linger_ms=linger_ms))

    def follow(self, topic: str, positions: Mapping[int, int]) -> Follower:
        return _RemoteFollower(self._client.consumer_at(topic, positions))

    @asynccontextmanager
    async def group(self, group: str, topic: str, start_at: Any) -> AsyncIterator[Follower]:
        async with self._client.groups.consumer(group, [topic], start_at=start_at) as consumer:
            yield _RemoteGroup(consumer, self._client, group, topic)


class _RemoteFollower:
    def __init__(self, consumer: client_aio.Consumer) -> None:
        self._consumer = consumer

    async def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        return await self._consumer.poll(timeout_s=timeout_s)

    def positions(self) -> dict[int, int]:
        return {place.partition: offset for place, offset in self._consumer.positions.items()}

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """No group, nothing to commit."""


class _RemoteGroup(_RemoteFollower):
    def __init__(
        self, consumer: client_aio.Consumer, client: client_aio.Client, group: str, topic: str
    ) -> None:
        super().__init__(consumer)
        self._client = client
        self._group = group
        self._topic = topic

    async def commit(self, offsets: Mapping[int, int]) -> None:
        from forebay.client import TopicPartition

        places = {TopicPartition(self._topic, partition): offset for partition, offset in offsets.items()}
        await self._client.groups.commit(self._group, places)


class _Embedded:
    """The deployment itself."""

    def __init__(self, bay: aio.Bay) -> None:
        self._bay = bay

    async def partitions(self, topic: str) -> int:
        return (await self._bay.writer.catalog.describe(topic)).partitions

    async def ends(self, topic: str, partition: int) -> tuple[int, int]:
        found = await self._bay.offsets(topic, partition)
        return found.earliest, found.next

    async def at_time(self, topic: str, partition: int, time_ms: int) -> int:
        return await self._bay.reader.offset_for_time(topic, partition, time_ms)

    def producer(self, linger_ms: int) -> Any:
        from forebay.log import ProducerConfig

        return self._bay.producer(ProducerConfig(batch_max_delay_ms=linger_ms))

    def follow(self, topic: str, positions: Mapping[int, int]) -> Follower:
        return _EmbeddedFollower(self._bay, topic, positions)

    @asynccontextmanager
    async def group(self, group: str, topic: str, start_at: Any) -> AsyncIterator[Follower]:
        async with self._bay.groups.consumer(group, [topic], start_at=start_at) as consumer:
            yield _EmbeddedGroup(consumer, topic)


class _EmbeddedFollower:
    def __init__(self, bay: aio.Bay, topic: str, positions: Mapping[int, int]) -> None:
        self._reader = bay.reader
        self._topic = topic
        self._positions = dict(positions)

    def positions(self) -> dict[int, int]:
        return dict(self._positions)

    async def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        batches = await self._read()
        if not batches and timeout_s > 0:
            wanted = [(self._topic, partition, offset) for partition, offset in self._positions.items()]
            if await self._reader.wait_for_data(wanted, timeout_s=timeout_s):
                batches = await self._read()
        return batches

    async def _read(self) -> list[pa.RecordBatch]:
        from forebay.errors import ForebayError
        from forebay.log import OffsetOutOfRange, ReadRequest

        asked = [ReadRequest(self._topic, partition, offset) for partition, offset in self._positions.items()]
        batches: list[pa.RecordBatch] = []
        for request, answer in zip(asked, await self._reader.read_many(asked), strict=True):
            if isinstance(answer, OffsetOutOfRange) and answer.earliest > request.offset:
                self._positions[request.partition] = answer.earliest
            elif isinstance(answer, ForebayError):
                raise answer
            else:
                self._positions[request.partition] = answer.next_offset
                batches += [batch.to_arrow() for batch in answer.batches]
        return batches

    async def commit(self, offsets: Mapping[int, int]) -> None:
        """No group, nothing to commit."""


class _EmbeddedGroup:
    def __init__(self, consumer: GroupConsumer, topic: str) -> None:
        self._consumer = consumer
        self._topic = topic

    def positions(self) -> dict[int, int]:
        return {place.partition: offset for place, offset in self._consumer.positions.items()}

    async def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        return [batch.to_arrow() for batch in await self._consumer.poll(timeout_s=timeout_s)]

    async def commit(self, offsets: Mapping[int, int]) -> None:
        from forebay.log import TopicPartition

        await self._consumer.member.commit(
            {TopicPartition(self._topic, partition): offset for partition, offset in offsets.items()}
        )


_OPTIONS = (
    option(
        "url",
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help=f"A broker, as http://127.0.0.1:8080. [env: {URL_VARIABLE}]",
            show_default=False,
        ),
    ),
    option(
        "token",
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            help=f"What the broker knows you by. [env: {TOKEN_VARIABLE}]",
            show_default=False,
        ),
    ),
    option(
        "ca",
        str | None,
        typer.Option(
            "--ca",
            metavar="FILE",
            help=f"Certificates to trust with https://. [env: {CA_VARIABLE}]",
            show_default=False,
        ),
    ),
    *DEPLOYMENT_OPTIONS,
)


def door_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of both ways, and its parameter `door` what they say."""

    def consume(values: dict[str, Any]) -> dict[str, Any]:
        return {"door": DoorChoice.choose(values, os.environ)}

    return add_parameters(function, _OPTIONS, consume, without="door")
