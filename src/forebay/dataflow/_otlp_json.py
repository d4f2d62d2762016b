"""OTLP in JSON: protobuf's JSON mapping, except that ids are hexadecimal and not base64.

The ids are rewritten in the parsed JSON before protobuf sees it. Doing it afterwards, on the message, cannot
work: text that is not a multiple of four letters long does not survive base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format

from forebay.dataflow._signals import Signal
from forebay.errors import FormatError

__all__ = ["message_from_json"]

_IDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_INNER = (
    *("resourceSpans", "scopeSpans", "spans", "links"),
    *("resourceLogs", "scopeLogs", "logRecords"),
    *("resourceMetrics", "scopeMetrics", "metrics", "dataPoints", "exemplars"),
    *("gauge", "sum", "histogram", "exponentialHistogram", "summary"),
    *("resource_spans", "scope_spans", "resource_logs", "scope_logs", "log_records"),
    *("resource_metrics", "scope_metrics", "data_points", "exponential_histogram"),
)


def message_from_json(signal: Signal, data: bytes) -> Any:
    """The message that a JSON request stands for. Raises `FormatError`."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("the document is not an object")
        for holder in _holders(document):
            for name in _IDS:
                text = holder.get(name)
                if isinstance(text, str):
                    holder[name] = base64.b64encode(bytes.fromhex(text)).decode()
        return json_format.ParseDict(document, signal.request(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise FormatError(
            f"not a request for {signal.name}: {str(error)[:200]}", hint="send OTLP in JSON"
        ) from error


def _holders(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object in which an id may stand. Attributes are not entered: what is in them is data."""
    waiting: list[Any] = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, dict):
            yield value
            waiting.extend(value[name] for name in _INNER if name in value)
