"""Requests are understood or refused, whatever the bytes."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.dataflow.otlp_kit import logs, traces

from forebay.dataflow._otlp_json import message_from_json
from forebay.dataflow._signals import SIGNALS, count_items
from forebay.errors import FormatError, LimitExceeded


@given(st.sampled_from(sorted(SIGNALS)), st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(signal: str, data: bytes) -> None:
    with suppress(FormatError, LimitExceeded):
        assert count_items(SIGNALS[signal], data) >= 0


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["resourceSpans", "scopeSpans", "spans", "traceId", "links", "name", "attributes", "resourceLogs",
             "scopeLogs", "logRecords", "body", "stringValue", "metrics", "sum", "dataPoints"]
        ),
        inner, max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(st.sampled_from(sorted(SIGNALS)), JSON_VALUES)
def test_any_json_is_understood_or_refused(signal: str, value: Any) -> None:
    try:
        message = message_from_json(SIGNALS[signal], json.dumps(value).encode())
    except FormatError:
        return
    assert count_items(SIGNALS[signal], message.SerializeToString()) >= 0


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[" * 100_000, b'{"resourceSpans":' * 5_000, b"1" * 10_000, b'{"a":"\\ud800"}'],
)
def test_hostile_json_is_refused(data: bytes) -> None:
    if data == b'{"a":"\\ud800"}':
        data = b'{"resourceSpans":[{"schemaUrl":"\\ud800"}]}'
    with pytest.raises(FormatError):
        message_from_json(SIGNALS["traces"], data)


@given(st.lists(st.text(max_size=20), max_size=5))
def test_json_and_protobuf_mean_the_same(names: list[str]) -> None:
    message = ExportTraceServiceRequest.FromString(traces(*names))
    document = json_format.MessageToDict(message)
    for resource in document.get("resourceSpans", []):
        for scope in resource.get("scopeSpans", []):
            for span in scope.get("spans", []):
                span.update(traceId="01" * 16, spanId="02" * 8)
    assert message_from_json(SIGNALS["traces"], json.dumps(document).encode()) == message


def test_nested_values_end_at_a_depth() -> None:
    value = b""
    for _ in range(200):
        inner = b"\x0a" + _varint(len(value)) + value
        value = b"\x2a" + _varint(len(inner)) + inner
    body = b"\x2a" + _varint(len(value)) + value
    for tag in (b"\x12", b"\x12", b"\x0a"):
        body = tag + _varint(len(body)) + body
    with pytest.raises(FormatError):
        count_items(SIGNALS["logs"], body)


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def test_many_items_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.dataflow._signals.REQUEST_ITEMS_MAX", 3)
    assert count_items(SIGNALS["logs"], logs("a", "b", "c")) == 3
    with pytest.raises(LimitExceeded):
        count_items(SIGNALS["logs"], logs("a", "b", "c", "d"))


@pytest.mark.parametrize("groups", [b"\x0a\x00" * 4, b"\x0a\x08" + b"\x12\x00" * 4])
def test_resources_and_scopes_with_nothing_in_them_count_too(
    groups: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert count_items(SIGNALS["logs"], groups) == 0
    monkeypatch.setattr("forebay.dataflow._signals.REQUEST_GROUPS_MAX", 3)
    with pytest.raises(LimitExceeded, match="REQUEST_GROUPS_MAX"):
        count_items(SIGNALS["logs"], groups)


def _inside(*fields: int, body: bytes) -> bytes:
    """`body` in messages one in the other, the outermost first."""
    for field in reversed(fields):
        body = _varint(field << 3 | 2) + _varint(len(body)) + body
    return body


@pytest.mark.parametrize(
    ("signal", "fields", "part"),
    [
        ("traces", (1, 2, 2), b"\x5a\x00"),  # events of one span
        ("traces", (1, 2, 2), b"\x6a\x00"),  # links
        ("metrics", (1, 2, 2, 5), b"\x0a\x00"),  # points of a gauge
        ("metrics", (1, 2, 2, 7), b"\x0a\x00"),  # of a sum
        ("metrics", (1, 2, 2, 9), b"\x0a\x00"),  # of a histogram
        ("metrics", (1, 2, 2, 10), b"\x0a\x00"),  # of an exponential one
        ("metrics", (1, 2, 2, 11), b"\x0a\x00"),  # of a summary
        ("metrics", (1, 2, 2, 5, 1), b"\x2a\x00"),  # exemplars of one point
        ("metrics", (1, 2, 2, 11, 1), b"\x32\x00"),  # quantiles
    ],
)
def test_parts_of_an_item_that_take_two_bytes_each_are_bounded(
    signal: str, fields: tuple[int, ...], part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.dataflow._signals.REQUEST_PARTS_MAX", 20)
    # The point that quantiles or exemplars are in counts as well.
    fit = 20 - (len(fields) == 5)
    assert count_items(SIGNALS[signal], _inside(*fields, body=part * fit)) == 1
    with pytest.raises(LimitExceeded, match="REQUEST_PARTS_MAX"):
        count_items(SIGNALS[signal], _inside(*fields, body=part * (fit + 1)))


def test_request_below_twice_the_bytes_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _inside(1, 2, 2, 5, body=b"\x0a\x00" * 100)
    monkeypatch.setattr("forebay.dataflow._signals._PARTS", {})
    assert count_items(SIGNALS["metrics"], data) == 1
