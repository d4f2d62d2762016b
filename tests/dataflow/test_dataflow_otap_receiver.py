"""OTAP comes in: a status of OK means safe, hostile Arrow costs nothing, and a broken stream ends."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pyarrow as pa
import pytest
from tests.dataflow.otap_samples import canonical, sample
from tests.dataflow.otlp_kit import until
from tests.dataflow.test_dataflow_receivers import FakeSink

from forebay.dataflow import _otap_receiver
from forebay.dataflow._grpc_exporter import _asked_wait_s
from forebay.dataflow._intake import Intake
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._otap import METHODS, Batch, BatchStatus, _streams, encode
from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap_receiver import OtapReceiver
from forebay.dataflow._parcels import Refused
from forebay.dataflow._settings import Address, OtapReceiverSettings
from forebay.dataflow._signals import SIGNALS, parse
from forebay.errors import StorageFull, Unavailable
from forebay.kit.metrics import MetricsRegistry

MOST = 1 << 20
INVALID, FULL, UNAVAILABLE = 3, 8, 14


@asynccontextmanager
async def receiving(**changes: Any) -> AsyncIterator[tuple[FakeSink, OtapReceiver]]:
    values: dict[str, Any] = {
        "address": Address("127.0.0.1", 0),
        "requests_max": 16,
        "request_bytes_max": MOST,
        "pending_bytes_max": 4 * MOST,
        "tls": None,
    }
    settings, sink = OtapReceiverSettings(**values | changes), FakeSink()
    receiver = OtapReceiver(settings, Intake("otap", settings, sink, DataflowMetrics(MetricsRegistry())))
    await receiver.start()
    try:
        yield sink, receiver
    finally:
        sink.go_on.set()
        await receiver.stop()


class Client:
    """One stream to a receiver."""

    def __init__(self, channel: grpc.aio.Channel, signal: str, **options: Any) -> None:
        service, method = METHODS[signal]
        self.call: Any = channel.stream_stream(f"/{service}/{method}")(**options)

    async def send(self, batch: Batch | bytes) -> None:
        await self.call.write(batch if isinstance(batch, bytes) else batch.SerializeToString())

    async def status(self) -> BatchStatus:
        async with asyncio.timeout(30):
            data = await self.call.read()
        assert data is not grpc.aio.EOF
        return BatchStatus.FromString(data)

    async def ask(self, batch: Batch | bytes) -> BatchStatus:
        await self.send(batch)
        return await self.status()

    async def ending(self) -> grpc.StatusCode:
        async with asyncio.timeout(30):
            code: grpc.StatusCode = await self.call.code()
        return code


@asynccontextmanager
async def client(receiver: OtapReceiver, signal: str = "logs", **options: Any) -> AsyncIterator[Client]:
    channel_options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(str(receiver.address), options=channel_options) as channel:
        yield Client(channel, signal, **options)


def batch_of(signal: str, number: int = 0, batch_id: int = 7, codec: str = "zstd") -> Batch:
    [batch] = encode(signal, sample(signal, number), codec, f"schema {number}")
    batch.batch_id = batch_id
    return batch


def messages(sink: FakeSink) -> list[Any]:
    return [parse(SIGNALS[each.signal], bytes(data)) for each in sink.parcels for data in each.requests]


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize("signal", sorted(SIGNALS))
async def test_a_batch_is_taken_as_otlp(signal: str, compression: grpc.Compression) -> None:
    async with receiving() as (sink, receiver), client(receiver, signal, compression=compression) as stream:
        for number in range(3):
            status = await stream.ask(batch_of(signal, number, batch_id=40 + number))
            assert (status.batch_id, status.status_code) == (40 + number, 0)
        await stream.call.done_writing()
        assert await stream.ending() is grpc.StatusCode.OK
    assert canonical(signal, *messages(sink)) == canonical(signal, *(sample(signal, n) for n in range(3)))


async def test_no_status_before_it_is_safe_and_each_when_it_is() -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream:
        sink.go_on.clear()
        for number in range(4):
            await stream.send(batch_of("logs", number, batch_id=number))
        await sink.entered.wait()
        waiting = asyncio.ensure_future(stream.status())
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        sink.go_on.set()
        found = {(await waiting).batch_id} | {(await stream.status()).batch_id for _ in range(3)}
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (StorageFull("full"), FULL),
        (Unavailable("down"), UNAVAILABLE),
        (RuntimeError("a defect"), UNAVAILABLE),
        (Refused("never"), INVALID),
    ],
)
async def test_what_goes_wrong_behind_is_the_status_of_the_batch_alone(problem: Exception, code: int) -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream:
        sink.problem = problem
        assert (await stream.ask(batch_of("logs", 0, 1))).status_code == code
        sink.problem = None
        assert (await stream.ask(batch_of("logs", 1, 2))).status_code == 0
    assert len(sink.parcels) == 1


async def test_one_sender_is_not_read_beyond_its_window() -> None:
    async with receiving(requests_max=2) as (sink, receiver), client(receiver) as stream:
        sink.go_on.clear()
        writes = asyncio.ensure_future(_send_all(stream, [batch_of("logs", 0, each) for each in range(8)]))
        await sink.entered.wait()
        await asyncio.wait({writes}, timeout=0.2)
        assert receiver.intake._requests <= 2
        sink.go_on.set()
        await writes
        assert {(await stream.status()).status_code for _ in range(8)} == {0}


async def _send_all(stream: Client, batches: list[Batch]) -> None:
    for batch in batches:
        await stream.send(batch)


async def test_too_much_under_way_is_refused_for_the_sender_to_try_again() -> None:
    async with (
        receiving(pending_bytes_max=3_000, request_bytes_max=MOST) as (sink, receiver),
        client(receiver) as stream,
    ):
        sink.go_on.clear()
        for number in range(2):
            await stream.send(batch_of("logs", 0, number))
        assert (await stream.status()).status_code == FULL
        sink.go_on.set()
        assert (await stream.status()).status_code == 0


async def test_a_batch_that_can_never_fit_is_not_asked_for_again() -> None:
    async with (
        receiving(pending_bytes_max=100, request_bytes_max=MOST) as (sink, receiver),
        client(receiver) as stream,
    ):
        await stream.send(batch_of("logs", 0, 0))
        status = await stream.status()
    assert (status.status_code, "max_pending_size" in status.status_message) == (INVALID, True)
    assert not sink.parcels


def with_table(batch: Batch, kind: PayloadType, table: pa.RecordBatch, codec: str | None = None) -> Batch:
    """The batch with one table replaced."""
    for payload in batch.payloads:
        if payload.type == kind:
            payload.record = stream_of(table, codec)
    return batch


def stream_of(table: pa.RecordBatch, codec: str | None = None) -> bytes:
    out = io.BytesIO()
    pa.ipc.new_stream(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)).write_batch(table)
    return out.getvalue()


def table_in(batch: Batch, kind: PayloadType) -> pa.RecordBatch:
    [data] = [each.record for each in batch.payloads if each.type == kind]
    return pa.ipc.open_stream(data).read_next_batch()


def _replaced(table: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    return table.set_column(table.schema.get_field_index(name), pa.field(name, values.type), values)


def _twice() -> Batch:
    batch = batch_of("logs")
    table = table_in(batch, PayloadType.LOGS)
    return with_table(
        batch, PayloadType.LOGS, _replaced(table, "id", pa.array([0] * table.num_rows, pa.uint16()))
    )


def _other_type() -> Batch:
    batch = batch_of("logs")
    table = table_in(batch, PayloadType.LOGS)
    return with_table(
        batch, PayloadType.LOGS, _replaced(table, "id", pa.array(["a"] * table.num_rows, pa.string()))
    )


def _no_key() -> Batch:
    batch = batch_of("logs")
    table = table_in(batch, PayloadType.LOG_ATTRS).drop_columns(["key"])
    return with_table(batch, PayloadType.LOG_ATTRS, table)


def _bad_value_type() -> Batch:
    batch = batch_of("logs")
    table = table_in(batch, PayloadType.LOG_ATTRS)
    return with_table(
        batch, PayloadType.LOG_ATTRS, _replaced(table, "type", pa.array([8] * table.num_rows, pa.uint8()))
    )


def _bad_cbor() -> Batch:
    batch = batch_of("logs", 1)
    table = table_in(batch, PayloadType.LOG_ATTRS)
    values = pa.array([b"\x9b" + b"\xff" * 8] * table.num_rows, pa.binary())
    return with_table(batch, PayloadType.LOG_ATTRS, _replaced(table, "ser", values))


def _no_root() -> Batch:
    batch = batch_of("logs")
    kept = [each for each in batch.payloads if each.type != PayloadType.LOGS]
    del batch.payloads[:]
    batch.payloads.extend(kept)
    return batch


def _long_words() -> Batch:
    """A dictionary of one long word that thousands of rows point at."""
    batch = batch_of("logs")
    rows = 20_000
    words = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.uint16()), pa.array(["w" * 10_000]))
    table = pa.record_batch(
        [
            pa.array([0] * rows, pa.uint16()),
            words,
            pa.array([1] * rows, pa.uint8()),
        ],
        names=["parent_id", "key", "type"],
    )
    return with_table(batch, PayloadType.LOG_ATTRS, table, "zstd")


def _copies() -> Batch:
    """Attributes of one resource that go into thousands of groups."""
    batch = batch_of("logs")
    rows = 5_000
    ids = pa.array([0] * rows, pa.uint16())
    urls = pa.array([str(each) for each in range(rows)])
    resource = pa.StructArray.from_arrays([ids, urls], names=["id", "schema_url"])
    root = pa.record_batch([resource], names=["resource"])
    table = pa.record_batch(
        [pa.array([0], pa.uint16()), pa.array(["k" * 10_000]), pa.array([0], pa.uint8())],
        names=["parent_id", "key", "type"],
    )
    return with_table(with_table(batch, PayloadType.LOGS, root), PayloadType.RESOURCE_ATTRS, table)


SENSELESS = {
    "an id twice": _twice,
    "another type": _other_type,
    "no key": _no_key,
    "a value of no type": _bad_value_type,
    "bad cbor": _bad_cbor,
    "no first table": _no_root,
    "a dictionary of long words": _long_words,
    "copies of attributes": _copies,
}


@pytest.mark.parametrize("name", SENSELESS)
async def test_content_that_makes_no_sense_is_refused_and_the_stream_goes_on(name: str) -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream:
        batch = SENSELESS[name]()
        status = await stream.ask(batch)
        assert (status.batch_id, status.status_code) == (7, INVALID), status
        assert status.status_message
        assert (await stream.ask(batch_of("logs", 2, 8))).status_code == 0
    assert len(sink.parcels) == 1


def _bomb() -> Batch:
    batch = batch_of("logs")
    table = pa.record_batch([pa.array([bytes(8 * MOST)], pa.binary())], names=["x"])
    return with_table(batch, PayloadType.LOGS, table, "zstd")


def _bomb_in_a_dictionary() -> Batch:
    words = pa.DictionaryArray.from_arrays(pa.array([0], pa.uint16()), pa.array(["w" * 8 * MOST]))
    return with_table(batch_of("logs"), PayloadType.LOGS, pa.record_batch([words], names=["x"]), "lz4")


def _cut() -> Batch:
    batch = batch_of("logs")
    batch.payloads[0].record = batch.payloads[0].record[:-100]
    return batch


def _noise() -> Batch:
    batch = batch_of("logs")
    batch.payloads[0].record = bytes(range(256)) * 4
    return batch


def _nothing() -> Batch:
    batch = batch_of("logs")
    batch.payloads[0].record = b""
    return batch


def _two_of_one() -> Batch:
    batch = batch_of("logs")
    batch.payloads.append(batch.payloads[0])
    return batch


def _of_another_signal() -> Batch:
    return batch_of("traces")


def _indices_beyond() -> Batch:
    words = pa.DictionaryArray.from_arrays(pa.array([200], pa.uint16()), pa.array(["a"]), safe=False)
    return with_table(batch_of("logs"), PayloadType.LOGS, pa.record_batch([words], names=["event_name"]))


def _two_batches() -> Batch:
    batch = batch_of("logs")
    table = table_in(batch, PayloadType.LOGS)
    out = io.BytesIO()
    writer = pa.ipc.new_stream(out, table.schema)
    writer.write_batch(table)
    writer.write_batch(table)
    batch.payloads[0].record = out.getvalue()
    return batch


def _many_columns() -> Batch:
    columns = {f"c{each}": pa.array([1]) for each in range(300)}
    return with_table(batch_of("logs"), PayloadType.LOGS, pa.record_batch(columns))


BREAKING = {
    "a bomb": _bomb,
    "a bomb in a dictionary": _bomb_in_a_dictionary,
    "cut": _cut,
    "noise": _noise,
    "nothing": _nothing,
    "two of one": _two_of_one,
    "another signal": _of_another_signal,
    "indices beyond": _indices_beyond,
    "two batches": _two_batches,
    "many columns": _many_columns,
}


@pytest.mark.parametrize("name", BREAKING)
async def test_arrow_that_cannot_be_read_ends_the_stream_and_no_other(name: str) -> None:
    async with receiving() as (sink, receiver), client(receiver) as other, client(receiver) as stream:
        assert (await other.ask(batch_of("logs", 0, 1))).status_code == 0
        status = await stream.ask(BREAKING[name]())
        assert (status.batch_id, status.status_code) == (7, INVALID), status
        assert await stream.ending() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await other.ask(batch_of("logs", 1, 2))).status_code == 0
        async with client(receiver) as again:
            assert (await again.ask(batch_of("logs", 2, 3))).status_code == 0
    assert len(sink.parcels) == 3


async def test_bytes_that_are_no_batch_end_the_stream() -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream:
        await stream.send(b"\xff\xff\xff")
        assert await stream.ending() is grpc.StatusCode.INVALID_ARGUMENT
    assert not sink.parcels


async def test_a_message_beyond_the_limit_ends_the_stream() -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream:
        batch = batch_of("logs")
        batch.headers = bytes(2 * MOST)
        await stream.send(batch)
        assert await stream.ending() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not sink.parcels


async def test_batches_before_a_broken_one_are_answered_first() -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream:
        sink.go_on.clear()
        await stream.send(batch_of("logs", 0, 1))
        await sink.entered.wait()
        await stream.send(_noise())
        assert (await stream.status()).batch_id == 7
        sink.go_on.set()
        status = await stream.status()
        assert (status.batch_id, status.status_code) == (1, 0)
        assert await stream.ending() is grpc.StatusCode.INVALID_ARGUMENT


async def test_dictionaries_grow_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_streams, "DICTIONARY_BYTES_MAX", 100_000)
    statuses = []
    async with receiving() as (_, receiver), client(receiver) as stream:
        for batch in growing(10):
            status = await stream.ask(batch)
            statuses.append(status.status_code)
            if status.status_code:
                break
        assert await stream.ending() is grpc.StatusCode.INVALID_ARGUMENT
    assert 2 <= len(statuses) < 10


async def test_dictionaries_of_all_streams_are_counted_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_otap_receiver, "ALL_DICTIONARIES_BYTES_MAX", 100_000)
    async with receiving() as (_, receiver):
        async with client(receiver) as stream:
            for batch in growing(3):
                assert (await stream.ask(batch)).status_code == 0
            async with client(receiver) as other:
                assert (await other.ask(growing(1)[0])).status_code == FULL
                assert await other.ending() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: receiver._dictionary_bytes == 0)
        async with client(receiver) as stream:
            assert (await stream.ask(growing(1)[0])).status_code == 0


def growing(count: int) -> list[Batch]:
    """Batches of one stream whose dictionary grows by some 25 kB each time."""
    schema = pa.schema([("event_name", pa.dictionary(pa.uint16(), pa.string()))])
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    writer = pa.ipc.new_stream(out, schema, options=options)
    words: list[str] = []
    batches, begin = [], 0
    for number in range(count):
        words += [f"{number}.{each}" + "w" * 1_000 for each in range(25)]
        column = pa.DictionaryArray.from_arrays(pa.array([len(words) - 1], pa.uint16()), pa.array(words))
        writer.write_batch(pa.record_batch([column], schema=schema))
        data = out.getvalue()
        batch = Batch(batch_id=number)
        batch.payloads.add(schema_id="a", type=PayloadType.LOGS, record=data[begin:])
        begin = len(data)
        batches.append(batch)
    return batches


async def test_growing_dictionaries_are_read_from_batch_to_batch() -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream:
        for batch in growing(3):
            assert (await stream.ask(batch)).status_code == 0
    found = [
        log.event_name.rstrip("w")
        for message in messages(sink)
        for group in message.resource_logs
        for scope in group.scope_logs
        for log in scope.log_records
    ]
    assert found == ["0.24", "1.24", "2.24"]


async def test_a_batch_without_rows_is_nothing_and_fine() -> None:
    batch = batch_of("traces", 1)
    for payload in batch.payloads:
        table = pa.ipc.open_stream(payload.record).read_next_batch()
        payload.record = stream_of(table.slice(0, 0))
    async with receiving() as (sink, receiver), client(receiver, "traces") as stream:
        assert (await stream.ask(batch)).status_code == 0
    assert not sink.parcels


async def test_a_large_batch_becomes_several_requests() -> None:
    async with receiving(request_bytes_max=32 * MOST, pending_bytes_max=64 * MOST) as (sink, receiver):
        request = sample("logs", 0, items=1)
        records = request.resource_logs[0].scope_logs[0].log_records
        for number in range(6_000):
            records.add(time_unix_nano=number + 1).body.string_value = f"{number:01000d}"
        [batch] = encode("logs", request, "zstd", "a")
        async with client(receiver, "logs") as stream:
            assert (await stream.ask(batch)).status_code == 0
    [parcel] = sink.parcels
    assert len(parcel.requests) > 2
    assert max(map(len, parcel.requests)) < 4 * MOST
    assert parcel.items == 6_000 + 4
    assert canonical("logs", *messages(sink)) == canonical("logs", request)


async def test_a_stop_answers_what_is_under_way_and_ends_the_streams() -> None:
    async with receiving() as (sink, receiver), client(receiver) as stream, client(receiver) as idle:
        assert (await idle.ask(batch_of("logs", 0, 1))).status_code == 0
        sink.entered.clear()
        sink.go_on.clear()
        await stream.send(batch_of("logs", 1, 2))
        await sink.entered.wait()
        stopping = asyncio.ensure_future(receiver.stop())
        assert await idle.ending() is grpc.StatusCode.UNAVAILABLE
        sink.go_on.set()
        assert (await stream.status()).status_code == 0
        assert await stream.ending() is grpc.StatusCode.UNAVAILABLE
        await stopping
    assert len(sink.parcels) == 2


async def test_a_sender_that_vanishes_leaves_nothing_behind() -> None:
    async with receiving() as (sink, receiver):
        async with client(receiver) as stream:
            sink.go_on.clear()
            await stream.send(batch_of("logs"))
            await sink.entered.wait()
        await until(lambda: receiver._dictionary_bytes == 0)
        sink.go_on.set()
        await until(lambda: receiver.intake._requests == 0)


class Flood:
    """A context with batches without end, up to `most`."""

    def __init__(self, most: int) -> None:
        self.reads, self.most = 0, most

    async def read(self) -> bytes:
        if self.reads == self.most:
            await asyncio.Event().wait()
        self.reads += 1
        return Batch(batch_id=self.reads).SerializeToString()


async def test_sender_that_takes_no_statuses_is_not_read_from() -> None:
    async with receiving(requests_max=16) as (_, receiver):
        flood: Any = Flood(200)
        stream = _otap_receiver._Stream(receiver, SIGNALS["logs"], flood)
        statuses: Any = stream.statuses()
        try:
            await anext(statuses)  # taken, and none after it
            await until(lambda: flood.reads == flood.most or stream._gate.locked())
            assert flood.reads <= 17
            found = [BatchStatus.FromString(await anext(statuses)).batch_id for _ in range(100)]
            assert sorted(found) == list(range(2, 102))
        finally:
            await statuses.aclose()
            await stream.close()


async def test_one_stream_too_many_is_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_otap_receiver, "STREAMS_MAX", 1)
    async with receiving() as (_, receiver), client(receiver) as first:
        assert (await first.ask(batch_of("logs", 0, 1))).status_code == 0
        async with client(receiver) as second:
            assert await second.ending() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert _asked_wait_s(await second.call.trailing_metadata()) == 1
        await first.call.done_writing()
        assert await first.ending() is grpc.StatusCode.OK
        async with client(receiver) as third:
            assert (await third.ask(batch_of("logs", 0, 1))).status_code == 0
