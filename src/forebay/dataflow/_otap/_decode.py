"""From the tables of a batch to OTLP requests.

Items are made row by row from the first table; what hangs on them finds them by their ids. Times are 64 bits
without a sign in OTLP and with one in Arrow; the bits are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from forebay.dataflow._otap._cbor import Reader
from forebay.dataflow._otap._decode_metrics import decode_metrics
from forebay.dataflow._otap._groups import Groups
from forebay.dataflow._otap._payloads import ROOTS, PayloadType
from forebay.dataflow._otap._table import NO_ID, Table, spread_bytes
from forebay.dataflow._otap._types import (
    DURATION,
    I32,
    SPAN_ID,
    TEXT,
    TIME,
    TRACE_ID,
    U16,
    U32,
    U64_MASK,
    Tables,
)
from forebay.dataflow._otap._values import Values, attach
from forebay.errors import FormatError, LimitExceeded

__all__ = ["decode"]

_ALIKE_EVENTS: Final = (("name", TEXT),)
_ALIKE_LINKS: Final = (("trace_id", TRACE_ID),)


def decode(signal: str, batches: Mapping[PayloadType, pa.RecordBatch], most: int) -> list[Any]:
    """The requests that a batch stands for, about `most` bytes or less in all.

    Raises `FormatError` and `LimitExceeded`.
    """
    root = batches.get(ROOTS[signal])
    if root is None:
        raise FormatError(
            f"no payload {ROOTS[signal].name} among {signal}", hint="every batch has its first table"
        )
    try:
        size = sum(spread_bytes(each) for each in batches.values())
        if size > most:
            raise LimitExceeded("max_request_size", limit=most, actual=size, hint="send smaller batches")
        tables = {kind: Table(kind.name, batch) for kind, batch in batches.items()}
        groups = Groups(signal, tables[ROOTS[signal]], size)
        reader = Reader()
        _DECODERS[signal](tables, groups, reader)
        resources, scopes = (
            tables.get(PayloadType.RESOURCE_ATTRS),
            tables.get(PayloadType.SCOPE_ATTRS),
        )
        groups.finish(resources, scopes, reader, most)
    except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
        text = str(error).replace("\n", " ")[:200]
        raise FormatError(f"not a batch of {signal}: {text}", hint="send OTAP") from error
    return groups.requests


def _logs(tables: Tables, groups: Groups, reader: Reader) -> None:
    root = tables[PayloadType.LOGS]
    owners: dict[int, Any] = {}
    body = Values(root, reader, "body.")
    put = body.setter()
    rows = zip(
        groups.scopes(),
        root.ids("id", U16),
        root.values("time_unix_nano", TIME, 0),
        root.values("observed_time_unix_nano", TIME, 0),
        root.values("severity_number", I32, 0),
        root.values("severity_text", TEXT, ""),
        root.values("event_name", TEXT, ""),
        root.optional_ids("trace_id", TRACE_ID),
        root.optional_ids("span_id", SPAN_ID),
        root.values("flags", U32, 0),
        root.values("dropped_attributes_count", U32, 0),
        strict=True,
    )
    for row, (group, ident, time, observed, number, text, event, trace, span, flags, dropped) in enumerate(
        rows
    ):
        log = group.log_records.add(
            time_unix_nano=time & U64_MASK,
            observed_time_unix_nano=observed & U64_MASK,
            severity_number=number,
            severity_text=text,
            event_name=event,
            trace_id=trace,
            span_id=span,
            flags=flags,
            dropped_attributes_count=dropped,
        )
        if body.types[row]:
            put(row, log.body)
        if ident != NO_ID:
            owners[ident] = log
    attach(tables.get(PayloadType.LOG_ATTRS), owners, reader, U16)


def _traces(tables: Tables, groups: Groups, reader: Reader) -> None:
    root = tables[PayloadType.SPANS]
    owners: dict[int, Any] = {}
    rows = zip(
        groups.scopes(),
        root.ids("id", U16),
        root.values("trace_id", TRACE_ID, b"", required=True),
        root.values("span_id", SPAN_ID, b"", required=True),
        root.optional_ids("parent_span_id", SPAN_ID),
        root.values("name", TEXT, "", required=True),
        root.values("kind", I32, 0),
        root.values("start_time_unix_nano", TIME, 0, required=True),
        root.values("duration_time_unix_nano", DURATION, 0, required=True),
        root.values("trace_state", TEXT, ""),
        root.values("flags", U32, 0),
        root.values("dropped_attributes_count", U32, 0),
        root.values("dropped_events_count", U32, 0),
        root.values("dropped_links_count", U32, 0),
        root.values("status.code", I32, 0),
        root.values("status.status_message", TEXT, ""),
        strict=True,
    )
    for (
        group,
        ident,
        trace,
        span_id,
        parent,
        name,
        kind,
        start,
        duration,
        state,
        flags,
        *dropped,
        code,
        text,
    ) in rows:
        attributes, events, links = dropped
        span = group.spans.add(
            trace_id=trace,
            span_id=span_id,
            parent_span_id=parent,
            name=name,
            kind=kind,
            start_time_unix_nano=start & U64_MASK,
            end_time_unix_nano=(start + duration) & U64_MASK,
            trace_state=state,
            flags=flags,
            dropped_attributes_count=attributes,
            dropped_events_count=events,
            dropped_links_count=links,
        )
        if code or text:
            span.status.code, span.status.message = code, text
        if ident != NO_ID:
            owners[ident] = span
    attach(tables.get(PayloadType.SPAN_ATTRS), owners, reader, U16)
    _events(tables, owners, reader)
    _links(tables, owners, reader)


def _events(tables: Tables, spans: Mapping[int, Any], reader: Reader) -> None:
    table = tables.get(PayloadType.SPAN_EVENTS)
    if table is None:
        return
    owners: dict[int, Any] = {}
    rows = zip(
        table.ids("id", U32),
        table.parents(U16, table.alike(_ALIKE_EVENTS)),
        table.values("time_unix_nano", TIME, 0),
        table.values("name", TEXT, "", required=True),
        table.values("dropped_attributes_count", U32, 0),
        strict=True,
    )
    for ident, parent, time, name, dropped in rows:
        if parent in spans:
            event = spans[parent].events.add(
                time_unix_nano=time & U64_MASK, name=name, dropped_attributes_count=dropped
            )
            if ident != NO_ID:
                owners[ident] = event
    attach(tables.get(PayloadType.SPAN_EVENT_ATTRS), owners, reader, U32)


def _links(tables: Tables, spans: Mapping[int, Any], reader: Reader) -> None:
    table = tables.get(PayloadType.SPAN_LINKS)
    if table is None:
        return
    owners: dict[int, Any] = {}
    rows = zip(
        table.ids("id", U32),
        table.parents(U16, table.alike(_ALIKE_LINKS)),
        table.values("trace_id", TRACE_ID, b""),
        table.values("span_id", SPAN_ID, b""),
        table.values("trace_state", TEXT, ""),
        table.values("flags", U32, 0),
        table.values("dropped_attributes_count", U32, 0),
        strict=True,
    )
    for ident, parent, trace, span_id, state, flags, dropped in rows:
        if parent in spans:
            link = spans[parent].links.add(
                trace_id=trace,
                span_id=span_id,
                trace_state=state,
                flags=flags,
                dropped_attributes_count=dropped,
            )
            if ident != NO_ID:
                owners[ident] = link
    attach(tables.get(PayloadType.SPAN_LINK_ATTRS), owners, reader, U32)


_DECODERS: Final[dict[str, Callable[[Tables, Groups, Reader], None]]] = {
    "traces": _traces,
    "logs": _logs,
    "metrics": decode_metrics,
}
