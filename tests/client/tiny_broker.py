"""The contract in few lines, on a real log in memory: what the client is tested against beside the broker.

It answers /produce and /consume in msgpack, /topics and offsets, and it can be told to misbehave: to drop the
connection before it acts, or after it acted; to refuse; to answer something that is not HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import httptools
import msgspec

from forebay import aio
from forebay.formats.bytes_batch import decode, encode_batch
from forebay.formats.http_messages import (
    JSON,
    MSGPACK,
    ConsumeBatch,
    ConsumeRequest,
    ConsumeResponsePacked,
    ConsumeResultPacked,
    ErrorBody,
    ErrorDetail,
    ProduceRequestPacked,
    ProduceResponse,
    ProduceResult,
)
from forebay.log import AppendGroup, OffsetOutOfRange

Answer = tuple[int, str, bytes]
Misbehaviour = Callable[["TinyBroker", bytes], Any]


class TinyBroker:
    """`async with TinyBroker() as broker: connect(broker.url)`."""

    def __init__(self) -> None:
        self.bay = aio.connect("memory://")
        self.produced: list[ProduceRequestPacked] = []
        self.headers: list[dict[str, str]] = []
        self.before: deque[str] = deque()
        """For the next produce requests: "" does nothing, "drop" hangs up before acting, "lose" after acting,
        "defect" answers 500 after acting, "400", "503", "stopping", "garbage", "strange", or the error type
        that every batch gets."""
        self.gate: asyncio.Event | None = None
        """Where set, produce requests are answered only once it is."""
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.bay.open()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._connections:
            writer.transport.abort()
        await self._server.wait_closed()
        await self.bay.close()
        await asyncio.sleep(0)

    async def values(self, topic: str, partition: int = 0) -> list[bytes]:
        table = await (await self.bay.read(topic, partition=partition)).read_all()
        found: list[bytes] = table.column("value").to_pylist()
        return found

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            while (request := await _read(reader)) is not None:
                answer = await self._answer(*request)
                if answer is None:
                    writer.transport.abort()
                    return
                status, kind, body = answer
                head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body if status else body)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        self.headers.append(headers)
        if path == "/produce":
            return await self._produce(body)
        if path == "/consume":
            return await self._consume(body)
        return await self._other(method, path)

    async def _produce(self, body: bytes) -> Answer | None:
        request = msgspec.msgpack.decode(body, type=ProduceRequestPacked)
        self.produced.append(request)
        how = self.before.popleft() if self.before else ""
        if self.gate is not None:
            await self.gate.wait()
        if how == "drop":
            return None
        if how in _ANSWERS:
            return _ANSWERS[how]
        if how not in ("", "lose", "defect"):
            return _told(
                [
                    ProduceResult(
                        topic=each.topic, partition=each.partition, ok=False, error_type=how, error="no"
                    )
                    for each in request.topic_partitions
                ]
            )
        groups = [
            replace(
                AppendGroup(each.topic, each.partition, decode(bytes(each.frame or b""))),
                producer_id=each.producer_id,
                sequence=each.sequence,
            )
            for each in request.topic_partitions
        ]
        results = await self.bay.writer.append_shared(groups)
        if how == "lose":
            return None
        if how == "defect":
            return _error(500, "InternalError", "the broker has a defect")
        return _told(
            [
                ProduceResult(
                    topic=each.topic,
                    partition=each.partition,
                    ok=each.ok,
                    start_offset=each.start_offset,
                    end_offset=each.end_offset,
                    count=each.count,
                    duplicate=each.duplicate,
                    error_type=None if each.error is None else type(each.error).__name__,
                    error=None if each.error is None else each.error.message,
                )
                for each in results
            ]
        )

    async def _consume(self, body: bytes) -> Answer:
        request = msgspec.json.decode(body, type=ConsumeRequest)
        results = []
        for each in request.topic_partitions:
            try:
                fetched = await self.bay.reader.read(
                    each.topic, each.partition, each.fetch_offset, max_bytes=each.partition_max_bytes
                )
            except OffsetOutOfRange as error:
                results.append(
                    ConsumeResultPacked(
                        topic=each.topic,
                        partition=each.partition,
                        ok=False,
                        error_type="OffsetOutOfRange",
                        error=error.message,
                        earliest_offset=error.earliest,
                        high_watermark=error.next,
                    )
                )
                continue
            batches = [
                ConsumeBatch(
                    start_offset=batch.start_offset,
                    count=len(batch),
                    timestamp_ms=batch.time_ms,
                    frame=memoryview(encode_batch(batch.batch)),
                )
                for batch in fetched.batches
            ]
            results.append(
                ConsumeResultPacked(
                    topic=each.topic,
                    partition=each.partition,
                    ok=True,
                    next_offset=fetched.next_offset,
                    high_watermark=fetched.high_watermark,
                    earliest_offset=fetched.earliest,
                    batches=batches,
                )
            )
        return 200, MSGPACK, msgspec.msgpack.encode(ConsumeResponsePacked(results, len(results), 0))

    async def _other(self, method: str, path: str) -> Answer:
        path, _, query = path.partition("?")
        parts = path.strip("/").split("/")
        if method == "GET" and parts[0] == "topics" and len(parts) == 2:
            found = await self.bay.writer.catalog.find(parts[1])
            if found is not None:
                view = {
                    "topic": found.topic,
                    "topic_id": found.topic_id,
                    "partitions": found.partitions,
                    "created_at_ms": found.created_at_ms,
                    "state": found.state,
                    "settings": {},
                    "offsets": [],
                }
                return 200, JSON, msgspec.json.encode(view)
        if method == "GET" and parts[-1] == "offsets" and parts[0] == "topics":
            ends = await self.bay.offsets(parts[1], int(parts[3]))
            view = {
                "topic": parts[1],
                "partition": int(parts[3]),
                "earliest": ends.earliest,
                "next": ends.next,
            }
            view |= {"records": ends.records, "log_state": "OPEN", "epoch": 0}
            if query:
                time_ms = int(query.removeprefix("time_ms="))
                view["at"] = await self.bay.reader.offset_for_time(parts[1], int(parts[3]), time_ms)
            return 200, JSON, msgspec.json.encode(view)
        return _error(404, "NotFound", f"{method} {path} is not here")


def _error(status: int, kind: str, message: str) -> Answer:
    return status, JSON, msgspec.json.encode(ErrorBody(ErrorDetail(kind, message, "look elsewhere", "r1")))


_ANSWERS = {
    "garbage": (0, "", b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "400": _error(400, "UsageError", "one of these is wrong"),
    "strange": (200, "text/html", b"<h1>Welcome to the portal</h1>"),
    "503": (503, "text/plain", b"busy"),
    "stopping": _error(503, "Stopping", "the broker is stopping"),
}


def _told(results: list[ProduceResult]) -> Answer:
    good = sum(each.ok for each in results)
    body = msgspec.msgpack.encode(ProduceResponse(results, good, len(results) - good))
    return (200 if good == len(results) else 409), MSGPACK, body


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes] | None:
    """One request; None where the client has hung up."""
    parsed = _Parsed()
    parser = httptools.HttpRequestParser(parsed)
    while not parsed.complete:
        data = await reader.read(1 << 18)
        if not data:
            return None
        parser.feed_data(data)
    return parser.get_method().decode(), parsed.url.decode(), parsed.headers, b"".join(parsed.body)


class _Parsed:
    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
