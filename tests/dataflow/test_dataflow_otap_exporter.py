"""OTAP goes out: everything arrives, what is in doubt is sent again, and nobody pays for another's batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.dataflow.otap_samples import canonical, sample
from tests.dataflow.otlp_kit import logs, names_in, traces
from tests.dataflow.test_dataflow_otap_receiver import MOST, messages, receiving

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._otap import METHODS, Batch, BatchStatus, PayloadStreams, decode
from forebay.dataflow._otap_exporter import OtapExporter
from forebay.dataflow._parcels import Parcel, Refused
from forebay.dataflow._settings import OtapExporterSettings
from forebay.dataflow._signals import SIGNALS
from forebay.errors import ForebayError, OutcomeUnknown, StorageFull, Unavailable
from forebay.kit.metrics import MetricsRegistry
from forebay.testing._servers.ports import free_ports


def parcel(signal: str, *requests: bytes, key: str = "store-1") -> Parcel:
    items = sum(len(names_in(signal, each)) for each in requests)
    return Parcel(signal, requests, items, sum(map(len, requests)), 1_700_000_000_000, key)


@asynccontextmanager
async def exporting(target: str, **changes: Any) -> AsyncIterator[OtapExporter]:
    values: dict[str, Any] = {
        "target": target,
        "is_tls": False,
        "compression": "none",
        "timeout_ms": 10_000,
        "request_bytes_max": 1_000,
        "headers": (),
        "ca_file": None,
        "payload_compression": "zstd",
    }
    settings = OtapExporterSettings(**values | changes)
    exporter = OtapExporter("out", settings, DataflowMetrics(MetricsRegistry()))
    await exporter.start()
    try:
        yield exporter
    finally:
        await exporter.stop()


@pytest.mark.parametrize("payload", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("signal", sorted(SIGNALS))
async def test_everything_arrives(signal: str, payload: str) -> None:
    requests = [sample(signal, number) for number in range(4)]
    async with receiving() as (sink, receiver):
        target = str(receiver.address)
        async with exporting(target, payload_compression=payload, compression="gzip") as exporter:
            await exporter.take(parcel(signal, *(each.SerializeToString() for each in requests)))
    assert canonical(signal, *messages(sink)) == canonical(signal, *requests)


async def test_requests_are_joined() -> None:
    async with receiving() as (sink, receiver), exporting(str(receiver.address)) as exporter:
        await exporter.take(parcel("logs", *(logs(f"number {each}", "x" * 50) for each in range(50))))
        found = [name for each in sink.names if (name := each).startswith("number")]
    assert sorted(found) == sorted(f"number {each}" for each in range(50))
    assert len(sink.parcels) < 20


async def test_a_request_of_more_items_than_ids_becomes_several_batches() -> None:
    names = [str(each) for each in range(70_000)]
    async with receiving(request_bytes_max=32 * MOST, pending_bytes_max=64 * MOST) as (sink, receiver):
        async with exporting(str(receiver.address)) as exporter:
            await exporter.take(parcel("traces", traces(*names)))
        assert sorted(sink.names) == sorted(names)
        assert len(sink.parcels) == 3


async def test_a_destination_that_is_down_is_certainly_not_done_and_found_again() -> None:
    [port] = free_ports(1)
    async with exporting(f"127.0.0.1:{port}") as exporter:
        with pytest.raises(Unavailable):
            await exporter.take(parcel("logs", logs("a")))


@pytest.mark.parametrize(
    ("problem", "expected"),
    [(StorageFull("full"), Unavailable), (Unavailable("down"), Unavailable), (Refused("never"), Refused)],
)
async def test_the_status_decides(problem: Exception, expected: type[ForebayError]) -> None:
    async with receiving() as (sink, receiver), exporting(str(receiver.address)) as exporter:
        sink.problem = problem
        with pytest.raises(expected):
            await exporter.take(parcel("logs", logs("a")))
        sink.problem = None
        await exporter.take(parcel("logs", logs("a")))
        assert sink.names == ["a"]


class Server:
    """A server of OTAP that does with each batch what it is told."""

    def __init__(self, **options: Any) -> None:
        self.names: list[str] = []
        self.streams = 0
        self.on_batch: Callable[[Batch, list[str], Any], Any] | None = None
        self._options = list(options.items())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = grpc.aio.server(options=[*self._options, ("grpc.so_reuseport", 0)])
        service, method = METHODS["logs"]
        handler: Any = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.streams += 1
        streams = PayloadStreams("logs", 64 * MOST)
        async for data in requests:
            batch = Batch.FromString(data)
            found = decode("logs", streams.read(batch), 64 * MOST)
            names = [name for each in found for name in names_in("logs", each.SerializeToString())]
            if self.on_batch is not None and await self.on_batch(batch, names, context):
                continue
            self.names += names
            await context.write(BatchStatus(batch_id=batch.batch_id).SerializeToString())


async def test_a_stream_that_ends_without_a_status_leaves_doubt_and_the_next_takes_it() -> None:
    server = Server()
    ended: list[list[str]] = []

    async def once(_: Batch, names: list[str], context: Any) -> bool:
        if not ended:
            ended.append(names)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "good bye")
        return False

    server.on_batch = once
    async with server.running() as target, exporting(target) as exporter:
        with pytest.raises(OutcomeUnknown):
            await exporter.take(parcel("logs", logs("a")))
        await exporter.take(parcel("logs", logs("a")))
    assert server.names == ["a"]
    assert server.streams == 2


async def test_a_status_that_never_comes_is_in_doubt_after_the_timeout() -> None:
    server = Server()
    silent = [True]

    async def keep_silent(*_: Any) -> bool:
        return silent[0]

    server.on_batch = keep_silent
    async with server.running() as target, exporting(target, timeout_ms=300) as exporter:
        with pytest.raises(OutcomeUnknown):
            await exporter.take(parcel("logs", logs("a")))
        silent[0] = False
        await exporter.take(parcel("logs", logs("b")))
    assert server.names == ["b"]


async def test_one_that_is_too_large_is_refused_and_costs_no_other() -> None:
    """The stream ends with all that was on its way; only the one that is too large is given up."""
    large = logs("large " + "".join(chr(33 + (each * each) % 90) for each in range(60_000)))
    small = [logs(f"small {each}" + "x" * 900) for each in range(12)]
    server = Server(**{"grpc.max_receive_message_length": 20_000})
    async with server.running() as target, exporting(target, payload_compression="none") as exporter:
        for _ in range(20):
            try:
                await exporter.take(parcel("logs", *small[:6], large, *small[6:]))
            except OutcomeUnknown:
                continue
            except Refused:
                break
        else:
            raise AssertionError("it never came to an end")
        assert not exporter.careful
    found = {name.split("x")[0] for name in server.names}
    assert found == {f"small {each}" for each in range(12)}


async def test_a_server_without_otap_is_tried_again() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with exporting(f"127.0.0.1:{port}") as exporter:
            with pytest.raises((Unavailable, OutcomeUnknown)):
                await exporter.take(parcel("logs", logs("a")))
    finally:
        await server.stop(None)


async def test_statuses_in_another_order_find_their_batches() -> None:
    server = Server()
    held: list[tuple[int, str]] = []

    async def turn_round(batch: Batch, names: list[str], context: Any) -> bool:
        held.append((batch.batch_id, names[0]))
        for number, name in reversed(held) if len(held) == 3 else ():
            status = BatchStatus(batch_id=number, status_code={"a": 0, "b": 14, "c": 3}[name])
            await context.write(status.SerializeToString())
        return True

    server.on_batch = turn_round
    async with server.running() as target, exporting(target) as exporter:
        outcomes = await asyncio.gather(
            *(exporter.take(parcel("logs", logs(name), key=name)) for name in ("a", "b", "c")),
            return_exceptions=True,
        )
    assert [type(each) for each in outcomes] == [type(None), Unavailable, Refused]


async def test_a_stream_that_is_stuck_fails_for_all_and_cancels_nobody() -> None:
    """The task of a subscriber that took the end of a call for its own would deliver nothing any more."""
    server = Server(**{"grpc.max_receive_message_length": -1})
    stuck = asyncio.Event()

    async def read_no_more(*_: Any) -> bool:
        await stuck.wait()
        return True

    server.on_batch = read_no_more
    # More than the window of HTTP/2 takes.
    large = [logs(f"{each}" + "x" * 20_000_000) for each in range(2)]
    async with (
        server.running() as target,
        exporting(target, timeout_ms=3_000, payload_compression="none") as exporter,
    ):
        outcomes = await asyncio.gather(
            *(exporter.take(parcel("logs", each, key=str(number))) for number, each in enumerate(large)),
            exporter.take(parcel("logs", logs("small"), key="2")),
            return_exceptions=True,
        )
        stuck.set()
    assert {type(each) for each in outcomes} <= {OutcomeUnknown, Unavailable}
