"""Files with OTAP in them: what they may say, and two processes with OTAP between them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.dataflow.flow_files import pipeline
from tests.dataflow.otlp_kit import Destination, FlowProcess, parquet_rows
from tests.dataflow.test_dataflow_sdk import Sdk, Sender

from forebay.dataflow import check, load
from forebay.dataflow._settings import OtapExporterSettings, OtapReceiverSettings
from forebay.testing._servers.ports import free_ports

SEED = """\
nodes:
  otlp_receiver:
    kind: receiver
    plugin_urn: "urn:otel:otlp:receiver"
    out_ports:
      out_port:
        destinations:
          - persistence
        dispatch_strategy: round_robin
    config:
      listening_addr: "127.0.0.1:4317"
      response_stream_channel_size: 256 # Required: channel buffer capacity (number of messages)

  otap_receiver:
    kind: receiver
    plugin_urn: "urn:otel:otap:receiver"
    out_ports:
      out_port:
        destinations:
          - persistence
        dispatch_strategy: round_robin
    config:
      listening_addr: "127.0.0.1:4318"
      response_stream_channel_size: 256 # Required: channel buffer capacity (number of messages)

  persistence:
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports:
      out_port:
        destinations:
          - otap_exporter
          - otlp_exporter
        dispatch_strategy: round_robin
    config:
      path: ./quiver_data  # Platform-appropriate persistent storage location
      segment:
        target_size: 32MB
      wal:
        max_size: 4GB
        flush_interval: 25ms
      retention:
        max_retain_after_ingestion_hours: 72
        size_cap: 500GB
        size_cap_policy: drop_oldest  # or backpressure

  otap_exporter:
    kind: exporter
    plugin_urn: "urn:otel:otap:exporter"
    config:
      grpc_endpoint: "http://{{backend_hostname}}:1235"
      compression_method: zstd
      arrow:
        payload_compression: none
  otlp_exporter:
    kind: exporter
    plugin_urn: "urn:otel:otlp:exporter"
    config:
      grpc_endpoint: "http://127.0.0.1:4318"
      # timeout: "15s"  # Optional: timeout for RPC requests
"""


def test_the_file_of_the_design_is_right_once_its_host_has_a_name() -> None:
    [problem], _ = check(SEED.encode())
    assert "is not an endpoint" in problem.message
    data = SEED.replace("{{backend_hostname}}", "backend").encode()
    problems, remarks = check(data)
    assert not problems
    # round_robin behind a store, zstd for whole messages, and OTLP to a receiver that takes OTAP.
    assert [each.where.rpartition(".")[2] for each in remarks] == [
        *("out_port", "compression_method", "grpc_endpoint")
    ]
    assert "this is otap_receiver, which does not take OTLP" in remarks[2].message
    plan = load(data)
    receiver, exporter = (plan.nodes[name].settings for name in ("otap_receiver", "otap_exporter"))
    assert isinstance(receiver, OtapReceiverSettings)
    assert (str(receiver.address), receiver.requests_max) == ("127.0.0.1:4318", 256)
    assert isinstance(exporter, OtapExporterSettings)
    assert (exporter.target, exporter.payload_compression) == ("backend:1235", "zstd")


GOOD = SEED.replace("{{backend_hostname}}", "backend")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("payload_compression: none", "payload_compression: gzip", "'gzip' is not known"),
        ("payload_compression: none", "payload: none", "unknown key"),
        (
            'listening_addr: "127.0.0.1:4318"',
            'listening_address: "127.0.0.1:4318"',
            "listening_addr is missing",
        ),
        (
            'listening_addr: "127.0.0.1:4318"',
            'listening_addr: "127.0.0.1:4317"',
            "used by otlp_receiver already",
        ),
        ('listening_addr: "127.0.0.1:4318"', 'listening_addr: "4318"', "is not an address"),
        ("compression_method: zstd", "compression_method: brotli", "'brotli' is not known"),
    ],
)
def test_mistakes_in_otap_nodes_are_named(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    problems, _ = check(GOOD.replace(old, new).encode())
    assert any(message in each.message for each in problems), problems


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", ("none", "zstd")),
        ("compression_method: gzip", ("gzip", "none")),
        ("arrow: {payload_compression: lz4}", ("none", "lz4")),
        ("compression_method: gzip\n      arrow.payload_compression: zstd", ("gzip", "zstd")),
    ],
)
def test_what_is_compressed(config: str, expected: tuple[str, str]) -> None:
    old = "compression_method: zstd\n      arrow:\n        payload_compression: none\n"
    settings = load(GOOD.replace(old, config + "\n").encode()).nodes["otap_exporter"].settings
    assert isinstance(settings, OtapExporterSettings)
    assert (settings.compression, settings.payload_compression) == expected


@pytest.fixture
def destination() -> Iterator[Destination]:
    destination = Destination()
    yield destination
    destination.down()


def first_and_second(directory: Path, destination: Destination) -> tuple[Path, Path]:
    """Two files: OTLP in and OTAP out; OTAP in and Parquet and OTLP out."""
    [port] = free_ports(1)
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    first = pipeline(directory / "a", endpoint=f"http://127.0.0.1:{port}").replace(
        b"urn:otel:otlp:exporter", b"urn:otel:otap:exporter"
    )
    second = (
        pipeline(directory / "b", endpoint=destination.endpoint, parquet=True)
        .replace(b"urn:otel:otlp:receiver", b"urn:otel:otap:receiver")
        .replace(b"      listening_addr: 127.0.0.1:0\n", b"      listening_addr: 127.0.0.1:%d\n" % port)
        .replace(b"      http_listening_addr: 127.0.0.1:0\n", b"")
    )
    (directory / "a.yaml").write_bytes(first)
    (directory / "b.yaml").write_bytes(second)
    return directory / "a.yaml", directory / "b.yaml"


def test_everything_from_the_sdk_passes_through_otap_whatever_is_killed(
    tmp_path: Path, destination: Destination
) -> None:
    first, second = first_and_second(tmp_path, destination)
    names = [f"span {number}" for number in range(60)]
    with FlowProcess(first) as flow, FlowProcess(second) as behind:
        assert set(behind.ready["receivers"]["receiver"]) == {"otap"}
        for number in range(3):
            sdk = Sdk(flow, "grpc")
            tracer = sdk.tracers.get_tracer("tests", "1.0")
            for name in names[20 * number : 20 * (number + 1)]:
                with tracer.start_as_current_span(name, attributes={"tags": ["a", "b"], "n": 3}) as span:
                    span.add_event("paid", {"ok": True})
            sdk.meters.get_meter("tests").create_counter(f"orders{number}").add(41, {"shop": "north"})
            sdk.flush()
            sdk.close()
            # With the other side gone, and this side killed; then the other side is killed while it gets it.
            behind.kill()
            flow.kill()
            flow.start()
            behind.start()
        destination.up()
        destination.wait_for("traces", names)
        destination.wait_for("metrics", [f"orders{number}" for number in range(3)])
        assert flow.terminate() == 0
        assert behind.terminate() == 0
    rows = parquet_rows(tmp_path / "b" / "parquet", "traces")
    assert {row["name"] for row in rows} == set(names)
    assert dict(rows[0]["attributes"]) == {"tags": '["a", "b"]', "n": "3"}
    assert dict(rows[0]["events"][0]["attributes"]) == {"ok": "true"}
    assert (rows[0]["scope_name"], rows[0]["scope_version"]) == ("tests", "1.0")
    metrics = {row["name"]: row for row in parquet_rows(tmp_path / "b" / "parquet", "metrics")}
    assert metrics["orders1"]["value_int"] == 41


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_acknowledged_requests_pass_through_otap_whichever_side_is_killed(
    tmp_path: Path, destination: Destination
) -> None:
    randomness = random.Random(int(os.environ.get("FOREBAY_SEED", "7")))
    first, second = first_and_second(tmp_path, destination)
    [port] = free_ports(1)
    old, new = b"  listening_addr: 127.0.0.1:0", b"  listening_addr: 127.0.0.1:%d" % port
    first.write_bytes(first.read_bytes().replace(old, new, 1))
    enough = threading.Event()
    sender = Sender(f"127.0.0.1:{port}", enough)
    sender.start()
    destination.up()
    with FlowProcess(first) as flow, FlowProcess(second) as behind:
        for _ in range(int(os.environ.get("FOREBAY_KILLS", "50"))):
            sender.news.clear()
            assert sender.news.wait(60)
            # Not a wait for something: the moment of the kill is what is random.
            threading.Event().wait(randomness.uniform(0, 0.5))
            victim = randomness.choice([flow, behind])
            victim.kill()
            victim.start()
        enough.set()
        sender.join(60)
        destination.wait_for("traces", sender.acknowledged)
        assert flow.terminate() == 0
        assert behind.terminate() == 0
    assert set(sender.acknowledged) <= set(destination.names("traces"))
