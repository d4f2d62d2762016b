"""What clients do to a server, on purpose or not: slow, half-closed, pipelined, oversized, malformed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.broker.bed import FAST, Answer, Client, Wire, serving, until

from forebay.broker import BrokerConfig, HttpLimits, _produce_columns
from forebay.broker._connection import PLACE_FACTOR
from forebay.broker._http import Reply, Request
from forebay.broker._limits import HEADERS_MAX, PIPELINE_MAX, TARGET_BYTES_MAX
from forebay.formats.bytes_batch import BytesBatch, encode_batch
from forebay.formats.http_messages import ARROW, MSGPACK, ProducePartitionPacked, ProduceRequestPacked

SHORT = BrokerConfig(
    producer=FAST, limits=HttpLimits(head_timeout_ms=150, body_timeout_ms=150, idle_timeout_ms=150)
)
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def alive(client: Client) -> bool:
    return (await client.get("/health")).status == 200


async def test_connection_is_kept_for_the_next_request() -> None:
    async with serving() as (broker, client):
        wire = await client.open()
        for _ in range(3):
            await wire.send("GET", "/health")
            assert (await wire.answer()).status == 200
        assert len(broker.server.connections) == 1
        await wire.close()


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await client.open()
        poll = json.dumps(
            {"topic_partitions": [{"topic": "t", "partition": 0, "fetch_offset": 2}], "max_wait_ms": 150}
        ).encode()
        # The first waits, the others could be answered at once: they stand behind it all the same.
        await wire.send("POST", "/consume", poll, {"X-Request-Id": "0"})
        for number in range(1, PIPELINE_MAX * 3):
            await wire.send("GET", "/health", None, {"X-Request-Id": str(number)})
        answers = [await wire.answer() for _ in range(PIPELINE_MAX * 3)]
        assert [answer.headers["X-Request-Id"] for answer in answers] == [
            str(number) for number in range(PIPELINE_MAX * 3)
        ]
        await wire.close()


async def test_pipelined_appends_keep_their_order() -> None:
    async with serving() as (_, client):
        wire = await client.open()
        for number in range(20):
            batch = {"topic": "t", "partition": 0, "records": [str(number)]}
            await wire.send("POST", "/produce", json.dumps({"topic_partitions": [batch]}).encode())
        offsets = [(await wire.answer()).json()["results"][0]["start_offset"] for _ in range(20)]
        assert offsets == list(range(1, 21))
        records = (await client.consume("t", 0, 1)).json()["results"][0]["records"]
        assert [record["value"] for record in records] == [str(number) for number in range(20)]
        await wire.close()


@pytest.mark.parametrize("kind", ["heads", "bodies", "chunks"])
async def test_requests_that_come_with_one_read_are_begun_only_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    body = b'{"topic_partitions":[{"topic":"t","partition":0,"fetch_offset":1}]}'
    post = b"POST /consume HTTP/1.1\r\nHost: localhost\r\n"
    one = {
        "heads": GET,
        "bodies": post + b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        "chunks": post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    }[kind]
    count = PIPELINE_MAX * 40
    async with serving() as (broker, client):
        await client.produce("t", 0, ["a"])
        begun, handler = 0, broker.server._handler
        may_answer = asyncio.Event()

        def waits(request: Request, reply: Reply) -> Coroutine[Any, Any, None]:
            nonlocal begun
            begun += 1

            async def later() -> None:
                await may_answer.wait()
                if (work := handler(request, reply)) is not None:
                    await work

            return later()

        monkeypatch.setattr(broker.server, "_handler", waits)
        wire = await client.open()
        await wire.raw(one * count)
        await until(lambda: begun >= PIPELINE_MAX)
        # A body in chunks ends where only the parser knows, so a few more may have begun.
        assert begun <= (PIPELINE_MAX if kind != "chunks" else PIPELINE_MAX * 4)
        may_answer.set()
        for _ in range(count):
            assert (await wire.answer()).status == 200
        assert begun == count
        assert broker.server.body_bytes == 0
        await wire.close()


async def test_requests_that_wait_unparsed_are_answered_after_a_half_close_and_leave_with_their_client() -> (
    None
):
    count = PIPELINE_MAX * 40
    async with serving() as (broker, client):
        wire = await client.open()
        await wire.raw(GET * count)
        wire.writer.write_eof()
        assert (await wire.ended()).count(b"HTTP/1.1 200 OK") == count
        await client.produce("t", 0, ["a"])
        poll = b'{"topic_partitions":[{"topic":"t","partition":0,"fetch_offset":2}],"max_wait_ms":60000}'
        gone = await client.open()
        await gone.raw(b"POST /consume HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(poll), poll) * count)
        await until(lambda: broker.server.body_bytes > len(poll) * PIPELINE_MAX)
        gone.writer.transport.abort()
        await until(lambda: broker.server.body_bytes == 0)
        await wire.close()


async def test_a_handler_that_fails_keeps_no_other_request_from_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (broker, client):
        real = broker.server._handler

        def failing(request: Request, reply: Reply) -> Coroutine[Any, Any, None] | None:
            if request.path == "/boom":
                raise RuntimeError("boom")
            return real(request, reply)

        monkeypatch.setattr(broker.server, "_handler", failing)
        wires = [await client.open() for _ in range(3)]
        # All in one turn of the loop, so that they are handled together.
        for wire, path in zip(wires, ("/health", "/boom", "/health"), strict=True):
            wire.writer.write(GET.replace(b"/health", path.encode()))
        assert [(await wire.answer()).status for wire in wires] == [200, 500, 200]
        for wire in wires:
            await wire.close()


async def test_body_in_small_pieces_and_in_chunks_is_whole() -> None:
    body = json.dumps({"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a", "é"]}]}).encode()
    async with serving() as (_, client):
        wire = await client.open()
        head = f"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for byte in head + body:
            await wire.raw(bytes([byte]))
        assert (await wire.answer()).status == 200
        chunks = b"".join(b"%x\r\n%b\r\n" % (1, bytes([byte])) for byte in body) + b"0\r\n\r\n"
        await wire.raw(
            b"POST /produce HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        )
        assert (await wire.answer()).json()["results"][0]["start_offset"] == 3
        await wire.close()


async def test_client_that_expects_to_be_asked_for_the_body_is() -> None:
    body = b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"]}]}'
    async with serving() as (_, client):
        wire = await client.open()
        await wire.raw(
            b"POST /produce HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await wire.raw(body)
        assert (await wire.answer()).status == 200
        await wire.close()


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTT",
        b"GET /health HTTP/1.1\r\nHost: loc",
        b"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"POST /produce HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
async def test_slow_request_is_408_and_others_are_served(start: bytes) -> None:
    async with serving(SHORT) as (broker, client):
        wire = await client.open()
        await wire.raw(start)
        assert await alive(client)
        answer = await wire.answer()
        assert answer.status == 408
        assert answer.headers["Connection"] == "close"
        await wire.ended()
        await wire.close()
        assert broker.server.body_bytes == 0


async def test_drip_of_bytes_does_not_keep_a_connection_open() -> None:
    async with serving(SHORT) as (_, client):
        wire = await client.open()
        await wire.raw(b"GET /health HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                await wire.raw(b"X-A: b\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert (await wire.answer()).status == 408
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        await wire.close()


async def test_idle_connections_end_without_a_word() -> None:
    async with serving(SHORT) as (broker, client):
        fresh, used = await client.open(), await client.open()
        await used.send("GET", "/health")
        assert (await used.answer()).status == 200
        assert await fresh.ended() == b""
        assert await used.ended() == b""
        await fresh.close()
        await used.close()
        assert not broker.server.connections


async def test_client_that_takes_no_answer_is_cut_off() -> None:
    limits = HttpLimits(write_timeout_ms=150)
    async with serving(limits=limits) as (broker, client):
        await client.produce("t", 0, ["x" * 1_000_000] * 8)
        wire = await client.open()
        place = {"topic": "t", "partition": 0, "fetch_offset": 1}
        poll = json.dumps({"topic_partitions": [place]}).encode()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(4):
            await wire.send("POST", "/consume", poll)
        await until(lambda: not broker.server.connections)
        await wire.close()
        assert await alive(client)


async def test_answers_that_nobody_takes_are_bounded_together() -> None:
    limits = HttpLimits(answers_max_bytes=4_000_000)
    body = b'{"topic_partitions":[{"topic":"t","partition":0,"fetch_offset":1}]}'
    one = b"POST /consume HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(limits=limits) as (broker, client):
        for _ in range(4):
            await client.produce("t", 0, ["x" * 500_000])
        wires = [await client.open() for _ in range(3)]
        for wire in wires:
            await wire.raw(one * PIPELINE_MAX)
        await until(lambda: broker.server.answer_bytes > 2_000_000 and not broker.app._working)
        assert broker.server.answer_bytes < 5_000_000
        refused = await client.consume("t", 0, 1)
        assert (refused.status, refused.json()["error"]["type"]) == (503, "BackPressureRejected")
        assert refused.headers["Retry-After"]
        assert (await client.consume("t", 0, 5)).status == 200, "an answer without records takes no room"
        for wire in wires:
            wire.writer.transport.abort()
        await until(lambda: not broker.server.answer_bytes)
        assert len((await client.consume("t", 0, 1)).json()["results"][0]["records"]) == 4
        for wire in wires:
            await wire.close()


async def test_half_closed_client_gets_its_answer() -> None:
    async with serving() as (broker, client):
        wire = await client.open()
        body = b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"]}]}'
        await wire.send("POST", "/produce", body)
        wire.writer.write_eof()
        assert (await wire.answer()).status == 200
        assert await wire.ended() == b""
        await wire.close()
        assert not broker.server.connections


async def test_half_closed_long_poll_is_answered_at_once() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await client.open()
        place = {"topic": "t", "partition": 0, "fetch_offset": 2}
        poll = json.dumps({"topic_partitions": [place], "max_wait_ms": 60_000}).encode()
        await wire.send("POST", "/consume", poll)
        wire.writer.write_eof()
        assert (await wire.answer()).json()["results"][0]["records"] == []
        await wire.close()


@pytest.mark.parametrize("after", [b"", b"POST /produce HTTP/1.1\r\nContent-Length: 50\r\n\r\n{"])
async def test_client_that_vanishes_leaves_nothing_behind(after: bytes) -> None:
    async with serving() as (broker, client):
        wire = await client.open()
        await wire.raw(after)
        wire.writer.transport.abort()
        await until(lambda: not broker.server.connections)
        assert broker.server.body_bytes == 0
        assert await alive(client)
        await wire.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 400),
        (b"GET " + b"/" * (TARGET_BYTES_MAX + 10) + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * (HEADERS_MAX + 1) + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nX-A: " + b"b" * 100_000 + b"\r\n\r\n", 431),
        (b"POST /produce HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /produce HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /produce HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde", 400),
        (b"POST /produce HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /produce HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /produce HTTP/1.1\r\nHost: localhost\r\n\r\n", 411),
    ],
)
async def test_what_is_not_proper_http_is_refused_with_a_reason(request_bytes: bytes, status: int) -> None:
    async with serving() as (broker, client):
        wire = await client.open()
        await wire.raw(request_bytes)
        answer = await wire.answer()
        assert answer.status == status, answer.body
        assert answer.json()["error"]["message"]
        await wire.close()
        assert await alive(client)
        assert broker.server.body_bytes == 0


async def test_what_comes_behind_the_chunks_is_no_header() -> None:
    chunks = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    trailers = b"Host: elsewhere\r\nContent-Type: text/xml\r\nX-Request-Id: mine\r\n\r\n"
    async with serving() as (_, client):
        wire = await client.open()
        await wire.raw(b"POST /produce HTTP/1.1\r\nHost: localhost\r\n" + chunks + trailers)
        answer = await wire.answer()
        # Of the body only is complained: the trailers name another host and another type.
        assert (answer.status, answer.json()["error"]["type"]) == (400, "BadRequest")
        assert answer.headers["X-Request-Id"] != "mine"
        await wire.close()


async def test_upgrade_is_not_taken_up_and_the_connection_ends() -> None:
    async with serving() as (_, client):
        wire = await client.open()
        await wire.send("GET", "/health", None, {"Upgrade": "websocket", "Connection": "Upgrade"})
        assert (await wire.answer()).status == 200
        assert await wire.ended() == b""
        await wire.close()


async def test_refused_client_that_goes_on_sending_reads_its_answer() -> None:
    limits = HttpLimits(body_max_bytes=1_000)
    async with serving(limits=limits) as (_, client):
        wire = await client.open()
        await wire.raw(b"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n")
        for _ in range(40):
            await wire.raw(b"x" * 50_000)
        assert (await wire.answer()).status == 413
        await wire.close()


async def test_chunked_body_over_the_limit_is_413() -> None:
    limits = HttpLimits(body_max_bytes=1_000)
    async with serving(limits=limits) as (broker, client):
        wire = await client.open()
        await wire.raw(b"POST /produce HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        await wire.raw((b"%x\r\n%b\r\n" % (400, b"x" * 400)) * 4)
        assert (await wire.answer()).status == 413
        await wire.close()
        assert broker.server.body_bytes == 0


async def test_bodies_of_all_requests_together_are_bounded() -> None:
    limits = HttpLimits(body_max_bytes=1_000, bodies_max_bytes=1_500)
    async with serving(limits=limits) as (broker, client):
        first = await client.open()
        await first.raw(b"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        await first.raw(b"x" * 900)
        await until(lambda: broker.server.body_bytes == 900)
        second = await client.open()
        await second.raw(b"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n")
        answer = await second.answer()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        await first.close()
        await second.close()


async def test_a_body_that_is_announced_and_never_sent_keeps_nobody_out() -> None:
    limits = HttpLimits(body_max_bytes=1_000, bodies_max_bytes=1_500)
    async with serving(limits=limits) as (broker, client):
        idle = [await client.open() for _ in range(4)]
        for wire in idle:
            await wire.raw(b"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        await until(lambda: broker.server.body_bytes == len(idle))
        assert (await client.produce("t", 0, ["x" * 800])).status == 200
        for wire in idle:
            await wire.close()
        await until(lambda: broker.server.body_bytes == 0)


@pytest.mark.parametrize("kind", ["json", "frame", "arrow", "packed"])
async def test_bodies_that_come_in_odd_pieces_are_whole_and_requests_follow_each_other(kind: str) -> None:
    """Some come with their headers, some grow where they stay, some end in the middle of a read."""
    randomness = random.Random(5)
    sizes = [1, 15_000, 100_000, 262_144, 262_300, 1_100_000, 3, 2_500_000, 300_000]
    records = [randomness.randbytes(size // 2).hex() for size in sizes]
    stream = b""
    for number, record in enumerate(records):
        if kind == "json":
            body = json.dumps({"topic_partitions": [{"topic": "t", "partition": 0, "records": [record]}]})
            stream += _post(body.encode(), "application/json", number)
        elif kind == "arrow":
            sink = pa.BufferOutputStream()
            table = pa.table({"value": pa.array([record.encode()], pa.binary())})
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            body_of_arrow = sink.getvalue().to_pybytes()
            stream += _post(body_of_arrow, ARROW, number).replace(
                b"/produce", b"/produce?topic=t&partition=0", 1
            )
        elif kind == "packed":
            values = [memoryview(record.encode())]
            whole = ProducePartitionPacked(topic="t", partition=0, records=values)
            stream += _post(msgspec.msgpack.encode(ProduceRequestPacked([whole])), MSGPACK, number)
        else:
            frame = memoryview(encode_batch(BytesBatch.of([record.encode()])))
            batch = ProducePartitionPacked(topic="t", partition=0, frame=frame)
            stream += _post(msgspec.msgpack.encode(ProduceRequestPacked([batch])), MSGPACK, number)
    async with serving() as (broker, client):
        wire = await client.open()
        answers = asyncio.create_task(_answers(wire, len(records)))
        at = 0
        while at < len(stream):
            step = randomness.choice([1, 200, 5_000, 16_384, 60_000, 400_000])
            await wire.raw(stream[at : at + step])
            at += step
            await asyncio.sleep(0)
        assert [answer.headers["X-Request-Id"] for answer in await answers] == [
            str(number) for number in range(len(records))
        ]
        assert broker.server.body_bytes == 0
        await wire.close()
        found: list[str] = []
        while len(found) < len(records):
            answer = (await client.consume("t", 0, len(found) + 1)).json()
            found += [one["value"] for one in answer["results"][0]["records"]]
        assert found == records


def _post(body: bytes, kind: str, number: int) -> bytes:
    head = f"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nX-Request-Id: {number}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _answers(wire: Wire, count: int) -> list[Answer]:
    return [await wire.answer() for _ in range(count)]


async def test_a_body_takes_no_more_memory_than_a_few_times_what_has_come() -> None:
    async with serving() as (broker, client):
        wire = await client.open()
        head = b"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\n\r\n"
        await wire.raw(head + b" " * 1_000)
        await until(lambda: broker.server.body_bytes == 1_000)
        [connection] = broker.server.connections
        assert connection._place is not None
        assert len(connection._place) == PLACE_FACTOR * 1_000
        await wire.close()
        await until(lambda: broker.server.body_bytes == 0)


async def test_connections_over_the_limit_are_told_so() -> None:
    async with serving(limits=HttpLimits(connections_max=2)) as (_, client):
        first, second = await client.open(), await client.open()
        for wire in (first, second):
            await wire.send("GET", "/health")
            assert (await wire.answer()).status == 200
        third = await client.open()
        assert (await third.answer()).status == 503
        await third.close()
        await first.send("GET", "/health")
        assert (await first.answer()).status == 200
        await first.close()
        await second.close()


async def test_many_connections_over_the_limit_are_ended_without_a_word() -> None:
    async with serving(limits=HttpLimits(connections_max=2)) as (broker, client):
        wires = [await client.open() for _ in range(10)]
        await until(lambda: len(broker.server.connections) <= 3)
        said = [await wire.reader.read(12) for wire in wires[2:]]
        assert said == [b"HTTP/1.1 503"] + [b""] * 7
        await wires[0].send("GET", "/health")
        assert (await wires[0].answer()).status == 200
        for wire in wires:
            await wire.close()


@pytest.mark.parametrize(
    ("change", "records", "name"),
    [
        ({"records_max": 3}, ["a"] * 4, "records_max"),
        ({"record_max_bytes": 10}, ["x" * 11], "record_max_bytes"),
    ],
)
async def test_limits_of_records_are_named_in_the_error(
    change: dict[str, int], records: list[str], name: str
) -> None:
    async with serving(limits=HttpLimits(**change)) as (_, client):
        answer = await client.produce("t", 0, records)
        assert answer.status == 400
        assert name in answer.json()["error"]["message"]


async def test_compressed_frames_of_a_request_are_bounded_together_and_none_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = encode_batch(BytesBatch.of([bytes(600_000)]), codec="zstd")
    assert len(frame) < 1_000
    async with serving(limits=HttpLimits(body_max_bytes=1_000_000)) as (_, client):
        kind = {"Content-Type": MSGPACK}
        for count, status in ((1, 200), (2, 400)):
            batches = [
                ProducePartitionPacked(topic="t", partition=number, frame=memoryview(frame))
                for number in range(count)
            ]
            body = msgspec.msgpack.encode(ProduceRequestPacked(batches))
            answer = await client.request("POST", "/produce", body, kind)
            assert answer.status == status, answer.body
            monkeypatch.setattr(_produce_columns, "open_piece", None)
        assert "body_max_bytes" in answer.json()["error"]["message"]


async def test_partitions_of_a_request_are_bounded() -> None:
    async with serving(limits=HttpLimits(partitions_max=2)) as (_, client):
        batches = [{"topic": "t", "partition": number, "records": ["a"]} for number in range(3)]
        answer = await client.post("/produce", {"topic_partitions": batches})
        assert answer.status == 400
        assert "partitions_max" in answer.json()["error"]["message"]
        places = [{"topic": "t", "partition": number, "fetch_offset": 1} for number in range(3)]
        assert (await client.post("/consume", {"topic_partitions": places})).status == 400


async def test_head_of_an_event_stream_has_no_events() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await client.open()
        await wire.send("HEAD", "/tail?topic=t&from=earliest")
        await wire.send("GET", "/health")
        head = await wire.head()
        assert (head.status, head.headers["Content-Type"]) == (200, "text/event-stream")
        assert (await wire.answer()).json()["status"] == "ok"
        await wire.close()


async def test_event_stream_for_an_old_client_has_no_chunks_and_ends_with_the_connection() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        wire = await client.open()
        await wire.raw(b"GET /tail?topic=t&from=earliest HTTP/1.0\r\n\r\n")
        head = await wire.head()
        assert "Transfer-Encoding" not in head.headers
        assert await wire.reader.readuntil(b"\n\n") == b": forebay\n\n"
        assert (await wire.reader.readuntil(b"\n\n")).startswith(b"id: 1\ndata: ")
        wire.writer.write_eof()
        assert b"0\r\n" not in await wire.ended()
        await wire.close()


async def test_head_is_get_without_a_body_and_http_10_closes() -> None:
    async with serving() as (_, client):
        answer = await client.request("HEAD", "/health")
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 0
        wire = await client.open()
        await wire.raw(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        whole = await wire.ended()
        assert whole.startswith(b"HTTP/1.1 200")
        assert b"Connection: close" in whole
        await wire.close()
