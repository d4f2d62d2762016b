"""The three kinds of telemetry, and what is known of a request before it is taken in.

A request is kept as the bytes that arrived. It is parsed once at the door: what cannot be parsed is refused
while its sender still listens, and everything behind may rely on it. The message itself is thrown away again:
the bytes are what the OTLP exporter sends on, exactly, and what the Parquet exporter decodes in its own time.
Several requests of one kind are joined by joining their bytes, because the wire format of a message that only
has repeated fields is closed under concatenation.

Bounds: the receiver limits the bytes, protobuf the nesting (100 levels), `REQUEST_ITEMS_MAX` the records,
`REQUEST_GROUPS_MAX` what they lie in: a resource without anything in it takes two bytes to send and a turn of
a Python loop to count. `REQUEST_PARTS_MAX` is about what lies in them: an event of a span takes two bytes as
well, and hundreds where it is decoded into columns, long after its sender was told that it is safe. No part
is shorter, so that requests up to twice as many bytes need no look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

__all__ = [
    "REQUEST_GROUPS_MAX",
    "REQUEST_ITEMS_MAX",
    "REQUEST_PARTS_MAX",
    "SIGNALS",
    "Signal",
    "check_count",
    "count_items",
    "items_in",
    "parse",
]

REQUEST_ITEMS_MAX: Final = 250_000
"""Most spans, log records or metrics in one request."""
REQUEST_GROUPS_MAX: Final = 50_000
"""Most resources in one request, and most scopes in all of them."""
REQUEST_PARTS_MAX: Final = 250_000
"""Most data points of metrics in one request, with their exemplars and quantiles; most events and links of
spans."""
_PART_BYTES: Final = 2
"""Of the shortest part: a tag, and a length of 0."""


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
    levels: tuple[str, str, str]
    """Fields of a request: the resources, the scopes in each of them, the items in each of those."""

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
            ("resource_spans", "scope_spans", "spans"),
        ),
        Signal(
            "metrics",
            ExportMetricsServiceRequest,
            ExportMetricsServiceResponse,
            f"{_SERVICE}.metrics.v1.MetricsService",
            "/v1/metrics",
            "rejected_data_points",
            ("resource_metrics", "scope_metrics", "metrics"),
        ),
        Signal(
            "logs",
            ExportLogsServiceRequest,
            ExportLogsServiceResponse,
            f"{_SERVICE}.logs.v1.LogsService",
            "/v1/logs",
            "rejected_log_records",
            ("resource_logs", "scope_logs", "log_records"),
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


def items_in(signal: Signal, message: Any) -> int:
    """The number of spans, log records or metrics."""
    return sum(len(getattr(scope, signal.levels[2])) for scope in _scopes(signal, message))


def count_items(signal: Signal, data: bytes) -> int:
    """Check a request and count what is in it. Raises `FormatError` and `LimitExceeded`."""
    return check_count(signal, parse(signal, data), len(data))


def check_count(signal: Signal, message: Any, size: int) -> int:
    """The number of spans, log records or metrics in a message of `size` bytes. Raises `LimitExceeded`."""
    outer, inner, _ = signal.levels
    resources = getattr(message, outer)
    _check("REQUEST_GROUPS_MAX", REQUEST_GROUPS_MAX, len(resources))
    scopes = sum(len(getattr(each, inner)) for each in resources)
    _check("REQUEST_GROUPS_MAX", REQUEST_GROUPS_MAX, scopes)
    items = items_in(signal, message)
    _check("REQUEST_ITEMS_MAX", REQUEST_ITEMS_MAX, items)
    if size > _PART_BYTES * REQUEST_PARTS_MAX:
        _check("REQUEST_PARTS_MAX", REQUEST_PARTS_MAX, _PARTS[signal.name](message))
    return items


def _scopes(signal: Signal, message: Any) -> Iterator[Any]:
    outer, inner, _ = signal.levels
    return (scope for each in getattr(message, outer) for scope in getattr(each, inner))


def _span_parts(message: Any) -> int:
    return sum(
        len(span.events) + len(span.links)
        for scope in _scopes(SIGNALS["traces"], message)
        for span in scope.spans
    )


def _metric_parts(message: Any) -> int:
    total = 0
    for scope in _scopes(SIGNALS["metrics"], message):
        for metric in scope.metrics:
            kind = metric.WhichOneof("data")
            if kind is None:
                continue
            points = getattr(metric, kind).data_points
            total += len(points)
            inner = "quantile_values" if kind == "summary" else "exemplars"
            if len(points) <= REQUEST_PARTS_MAX:
                total += sum(len(getattr(point, inner)) for point in points)
    return total


_PARTS: Final[dict[str, Callable[[Any], int]]] = {
    "traces": _span_parts,
    "metrics": _metric_parts,
    "logs": lambda _: 0,
}


def _check(name: str, limit: int, actual: int) -> None:
    if actual > limit:
        raise LimitExceeded(name, limit=limit, actual=actual, hint="send smaller batches")
