"""What the tests of the broker stand on: a broker in the loop of the test, a client that sees the bytes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from forebay._connect import Parts
from forebay.broker import Broker, BrokerConfig
from forebay.coordination import open_coordinator
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.log import ProducerConfig
from forebay.storage import open_store

FAST = ProducerConfig(batch_max_delay_ms=1)


@dataclass(slots=True)
class Answer:
    """One answer, as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Client:
    """Talks to one address; a connection per request, unless `connection` is used."""

    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict)
    tls: Any = None

    async def open(self) -> Wire:
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls)
        return Wire(reader, writer, self)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        wire = await self.open()
        try:
            await wire.send(method, path, body, headers)
            return await wire.answer(head_only=method == "HEAD")
        finally:
            await wire.close()

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.request("GET", path, None, headers)

    async def post(self, path: str, message: Any, headers: Mapping[str, str] | None = None) -> Answer:
        given = {"Content-Type": "application/json", **(headers or {})}
        return await self.request("POST", path, json.dumps(message).encode(), given)

    async def produce(self, topic: str, partition: int, records: Sequence[Any], **more: Any) -> Answer:
        batch = {"topic": topic, "partition": partition, "records": list(records), **more}
        return await self.post("/produce", {"topic_partitions": [batch]})

    async def consume(self, topic: str, partition: int, offset: int, **more: Any) -> Answer:
        place = {"topic": topic, "partition": partition, "fetch_offset": offset}
        return await self.post("/consume", {"topic_partitions": [place], **more})


@dataclass(slots=True)
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    client: Client

    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        lines = {"Host": f"{self.client.host}:{self.client.port}", **self.client.headers, **(headers or {})}
        if body is not None:
            lines.setdefault("Content-Length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.raw(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + (body or b""))

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, head_only: bool = False) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        length = int(headers.get("Content-Length", "0"))
        body = b"" if head_only else await self.reader.readexactly(length)
        return Answer(int(first.split()[1]), headers, body)

    async def events(self) -> AsyncIterator[str]:
        """The events of a chunked stream whose head was read."""
        text = ""
        while True:
            size = int((await self.reader.readline()).strip() or b"0", 16)
            piece = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            if not size:
                return
            text += piece.decode()
            while "\n\n" in text:
                event, _, text = text.partition("\n\n")
                yield event

    async def head(self) -> Answer:
        return await self.answer(head_only=True)

    async def ended(self) -> bytes:
        """What comes until the other side closes."""
        return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


async def until(condition: Callable[[], object]) -> None:
    """Return once it holds; the test's own timeout is the only clock here."""
    while not condition():  # noqa: ASYNC110 - what is looked at is the broker's, and has no event
        await asyncio.sleep(0.005)


def parts(name: str = "") -> Parts:
    """A deployment in memory; the same one for the same name."""
    clock = SystemClock()
    ids = IdSource(clock)
    url = f"memory://{name or ids.token()}"
    return Parts(
        open_store(url, clock=clock, ids=ids),
        open_coordinator(url),
        clock,
        ids,
        random.Random(7),
        MetricsRegistry(),
    )


@asynccontextmanager
async def serving(
    config: BrokerConfig | None = None, made_of: Parts | None = None, **changes: Any
) -> AsyncIterator[tuple[Broker, Client]]:
    """A broker on a free port, flushing at once."""
    config = config or BrokerConfig(port=0, producer=FAST)
    async with Broker(made_of or parts(), replace(config, port=0, **changes)) as broker:
        host, port = broker.url.removeprefix("http://").rsplit(":", 1)
        yield broker, Client(host, int(port))
