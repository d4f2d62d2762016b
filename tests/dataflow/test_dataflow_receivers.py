"""Requests over gRPC and HTTP: taken when they are safe, refused with a reason otherwise."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.dataflow.otlp_kit import logs, metrics, names_in, traces, until

from forebay.dataflow._grpc_receiver import GrpcReceiver
from forebay.dataflow._http import AHEAD_MAX, HEADER_BYTES_MAX
from forebay.dataflow._http_receiver import ASIDE_BYTES_MIN, MEMBERS_MAX, HttpReceiver
from forebay.dataflow._intake import Intake
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._otlp_json import message_from_json
from forebay.dataflow._parcels import Parcel, Refused
from forebay.dataflow._settings import Address, OtlpReceiverSettings, Tls
from forebay.dataflow._signals import SIGNALS, Signal
from forebay.errors import Backpressure, StorageFull, Unavailable
from forebay.kit.metrics import MetricsRegistry

SMALL = 64 * 1024


class FakeSink:
    """Keeps what it is given; can be told to fail or to wait."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []
        self.problem: Exception | None = None
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def take(self, parcel: Parcel) -> None:
        self.entered.set()
        await self.go_on.wait()
        if self.problem is not None:
            raise self.problem
        self.parcels.append(parcel)

    @property
    def names(self) -> list[str]:
        return [
            name
            for parcel in self.parcels
            for request in parcel.requests
            for name in names_in(parcel.signal, bytes(request))
        ]


def settings(**changes: Any) -> OtlpReceiverSettings:
    values: dict[str, Any] = {
        "grpc": Address("127.0.0.1", 0),
        "http": Address("127.0.0.1", 0),
        "requests_max": 16,
        "request_bytes_max": SMALL,
        "pending_bytes_max": 10 * SMALL,
        "tls": None,
    }
    return OtlpReceiverSettings(**values | changes)


@asynccontextmanager
async def receiving(
    **changes: Any,
) -> AsyncIterator[tuple[FakeSink, GrpcReceiver, HttpReceiver]]:
    sink, chosen = FakeSink(), settings(**changes)
    intake = Intake("receiver", chosen, sink, DataflowMetrics(MetricsRegistry()))
    over_grpc, over_http = GrpcReceiver(chosen, intake), HttpReceiver(chosen, intake)
    await over_grpc.start()
    await over_http.start()
    try:
        yield sink, over_grpc, over_http
    finally:
        sink.go_on.set()
        await over_grpc.stop()
        await over_http.stop()


@asynccontextmanager
async def client(receiver: GrpcReceiver) -> AsyncIterator[Callable[..., Awaitable[bytes]]]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(str(receiver.address), options=options) as channel:

        async def call(signal: str, data: bytes, **more: Any) -> bytes:
            method: Any = channel.unary_unary(SIGNALS[signal].grpc_method)
            answer: bytes = await method(data, timeout=30, **more)
            return answer

        yield call


async def post(
    receiver: HttpReceiver,
    path: str,
    body: bytes,
    kind: str = "application/x-protobuf",
    method: str = "POST",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    def work() -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(receiver.address.host, receiver.address.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {"content-type": kind, **named})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    return await asyncio.to_thread(work)


REQUESTS = {"traces": traces("a", "b"), "metrics": metrics("a", "b"), "logs": logs("a", "b")}


# Both ways.


@pytest.mark.parametrize("signal", SIGNALS)
async def test_requests_are_kept_byte_for_byte(signal: str) -> None:
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        assert await call(signal, REQUESTS[signal]) == b""
        status, headers, body = await post(over_http, f"/v1/{signal}", REQUESTS[signal])
        assert (status, headers["content-type"], body) == (200, "application/x-protobuf", b"")
    assert [(each.signal, each.requests, each.items) for each in sink.parcels] == [
        (signal, (REQUESTS[signal],), 2)
    ] * 2


async def test_no_answer_before_the_data_is_safe() -> None:
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        for send in (
            lambda: call("logs", logs("a")),
            lambda: post(over_http, "/v1/logs", logs("a")),
        ):
            sink.entered.clear()
            sink.go_on.clear()
            answer = asyncio.ensure_future(send())
            await sink.entered.wait()
            done, _ = await asyncio.wait([answer], timeout=0.05)
            assert not done
            sink.go_on.set()
            await answer
    assert sink.names == ["a", "a"]


@pytest.mark.parametrize(
    ("problem", "code", "status"),
    [
        (Backpressure("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (StorageFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (Unavailable("down"), grpc.StatusCode.UNAVAILABLE, 503),
        (RuntimeError("a defect"), grpc.StatusCode.UNAVAILABLE, 503),
    ],
)
async def test_what_may_pass_is_answered_with_a_time_to_wait(
    problem: Exception, code: grpc.StatusCode, status: int
) -> None:
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        sink.problem = problem
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("traces", traces("a"))
        assert caught.value.code() is code
        trailing: dict[str, Any] = dict(caught.value.trailing_metadata() or ())
        details = Status.FromString(trailing["grpc-status-details-bin"])
        info = RetryInfo()
        assert details.details[0].Unpack(info)
        assert info.retry_delay.seconds == 1
        found, headers, body = await post(over_http, "/v1/traces", traces("a"))
        assert (found, headers["retry-after"]) == (status, "1")
        assert str(problem) in Status.FromString(body).message


async def test_what_is_wrong_for_good_is_answered_without_one() -> None:
    async with receiving() as (_, over_grpc, over_http), client(over_grpc) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("traces", b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "grpc-status-details-bin" not in dict(caught.value.trailing_metadata() or ())
        status, headers, _ = await post(over_http, "/v1/traces", b"\xff\xff\xff")
        assert status == 400
        assert "retry-after" not in headers


async def test_more_under_way_than_allowed_is_refused_and_not_lost() -> None:
    async with receiving(requests_max=1) as (sink, over_grpc, over_http), client(over_grpc) as call:
        sink.go_on.clear()
        first = asyncio.ensure_future(call("logs", logs("first")))
        await sink.entered.wait()
        assert (await post(over_http, "/v1/logs", logs("second")))[0] == 429
        sink.go_on.set()
        await first
        assert (await post(over_http, "/v1/logs", logs("second")))[0] == 200
    assert sink.names == ["first", "second"]


async def test_bytes_under_way_are_bounded() -> None:
    large = logs("x" * 40_000)
    async with receiving(pending_bytes_max=SMALL) as (sink, over_grpc, over_http), client(over_grpc) as call:
        sink.go_on.clear()
        first = asyncio.ensure_future(call("logs", large))
        await sink.entered.wait()
        assert (await post(over_http, "/v1/logs", large))[0] == 429
        assert not first.done()


async def test_a_request_with_nothing_in_it_is_fine_and_not_kept() -> None:
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        assert await call("traces", b"") == b""
        assert (await post(over_http, "/v1/traces", b""))[0] == 200
    assert not sink.parcels


async def test_what_a_destination_refuses_for_good_is_not_asked_for_again() -> None:
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        sink.problem = Refused("the destination will not have it")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("logs", logs("x"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await post(over_http, "/v1/logs", logs("x")))[0] == 400


async def test_too_large_requests_are_refused() -> None:
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("logs", logs("x" * SMALL))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await post(over_http, "/v1/logs", logs("x" * SMALL)))[0] == 413
    assert not sink.parcels


async def test_small_bodies_that_unfold_into_large_ones_are_refused() -> None:
    bomb = logs("x" * 50 * SMALL)
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("logs", bomb, compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        packed = gzip.compress(bomb)
        assert len(packed) < SMALL
        assert (await post(over_http, "/v1/logs", packed, content_encoding="gzip"))[0] == 413
        twice = gzip.compress(logs("x" * 60_000)) * 2
        assert (await post(over_http, "/v1/logs", twice, content_encoding="gzip"))[0] == 413
    assert not sink.parcels


async def test_tls_serves_both(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    import ssl
    import urllib.request

    cert, key = certificate
    async with receiving(tls=Tls(cert, key, None)) as (sink, over_grpc, over_http):
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        target = f"localhost:{over_grpc.address.port}"
        async with grpc.aio.secure_channel(target, credentials) as channel:
            method: Any = channel.unary_unary(SIGNALS["logs"].grpc_method)
            await method(logs("a"), timeout=30)
        context = ssl.create_default_context(cafile=str(cert))
        request = urllib.request.Request(
            f"https://localhost:{over_http.address.port}/v1/logs",
            logs("b"),
            {"content-type": "application/x-protobuf"},
        )

        def fetch() -> int:
            with urllib.request.urlopen(request, context=context, timeout=30) as response:
                return int(response.status)

        assert await asyncio.to_thread(fetch) == 200
    assert sink.names == ["a", "b"]


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    import datetime

    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    yield paths


async def test_a_taken_address_is_an_error_with_a_name() -> None:
    async with receiving() as (_, over_grpc, over_http):
        intake = Intake("other", settings(), FakeSink(), DataflowMetrics(MetricsRegistry()))
        with pytest.raises(Unavailable, match=str(over_grpc.address.port)):
            await GrpcReceiver(settings(grpc=over_grpc.address), intake).start()
        with pytest.raises(Unavailable, match=str(over_http.address.port)):
            await HttpReceiver(settings(http=over_http.address), intake).start()


# HTTP alone.


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_bodies(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    async with receiving() as (sink, _, over_http):
        packed = pack(logs("a"))
        assert (await post(over_http, "/v1/logs", packed, content_encoding=encoding))[0] == 200
        assert (await post(over_http, "/v1/logs", packed[:-3], content_encoding=encoding))[0] == 400
        assert (await post(over_http, "/v1/logs", b"plain", content_encoding=encoding))[0] == 400
        assert (await post(over_http, "/v1/logs", packed, content_encoding="br"))[0] == 415
    assert sink.names == ["a"]


async def test_other_paths_methods_and_kinds_are_told_what_there_is() -> None:
    async with receiving() as (_, __, over_http):
        assert (await post(over_http, "/v1/profiles", b""))[0] == 404
        status, headers, _body = await post(over_http, "/v1/logs", b"", method="PUT")
        assert (status, headers["allow"]) == (405, "POST")
        assert (await post(over_http, "/v1/logs", b"", kind="text/plain"))[0] == 415


JSON_TRACE = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]},
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "5B8EFFF798038103D269B633813FC60C",
                            "spanId": "EEE19B7EC3C1B174",
                            "parentSpanId": "EEE19B7EC3C1B173",
                            "name": "I'm a server span",
                            "startTimeUnixNano": "1544712660000000000",
                            "kind": 2,
                            "links": [{"traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE1"}],
                            "attributes": [{"key": "traceId", "value": {"stringValue": "not hex"}}],
                            "aFieldOfTheFuture": {"x": 1},
                        }
                    ]
                }
            ],
        }
    ]
}  # fmt: skip


async def test_json_has_ids_in_hex() -> None:
    async with receiving() as (sink, _, over_http):
        body = json.dumps(JSON_TRACE).encode()
        status, headers, answer = await post(
            over_http, "/v1/traces", body, kind="application/json; charset=utf-8"
        )
        assert (status, headers["content-type"], json.loads(answer)) == (200, "application/json", {})
        status, _h, answer = await post(over_http, "/v1/traces", b"[1]", kind="application/json")
        assert (status, json.loads(answer)["code"]) == (400, 3)
    [span] = (
        ExportTraceServiceRequest.FromString(bytes(sink.parcels[0].requests[0]))
        .resource_spans[0]
        .scope_spans[0]
        .spans
    )
    assert span.trace_id.hex() == "5b8efff798038103d269b633813fc60c"
    assert (span.span_id.hex(), span.parent_span_id.hex()) == ("eee19b7ec3c1b174", "eee19b7ec3c1b173")
    assert span.links[0].span_id.hex() == "eee1"
    assert span.attributes[0].value.string_value == "not hex"


async def test_a_large_body_in_json_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, entered, go_on = message_from_json, threading.Event(), threading.Event()

    def slow(signal: Signal, data: bytes) -> Any:
        entered.set()
        assert go_on.wait(10)
        return decode(signal, data)

    monkeypatch.setattr("forebay.dataflow._http_receiver.message_from_json", slow)
    record = {"body": {"stringValue": "x" * ASIDE_BYTES_MIN}}
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}).encode()
    async with receiving() as (sink, over_grpc, over_http), client(over_grpc) as call:
        large = asyncio.create_task(post(over_http, "/v1/logs", body, kind="application/json"))
        await asyncio.to_thread(entered.wait, 30)
        await call("logs", logs("another"))
        assert sink.names == ["another"]
        go_on.set()
        assert (await large)[0] == 200
    assert len(sink.names) == 2


async def test_json_that_waits_to_be_decoded_counts_as_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(signal: Signal, data: bytes) -> Any:
        assert go_on.wait(30)
        return message_from_json(signal, data)

    monkeypatch.setattr("forebay.dataflow._http_receiver.message_from_json", slow)
    body = b'{"resourceLogs": []}' + b" " * ASIDE_BYTES_MIN
    async with receiving(requests_max=2) as (_, __, over_http):
        waiting = {
            asyncio.create_task(post(over_http, "/v1/logs", body, kind="application/json")) for _ in range(3)
        }
        # Whichever of them comes last is refused, without being decoded.
        [refused], waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result()[0] == 429
        go_on.set()
        assert [(await each)[0] for each in waiting] == [200, 200]


async def test_a_crowd_of_compressed_streams_in_one_body_is_refused() -> None:
    streams = [gzip.compress(each, 1) for each in (logs("a"), *[b""] * (MEMBERS_MAX - 1))]
    async with receiving() as (sink, _, over_http):
        answers = [
            (await post(over_http, "/v1/logs", b"".join(each), content_encoding="gzip"))[0]
            for each in (streams, [*streams, streams[-1]])
        ]
        assert answers == [200, 400]
    assert sink.names == ["a"]


class Raw:
    """A client that writes what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answers(self) -> list[int]:
        """The status of every answer until the server closes."""
        text = (await asyncio.wait_for(self.reader.read(), 30)).decode("latin-1")
        return [int(part.split(" ", 1)[0]) for part in text.split("HTTP/1.1 ")[1:]]


@asynccontextmanager
async def raw(receiver: HttpReceiver) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(receiver.address.host, receiver.address.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def head(body: bytes, more: str = "") -> bytes:
    return (
        f"POST /v1/logs HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
        f"content-length: {len(body)}\r\n{more}\r\n"
    ).encode()


async def test_requests_sent_ahead_are_answered_in_order_on_one_connection() -> None:
    async with receiving() as (sink, _, over_http), raw(over_http) as line:
        bodies = [logs(f"number {each}") for each in range(4)]
        line.writer.write(b"".join(head(each) + each for each in bodies[:-1]))
        line.writer.write(head(bodies[-1], "connection: close\r\n") + bodies[-1])
        assert await line.answers() == [200] * 4
    assert sink.names == [f"number {each}" for each in range(4)]


async def test_a_crowd_of_requests_ahead_ends_the_connection_and_not_the_server() -> None:
    async with receiving() as (sink, _, over_http):
        sink.go_on.clear()
        async with raw(over_http) as line:
            line.writer.write((head(logs("a")) + logs("a")) * (AHEAD_MAX * 20))
            await line.writer.drain()
            assert await asyncio.wait_for(line.reader.read(), 30) == b""
        sink.go_on.set()
        assert (await post(over_http, "/v1/logs", logs("b")))[0] == 200


async def test_chunked_bodies_and_expectations() -> None:
    body = logs("a")
    start = b"POST /v1/logs HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
    async with receiving() as (sink, _, over_http):
        async with raw(over_http) as line:
            line.writer.write(start + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
            line.writer.write(b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n")
            assert await line.answers() == [200]
        async with raw(over_http) as line:
            line.writer.write(head(body, "expect: 100-continue\r\nconnection: close\r\n"))
            assert (await line.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            line.writer.write(body)
            assert await line.answers() == [200]
    assert sink.names == ["a", "a"]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (HEADER_BYTES_MAX + 1) + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * (HEADER_BYTES_MAX + 1) + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"a header without end " * (HEADER_BYTES_MAX // 20), 431),
        (b"GET / HTTP/1.1\r\n" + b"a-name-without-end" * (HEADER_BYTES_MAX // 17), 431),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 404),
    ],
)
async def test_what_is_no_request_is_answered_once_and_closed(data: bytes, status: int) -> None:
    async with receiving() as (_, __, over_http), raw(over_http) as line:
        line.writer.write(data)
        assert await line.answers() == [status]


async def test_a_request_that_does_not_arrive_in_time_loses_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.dataflow._http.READ_TIMEOUT_S", 0.3)
    async with receiving() as (_, __, over_http), raw(over_http) as line:
        line.writer.write(head(b"x" * 1_000))

        async def drip() -> None:
            with suppress(ConnectionError):
                while True:
                    line.writer.write(b"x")
                    await line.writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        try:
            # What it drips into a closed connection may be answered with a reset.
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(line.reader.read(), 30) == b""
        finally:
            dripping.cancel()


async def test_bodies_that_are_arriving_share_a_bound() -> None:
    async with receiving() as (_, __, over_http):
        over_http._server.arriving_bytes_max = 1_000
        async with raw(over_http) as slow, raw(over_http) as other:
            slow.writer.write(head(b"x" * 2_000) + b"x" * 900)
            await slow.writer.drain()
            await until(lambda: over_http._server.arriving_bytes >= 900)
            other.writer.write(head(b"x" * 200) + b"x" * 200)
            assert await other.answers() == [503]
        await until(lambda: not over_http._server.arriving_bytes)
        assert (await post(over_http, "/v1/logs", logs("a")))[0] == 200


async def test_stopping_answers_what_is_under_way() -> None:
    async with receiving() as (sink, _, over_http):
        sink.go_on.clear()
        answer = asyncio.ensure_future(post(over_http, "/v1/logs", logs("a")))
        await sink.entered.wait()
        stop = asyncio.ensure_future(over_http.stop())
        await asyncio.sleep(0)
        assert not stop.done()
        sink.go_on.set()
        status, headers, _ = await answer
        assert (status, headers["connection"]) == (200, "close")
        await stop
    assert sink.names == ["a"]
