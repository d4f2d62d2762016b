"""A destination that speaks OTLP, requests to send, and the command as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import pyarrow.parquet as pq
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from forebay.dataflow._signals import SIGNALS, Signal, parse
from forebay.testing._servers import guard
from forebay.testing._servers.ports import free_ports

PATIENCE_S = 60.0


def traces(*names: str) -> bytes:
    """A request with a span for each name."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for name in names:
        span = scope.spans.add(name=name, trace_id=b"\x01" * 16, span_id=b"\x02" * 8)
        span.start_time_unix_nano = 1_700_000_000_000_000_000
    return request.SerializeToString()


def logs(*bodies: str) -> bytes:
    """A request with a log record for each body."""
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for body in bodies:
        scope.log_records.add(time_unix_nano=1_700_000_000_000_000_000).body.string_value = body
    return request.SerializeToString()


def metrics(*names: str) -> bytes:
    """A request with a gauge for each name."""
    request = ExportMetricsServiceRequest()
    scope = request.resource_metrics.add().scope_metrics.add()
    for name in names:
        scope.metrics.add(name=name).gauge.data_points.add(as_int=7, time_unix_nano=1_700_000_000_000_000_000)
    return request.SerializeToString()


def names_in(signal: str, data: bytes) -> list[str]:
    """What is in a request: names of spans and metrics, bodies of logs."""
    message = parse(SIGNALS[signal], data)
    if signal == "traces":
        return [s.name for r in message.resource_spans for c in r.scope_spans for s in c.spans]
    if signal == "metrics":
        return [m.name for r in message.resource_metrics for c in r.scope_metrics for m in c.metrics]
    return [
        log.body.string_value for r in message.resource_logs for c in r.scope_logs for log in c.log_records
    ]


class Destination:
    """A real OTLP server. It can go down and come back on the same port, and answer as it is told."""

    def __init__(self) -> None:
        [self.port] = free_ports(1)
        self.requests: list[tuple[str, bytes]] = []
        self.answer: Callable[[str, bytes, grpc.ServicerContext], bytes] = lambda *_: b""
        self.metadata: list[tuple[str, str]] = []
        self._news = threading.Condition()
        self._server: grpc.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(
                    each.grpc_service, {"Export": grpc.unary_unary_rpc_method_handler(self._handler(each))}
                )
                for each in SIGNALS.values()
            )
        )
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def down(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def names(self, signal: str) -> Counter[str]:
        """How often each name arrived."""
        with self._news:
            return Counter(
                name for kind, data in self.requests if kind == signal for name in names_in(kind, data)
            )

    def wait_for(self, signal: str, names: Sequence[str]) -> None:
        """Return when all of these have arrived."""
        deadline = time.monotonic() + PATIENCE_S
        while missing := set(names) - set(self.names(signal)):
            with self._news:
                assert time.monotonic() < deadline, f"missing: {sorted(missing)[:10]}"
                self._news.wait(0.5)

    def _handler(self, signal: Signal) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def export(data: bytes, context: grpc.ServicerContext) -> bytes:
            answer = self.answer(signal.name, data, context)  # aborts by raising
            with self._news:
                self.requests.append((signal.name, data))
                self.metadata = [(str(key), str(value)) for key, value in context.invocation_metadata()]
                self._news.notify_all()
            return answer

        return export


class FlowProcess:
    """`forebay dataflow run FILE` as a process of its own."""

    def __init__(self, path: Path, *options: str) -> None:
        self._command = [
            sys.executable,
            "-m",
            "forebay.cli",
            "dataflow",
            "run",
            str(path),
            "--output",
            "json",
        ]
        self._command += options
        self._errors = path.with_suffix(".stderr")
        self._process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] = {}

    def start(self) -> None:
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
            )
        guard.watch(self._process.pid)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._errors.read_text()
        self.ready = json.loads(line)

    @property
    def grpc(self) -> str:
        return str(self.ready["receivers"]["receiver"]["grpc"])

    @property
    def http(self) -> str:
        return str(self.ready["receivers"]["receiver"]["http"])

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def terminate(self) -> int:
        return self.end(signal.SIGTERM)

    def end(self, number: signal.Signals, *, once: bool = True) -> int:
        """Send a signal by the process's own id, once or until it has ended, and return its status."""
        process = self._process
        if process is None:
            return 0
        process.send_signal(number)
        while not once and process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)
        status = process.wait(PATIENCE_S)
        guard.forget(process.pid)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
        return status

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()


@contextlib.contextmanager
def calls(address: str) -> Iterator[dict[str, Callable[..., bytes]]]:
    """A function per signal that sends a request over gRPC."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.min_reconnect_backoff_ms", 20),
        ("grpc.max_reconnect_backoff_ms", 100),
    ]
    with grpc.insecure_channel(address, options=options) as channel:
        yield {name: channel.unary_unary(signal.grpc_method) for name, signal in SIGNALS.items()}


async def until(condition: Callable[[], object]) -> None:
    """Return when it holds; fail when it never does."""
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


def parquet_rows(path: Path, signal: str) -> list[dict[str, Any]]:
    """All rows of a signal, from all files."""
    rows: list[dict[str, Any]] = []
    for file in sorted((path / f"signal={signal}").rglob("*.parquet")):
        rows += pq.ParquetFile(file).read().to_pylist()
    return rows
