"""Requests as rows and columns: a row per span, per log record, per data point of a metric.

Ids are hexadecimal text, times are timestamps in UTC, enumerations are their names without the prefix.
Attributes are maps from text to text: strings as they are, numbers and truth values as JSON writes them,
lists, maps and bytes (base64) as JSON. Numbers that do not fit (times after 2262) are null. A key that comes
twice has its last value, as with an SDK that sets it again: there are readers (DuckDB) that refuse a map with
a key twice, and with it every query over the directory.

What many rows have in common, above all the attributes of their resource, is in a request once and in each of
its rows: a megabyte of them before ten thousand empty spans becomes ten gigabytes. So each row comes with the
bytes of that, and whoever collects rows counts them.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa

__all__ = ["SCHEMAS", "Row", "repeated_bytes", "rows_of", "table_of"]

Row: TypeAlias = tuple[Any, ...]
_Rows: TypeAlias = Iterator[tuple[Row, int]]

_TEXT: Final = pa.string()
_TIME: Final = pa.timestamp("ns", tz="UTC")
_MAP: Final = pa.map_(_TEXT, _TEXT)
_TIME_MAX: Final = 2**63 - 1
_COMMON: Final = [
    ("resource_attributes", _MAP),
    ("resource_schema_url", _TEXT),
    ("scope_name", _TEXT),
    ("scope_version", _TEXT),
    ("scope_attributes", _MAP),
    ("scope_schema_url", _TEXT),
]
_EVENT: Final = pa.struct(
    [("time", _TIME), ("name", _TEXT), ("attributes", _MAP), ("dropped_attributes_count", pa.uint32())]
)
_LINK: Final = pa.struct(
    [
        ("trace_id", _TEXT),
        ("span_id", _TEXT),
        ("trace_state", _TEXT),
        ("attributes", _MAP),
        ("dropped_attributes_count", pa.uint32()),
        ("flags", pa.uint32()),
    ]
)
_EXEMPLAR: Final = pa.struct(
    [
        ("time", _TIME),
        ("value", pa.float64()),
        ("trace_id", _TEXT),
        ("span_id", _TEXT),
        ("filtered_attributes", _MAP),
    ]
)
_QUANTILE: Final = pa.struct([("quantile", pa.float64()), ("value", pa.float64())])

SCHEMAS: Final = {
    "traces": pa.schema(
        [
            ("trace_id", _TEXT),
            ("span_id", _TEXT),
            ("parent_span_id", _TEXT),
            ("name", _TEXT),
            ("kind", _TEXT),
            ("start_time", _TIME),
            ("end_time", _TIME),
            ("duration_ns", pa.int64()),
            ("status_code", _TEXT),
            ("status_message", _TEXT),
            ("attributes", _MAP),
            ("events", pa.list_(_EVENT)),
            ("links", pa.list_(_LINK)),
            ("trace_state", _TEXT),
            ("flags", pa.uint32()),
            ("dropped_attributes_count", pa.uint32()),
            ("dropped_events_count", pa.uint32()),
            ("dropped_links_count", pa.uint32()),
            *_COMMON,
        ]
    ),
    "logs": pa.schema(
        [
            ("time", _TIME),
            ("observed_time", _TIME),
            ("severity_number", pa.int32()),
            ("severity_text", _TEXT),
            ("body", _TEXT),
            ("event_name", _TEXT),
            ("attributes", _MAP),
            ("trace_id", _TEXT),
            ("span_id", _TEXT),
            ("flags", pa.uint32()),
            ("dropped_attributes_count", pa.uint32()),
            *_COMMON,
        ]
    ),
    "metrics": pa.schema(
        [
            ("name", _TEXT),
            ("type", _TEXT),
            ("description", _TEXT),
            ("unit", _TEXT),
            ("start_time", _TIME),
            ("time", _TIME),
            ("attributes", _MAP),
            ("value", pa.float64()),
            ("value_int", pa.int64()),
            ("is_monotonic", pa.bool_()),
            ("aggregation_temporality", _TEXT),
            ("count", pa.uint64()),
            ("sum", pa.float64()),
            ("min", pa.float64()),
            ("max", pa.float64()),
            ("bucket_counts", pa.list_(pa.uint64())),
            ("explicit_bounds", pa.list_(pa.float64())),
            ("scale", pa.int32()),
            ("zero_count", pa.uint64()),
            ("zero_threshold", pa.float64()),
            ("positive_offset", pa.int32()),
            ("positive_bucket_counts", pa.list_(pa.uint64())),
            ("negative_offset", pa.int32()),
            ("negative_bucket_counts", pa.list_(pa.uint64())),
            ("quantiles", pa.list_(_QUANTILE)),
            ("exemplars", pa.list_(_EXEMPLAR)),
            ("flags", pa.uint32()),
            ("metadata", _MAP),
            *_COMMON,
        ]
    ),
}


def table_of(signal: str, rows: Sequence[Row]) -> pa.Table:
    """Rows as a table."""
    schema = SCHEMAS[signal]
    columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [
        _maps(column) if field.type == _MAP else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _maps(column: Sequence[Sequence[tuple[str, str | None]]]) -> pa.Array:
    """Maps from flat lists of keys and values: several times as fast as from a list of lists of pairs."""
    offsets = list(itertools.accumulate(map(len, column), initial=0))
    keys = [pair[0] for pairs in column for pair in pairs]
    values = [pair[1] for pairs in column for pair in pairs]
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(keys, _TEXT), pa.array(values, _TEXT)
    )


def rows_of(signal: str, message: Any) -> _Rows:
    """The rows of one request, each with the bytes in it that it shares with others."""
    return _ROWS[signal](message)


def repeated_bytes(signal: str, message: Any) -> int:
    """The sum of these bytes over all rows, without making them."""
    return sum(size * count for size, count in _REPEATED[signal](message))


# Traces.


def _trace_rows(message: Any) -> _Rows:
    for resource in message.resource_spans:
        for scope in resource.scope_spans:
            common, size = _common(resource, scope), _common_bytes(resource, scope)
            for span in scope.spans:
                yield (*_span(span), *common), size


def _trace_repeated(message: Any) -> Iterator[tuple[int, int]]:
    for resource in message.resource_spans:
        for scope in resource.scope_spans:
            yield _common_bytes(resource, scope), len(scope.spans)


def _span(span: Any) -> Row:
    begin, end = span.start_time_unix_nano, span.end_time_unix_nano
    return (
        _hex(span.trace_id),
        _hex(span.span_id),
        _hex(span.parent_span_id),
        span.name,
        _SPAN_KINDS.get(span.kind, str(span.kind)),
        _time(begin),
        _time(end),
        end - begin if begin <= end <= _TIME_MAX else None,
        _STATUS_CODES.get(span.status.code, str(span.status.code)),
        span.status.message or None,
        _attributes(span.attributes),
        [
            (
                _time(each.time_unix_nano),
                each.name,
                _attributes(each.attributes),
                each.dropped_attributes_count,
            )
            for each in span.events
        ],
        [
            (
                _hex(each.trace_id),
                _hex(each.span_id),
                each.trace_state or None,
                _attributes(each.attributes),
                each.dropped_attributes_count,
                each.flags,
            )
            for each in span.links
        ],
        span.trace_state or None,
        span.flags,
        span.dropped_attributes_count,
        span.dropped_events_count,
        span.dropped_links_count,
    )


# Logs.


def _log_rows(message: Any) -> _Rows:
    for resource in message.resource_logs:
        for scope in resource.scope_logs:
            common, size = _common(resource, scope), _common_bytes(resource, scope)
            for log in scope.log_records:
                row = (
                    _time(log.time_unix_nano),
                    _time(log.observed_time_unix_nano),
                    log.severity_number,
                    log.severity_text or None,
                    _text(log.body) if log.HasField("body") else None,
                    log.event_name or None,
                    _attributes(log.attributes),
                    _hex(log.trace_id),
                    _hex(log.span_id),
                    log.flags,
                    log.dropped_attributes_count,
                    *common,
                )
                yield row, size


def _log_repeated(message: Any) -> Iterator[tuple[int, int]]:
    for resource in message.resource_logs:
        for scope in resource.scope_logs:
            yield _common_bytes(resource, scope), len(scope.log_records)


# Metrics.


def _metric_rows(message: Any) -> _Rows:
    for resource in message.resource_metrics:
        for scope in resource.scope_metrics:
            common, common_size = _common(resource, scope), _common_bytes(resource, scope)
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                if kind is None:
                    continue
                data = getattr(metric, kind)
                size = common_size + _head_bytes(metric)
                head = (metric.name, kind, metric.description or None, metric.unit or None)
                metadata = _attributes(metric.metadata)
                temporality = _TEMPORALITIES.get(getattr(data, "aggregation_temporality", 0))
                monotonic = data.is_monotonic if kind == "sum" else None
                figures = _FIGURES[kind]
                for point in data.data_points:
                    row = (
                        *head,
                        _time(point.start_time_unix_nano),
                        _time(point.time_unix_nano),
                        _attributes(point.attributes),
                        *figures(point, monotonic, temporality),
                        [_exemplar(each) for each in getattr(point, "exemplars", ())],
                        point.flags,
                        metadata,
                        *common,
                    )
                    yield row, size


def _metric_repeated(message: Any) -> Iterator[tuple[int, int]]:
    for resource in message.resource_metrics:
        for scope in resource.scope_metrics:
            size = _common_bytes(resource, scope)
            for metric in scope.metrics:
                if (kind := metric.WhichOneof("data")) is not None:
                    yield size + _head_bytes(metric), len(getattr(metric, kind).data_points)


def _head_bytes(metric: Any) -> int:
    size: int = sum(each.ByteSize() for each in metric.metadata)
    return size + len(metric.name) + len(metric.description) + len(metric.unit)


def _number(point: Any, monotonic: bool | None, temporality: str | None) -> Row:
    kind = point.WhichOneof("value")
    exact = point.as_int if kind == "as_int" else None
    value = None if kind is None else float(exact) if exact is not None else point.as_double
    return (value, exact, monotonic, temporality, *[None] * 14)


def _histogram(point: Any, _: bool | None, temporality: str | None) -> Row:
    return (
        *(None, None, None, temporality),
        *_totals(point),
        list(point.bucket_counts),
        list(point.explicit_bounds),
        *[None] * 8,
    )


def _exponential(point: Any, _: bool | None, temporality: str | None) -> Row:
    return (
        *(None, None, None, temporality),
        *_totals(point),
        *(None, None),
        *(point.scale, point.zero_count, point.zero_threshold),
        *(point.positive.offset, list(point.positive.bucket_counts)),
        *(point.negative.offset, list(point.negative.bucket_counts)),
        None,
    )


def _summary(point: Any, _: bool | None, __: str | None) -> Row:
    quantiles = [(each.quantile, each.value) for each in point.quantile_values]
    return (None, None, None, None, point.count, point.sum, *[None] * 11, quantiles)


def _totals(point: Any) -> Row:
    optional = [getattr(point, name) if point.HasField(name) else None for name in ("sum", "min", "max")]
    return (point.count, *optional)


def _exemplar(each: Any) -> Row:
    kind = each.WhichOneof("value")
    value = None if kind is None else float(getattr(each, kind))
    return (
        _time(each.time_unix_nano),
        value,
        _hex(each.trace_id),
        _hex(each.span_id),
        _attributes(each.filtered_attributes),
    )


# Parts that all have.


def _common(resource: Any, scope: Any) -> Row:
    inner = scope.scope
    return (
        _attributes(resource.resource.attributes),
        resource.schema_url or None,
        inner.name or None,
        inner.version or None,
        _attributes(inner.attributes),
        scope.schema_url or None,
    )


def _common_bytes(resource: Any, scope: Any) -> int:
    inner: int = resource.resource.ByteSize() + scope.scope.ByteSize()
    return inner + len(resource.schema_url) + len(scope.schema_url)


def _hex(data: bytes) -> str | None:
    return data.hex() or None


def _time(nanoseconds: int) -> int | None:
    return nanoseconds if 0 < nanoseconds <= _TIME_MAX else None


def _attributes(pairs: Any) -> list[tuple[str, str | None]]:
    # Most values are texts; asking which kind a value is costs as much as all the rest.
    return list({pair.key: pair.value.string_value or _text(pair.value) for pair in pairs}.items())


def _text(value: Any) -> str | None:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        text: str = value.string_value
        return text
    if kind == "double_value":
        return json.dumps(value.double_value)
    plain = _plain(value)
    return None if plain is None else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    inner = getattr(value, kind)
    if kind == "array_value":
        return [_plain(each) for each in inner.values]
    if kind == "kvlist_value":
        return {each.key: _plain(each.value) for each in inner.values}
    if kind == "double_value" and not math.isfinite(inner):
        # JSON has no number for it; a text is what protobuf writes.
        return json.dumps(inner)
    return base64.b64encode(inner).decode() if kind == "bytes_value" else inner


_ROWS: Final[dict[str, Callable[[Any], _Rows]]] = {
    "traces": _trace_rows,
    "logs": _log_rows,
    "metrics": _metric_rows,
}
_REPEATED: Final[dict[str, Callable[[Any], Iterator[tuple[int, int]]]]] = {
    "traces": _trace_repeated,
    "logs": _log_repeated,
    "metrics": _metric_repeated,
}
_FIGURES: Final[dict[str, Callable[[Any, bool | None, str | None], Row]]] = {
    "gauge": _number,
    "sum": _number,
    "histogram": _histogram,
    "exponential_histogram": _exponential,
    "summary": _summary,
}
_SPAN_KINDS: Final = {0: "UNSPECIFIED", 1: "INTERNAL", 2: "SERVER", 3: "CLIENT", 4: "PRODUCER", 5: "CONSUMER"}
_STATUS_CODES: Final = {0: "UNSET", 1: "OK", 2: "ERROR"}
_TEMPORALITIES: Final = {1: "DELTA", 2: "CUMULATIVE"}
