"""The connection layer against servers that answer byte by byte, too much, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from forebay.client._address import parse_address
from forebay.client._config import ClientConfig
from forebay.client._connection import HEADER_BYTES_MAX
from forebay.client._pool import Pool
from forebay.errors import Closed, OutcomeUnknown, Unavailable
from forebay.kit.clock import SystemClock
from forebay.testing._servers.ports import free_ports

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, config: ClientConfig | None = None) -> AsyncIterator[Pool]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    address = parse_address(f"http://127.0.0.1:{port}")
    pool = Pool(address, clock=SystemClock(), config=config or ClientConfig(), token=None)
    try:
        yield pool
    finally:
        await pool.close()
        server.close()
        await server.wait_closed()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def answering(*answers: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await head_of(reader)
            writer.write(answer)
            await writer.drain()

    return handler


async def test_an_answer_in_single_bytes_is_one_answer() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello":
            writer.write(bytes([byte]))
            await writer.drain()
        await reader.read()

    async with serving(handler) as pool:
        response = await pool.request("GET", "/x")
    assert (response.status, response.body, response.headers["x-a"]) == (200, b"hello", "b")


async def test_chunks_and_answers_without_a_length_are_understood() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with serving(answering(chunked)) as pool:
        assert (await pool.request("GET", "/x")).body == b"abcde"
    async with serving(answering(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")) as pool:
        assert (await pool.request("GET", "/x")).body == b"until the end"


async def test_a_connection_is_used_again_and_a_closed_one_is_not() -> None:
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for number in range(2):
            await head_of(reader)
            last = b"Connection: close\r\n" if number else b""
            writer.write(b"HTTP/1.1 200 OK\r\n" + last + b"Content-Length: 0\r\n\r\n")
            await writer.drain()

    async with serving(handler) as pool:
        for _ in range(6):
            assert (await pool.request("GET", "/x")).status == 200
    assert connections == 3


async def test_no_more_connections_than_allowed_are_open_at_once() -> None:
    open_now = most = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            while True:
                await head_of(reader)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        finally:
            open_now -= 1

    async with serving(handler, ClientConfig(connections_max=3)) as pool:
        await asyncio.gather(*(pool.request("GET", "/x") for _ in range(30)))
    assert most == 3


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * (HEADER_BYTES_MAX + 1) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + bytes(2000),
    ],
    ids=["nothing", "cut short", "no HTTP", "endless headers", "too large"],
)
async def test_an_answer_that_is_none_leaves_the_outcome_unknown(answer: bytes) -> None:
    async with serving(answering(answer), ClientConfig(response_bytes_max=1000)) as pool:
        with pytest.raises(OutcomeUnknown):
            await pool.request("POST", "/x", body=[b"data"])


async def test_silence_ends_with_the_timeout_and_the_next_request_has_a_new_connection() -> None:
    asked = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await head_of(reader)
        asked += 1
        if asked > 1:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            await writer.drain()
        await reader.read()

    async with serving(handler) as pool:
        with pytest.raises(OutcomeUnknown, match="no answer"):
            await pool.request("GET", "/x", timeout_s=0.02)
        assert (await pool.request("GET", "/x")).status == 204


async def test_nobody_there_is_unavailable_and_after_close_nothing_is_sent() -> None:
    [port] = free_ports(1)
    pool = Pool(
        parse_address(f"http://127.0.0.1:{port}"), clock=SystemClock(), config=ClientConfig(), token=None
    )
    with pytest.raises(Unavailable) as failed:
        await pool.request("GET", "/x")
    assert "forebay serve" in failed.value.hint
    await pool.close()
    with pytest.raises(Closed):
        await pool.request("GET", "/x")


async def test_the_sender_hears_when_the_request_has_left_and_not_before() -> None:
    let_in = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await let_in.wait()
        await head_of(reader)
        await reader.readexactly(64 * 1024 * 1024)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    sent = asyncio.Event()
    async with serving(handler) as pool:
        body = bytes(64 * 1024 * 1024)
        asking = asyncio.create_task(pool.request("POST", "/x", body=[body], on_sent=sent.set))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not sent.is_set()
        let_in.set()
        await asking
        assert sent.is_set()
