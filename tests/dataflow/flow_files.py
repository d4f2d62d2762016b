"""Dataflow files for tests, made of a good one and a change to it."""

from __future__ import annotations

from pathlib import Path

GOOD = """\
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
      http_listening_addr: "127.0.0.1:4318"
      response_stream_channel_size: 256 # requests under way
  persistence:
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports:
      out_port:
        destinations:
          - parquet
          - otlp_exporter
        dispatch_strategy: broadcast
    config:
      path: ./quiver_data
      segment:
        target_size: 32MB
      wal:
        max_size: 4GB
        flush_interval: 25ms
      retention:
        max_retain_after_ingestion_hours: 72
        size_cap: 500GB
        size_cap_policy: drop_oldest
  parquet:
    kind: exporter
    plugin_urn: "urn:otel:parquet:exporter"
    config:
      path: ./parquet
  otlp_exporter:
    kind: exporter
    plugin_urn: "urn:otel:otlp:exporter"
    config:
      grpc_endpoint: "http://127.0.0.1:4320"
      compression_method: gzip
      timeout: "15s"
"""


def changed(old: str, new: str, text: str = GOOD) -> bytes:
    """The good file with one place changed."""
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    return text.replace(old, new).encode()


def line_of(data: bytes, piece: str) -> int:
    """The line on which a piece of text stands."""
    before, found, _ = data.decode().partition(piece)
    assert found
    return before.count("\n") + 1


def pipeline(
    directory: Path,
    *,
    endpoint: str | None = None,
    parquet: bool = False,
    strategy: str = "broadcast",
    open_ms: int = 100,
    flush_ms: int = 5,
    cap: str = "1GiB",
    more_receiver: str = "",
    more_persistence: str = "",
) -> bytes:
    """A file whose receiver takes free ports, with the exporters asked for."""
    exporters, names = "", []
    if endpoint is not None:
        names.append("otlp_exporter")
        exporters += f"""
  otlp_exporter:
    kind: exporter
    plugin_urn: "urn:otel:otlp:exporter"
    config: {{grpc_endpoint: "{endpoint}", timeout: 5s}}
"""
    if parquet:
        names.append("parquet")
        exporters += f"""
  parquet:
    kind: exporter
    plugin_urn: "urn:otel:parquet:exporter"
    config: {{path: "{directory / "parquet"}"}}
"""
    return f"""
nodes:
  receiver:
    kind: receiver
    plugin_urn: "urn:otel:otlp:receiver"
    out_ports: {{out_port: {{destinations: [persistence]}}}}
    config:
      listening_addr: 127.0.0.1:0
      http_listening_addr: 127.0.0.1:0
{more_receiver}
  persistence:
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports: {{out_port: {{destinations: [{", ".join(names)}], dispatch_strategy: {strategy}}}}}
    config:
      path: "{directory / "quiver"}"
      segment: {{target_size: 1MB, max_open_duration: {open_ms}ms}}
      wal: {{max_size: 4MB, flush_interval: {flush_ms}ms}}
      retention: {{size_cap: {cap}}}
{more_persistence}
{exporters}""".encode()
