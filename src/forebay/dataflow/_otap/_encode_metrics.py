"""Metrics of a request as tables; the counterpart of `_decode_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from forebay.dataflow._otap._build import Column, column, ids, make_struct, make_table, parents, required
from forebay.dataflow._otap._decode_metrics import ALIKE_EXEMPLARS, KINDS, POINTS, PointTables
from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap._rows import Attributes, Item, common_columns, fixed, signed
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
)

__all__ = ["encode_metrics"]

_COUNTS: Final = pa.list_(U64)
_BOUNDS: Final = pa.list_(F64)
_QUANTILES: Final = pa.list_(pa.struct([("quantile", F64), ("value", F64)]))
_Tables = dict[PayloadType, pa.RecordBatch]


def encode_metrics(rows: Sequence[Item], attributes: list[Attributes]) -> _Tables:
    """The tables, without those of attributes."""
    of_metrics = Attributes(PayloadType.METRIC_ATTRS, U16)
    attributes.append(of_metrics)
    common = common_columns(rows, attributes)
    metrics = [row.item for row in rows]
    kinds = [metric.WhichOneof("data") or "" for metric in metrics]
    for number, metric in enumerate(metrics):
        of_metrics.add(number, metric.metadata)
    bodies = [getattr(metric, kind, None) for metric, kind in zip(metrics, kinds, strict=True)]
    tables = {
        PayloadType.METRICS: make_table(
            [
                *common,
                required("metric_type", U8, [KINDS.index(kind) for kind in kinds]),
                required("name", TEXT, [each.name for each in metrics]),
                column("description", TEXT, [each.description for each in metrics], ""),
                column("unit", TEXT, [each.unit for each in metrics], ""),
                column(
                    "aggregation_temporality",
                    I32,
                    [getattr(each, "aggregation_temporality", None) for each in bodies],
                ),
                column("is_monotonic", BOOL, [getattr(each, "is_monotonic", None) for each in bodies]),
            ]
        )
    }
    for which in POINTS:
        points = [
            (number, point)
            for number, (kind, body) in enumerate(zip(kinds, bodies, strict=True))
            if kind in which.kinds and body is not None
            for point in body.data_points
        ]
        if points:
            tables |= _points(which, points, attributes)
    return tables


def _points(which: PointTables, rows: Sequence[tuple[int, Any]], attributes: list[Attributes]) -> _Tables:
    of_points = Attributes(which.attributes, U32)
    attributes.append(of_points)
    points = [point for _, point in rows]
    for number, point in enumerate(points):
        of_points.add(number, point.attributes)
    batch = make_table(
        [
            ids("id", U32, range(len(points))),
            required("start_time_unix_nano", TIME, [signed(each.start_time_unix_nano) for each in points]),
            required("time_unix_nano", TIME, [signed(each.time_unix_nano) for each in points]),
            *_COLUMNS[which.points](points),
            column("flags", U32, [each.flags for each in points], 0),
        ]
    )
    tables = {which.points: parents(which.points, batch, [owner for owner, _ in rows], U16, lambda _: None)}
    if which.exemplars is not None:
        tables |= _exemplars(which, points, attributes)
    return tables


def _exemplars(which: PointTables, points: Sequence[Any], attributes: list[Attributes]) -> _Tables:
    assert which.exemplars is not None and which.exemplar_attributes is not None
    rows = [(number, each) for number, point in enumerate(points) for each in point.exemplars]
    if not rows:
        return {}
    of_exemplars = Attributes(which.exemplar_attributes, U32)
    attributes.append(of_exemplars)
    exemplars = [each for _, each in rows]
    for number, each in enumerate(exemplars):
        of_exemplars.add(number, each.filtered_attributes)
    batch = make_table(
        [
            ids("id", U32, range(len(rows))),
            required("time_unix_nano", TIME, [signed(each.time_unix_nano) for each in exemplars]),
            *_either(exemplars),
            column("span_id", SPAN_ID, [fixed(each.span_id, 8) for each in exemplars]),
            column("trace_id", TRACE_ID, [fixed(each.trace_id, 16) for each in exemplars]),
        ]
    )
    owners = [number for number, _ in rows]
    return {
        which.exemplars: parents(
            which.exemplars, batch, owners, U32, lambda table: table.alike(ALIKE_EXEMPLARS)
        )
    }


def _either(values: Sequence[Any]) -> list[Column | None]:
    kinds = [each.WhichOneof("value") for each in values]
    pairs = list(zip(kinds, values, strict=True))
    return [
        column("int_value", I64, [each.as_int if kind == "as_int" else None for kind, each in pairs]),
        column(
            "double_value", F64, [each.as_double if kind == "as_double" else None for kind, each in pairs]
        ),
    ]


def _totals(points: Sequence[Any]) -> list[Column | None]:
    return [
        required("count", U64, [each.count for each in points]),
        *(
            column(name, F64, [getattr(each, name) if each.HasField(name) else None for each in points])
            for name in ("sum", "min", "max")
        ),
    ]


def _histograms(points: Sequence[Any]) -> list[Column | None]:
    return [
        *_totals(points),
        required("bucket_counts", _COUNTS, [list(each.bucket_counts) for each in points]),
        required("explicit_bounds", _BOUNDS, [list(each.explicit_bounds) for each in points]),
    ]


def _exponential(points: Sequence[Any]) -> list[Column | None]:
    return [
        *_totals(points),
        required("scale", I32, [each.scale for each in points]),
        required("zero_count", U64, [each.zero_count for each in points]),
        column("zero_threshold", F64, [each.zero_threshold for each in points], 0.0),
        *(_buckets(name, [getattr(each, name) for each in points]) for name in ("positive", "negative")),
    ]


def _buckets(name: str, buckets: Sequence[Any]) -> Column | None:
    return make_struct(
        name,
        [
            required("offset", I32, [each.offset for each in buckets]),
            required("bucket_counts", _COUNTS, [list(each.bucket_counts) for each in buckets]),
        ],
    )


def _summaries(points: Sequence[Any]) -> list[Column | None]:
    quantiles = [[(each.quantile, each.value) for each in point.quantile_values] for point in points]
    return [
        required("count", U64, [each.count for each in points]),
        required("sum", F64, [each.sum for each in points]),
        required("quantile", _QUANTILES, quantiles),
    ]


_COLUMNS: Final[dict[PayloadType, Callable[[Sequence[Any]], list[Column | None]]]] = {
    PayloadType.NUMBER_POINTS: _either,
    PayloadType.HISTOGRAM_POINTS: _histograms,
    PayloadType.EXP_HISTOGRAM_POINTS: _exponential,
    PayloadType.SUMMARY_POINTS: _summaries,
}
