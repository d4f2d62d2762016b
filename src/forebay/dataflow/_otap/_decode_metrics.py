"""Metrics: a table of metrics, a table of data points for each of four kinds, exemplars, attributes of all.

metric_type   1 gauge   2 sum   3 histogram   4 exponential histogram   5 summary
data points   numbers           histograms    exponential histograms    summaries
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from forebay.dataflow._otap._cbor import Reader
from forebay.dataflow._otap._groups import Groups
from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap._table import NO_ID, Table
from forebay.dataflow._otap._types import (
    BOOL,
    F64,
    I32,
    I64,
    SPAN_ID,
    TEXT,
    TIME,
    TRACE_ID,
    U8,
    U16,
    U32,
    U64,
    U64_MASK,
    Tables,
)
from forebay.dataflow._otap._values import attach

__all__ = ["ALIKE_EXEMPLARS", "KINDS", "POINTS", "PointTables", "decode_metrics"]

KINDS: Final = ("", "gauge", "sum", "histogram", "exponential_histogram", "summary")
"""Field of a metric by the number of its type."""
ALIKE_EXEMPLARS: Final = (("int_value", I64), ("double_value", F64))
_COUNTS: Final = pa.list_(U64)
_BOUNDS: Final = pa.list_(F64)


@dataclass(frozen=True, slots=True)
class PointTables:
    """Tables of one kind of data points."""

    kinds: tuple[str, ...]
    points: PayloadType
    attributes: PayloadType
    exemplars: PayloadType | None = None
    exemplar_attributes: PayloadType | None = None


POINTS: Final = (
    PointTables(
        ("gauge", "sum"),
        PayloadType.NUMBER_POINTS,
        PayloadType.NUMBER_ATTRS,
        PayloadType.NUMBER_EXEMPLARS,
        PayloadType.NUMBER_EXEMPLAR_ATTRS,
    ),
    PointTables(
        ("histogram",),
        PayloadType.HISTOGRAM_POINTS,
        PayloadType.HISTOGRAM_ATTRS,
        PayloadType.HISTOGRAM_EXEMPLARS,
        PayloadType.HISTOGRAM_EXEMPLAR_ATTRS,
    ),
    PointTables(
        ("exponential_histogram",),
        PayloadType.EXP_HISTOGRAM_POINTS,
        PayloadType.EXP_HISTOGRAM_ATTRS,
        PayloadType.EXP_HISTOGRAM_EXEMPLARS,
        PayloadType.EXP_HISTOGRAM_EXEMPLAR_ATTRS,
    ),
    PointTables(("summary",), PayloadType.SUMMARY_POINTS, PayloadType.SUMMARY_ATTRS),
)


def decode_metrics(tables: Tables, groups: Groups, reader: Reader) -> None:
    """Fill the groups."""
    root = tables[PayloadType.METRICS]
    owners: dict[int, Any] = {}
    rows = zip(
        groups.scopes(),
        root.ids("id", U16),
        root.values("metric_type", U8, 0, required=True),
        root.values("name", TEXT, "", required=True),
        root.values("description", TEXT, ""),
        root.values("unit", TEXT, ""),
        root.values("aggregation_temporality", I32, 0),
        root.values("is_monotonic", BOOL, False),
        strict=True,
    )
    for group, ident, kind, name, description, unit, temporality, monotonic in rows:
        if kind >= len(KINDS):
            raise root.wrong(f"a metric of type {kind}")
        metric = group.metrics.add(name=name, description=description, unit=unit)
        if kind:
            data = getattr(metric, KINDS[kind])
            data.SetInParent()
            if kind not in (1, 5):
                data.aggregation_temporality = temporality
            if kind == 2:
                data.is_monotonic = monotonic
        if ident != NO_ID:
            owners[ident] = metric
    attach(tables.get(PayloadType.METRIC_ATTRS), owners, reader, U16, "metadata")
    for each in POINTS:
        _points(tables, each, owners, reader)


def _points(tables: Tables, which: PointTables, metrics: Mapping[int, Any], reader: Reader) -> None:
    table = tables.get(which.points)
    if table is None:
        return
    lists: dict[int, Any] = {}
    for ident, metric in metrics.items():
        kind = metric.WhichOneof("data")
        lists[ident] = getattr(metric, kind).data_points if kind in which.kinds else None
    owners: dict[int, Any] = {}
    rows_of, fill = _ROWS[which.points]
    rows = zip(
        table.ids("id", U32),
        table.parents(U16, None),
        table.values("start_time_unix_nano", TIME, 0),
        table.values("time_unix_nano", TIME, 0),
        table.values("flags", U32, 0),
        rows_of(table),
        strict=True,
    )
    for ident, parent, start, time, flags, row in rows:
        if parent not in lists:
            continue
        points = lists[parent]
        if points is None:
            raise table.wrong(f"points of a metric of another type, id {parent}")
        point = points.add(start_time_unix_nano=start & U64_MASK, time_unix_nano=time & U64_MASK, flags=flags)
        fill(point, row)
        if ident != NO_ID:
            owners[ident] = point
    attach(tables.get(which.attributes), owners, reader, U32)
    if which.exemplars is not None and which.exemplar_attributes is not None:
        _exemplars(tables.get(which.exemplars), tables.get(which.exemplar_attributes), owners, reader)


_Row = tuple[Any, ...]


def _number_rows(table: Table) -> Iterator[_Row]:
    return zip(table.values("int_value", I64, None), table.values("double_value", F64, None), strict=True)


def _fill_number(point: Any, row: _Row) -> None:
    integer, double = row
    if integer is not None:
        point.as_int = integer
    elif double is not None:
        point.as_double = double


def _histogram_rows(table: Table) -> Iterator[_Row]:
    return zip(
        *_totals(table),
        table.values("bucket_counts", _COUNTS, ()),
        table.values("explicit_bounds", _BOUNDS, ()),
        strict=True,
    )


def _fill_histogram(point: Any, row: _Row) -> None:
    _fill_totals(point, row)
    point.bucket_counts.extend(row[4])
    point.explicit_bounds.extend(row[5])


def _exponential_rows(table: Table) -> Iterator[_Row]:
    return zip(
        *_totals(table),
        table.values("scale", I32, 0),
        table.values("zero_count", U64, 0),
        table.values("zero_threshold", F64, 0.0),
        table.values("positive.offset", I32, 0),
        table.values("positive.bucket_counts", _COUNTS, ()),
        table.values("negative.offset", I32, 0),
        table.values("negative.bucket_counts", _COUNTS, ()),
        strict=True,
    )


def _fill_exponential(point: Any, row: _Row) -> None:
    _fill_totals(point, row)
    point.scale, point.zero_count, point.zero_threshold = row[4:7]
    for buckets, offset, counts in ((point.positive, *row[7:9]), (point.negative, *row[9:11])):
        if offset or counts:
            buckets.offset = offset
            buckets.bucket_counts.extend(counts)


def _summary_rows(table: Table) -> Iterator[_Row]:
    return zip(
        table.values("count", U64, 0),
        table.values("sum", F64, 0.0),
        table.pairs("quantile", ("quantile", "value")),
        strict=True,
    )


def _fill_summary(point: Any, row: _Row) -> None:
    point.count, point.sum, pairs = row
    for quantile, value in pairs:
        point.quantile_values.add(quantile=quantile, value=value)


def _totals(table: Table) -> tuple[Any, ...]:
    optional = (table.values(name, F64, None) for name in ("sum", "min", "max"))
    return table.values("count", U64, 0), *optional


def _fill_totals(point: Any, row: _Row) -> None:
    point.count = row[0]
    for name, value in zip(("sum", "min", "max"), row[1:4], strict=True):
        if value is not None:
            setattr(point, name, value)


def _exemplars(
    table: Table | None, attributes: Table | None, points: Mapping[int, Any], reader: Reader
) -> None:
    if table is None:
        return
    owners: dict[int, Any] = {}
    rows = zip(
        table.ids("id", U32),
        table.parents(U32, table.alike(ALIKE_EXEMPLARS)),
        table.values("time_unix_nano", TIME, 0),
        table.values("int_value", I64, None),
        table.values("double_value", F64, None),
        table.optional_ids("span_id", SPAN_ID),
        table.optional_ids("trace_id", TRACE_ID),
        strict=True,
    )
    for ident, parent, time, integer, double, span_id, trace in rows:
        if parent not in points:
            continue
        exemplar = points[parent].exemplars.add(
            time_unix_nano=time & U64_MASK, span_id=span_id, trace_id=trace
        )
        if integer is not None:
            exemplar.as_int = integer
        elif double is not None:
            exemplar.as_double = double
        if ident != NO_ID:
            owners[ident] = exemplar
    attach(attributes, owners, reader, U32, "filtered_attributes")


_ROWS: Final[dict[PayloadType, tuple[Callable[[Table], Iterator[_Row]], Callable[[Any, _Row], None]]]] = {
    PayloadType.NUMBER_POINTS: (_number_rows, _fill_number),
    PayloadType.HISTOGRAM_POINTS: (_histogram_rows, _fill_histogram),
    PayloadType.EXP_HISTOGRAM_POINTS: (_exponential_rows, _fill_exponential),
    PayloadType.SUMMARY_POINTS: (_summary_rows, _fill_summary),
}
