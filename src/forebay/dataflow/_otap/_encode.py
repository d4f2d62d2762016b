"""From an OTLP request to the tables of batches.

Ids of items, resources and scopes have sixteen bits, so a request with more items becomes several batches,
and each of them counts its resources and scopes anew. What OTLP knows and OTAP has no column for is lost:
counts of dropped attributes of entities, fields newer than this version.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from forebay.dataflow._otap._build import column, ids, make_struct, make_table, parents, required
from forebay.dataflow._otap._encode_metrics import encode_metrics
from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap._rows import (
    Attributes,
    Item,
    common_columns,
    fixed,
    signed,
    value_columns,
    value_row,
)
from forebay.dataflow._otap._types import DURATION, I32, SPAN_ID, TEXT, TIME, TRACE_ID, U16, U32, U64_MASK
from forebay.dataflow._otap.otap_pb2 import Batch

__all__ = ["encode"]

ITEMS_MAX: Final = 32_768
"""Items of one batch."""
_FIELDS: Final = {
    "traces": ("resource_spans", "scope_spans", "spans"),
    "logs": ("resource_logs", "scope_logs", "log_records"),
    "metrics": ("resource_metrics", "scope_metrics", "metrics"),
}


def encode(signal: str, request: Any, codec: str, schema_id: str) -> Iterator[Batch]:
    """The batches of a request, without numbers. `schema_id` must be new to the stream they go into."""
    for number, rows in enumerate(_groups(signal, request)):
        batch = Batch()
        for kind, table in _ENCODERS[signal](rows).items():
            # The reference looks streams up by this name alone, so it differs from table to table.
            data = _stream(table, codec)
            batch.payloads.add(schema_id=f"{schema_id}.{number}.{kind:d}", type=kind, record=data)
        yield batch


def _groups(signal: str, request: Any) -> Iterator[list[Item]]:
    """The items of each batch. Resources and scopes without items have no number."""
    outer, middle, inner = _FIELDS[signal]
    rows: list[Item] = []
    resources = scopes = 0
    for resource in getattr(request, outer):
        for scope in getattr(resource, middle):
            for item in getattr(scope, inner):
                if len(rows) == ITEMS_MAX:
                    yield rows
                    rows, resources, scopes = [], 0, 0
                if rows:
                    resources += rows[-1].resource_group is not resource
                    scopes += rows[-1].scope_group is not scope
                rows.append(Item(resources, resource, scopes, scope, item))
    if rows:
        yield rows


def _stream(table: pa.RecordBatch, codec: str) -> bytes:
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec, use_threads=False)
    # Not closed: the mark of the end would tell the reader that no batch follows in this stream.
    writer = pa.ipc.new_stream(out, table.schema, options=options)
    writer.write_batch(table)
    return out.getvalue()


def _with_attributes(
    tables: dict[PayloadType, pa.RecordBatch], attributes: Sequence[Attributes]
) -> dict[PayloadType, pa.RecordBatch]:
    for each in attributes:
        table = each.table()
        if table is not None:
            tables[each.kind] = table
    return tables


def _logs(rows: Sequence[Item]) -> dict[PayloadType, pa.RecordBatch]:
    of_logs = Attributes(PayloadType.LOG_ATTRS, U16)
    attributes = [of_logs]
    common = common_columns(rows, attributes)
    logs = [row.item for row in rows]
    for number, log in enumerate(logs):
        of_logs.add(number, log.attributes)
    root = make_table(
        [
            *common,
            required("time_unix_nano", TIME, [signed(each.time_unix_nano) for each in logs]),
            required(
                "observed_time_unix_nano", TIME, [signed(each.observed_time_unix_nano) for each in logs]
            ),
            column("trace_id", TRACE_ID, [fixed(each.trace_id, 16) for each in logs]),
            column("span_id", SPAN_ID, [fixed(each.span_id, 8) for each in logs]),
            column("severity_number", I32, [each.severity_number for each in logs], 0),
            column("severity_text", TEXT, [each.severity_text for each in logs], ""),
            column("event_name", TEXT, [each.event_name for each in logs], ""),
            make_struct("body", value_columns([value_row(each.body) for each in logs])),
            column("dropped_attributes_count", U32, [each.dropped_attributes_count for each in logs], 0),
            column("flags", U32, [each.flags for each in logs], 0),
        ]
    )
    return _with_attributes({PayloadType.LOGS: root}, attributes)


def _traces(rows: Sequence[Item]) -> dict[PayloadType, pa.RecordBatch]:
    of_spans = Attributes(PayloadType.SPAN_ATTRS, U16)
    attributes = [of_spans]
    common = common_columns(rows, attributes)
    spans = [row.item for row in rows]
    for number, span in enumerate(spans):
        of_spans.add(number, span.attributes)
    durations = [(each.end_time_unix_nano - each.start_time_unix_nano) & U64_MASK for each in spans]
    root = make_table(
        [
            *common,
            required("start_time_unix_nano", TIME, [signed(each.start_time_unix_nano) for each in spans]),
            required("duration_time_unix_nano", DURATION, [signed(each) for each in durations]),
            required("trace_id", TRACE_ID, [fixed(each.trace_id, 16) for each in spans]),
            required("span_id", SPAN_ID, [fixed(each.span_id, 8) for each in spans]),
            column("parent_span_id", SPAN_ID, [fixed(each.parent_span_id, 8) for each in spans]),
            required("name", TEXT, [each.name for each in spans]),
            column("kind", I32, [each.kind for each in spans], 0),
            column("trace_state", TEXT, [each.trace_state for each in spans], ""),
            column("flags", U32, [each.flags for each in spans], 0),
            column("dropped_attributes_count", U32, [each.dropped_attributes_count for each in spans], 0),
            column("dropped_events_count", U32, [each.dropped_events_count for each in spans], 0),
            column("dropped_links_count", U32, [each.dropped_links_count for each in spans], 0),
            make_struct(
                "status",
                [
                    column("code", I32, [each.status.code for each in spans], 0),
                    column("status_message", TEXT, [each.status.message for each in spans], ""),
                ],
            ),
        ]
    )
    tables = {PayloadType.SPANS: root} | _events(spans, attributes) | _links(spans, attributes)
    return _with_attributes(tables, attributes)


def _events(spans: Sequence[Any], attributes: list[Attributes]) -> dict[PayloadType, pa.RecordBatch]:
    events = [(number, event) for number, span in enumerate(spans) for event in span.events]
    if not events:
        return {}
    of_events = Attributes(PayloadType.SPAN_EVENT_ATTRS, U32)
    attributes.append(of_events)
    for number, (_, event) in enumerate(events):
        of_events.add(number, event.attributes)
    all_events = [event for _, event in events]
    batch = make_table(
        [
            ids("id", U32, range(len(events))),
            column("time_unix_nano", TIME, [signed(each.time_unix_nano) for each in all_events]),
            required("name", TEXT, [each.name for each in all_events]),
            column(
                "dropped_attributes_count", U32, [each.dropped_attributes_count for each in all_events], 0
            ),
        ]
    )
    owners = [number for number, _ in events]
    table = parents(PayloadType.SPAN_EVENTS, batch, owners, U16, lambda table: table.alike((("name", TEXT),)))
    return {PayloadType.SPAN_EVENTS: table}


def _links(spans: Sequence[Any], attributes: list[Attributes]) -> dict[PayloadType, pa.RecordBatch]:
    links = [(number, link) for number, span in enumerate(spans) for link in span.links]
    if not links:
        return {}
    of_links = Attributes(PayloadType.SPAN_LINK_ATTRS, U32)
    attributes.append(of_links)
    for number, (_, link) in enumerate(links):
        of_links.add(number, link.attributes)
    all_links = [link for _, link in links]
    batch = make_table(
        [
            ids("id", U32, range(len(links))),
            required("trace_id", TRACE_ID, [fixed(each.trace_id, 16) for each in all_links]),
            required("span_id", SPAN_ID, [fixed(each.span_id, 8) for each in all_links]),
            column("trace_state", TEXT, [each.trace_state for each in all_links], ""),
            column("flags", U32, [each.flags for each in all_links], 0),
            column("dropped_attributes_count", U32, [each.dropped_attributes_count for each in all_links], 0),
        ]
    )
    owners = [number for number, _ in links]
    table = parents(
        PayloadType.SPAN_LINKS, batch, owners, U16, lambda table: table.alike((("trace_id", TRACE_ID),))
    )
    return {PayloadType.SPAN_LINKS: table}


def _metrics(rows: Sequence[Item]) -> dict[PayloadType, pa.RecordBatch]:
    attributes: list[Attributes] = []
    return _with_attributes(encode_metrics(rows, attributes), attributes)


_ENCODERS: Final[dict[str, Callable[[Sequence[Item]], dict[PayloadType, pa.RecordBatch]]]] = {
    "traces": _traces,
    "logs": _logs,
    "metrics": _metrics,
}
