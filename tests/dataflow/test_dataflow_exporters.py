"""Exporters: everything reaches the destination, and a second delivery does no harm."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import stat
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from tests.dataflow.otlp_kit import Destination, logs, metrics, names_in, parquet_rows, traces

from forebay.dataflow import _grpc_exporter
from forebay.dataflow._columns import SCHEMAS, rows_of, table_of
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._otlp_exporter import OtlpExporter
from forebay.dataflow._parcels import Parcel, Refused, join
from forebay.dataflow._parquet import ParquetExporter, _remove_leftovers, directory_of
from forebay.dataflow._settings import OtlpExporterSettings, ParquetSettings
from forebay.dataflow._signals import SIGNALS, parse
from forebay.errors import FormatError, OutcomeUnknown, Unavailable
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import as_json
from forebay.testing.proxy import FaultProxy, hang


def parcel(
    signal: str, *requests: bytes, key: str = "store-1-abc", ingested_ms: int = 1_700_000_000_000
) -> Parcel:
    items = sum(len(names_in(signal, each)) for each in requests)
    return Parcel(signal, requests, items, sum(map(len, requests)), ingested_ms, key)


# OTLP.


@pytest.fixture
def destination() -> Iterator[Destination]:
    with Destination() as destination:
        yield destination


@asynccontextmanager
async def exporting(
    destination: Destination, registry: MetricsRegistry | None = None, **changes: Any
) -> AsyncIterator[OtlpExporter]:
    values: dict[str, Any] = {
        "target": f"127.0.0.1:{destination.port}",
        "is_tls": False,
        "compression": "none",
        "timeout_ms": 10_000,
        "request_bytes_max": 1_000,
        "headers": (),
        "ca_file": None,
    }
    settings = OtlpExporterSettings(**values | changes)
    exporter = OtlpExporter("out", settings, DataflowMetrics(registry or MetricsRegistry()))
    await exporter.start()
    try:
        yield exporter
    finally:
        await exporter.stop()


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_requests_are_joined_and_arrive_unchanged(destination: Destination, compression: str) -> None:
    sent = [logs(f"number {each}", "x" * 100) for each in range(50)]
    async with exporting(destination, compression=compression, headers=(("x-key", "secret"),)) as exporter:
        await exporter.take(parcel("logs", *sent))
    assert 5 <= len(destination.requests) < 20
    whole = [log for _, data in destination.requests for log in _scopes(data)]
    assert Counter(each.SerializeToString() for each in whole) == Counter(
        each.SerializeToString() for data in sent for each in _scopes(data)
    )
    assert ("x-key", "secret") in destination.metadata


def _scopes(data: bytes) -> list[Any]:
    return list(ExportLogsServiceRequest.FromString(data).resource_logs)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_joining_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    requests = [bytes([index % 256]) * size for index, size in enumerate(sizes)]
    groups = join(requests, limit)
    assert [each for group in groups for each in group] == requests
    assert all(len(group) == 1 or sum(map(len, group)) <= limit for group in groups)


async def test_a_destination_that_is_down_is_certainly_not_done(destination: Destination) -> None:
    destination.down()
    async with exporting(destination) as exporter:
        with pytest.raises(Unavailable):
            await exporter.take(parcel("logs", logs("a")))
        destination.up()
        for _ in range(100):  # the channel finds out by itself
            try:
                await exporter.take(parcel("logs", logs("a")))
                break
            except Unavailable:
                await SystemClock().sleep(0.05)
    assert destination.names("logs") == {"a": 1}


async def test_a_timeout_is_an_unknown_outcome(destination: Destination) -> None:
    destination.answer = lambda _, __, context: context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "slow")
    async with exporting(destination) as exporter:
        with pytest.raises(OutcomeUnknown):
            await exporter.take(parcel("logs", logs("a")))


def open_sockets(port: int) -> Iterator[socket.socket]:
    """Those of this process that are connected to the port."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if not stat.S_ISSOCK(path.stat().st_mode):
                continue  # A duplicate of it would stay open: that of a pipe keeps its reader waiting.
            with socket.socket(fileno=os.dup(int(path.name))) as found:
                peer: Any = found.getpeername()
                if found.type == socket.SOCK_STREAM and isinstance(peer, tuple) and peer[1] == port:
                    yield found


async def test_the_kernel_does_not_talk_for_long_to_a_machine_that_is_gone(destination: Destination) -> None:
    async with exporting(destination) as exporter:
        await exporter.take(parcel("logs", logs("a")))
        found = [
            each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            for each in open_sockets(destination.port)
        ]
    assert found == [20_000]


async def test_a_connection_that_went_silent_is_given_up_for_a_new_one(
    destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(_grpc_exporter._CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] > 300_000, "servers close the connection, by default"
    for name in ("keepalive_time", "keepalive_timeout", "http2.ping_timeout"):
        options[f"grpc.{name}_ms"] = 100
    monkeypatch.setattr(_grpc_exporter, "_CHANNEL_OPTIONS", tuple(options.items()))
    with FaultProxy("127.0.0.1", destination.port) as proxy:
        proxy.next_connection(hang(after_bytes=400))
        async with exporting(destination, target=proxy.address, timeout_ms=2_000) as exporter:
            with pytest.raises((OutcomeUnknown, Unavailable)):
                for _ in range(100):
                    await exporter.take(parcel("logs", logs("before")))
            for _ in range(10):
                with suppress(OutcomeUnknown, Unavailable):
                    await exporter.take(parcel("logs", logs("after")))
                    break
            else:
                pytest.fail("it never came through")
            assert proxy.stats.connections >= 2


async def test_one_bad_request_costs_nobody_else_anything(destination: Destination) -> None:
    def picky(signal: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        if "bad" in names_in(signal, data):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad")
        return b""

    destination.answer = picky
    names = [f"good {each}" for each in range(40)]
    requests = [logs(each) for each in [*names[:20], "bad", *names[20:]]]
    async with exporting(destination) as exporter:
        with pytest.raises(Refused):
            await exporter.take(parcel("logs", *requests))
    assert destination.names("logs") == Counter(names)


async def test_what_arrived_of_a_parcel_is_not_sent_again(destination: Destination) -> None:
    calls = itertools.count()

    def sometimes(signal: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        if next(calls) % 3 == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return b""

    destination.answer = sometimes
    names = [f"number {each}" for each in range(30)]
    whole = parcel("logs", *[logs(each, "x" * 400) for each in names])
    async with exporting(destination) as exporter:
        for _ in range(50):
            try:
                await exporter.take(whole)
                break
            except (OutcomeUnknown, Unavailable):
                continue
        else:
            pytest.fail("it never arrived")
    arrived = destination.names("logs")
    assert {name: arrived[name] for name in names} == dict.fromkeys(names, 1)


async def test_a_partial_success_is_counted_and_final(destination: Destination) -> None:
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = 2
    response.partial_success.error_message = "too old"
    destination.answer = lambda *_: response.SerializeToString()
    registry = MetricsRegistry()
    async with exporting(destination, registry) as exporter:
        await exporter.take(parcel("traces", traces("a", "b", "c")))
    [series] = as_json(registry)["counters"]["dataflow.exporter.rejected_total"]
    assert (series["labels"], series["value"]) == ({"node": "out", "signal": "traces"}, 2)
    assert len(destination.requests) == 1


# Columns.


def metrics_of_every_kind() -> bytes:
    request: Any = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add(schema_url="schema:r")
    resource.resource.attributes.add(key="service.name").value.string_value = "shop"
    scope = resource.scope_metrics.add(schema_url="schema:s")
    scope.scope.name = "tests"
    gauge = scope.metrics.add(name="gauge", unit="C").gauge.data_points.add(as_double=1.5, time_unix_nano=5)
    gauge.attributes.add(key="room").value.int_value = 4
    total = scope.metrics.add(name="sum").sum
    total.is_monotonic, total.aggregation_temporality = True, 2
    point = total.data_points.add(as_int=2**62 + 1, start_time_unix_nano=3, time_unix_nano=5)
    point.exemplars.add(as_double=2.5, trace_id=b"\x0a" * 16, span_id=b"\x0b" * 8)
    histogram = scope.metrics.add(name="histogram").histogram
    histogram.aggregation_temporality = 1
    histogram.data_points.add(count=3, sum=6.0, min=1.0, bucket_counts=[1, 2], explicit_bounds=[2.0])
    point = scope.metrics.add(name="exponential").exponential_histogram.data_points.add(
        count=2, scale=-1, zero_count=1
    )
    point.positive.offset = 3
    point.positive.bucket_counts.extend([1, 1])
    point = scope.metrics.add(name="summary").summary.data_points.add(count=9, sum=4.5)
    point.quantile_values.add(quantile=0.5, value=0.25)
    scope.metrics.add(name="empty")
    return bytes(request.SerializeToString())


def rows(signal: str, data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table(signal, data).to_pylist()
    return found


def table(signal: str, data: bytes) -> pa.Table:
    return table_of(signal, [row for row, _ in rows_of(signal, parse(SIGNALS[signal], data))])


def test_every_kind_of_metric_has_its_columns() -> None:
    found = {row["name"]: row for row in rows("metrics", metrics_of_every_kind())}
    assert list(found) == ["gauge", "sum", "histogram", "exponential", "summary"]
    gauge = found["gauge"]
    assert (gauge["type"], gauge["value"], gauge["value_int"], gauge["unit"]) == ("gauge", 1.5, None, "C")
    assert gauge["attributes"] == [("room", "4")]
    assert gauge["resource_attributes"] == [("service.name", "shop")]
    assert (gauge["resource_schema_url"], gauge["scope_schema_url"]) == ("schema:r", "schema:s")
    total = found["sum"]
    assert (total["value_int"], total["is_monotonic"], total["aggregation_temporality"]) == (
        2**62 + 1,
        True,
        "CUMULATIVE",
    )
    assert total["exemplars"][0]["trace_id"] == "0a" * 16
    histogram = found["histogram"]
    assert [histogram[each] for each in ("count", "sum", "min", "max")] == [3, 6.0, 1.0, None]
    assert (histogram["bucket_counts"], histogram["explicit_bounds"]) == ([1, 2], [2.0])
    assert histogram["aggregation_temporality"] == "DELTA"
    exponential = found["exponential"]
    assert (exponential["scale"], exponential["positive_offset"]) == (-1, 3)
    assert (exponential["positive_bucket_counts"], exponential["zero_count"]) == ([1, 1], 1)
    assert found["summary"]["quantiles"] == [{"quantile": 0.5, "value": 0.25}]


def test_attributes_of_every_type_are_kept_as_text() -> None:
    request = ExportLogsServiceRequest()
    log = request.resource_logs.add().scope_logs.add().log_records.add()
    add = log.attributes.add
    add(key="string").value.string_value = "1"
    add(key="int").value.int_value = -1
    add(key="double").value.double_value = 0.5
    add(key="bool").value.bool_value = False
    add(key="bytes").value.bytes_value = b"\x00\xff"
    add(key="list").value.array_value.values.add().string_value = "ä"
    add(key="map").value.kvlist_value.values.add(key="k").value.int_value = 2
    add(key="none")
    [row] = rows("logs", request.SerializeToString())
    assert dict(row["attributes"]) == {
        "string": "1",
        "int": "-1",
        "double": "0.5",
        "bool": "false",
        "bytes": '"AP8="',
        "list": '["ä"]',
        "map": '{"k": 2}',
        "none": None,
    }
    assert row["body"] is None
    log.body.kvlist_value.values.add(key="message").value.string_value = "structured"
    [row] = rows("logs", request.SerializeToString())
    assert json.loads(row["body"]) == {"message": "structured"}


def test_numbers_that_json_lacks_do_not_spoil_what_they_are_in() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    request = ExportLogsServiceRequest()
    log = request.resource_logs.add().scope_logs.add().log_records.add()
    for number in (float("nan"), float("inf"), float("-inf"), 0.5):
        log.body.array_value.values.add().double_value = number
    log.attributes.add(key="alone").value.double_value = float("nan")
    [row] = rows("logs", request.SerializeToString())
    assert json.loads(row["body"], parse_constant=refuse) == ["NaN", "Infinity", "-Infinity", 0.5]
    assert dict(row["attributes"]) == {"alone": "NaN"}


def test_a_key_that_comes_twice_does_not_spoil_the_file_for_duckdb(tmp_path: Path) -> None:
    request: Any = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    span = resource.scope_spans.add().spans.add(name="s")
    owners = (resource.resource, span, span.events.add(name="e"), span.links.add())
    for value in ("first", "last"):
        for each in owners:
            each.attributes.add(key="k").value.string_value = value
    pq.write_table(table("traces", request.SerializeToString()), tmp_path / "f")
    maps = "resource_attributes, attributes, events[1].attributes, links[1].attributes"
    query = f"select {maps} from read_parquet(?)"
    assert duckdb.execute(query, [str(tmp_path / "f")]).fetchall() == [({"k": "last"},) * 4]


def test_spans_keep_events_links_and_times() -> None:
    request: Any = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(name="s", kind=3, trace_id=b"\xab" * 16)
    span.start_time_unix_nano, span.end_time_unix_nano = 1_000, 4_000
    span.status.code, span.status.message = 2, "no"
    span.events.add(name="e", time_unix_nano=2_000).attributes.add(key="k").value.bool_value = True
    span.links.add(trace_id=b"\x01" * 16, span_id=b"\x02" * 8, trace_state="t=1")
    [row] = rows("traces", request.SerializeToString())
    assert (row["kind"], row["status_code"], row["status_message"], row["duration_ns"]) == (
        "CLIENT",
        "ERROR",
        "no",
        3_000,
    )
    assert (row["trace_id"], row["span_id"], row["parent_span_id"]) == ("ab" * 16, None, None)
    assert row["events"][0]["attributes"] == [("k", "true")]
    assert (row["links"][0]["span_id"], row["links"][0]["trace_state"]) == ("02" * 8, "t=1")
    span.start_time_unix_nano = 2**64 - 1  # no time that a timestamp can hold
    [row] = rows("traces", request.SerializeToString())
    assert (row["start_time"], row["duration_ns"]) == (None, None)


@given(st.sampled_from(sorted(SIGNALS)), st.data())
def test_whatever_can_be_parsed_becomes_rows(signal: str, data: st.DataObject) -> None:
    good = {"traces": traces("a", "b"), "logs": logs("a", "b"), "metrics": metrics_of_every_kind()}[signal]
    changes = data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=6))
    damaged = bytearray(good)
    for position, value in changes:
        damaged[position] = value
    try:
        parse(SIGNALS[signal], bytes(damaged))
    except FormatError:
        return
    found = table(signal, bytes(damaged))
    found.validate(full=True)
    assert found.schema == SCHEMAS[signal]


# Parquet.


@asynccontextmanager
async def writing(path: Path, compression: str = "zstd") -> AsyncIterator[ParquetExporter]:
    exporter = ParquetExporter(ParquetSettings(path, compression), clock=SystemClock(), ids=IdSource())
    await exporter.start()
    try:
        yield exporter
    finally:
        await exporter.stop()


def files(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


async def test_files_lie_by_signal_and_hour_of_ingestion(tmp_path: Path) -> None:
    async with writing(tmp_path) as exporter:
        await exporter.take(parcel("traces", traces("a"), traces("b")))
        await exporter.take(parcel("logs", logs("c")))
        await exporter.take(parcel("metrics", metrics("d")))
    part = "date=2023-11-14/hour=22/store-1-abc.parquet"
    assert files(tmp_path) == [f"signal={each}/{part}" for each in ("logs", "metrics", "traces")]
    assert directory_of("logs", 1_700_000_000_000) == "signal=logs/date=2023-11-14/hour=22"
    everything = f"read_parquet('{tmp_path}/signal=traces/**/*.parquet')"
    with duckdb.connect() as database:
        found = database.execute(f"select name, hour from {everything} order by name").fetchall()
    assert found == [("a", 22), ("b", 22)]


async def test_a_second_delivery_replaces_the_file_by_an_equal_one(tmp_path: Path) -> None:
    async with writing(tmp_path) as exporter:
        whole = parcel("logs", logs("a", "b"))
        await exporter.take(whole)
        [name] = files(tmp_path)
        first = (tmp_path / name).read_bytes()
        await exporter.take(whole)
    assert files(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == first


async def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    problems = iter([OSError(28, "No space left on device")])

    def fsync(descriptor: int) -> None:
        for problem in problems:
            raise problem
        real(descriptor)

    async with writing(tmp_path) as exporter:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(Unavailable, match="No space"):
            await exporter.take(parcel("logs", logs("a")))
        assert not files(tmp_path)  # neither whole nor in part: a full disk needs the room
        await exporter.take(parcel("logs", logs("a")))
    assert [row["body"] for row in parquet_rows(tmp_path, "logs")] == ["a"]
    assert len(files(tmp_path)) == 1


async def test_start_removes_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    hour = tmp_path / directory_of("logs", 1_700_000_000_000)
    hour.mkdir(parents=True)
    kept = [hour / "store-1.parquet", hour / ".note.tmp", hour / "b.parquet.tmp", tmp_path / ".c.parquet.tmp"]
    for each in (*kept, hour / ".store-2.parquet.tmp", hour / ".store-3.parquet.tmp"):
        each.write_bytes(b"PAR1")
    (hour / ".directory.parquet.tmp").mkdir()
    async with writing(tmp_path):
        pass
    assert files(tmp_path) == sorted(str(each.relative_to(tmp_path)) for each in kept)


async def test_writer_whose_file_is_taken_for_a_leftover_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = os.fsync

    def fsync(descriptor: int) -> None:
        # Another process starts on the same path, after all was written and before the file has its name.
        monkeypatch.setattr(os, "fsync", synced)
        _remove_leftovers(tmp_path)
        synced(descriptor)

    async with writing(tmp_path) as exporter:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(Unavailable):
            await exporter.take(parcel("logs", logs("a")))
        await exporter.take(parcel("logs", logs("a")))
    assert [row["body"] for row in parquet_rows(tmp_path, "logs")] == ["a"]


async def test_rows_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.dataflow._parquet.ROW_GROUP_ROWS", 10)
    async with writing(tmp_path, "none") as exporter:
        await exporter.take(parcel("logs", *[logs("a", "b", "c")] * 9))
    [name] = files(tmp_path)
    file = pq.ParquetFile(tmp_path / name)
    assert [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)] == [10, 10, 7]


def with_large_resource(signal: str, count: int) -> bytes:
    """`count` items under a resource of 1,000 bytes, and metrics that have a description of as many."""
    request: Any = SIGNALS[signal].request()
    outer, inner, items = SIGNALS[signal].levels
    resource = getattr(request, outer).add()
    resource.resource.attributes.add(key="k").value.string_value = "x" * 1_000
    scope = getattr(resource, inner).add()
    if signal == "metrics":
        metric = scope.metrics.add(name="m", description="d" * 1_000)
        for _ in range(count):
            metric.gauge.data_points.add()
    else:
        for _ in range(count):
            getattr(scope, items).add()
    return bytes(request.SerializeToString())


@pytest.mark.parametrize(("signal", "rows"), [("traces", 4), ("logs", 4), ("metrics", 2)])
async def test_what_rows_share_counts_for_each_of_them_in_a_group(
    signal: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.dataflow._parquet.ROW_GROUP_BYTES", 5_000)
    async with writing(tmp_path, "none") as exporter:
        await exporter.take(parcel(signal, with_large_resource(signal, 40)))
    [name] = files(tmp_path)
    file = pq.ParquetFile(tmp_path / name)
    sizes = [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)]
    assert sum(sizes) == 40
    assert max(sizes) == rows


@pytest.mark.parametrize("signal", sorted(SIGNALS))
async def test_request_that_would_become_far_larger_is_refused_and_the_rest_is_written(
    signal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.dataflow._parquet.REPEATED_BYTES_MAX", 30_000)
    good, bad = with_large_resource(signal, 10), with_large_resource(signal, 40)
    async with writing(tmp_path) as exporter:
        with pytest.raises(Refused, match="too large for so many rows") as caught:
            await exporter.take(parcel(signal, good, bad, good))
    assert caught.value.items == (1 if signal == "metrics" else 40)
    assert len(parquet_rows(tmp_path, signal)) == 20


async def test_stop_gives_up_the_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, go_on, groups = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []

    def slow_table_of(signal: str, rows: Any) -> pa.Table:
        groups.append(len(rows))
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(30)
        return table_of(signal, rows)

    monkeypatch.setattr("forebay.dataflow._parquet.ROW_GROUP_ROWS", 1)
    monkeypatch.setattr("forebay.dataflow._parquet.table_of", slow_table_of)
    async with writing(tmp_path) as exporter:
        taking = asyncio.ensure_future(exporter.take(parcel("logs", logs("a", "b", "c"))))
        await begun.wait()
        stopping = asyncio.ensure_future(exporter.stop())
        await asyncio.sleep(0)
        go_on.set()
        await stopping
        with pytest.raises(Unavailable, match="stops"):
            await taking
    assert groups == [1]
    assert not files(tmp_path)


async def test_directories_that_a_start_makes_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("forebay.dataflow._parquet._sync_directory", synced.append)
    for _ in range(2):
        async with writing(tmp_path / "a" / "b"):
            assert sorted(synced) == [tmp_path, tmp_path / "a"]


async def test_parcels_without_a_name_get_files_of_their_own(tmp_path: Path) -> None:
    async with writing(tmp_path) as exporter:
        for _ in range(2):
            await exporter.take(parcel("logs", logs("a"), key="", ingested_ms=0))
    assert len(files(tmp_path)) == 2


async def test_a_directory_that_cannot_be_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    exporter = ParquetExporter(
        ParquetSettings(tmp_path / "file" / "x", "zstd"), clock=SystemClock(), ids=IdSource()
    )
    with pytest.raises(Unavailable):
        await exporter.start()
    await exporter.stop()
