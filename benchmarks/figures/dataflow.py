"""What the disk costs on the way: a pipeline with persistence against the same one without.

Processes run all the while, `receiver -> exporters` and `receiver -> persistence -> exporters`, with the WAL
synced every 25 ms: to an OTLP destination alone, which is the hardest comparison because such a pipeline
hardly does anything, and to Parquet and OTLP as in the design's example. In turn each gets the same requests
(512 spans, some 150 kB) from 64 senders that wait for their acknowledgements, and the round ends when the
destinations have everything. An acknowledgement means: without persistence, the destinations have it; with
it, the request is synced to disk.

Processor time is that of the pipeline's process alone, all threads, per request that went through it: what
the persistence itself costs, whoever else uses the machine. Time on the clock also has the waiting in it: for
the sync, and for the last segment to be closed. Destinations that keep up get segments before they are files,
as they do by default. No memory is free (`_memory`): what goes to disk would pay
the machine for every new page, several times what writing it costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.figures._memory import made_ready, memory_in_use
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_most

__all__ = ["dataflow_overhead"]

SENDERS = 64
SPANS, ATTRIBUTES = 512, 6
STRETCHES = {"direct": 12.0, "durable": 12.0, "direct both": 4.0, "durable both": 4.0}
"""Turns of three seconds: at the end of each, the last segment waits for its 100 ms to be closed, which in a
stream that goes on nobody waits for. In a turn of one second that is a tenth of the time. With Parquet turns
are of one second: what is taken in meanwhile keeps it busy for ten."""
METHOD = "opentelemetry.proto.collector.trace.v1.TraceService"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

RECEIVER = """
nodes:
  receiver:
    kind: receiver
    plugin_urn: "urn:otel:otlp:receiver"
    out_ports: {{out_port: {{destinations: [{first}]}}}}
    config: {{listening_addr: "127.0.0.1:0"}}
  otlp:
    kind: exporter
    plugin_urn: "urn:otel:otlp:exporter"
    config: {{grpc_endpoint: "http://127.0.0.1:{port}"}}
"""
PARQUET = """
  parquet:
    kind: exporter
    plugin_urn: "urn:otel:parquet:exporter"
    config: {{path: "{path}"}}
"""
PERSISTENCE = """
  persistence:
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports: {{out_port: {{destinations: [{exporters}]}}}}
    config:
      path: "{path}"
      segment: {{target_size: 32MB, max_open_duration: 100ms}}
      wal: {{max_size: 1GB, flush_interval: 25ms}}
      retention: {{size_cap: 8GB}}
"""


@dataclass(slots=True)
class Destination:
    """Counts bytes."""

    server: grpc.aio.Server
    port: int = 0
    received: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for(self, total: int) -> None:
        """Return when so many bytes have arrived."""
        while self.received < total:
            self.news.clear()
            await self.news.wait()


@dataclass(slots=True)
class Pipeline:
    """A process, and a connection to it."""

    process: subprocess.Popen[str]
    address: str
    page: str
    parquet: bool
    """Whether it hands everything to Parquet from a store, so that an acknowledgement comes before that."""
    channel: Any = None
    call: Any = None

    def cpu_s(self) -> float:
        """Seconds of processor time so far, all threads."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text()
        after_name = text.rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S

    def written(self) -> float:
        """Spans that are in Parquet files."""
        with urllib.request.urlopen(f"http://{self.page}/metrics") as answer:
            text = answer.read().decode()
        found = re.search(r'^dataflow_exporter_items_total\{node="parquet".*\} (\S+)$', text, re.M)
        return float(found[1]) if found else 0.0


@suite.benchmark(
    "dataflow overhead",
    "Keeping everything on disk on its way costs the pipeline hardly anything.",
    Figure("time, to OTLP alone, WAL at 25 ms", "durable", "direct", at_most(1.05), Measure.TIME),
    Figure("processor time of the same", "durable cpu", "direct cpu", at_most(1.05), Measure.TIME),
    Figure("time, to Parquet and OTLP", "durable both", "direct both", at_most(1.05), Measure.TIME),
    Figure("processor time, both", "durable both cpu", "direct both cpu", at_most(1.05), Measure.TIME),
)
def dataflow_overhead(bench: Bench) -> Iterator[Variants]:
    """64 senders, requests of 512 spans."""
    request = _request()
    with asyncio.Runner() as runner, ExitStack() as stack:
        memory = stack.enter_context(memory_in_use(bench))
        destination = runner.run(_destination())
        stack.callback(lambda: runner.run(destination.server.stop(None)))
        pipelines: dict[str, Pipeline] = {}
        for name, text in _files(Path(bench.directory), destination.port).items():
            pipelines[name] = _start(Path(bench.directory) / f"{name}.yaml", text, stack)
            pipelines[name].parquet = name == "durable both"
        for each in pipelines.values():
            each.channel = runner.run(_channel(each.address))
            stack.callback(_close, runner, each.channel)
            each.call = each.channel.unary_unary(f"/{METHOD}/Export")

        def run(name: str, seconds: float, by_cpu: bool = False) -> Sample:
            pipeline = pipelines[name]
            cpu, begin = pipeline.cpu_s(), time.perf_counter()
            before = pipeline.written() if pipeline.parquet else 0.0
            sent = runner.run(_send(pipeline, destination, request, seconds))
            while pipeline.parquet and pipeline.written() < before + sent * SPANS:
                time.sleep(0.02)
            passed = pipeline.cpu_s() - cpu if by_cpu else time.perf_counter() - begin
            return Sample(sent / max(passed, 1 / TICKS_PER_S))

        variants = {
            **{
                name: Variant(partial(run, name), "requests/s", stretch=STRETCHES[name]) for name in pipelines
            },
            **{
                f"{name} cpu": Variant(partial(run, name, by_cpu=True), "requests/CPU s")
                for name in pipelines
            },
        }
        yield made_ready(variants, memory.refill)


def _files(directory: Path, port: int) -> dict[str, str]:
    receiver, store, parquet = RECEIVER.format, PERSISTENCE.format, PARQUET.format
    return {
        "direct": receiver(first="otlp", port=port),
        "durable": receiver(first="persistence", port=port)
        + store(exporters="otlp", path=directory / "quiver"),
        "direct both": receiver(first="parquet, otlp", port=port) + parquet(path=directory / "parquet 1"),
        "durable both": receiver(first="persistence", port=port)
        + store(exporters="parquet, otlp", path=directory / "quiver 2")
        + parquet(path=directory / "parquet 2"),
    }


def _request() -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number in range(SPANS):
        span = scope.spans.add(trace_id=os.urandom(16), span_id=os.urandom(8), name=f"GET /orders/{number}")
        span.start_time_unix_nano = span.end_time_unix_nano = 1_700_000_000_000_000_000 + number
        for index in range(ATTRIBUTES):
            span.attributes.add(key=f"http.attribute.{index}").value.string_value = f"value number {number}"
    return request.SerializeToString()


async def _destination() -> Destination:
    destination = Destination(grpc.aio.server(options=[("grpc.max_receive_message_length", -1)]))

    async def export(data: bytes, _: object) -> bytes:
        destination.received += len(data)
        destination.news.set()
        return b""

    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    destination.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD, handlers),))
    destination.port = destination.server.add_insecure_port("127.0.0.1:0")
    await destination.server.start()
    return destination


def _close(runner: asyncio.Runner, channel: grpc.aio.Channel) -> None:
    runner.run(channel.close())


async def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


def _start(path: Path, text: str, stack: ExitStack) -> Pipeline:
    path.write_text(text)
    command = [sys.executable, "-m", "forebay.cli", "dataflow", "run", str(path)]
    process = subprocess.Popen(
        [*command, "--output", "json", "--metrics", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    ready = json.loads(process.stdout.readline())
    return Pipeline(process, ready["receivers"]["receiver"]["grpc"], ready["metrics"], parquet=False)


async def _send(pipeline: Pipeline, destination: Destination, request: bytes, seconds: float) -> int:
    """Send for so long; return the number of requests once all of them are at the destination."""
    before, end, sent = destination.received, time.perf_counter() + seconds, 0

    async def sender() -> None:
        nonlocal sent
        while time.perf_counter() < end:
            await pipeline.call(request)
            sent += 1

    await asyncio.gather(*(sender() for _ in range(SENDERS)))
    await destination.wait_for(before + sent * len(request))
    return sent
