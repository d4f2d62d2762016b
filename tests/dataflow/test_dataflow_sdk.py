"""Real clients, real processes: what the OpenTelemetry SDK sends arrives, whatever is killed or down."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogs
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogs
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tests.dataflow.flow_files import pipeline
from tests.dataflow.otlp_kit import Destination, FlowProcess, calls, logs, parquet_rows, traces

from forebay.testing._servers.ports import free_ports

KILLS = 20
KILLS_NIGHTLY = 100


@pytest.fixture
def destination() -> Iterator[Destination]:
    destination = Destination()
    yield destination
    destination.down()


def write(directory: Path, data: bytes) -> Path:
    path = directory / "flow.yaml"
    path.write_bytes(data)
    return path


class Sdk:
    """The three providers of the SDK, set up for one transport."""

    def __init__(self, flow: FlowProcess, transport: str) -> None:
        resource = Resource.create({"service.name": f"shop-{transport}"})
        spans: Any
        metrics: Any
        log: Any
        if transport == "grpc":
            endpoint = f"http://{flow.grpc}"
            spans, metrics, log = (
                each(endpoint=endpoint, insecure=True) for each in (GrpcSpans, GrpcMetrics, GrpcLogs)
            )
        else:
            spans, metrics, log = (
                each(endpoint=f"http://{flow.http}/v1/{path}", compression=Compression.Gzip)
                for each, path in ((HttpSpans, "traces"), (HttpMetrics, "metrics"), (HttpLogs, "logs"))
            )
        self.tracers = TracerProvider(resource=resource)
        self.tracers.add_span_processor(BatchSpanProcessor(spans))
        self.meters = MeterProvider(
            [PeriodicExportingMetricReader(metrics, export_interval_millis=3_600_000)], resource=resource
        )
        self.loggers = LoggerProvider(resource=resource)
        self.loggers.add_log_record_processor(BatchLogRecordProcessor(log))

    def flush(self) -> None:
        for provider in (self.tracers, self.meters, self.loggers):
            assert provider.force_flush()

    def close(self) -> None:
        for provider in (self.tracers, self.meters, self.loggers):
            provider.shutdown()


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_the_sdk_reaches_an_otlp_server_and_parquet(
    tmp_path: Path, destination: Destination, transport: str
) -> None:
    destination.up()
    path = write(tmp_path, pipeline(tmp_path, endpoint=destination.endpoint, parquet=True))
    with FlowProcess(path) as flow:
        sdk = Sdk(flow, transport)
        with sdk.tracers.get_tracer("tests", "1.0").start_as_current_span(
            "checkout", attributes={"items": 3, "user": "blue", "tags": ["a", "b"]}
        ) as span:
            span.add_event("paid", {"ok": True})
            ids = span.get_span_context()
            sdk.loggers.get_logger("tests").emit(
                LogRecord(
                    body="order received",
                    severity_number=SeverityNumber.WARN,
                    severity_text="WARN",
                    attributes={"size": 1.5},
                )
            )
        meter = sdk.meters.get_meter("tests")
        meter.create_counter("orders", unit="1").add(41, {"shop": "north"})
        meter.create_histogram("latency").record(12.5)
        sdk.flush()
        sdk.close()
        assert flow.terminate() == 0
    # Everything was handed on before the process ended.
    assert destination.names("traces") == {"checkout": 1}
    assert destination.names("logs") == {"order received": 1}
    assert set(destination.names("metrics")) == {"orders", "latency"}
    [row] = parquet_rows(tmp_path / "parquet", "traces")
    assert row["name"] == "checkout"
    assert row["trace_id"] == f"{ids.trace_id:032x}"
    assert row["span_id"] == f"{ids.span_id:016x}"
    assert dict(row["attributes"]) == {"items": "3", "user": "blue", "tags": '["a", "b"]'}
    assert dict(row["events"][0]["attributes"]) == {"ok": "true"}
    assert dict(row["resource_attributes"])["service.name"] == f"shop-{transport}"
    assert (row["scope_name"], row["scope_version"]) == ("tests", "1.0")
    [row] = parquet_rows(tmp_path / "parquet", "logs")
    assert (row["body"], row["severity_text"], dict(row["attributes"])) == (
        "order received",
        "WARN",
        {"size": "1.5"},
    )
    assert row["trace_id"] == f"{ids.trace_id:032x}"
    rows = {row["name"]: row for row in parquet_rows(tmp_path / "parquet", "metrics")}
    assert (rows["orders"]["value"], rows["orders"]["value_int"], rows["orders"]["type"]) == (41.0, 41, "sum")
    assert dict(rows["orders"]["attributes"]) == {"shop": "north"}
    assert (rows["latency"]["count"], rows["latency"]["sum"]) == (1, 12.5)


def test_everything_arrives_after_an_outage_with_a_kill_in_it(
    tmp_path: Path, destination: Destination
) -> None:
    path = write(tmp_path, pipeline(tmp_path, endpoint=destination.endpoint, parquet=True))
    names = [f"span {number}" for number in range(60)]
    with FlowProcess(path) as flow:
        for part in (names[:20], names[20:40]):  # the destination is down all the while
            sdk = Sdk(flow, "grpc")
            tracer = sdk.tracers.get_tracer("tests")
            for name in part:
                tracer.start_span(name).end()
            sdk.flush()
            sdk.close()
            flow.kill()
            flow.start()
        destination.up()
        sdk = Sdk(flow, "http")
        for name in names[40:]:
            sdk.tracers.get_tracer("tests").start_span(name).end()
        sdk.flush()
        sdk.close()
        destination.wait_for("traces", names)
        assert flow.terminate() == 0
    assert set(destination.names("traces")) == set(names)
    rows = parquet_rows(tmp_path / "parquet", "traces")
    assert sorted(row["name"] for row in rows) == sorted(names)  # once each: a segment is one file


def test_sigterm_while_the_destination_is_down_ends_with_0_and_keeps_the_data(
    tmp_path: Path, destination: Destination
) -> None:
    path = write(tmp_path, pipeline(tmp_path, endpoint=destination.endpoint))
    with FlowProcess(path) as flow:
        with calls(flow.grpc) as call:
            call["logs"](logs("kept"), timeout=30)
        assert flow.terminate() == 0
        assert not destination.requests
        destination.up()
        flow.start()
        destination.wait_for("logs", ["kept"])
        assert flow.terminate() == 0
    assert destination.names("logs") == {"kept": 1}


class Sender(threading.Thread):
    """Sends numbered requests, each until it is acknowledged."""

    def __init__(self, address: str, enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._enough = enough
        self.acknowledged: list[str] = []
        self.attempts = 0
        self.news = threading.Event()
        """Set by each acknowledgement."""

    def run(self) -> None:
        with calls(self._address) as call:
            number = 0
            while not self._enough.is_set():
                name = f"record {number}"
                self.attempts += 1
                try:
                    call["traces"](traces(name), timeout=5, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                self.acknowledged.append(name)
                self.news.set()
                number += 1


def killed_at_random(directory: Path, destination: Destination, kills: int) -> None:
    """Kill the process again and again while a sender sends and the destination comes and goes."""
    randomness = random.Random(int(os.environ.get("FOREBAY_SEED", "7")))
    [port] = free_ports(1)
    data = pipeline(directory, endpoint=destination.endpoint, parquet=True, open_ms=30)
    path = write(
        directory, data.replace(b"  listening_addr: 127.0.0.1:0", b"  listening_addr: 127.0.0.1:%d" % port, 1)
    )
    enough = threading.Event()
    sender = Sender(f"127.0.0.1:{port}", enough)
    sender.start()
    is_up = False
    with FlowProcess(path) as flow:
        for _ in range(kills):
            if randomness.random() < 0.5:
                destination.down() if is_up else destination.up()
                is_up = not is_up
            sender.news.clear()
            assert sender.news.wait(60)
            # Not a wait for something: the moment of the kill is what is random.
            threading.Event().wait(randomness.uniform(0, 0.3))
            flow.kill()
            flow.start()
        enough.set()
        sender.join(60)
        assert not sender.is_alive()
        if not is_up:
            destination.up()
        destination.wait_for("traces", sender.acknowledged)
        assert flow.terminate() == 0
    arrived = destination.names("traces")
    sent = {f"record {number}" for number in range(len(sender.acknowledged) + 1)}
    assert set(sender.acknowledged) <= set(arrived) <= sent
    written = [row["name"] for row in parquet_rows(directory / "parquet", "traces")]
    assert set(sender.acknowledged) <= set(written) <= sent
    # Files repeat nothing by themselves: only what was sent again, without an answer, is there twice.
    assert len(written) <= sender.attempts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_asks_it_to_end_again_and_again_gets_its_own_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    with FlowProcess(write(tmp_path, pipeline(tmp_path, parquet=True))) as flow:
        assert flow.end(number, once=False) == 0


@pytest.mark.timeout(280)
def test_acknowledged_requests_survive_kills_at_random_moments(
    tmp_path: Path, destination: Destination
) -> None:
    killed_at_random(tmp_path, destination, KILLS)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_acknowledged_requests_survive_a_hundred_kills(tmp_path: Path, destination: Destination) -> None:
    killed_at_random(tmp_path, destination, KILLS_NIGHTLY)
