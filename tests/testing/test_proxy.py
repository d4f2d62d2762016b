"""The fault proxy between a plain client and a small server that remembers what reached it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from forebay.errors import Closed
from forebay.testing.proxy import (
    ConnectionFault,
    Direction,
    FaultProxy,
    corrupt,
    half_close,
    hang,
    lose_reply,
    reset_after,
)

UP, DOWN = Direction.UP, Direction.DOWN


class Echo:
    """Answers every line with itself, and keeps what it read."""

    def __init__(self) -> None:
        self.received = b""
        self.got_something = asyncio.Event()
        self.writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.received += data
                self.got_something.set()
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    yield echo, server.sockets[0].getsockname()[1]
    server.close()
    for writer in echo.writers:
        writer.transport.abort()


@pytest.fixture
async def proxy(echo: tuple[Echo, int]) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", echo[1]) as running:
        yield running


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    @contextlib.asynccontextmanager
    async def of(proxy: FaultProxy) -> AsyncIterator[Client]:
        client = Client(*await asyncio.open_connection("127.0.0.1", proxy.port))
        try:
            yield client
        finally:
            client.writer.transport.abort()
            await asyncio.sleep(0)

    async def ask(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await self.reader.readexactly(len(data))


async def is_silent(client: Client) -> bool:
    """Nothing arrives although the loop had every chance to deliver it."""
    try:
        async with asyncio.timeout(0.1):
            return await client.reader.read(1) is None
    except TimeoutError:
        return True


async def test_bytes_pass_unchanged_and_are_counted(proxy: FaultProxy) -> None:
    data = random.Random(1).randbytes(1_000_000)
    async with Client.of(proxy) as client:
        client.writer.write(data)
        assert await client.reader.readexactly(len(data)) == data
        assert proxy.stats.open == 1
    assert (proxy.stats.connections, proxy.stats.bytes_up, proxy.stats.bytes_down) == (
        1,
        1_000_000,
        1_000_000,
    )


async def test_end_of_one_direction_is_passed_on(proxy: FaultProxy) -> None:
    async with Client.of(proxy) as client:
        client.writer.write(b"last words")
        client.writer.write_eof()
        assert await client.reader.read() == b"last words"


async def test_latency_delays_but_keeps_order_and_bytes(proxy: FaultProxy) -> None:
    proxy.shape(latency_ms=30, jitter_ms=30)
    loop = asyncio.get_running_loop()
    async with Client.of(proxy) as client:
        start = loop.time()
        for number in range(50):
            client.writer.write(b"%03d" % number)
            await client.writer.drain()
            await asyncio.sleep(0)
        assert await client.reader.readexactly(150) == b"".join(b"%03d" % number for number in range(50))
        assert loop.time() - start >= 0.060


async def test_bandwidth_is_capped_in_the_direction_asked_for(proxy: FaultProxy) -> None:
    proxy.shape(DOWN, bytes_per_s=200_000)
    loop = asyncio.get_running_loop()
    async with Client.of(proxy) as client:
        start = loop.time()
        assert len(await client.ask(bytes(40_000))) == 40_000
        # The last piece waits for nobody, so the cap shows in all pieces but one.
        assert loop.time() - start >= 0.1


async def test_blackhole_holds_everything_until_lifted(echo: tuple[Echo, int], proxy: FaultProxy) -> None:
    async with Client.of(proxy) as client:
        assert await client.ask(b"before") == b"before"
        proxy.blackhole()
        client.writer.write(b"held")
        assert await is_silent(client)
        assert echo[0].received == b"before"
        proxy.blackhole(on=False)
        assert await client.reader.readexactly(4) == b"held"


async def test_blackhole_of_replies_lets_requests_through(echo: tuple[Echo, int], proxy: FaultProxy) -> None:
    proxy.blackhole(DOWN)
    async with Client.of(proxy) as client:
        client.writer.write(b"request")
        await echo[0].got_something.wait()
        assert echo[0].received == b"request"
        assert await is_silent(client)


async def test_refusing_proxy_listens_again_on_the_same_port(proxy: FaultProxy) -> None:
    async with Client.of(proxy) as client:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await client.ask(b"open ones stay") == b"open ones stay"
    proxy.accept()
    async with Client.of(proxy) as client:
        assert await client.ask(b"again") == b"again"


async def test_dead_server_resets_its_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with FaultProxy("127.0.0.1", port) as proxy, Client.of(proxy) as client:
        with pytest.raises(ConnectionResetError):
            await client.reader.readexactly(1)


@pytest.mark.parametrize("direction", Direction)
async def test_reset_comes_after_exactly_so_many_bytes(
    echo: tuple[Echo, int], proxy: FaultProxy, direction: Direction
) -> None:
    proxy.next_connection(reset_after(10, direction))
    async with Client.of(proxy) as client:
        client.writer.write(b"0123456789abcdef")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.reader.readexactly(16)
    stats = proxy.stats
    assert (stats.bytes_up if direction is UP else stats.bytes_down) == 10
    assert stats.faults_met == 1


async def test_only_the_next_connection_is_reset_at_once(proxy: FaultProxy) -> None:
    proxy.next_connection(reset_after(0))
    async with Client.of(proxy) as doomed:
        with pytest.raises(ConnectionResetError):
            await doomed.reader.readexactly(1)
    async with Client.of(proxy) as lucky:
        assert await lucky.ask(b"x") == b"x"


async def test_lost_reply_reaches_the_server_and_not_the_client(
    echo: tuple[Echo, int], proxy: FaultProxy
) -> None:
    async with Client.of(proxy) as client:
        assert await client.ask(b"one") == b"one"
        proxy.next_response(lose_reply(quiet_ms=10))
        client.writer.write(b"two")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)) as caught:
            await client.reader.readexactly(3)
    assert echo[0].received == b"onetwo"
    assert getattr(caught.value, "partial", b"") == b""
    async with Client.of(proxy) as client:
        assert await client.ask(b"three") == b"three"


async def test_cut_reply_keeps_its_first_bytes(proxy: FaultProxy) -> None:
    proxy.next_response(lose_reply(after_bytes=3, quiet_ms=10))
    async with Client.of(proxy) as client:
        client.writer.write(b"abcdef")
        assert await client.reader.readexactly(3) == b"abc"
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.reader.readexactly(1)


async def test_corruption_changes_one_byte(proxy: FaultProxy) -> None:
    sent = bytes(1000)
    proxy.next_connection(corrupt(at_byte=700))
    async with Client.of(proxy) as client:
        got = await client.ask(sent)
        assert [place for place in range(1000) if got[place] != sent[place]] == [700]
        assert await client.ask(sent) == sent


async def test_half_closed_reply_leaves_requests_open(echo: tuple[Echo, int], proxy: FaultProxy) -> None:
    proxy.next_connection(half_close(after_bytes=4, direction=DOWN))
    async with Client.of(proxy) as client:
        client.writer.write(b"abcdefgh")
        assert await client.reader.read() == b"abcd"
        echo[0].got_something.clear()
        client.writer.write(b"still heard")
        await echo[0].got_something.wait()
        assert echo[0].received == b"abcdefghstill heard"


async def test_hanging_connection_goes_on_after_healing(proxy: FaultProxy) -> None:
    proxy.next_connection(hang(after_bytes=2))
    async with Client.of(proxy) as client, Client.of(proxy) as other:
        client.writer.write(b"abcdef")
        assert await client.reader.readexactly(2) == b"ab"
        assert await is_silent(client)
        assert await other.ask(b"x") == b"x"
        proxy.heal()
        assert await client.reader.readexactly(4) == b"cdef"


async def test_several_faults_of_one_connection_act_in_turn(proxy: FaultProxy) -> None:
    proxy.next_connection(corrupt(at_byte=1), reset_after(5))
    async with Client.of(proxy) as client:
        client.writer.write(bytes(20))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.reader.readexactly(20)
    assert (proxy.stats.bytes_down, proxy.stats.faults_met) == (6, 2)


async def test_cut_resets_every_open_connection(proxy: FaultProxy) -> None:
    async with Client.of(proxy) as one, Client.of(proxy) as two:
        await one.ask(b"x")
        await two.ask(b"x")
        assert proxy.cut() == 2
        for client in (one, two):
            with pytest.raises(ConnectionResetError):
                await client.reader.readexactly(1)


async def survivors(port: int, seed: int) -> list[bool]:
    async with FaultProxy("127.0.0.1", port, randomness=random.Random(seed)) as proxy:
        proxy.fail_randomly(0.5, [reset_after(0), reset_after(2)])
        lived = []
        for _ in range(16):
            async with Client.of(proxy) as client:
                try:
                    lived.append(await client.ask(b"abcd") == b"abcd")
                except (OSError, asyncio.IncompleteReadError):
                    lived.append(False)
        return lived


async def test_same_seed_hits_the_same_connections(echo: tuple[Echo, int]) -> None:
    first = await survivors(echo[1], 5)
    assert first == await survivors(echo[1], 5)
    assert {True, False} == set(first)
    assert first != await survivors(echo[1], 6)


# -- in a thread of its own, with an ordinary blocking HTTP client


@pytest.fixture
def site() -> Iterator[tuple[list[str], int]]:
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield seen, server.server_address[1]
        server.shutdown()
        thread.join()


def fetch(proxy: FaultProxy, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def test_threaded_proxy_serves_blocking_clients(site: tuple[list[str], int]) -> None:
    seen, port = site
    with FaultProxy("127.0.0.1", port) as proxy:
        assert fetch(proxy, "/1") == b"hello"
        proxy.next_response(lose_reply(quiet_ms=10))
        with pytest.raises(OSError):
            fetch(proxy, "/2")
        proxy.next_response(lose_reply(after_bytes=30, quiet_ms=10))
        with pytest.raises((OSError, http.client.HTTPException)):
            fetch(proxy, "/3")
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            fetch(proxy, "/4")
        proxy.heal()
        assert fetch(proxy, "/5") == b"hello"
        assert proxy.stats.faults_met == 2
    assert seen == ["/1", "/2", "/3", "/5"]


def test_controls_of_a_closed_proxy_say_so(site: tuple[list[str], int]) -> None:
    with FaultProxy("127.0.0.1", site[1]) as proxy:
        pass
    with pytest.raises(Closed, match="not running"):
        proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        fetch(proxy, "/")


def test_closing_ends_connections_that_hang(site: tuple[list[str], int]) -> None:
    fault: ConnectionFault = hang()
    with FaultProxy("127.0.0.1", site[1]) as proxy:
        proxy.next_connection(fault)
        client = socket.create_connection(("127.0.0.1", proxy.port))
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
    with client:
        client.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
