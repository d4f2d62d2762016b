"""The three kinds of telemetry, and what is known of a request before it is taken in.

A request is kept as the bytes that arrived. It is parsed once at the door: what cannot be parsed is refused
while its sender still listens, and everything behind may rely on it. The message itself is thrown away again:
the bytes are what the OTLP exporter sends on, exactly, and what the Parquet exporter decodes in its own time.
Several requests of one kind are joined by joining their bytes, because the wire format of a message that only
has repeated fields is closed under concatenation.

Bounds: the receiver limits the bytes, protobuf the nesting (100 levels), `REQUEST_ITEMS_MAX` the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from forebay.errors import FormatError, LimitExceeded

__all__ = ["REQUEST_ITEMS_MAX", "SIGNALS", "Signal", "count_items", "parse"]

REQUEST_ITEMS_MAX: Final = 250_000
"""Most spans, log records or metrics in one request."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A kind of telemetry."""

    name: str
    """`traces`, `metrics` or `logs`."""
    request: type[Message]
    response: type[Message]
    grpc_service: str
    http_path: str
    rejected_field: str
    """In a response: how many items the other side did not take."""
    counts: Callable[[Any], int]

    @property
    def grpc_method(self) -> str:
        """The full name of its one method."""
        return f"/{self.grpc_service}/Export"


_SERVICE = "opentelemetry.proto.collector"

SIGNALS: Final = {
    signal.name: signal
    for signal in (
        Signal(
            "traces",
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
            f"{_SERVICE}.trace.v1.TraceService",
            "/v1/traces",
            "rejected_spans",
            lambda message: sum(
                len(scope.spans) for each in message.resource_spans for scope in each.scope_spans
            ),
        ),
        Signal(
            "metrics",
            ExportMetricsServiceRequest,
            ExportMetricsServiceResponse,
            f"{_SERVICE}.metrics.v1.MetricsService",
            "/v1/metrics",
            "rejected_data_points",
            lambda message: sum(
                len(scope.metrics) for each in message.resource_metrics for scope in each.scope_metrics
            ),
        ),
        Signal(
            "logs",
            ExportLogsServiceRequest,
            ExportLogsServiceResponse,
            f"{_SERVICE}.logs.v1.LogsService",
            "/v1/logs",
            "rejected_log_records",
            lambda message: sum(
                len(scope.log_records) for each in message.resource_logs for scope in each.scope_logs
            ),
        ),
    )
}


def parse(signal: Signal, data: bytes) -> Any:
    """The message of a request. Raises `FormatError`."""
    try:
        return signal.request.FromString(data)
    except (DecodeError, ValueError) as error:
        raise FormatError(
            f"not a request for {signal.name}: {str(error)[:200]}", hint="send OTLP in protobuf"
        ) from error


def count_items(signal: Signal, data: bytes) -> int:
    """Check a request and count what is in it. Raises `FormatError` and `LimitExceeded`."""
    return check_count(signal, parse(signal, data))


def check_count(signal: Signal, message: Any) -> int:
    """The number of spans, log records or metrics. Raises `LimitExceeded`."""
    items = signal.counts(message)
    if items > REQUEST_ITEMS_MAX:
        raise LimitExceeded(
            "REQUEST_ITEMS_MAX", limit=REQUEST_ITEMS_MAX, actual=items, hint="send smaller batches"
        )
    return items
