"""Clients that do not listen, and clients that do not stop: they keep no memory, no place and no stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from tests.dataflow.otlp_kit import logs, until
from tests.dataflow.test_dataflow_receivers import SMALL, client, head, post, raw, receiving

from forebay.dataflow import MetricsPage
from forebay.dataflow._grpc_exporter import _asked_wait_s
from forebay.dataflow._grpc_receiver import CALLS_FACTOR, GrpcReceiver
from forebay.dataflow._http import Answer, HttpServer, Request
from forebay.dataflow._settings import Address
from forebay.dataflow._signals import SIGNALS
from forebay.kit.metrics import MetricsRegistry

PAGE = b"x" * 100_000
PAGES = 500
"""Fifty megabytes of answers: several times what the kernel holds for both sides of a connection."""


class Pages:
    """A server of large answers, and a client that asks for the next whenever the last one was made."""

    def __init__(self) -> None:
        self.made = 0
        self.server = HttpServer(Address("127.0.0.1", 0), self.handle, body_bytes_max=0)
        self._news = asyncio.Event()

    async def handle(self, request: Request) -> Answer:
        self.made += 1
        self._news.set()
        return Answer(200, PAGE)

    async def ask(self, writer: asyncio.StreamWriter) -> None:
        for _ in range(PAGES):
            self._news.clear()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await self._news.wait()

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[asyncio.StreamReader]:
        await self.server.start()
        address = self.server.address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        asking = asyncio.ensure_future(self.ask(writer))
        try:
            yield reader
        finally:
            asking.cancel()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            await self.server.stop(0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.dataflow._http.READ_TIMEOUT_S", 0.3)


async def test_answers_wait_for_a_client_that_takes_them_late() -> None:
    pages = Pages()
    async with pages.asked() as reader:
        await until(lambda: any(not each._is_heard.is_set() for each in pages.server.connections))
        assert pages.made < PAGES // 2
        for _ in range(PAGES):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(PAGE)) == PAGE


@pytest.mark.usefixtures("impatient")
async def test_who_asks_and_takes_no_answer_loses_his_place() -> None:
    pages = Pages()
    async with pages.asked():
        await until(lambda: pages.made)
        await until(lambda: not pages.server.connections and not pages.server.tasks)
        assert pages.made < PAGES // 2


@pytest.mark.parametrize(("request_max", "status"), [(SMALL, 413), (1 << 24, 503)])
async def test_who_is_refused_while_sending_hears_why(request_max: int, status: int) -> None:
    body = b"x" * 8_000_000
    async with receiving(request_bytes_max=request_max) as (_, __, over_http):
        server = over_http._server
        server.arriving_bytes_max = 1_000
        for _attempt in range(3):
            assert (await post(over_http, "/v1/logs", body))[0] == status
        await until(lambda: not server.connections)
        assert server.arriving_bytes == 0


@pytest.mark.parametrize(("kind", "code"), [("application/json", 413), ("application/x-protobuf", 503)])
async def test_who_is_refused_early_gets_a_status_in_his_own_encoding(kind: str, code: int) -> None:
    async with receiving() as (_, __, over_http):
        over_http._server.arriving_bytes_max = 0
        status, headers, body = await post(
            over_http, "/v1/logs", b"x" * (SMALL * 2 if code == 413 else 9), kind
        )
    assert (status, headers["content-type"], headers.get("retry-after")) == (
        code,
        kind,
        "1" if code == 503 else None,
    )
    found = json.loads(body)["code"] if code == 413 else Status.FromString(body).code
    assert found == (3 if code == 413 else 14)


@pytest.mark.usefixtures("impatient")
async def test_who_is_refused_and_never_stops_sending_loses_his_place() -> None:
    async with receiving() as (_, __, over_http), raw(over_http) as line:

        async def flood() -> None:
            with suppress(ConnectionError):
                line.writer.write(head(b"x" * 10**9))
                while True:
                    line.writer.write(b"x" * 1_000)
                    await line.writer.drain()
                    await asyncio.sleep(0.01)

        flooding = asyncio.ensure_future(flood())
        await until(lambda: over_http._server.connections)
        await until(lambda: not over_http._server.connections)
        flooding.cancel()


async def test_an_answer_to_head_has_no_body() -> None:
    registry = MetricsRegistry()
    registry.counter("some.things_total", "Things")
    page = MetricsPage("127.0.0.1:0", registry)
    await page.start()
    reader, writer = await asyncio.open_connection(*page.address.split(":"))
    try:
        for path in ("healthz", "metrics", "other"):
            writer.write(f"HEAD /{path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = (await asyncio.wait_for(reader.read(), 30)).split(b"HTTP/1.1 ")[1:]
    finally:
        writer.close()
        await page.stop()
    assert [each[:3] for each in answers] == [b"200", b"200", b"404", b"200"]
    assert [each.partition(b"\r\n\r\n")[2] for each in answers] == [b"", b"", b"", b"ok\n"]
    assert b"content-length: 3\r\n" in answers[0]


async def test_http_stops_while_others_go_on_sending_over_grpc() -> None:
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        enough = asyncio.Event()

        async def sender() -> None:
            while not enough.is_set():
                await call("logs", logs("a"))

        # Two of them at least, so that there is always one under way.
        senders = [asyncio.ensure_future(sender()) for _ in range(4)]
        await sink.entered.wait()
        sink.go_on.clear()
        await until(lambda: over_http._intake._requests == len(senders))
        try:
            # Nothing of this is HTTP's, whose stop waited for all of it.
            await asyncio.wait_for(over_http.stop(), 10)
        finally:
            enough.set()
            sink.go_on.set()
            await asyncio.wait(senders)


async def test_http_stops_although_a_request_under_way_never_ends() -> None:
    async with receiving() as (sink, _, over_http), raw(over_http) as line:
        sink.go_on.clear()
        line.writer.write(head(logs("a")) + logs("a"))
        await sink.entered.wait()
        await asyncio.wait_for(over_http.stop(0.1), 10)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(line.reader.read(), 10) == b""
    assert not sink.parcels


async def test_stop_waits_for_a_request_whose_client_is_gone() -> None:
    async with receiving() as (sink, _, over_http):
        sink.go_on.clear()
        async with raw(over_http) as line:
            line.writer.write(head(logs("a")) + logs("a"))
            await sink.entered.wait()
        stop = asyncio.ensure_future(over_http.stop())
        await asyncio.sleep(0)
        assert not stop.done()
        sink.go_on.set()
        await stop
        assert sink.names == ["a"]


@asynccontextmanager
async def half_a_request(receiver: GrpcReceiver) -> AsyncIterator[None]:
    """A client with a connection of its own that calls and sends nothing."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(str(receiver.address), options=options) as channel:
        call: Any = channel.stream_unary(SIGNALS["logs"].grpc_method)()
        await call.wait_for_connection()
        try:
            yield
        finally:
            call.cancel()


async def test_more_calls_than_there_is_room_for_are_asked_to_come_again() -> None:
    async with receiving(requests_max=1) as (sink, over_grpc, _), AsyncExitStack() as clients:
        for _each in range(CALLS_FACTOR):
            await clients.enter_async_context(half_a_request(over_grpc))
        await until(lambda: over_grpc._calls == CALLS_FACTOR)
        async with client(over_grpc) as call:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call("logs", logs("one too many"))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert _asked_wait_s(caught.value.trailing_metadata()) == 1
            await clients.aclose()
            await until(lambda: over_grpc._calls == 0)
            await call("logs", logs("again"))
    assert sink.names == ["again"]
