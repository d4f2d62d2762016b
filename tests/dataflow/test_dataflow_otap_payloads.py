"""OTAP and OTLP mean the same: real payloads, requests there and back, hostile bytes."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from tests.dataflow.otap_samples import canonical, random_request, sample

from forebay.dataflow._otap import Batch, PayloadStreams, decode, encode
from forebay.dataflow._otap._cbor import DEPTH_MAX, Reader, write_value
from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap._table import Table
from forebay.dataflow._otap._types import F64, I64, U16, U32
from forebay.dataflow._signals import SIGNALS, parse
from forebay.errors import FormatError, LimitExceeded

DATA = Path(__file__).resolve().parent / "data" / "otap"
MOST = 64 << 20


def vectors(name: str) -> list[tuple[bytes, bytes]]:
    """Pairs of a request and the batch that the reference made from it."""
    data = zstandard.ZstdDecompressor().decompress((DATA / f"{name}.zst").read_bytes())
    parts, at = [], 0
    while at < len(data):
        [length] = struct.unpack_from("<I", data, at)
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return list(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("kind", ["samples", "random"])
@pytest.mark.parametrize("signal", sorted(SIGNALS))
def test_real_payloads_are_the_requests_they_were_made_from(signal: str, kind: str) -> None:
    streams = PayloadStreams(signal, MOST)
    found = vectors(f"{signal}-{kind}")
    assert len(found) >= 3
    begun: set[str] = set()
    for request, data in found:
        batch = Batch.FromString(data)
        messages = decode(signal, streams.read(batch), MOST)
        assert canonical(signal, *messages) == canonical(signal, parse(SIGNALS[signal], request))
        begun |= {each.schema_id for each in batch.payloads}
    # Some streams went on from batch to batch, and some began anew: both are in the payloads.
    tables = {each.type for _, data in found for each in Batch.FromString(data).payloads}
    assert len(tables) < len(begun) < sum(len(Batch.FromString(data).payloads) for _, data in found)


@settings(max_examples=40)
@given(st.sampled_from(sorted(SIGNALS)), st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 50))
def test_a_request_is_the_same_there_and_back(signal: str, seed: int, items: int, words: int) -> None:
    request = random_request(signal, seed, items, words)
    streams = PayloadStreams(signal, MOST)
    found = [
        message
        for batch in encode(signal, request, "none", "a")
        for message in decode(signal, streams.read(batch), MOST)
    ]
    assert canonical(signal, *found) == canonical(signal, request)


@pytest.mark.parametrize("empty", [0, 70_000])
def test_more_resources_than_ids_have_numbers_keep_their_items(empty: int) -> None:
    # Each request has fewer, but several are joined before they are sent on.
    request: Any = SIGNALS["logs"].request()
    for number in range(empty + 70_000):
        resource = request.resource_logs.add()
        scope = resource.scope_logs.add()
        if number >= empty:
            resource.resource.attributes.add(key="n").value.int_value = number
            scope.scope.attributes.add(key="n").value.int_value = number
            scope.log_records.add(time_unix_nano=number)
    streams = PayloadStreams("logs", MOST)
    found = [
        (log.time_unix_nano, resource.resource.attributes[0].value.int_value, scope.scope.attributes[0].value)
        for batch in encode("logs", request, "none", "a")
        for message in decode("logs", streams.read(batch), MOST)
        for resource in message.resource_logs
        for scope in resource.scope_logs
        for log in scope.log_records
    ]
    assert [(time, of_resource, of_scope.int_value) for time, of_resource, of_scope in found] == [
        (each, each, each) for each in range(empty, empty + 70_000)
    ]


def test_times_and_numbers_at_their_ends_survive() -> None:
    request = sample("metrics", 0, items=1)
    metric = request.resource_metrics[0].scope_metrics[0].metrics[0]
    metric.gauge.data_points.add(as_int=0, time_unix_nano=2**64 - 1, start_time_unix_nano=2**63)
    histogram = request.resource_metrics[0].scope_metrics[0].metrics.add(name="h").histogram
    histogram.data_points.add(count=0, sum=0.0, min=0.0, max=-0.0)
    [batch] = encode("metrics", request, "none", "a")
    found = decode("metrics", PayloadStreams("metrics", MOST).read(batch), MOST)
    assert canonical("metrics", *found) == canonical("metrics", request)


def test_a_kind_of_value_that_otap_lacks_is_nothing() -> None:
    request: Any = SIGNALS["logs"].request()
    log = request.resource_logs.add().scope_logs.add().log_records.add(severity_text="kept")
    inner = log.attributes.add(key="in a list").value.array_value.values.add()
    for value in (log.body, log.attributes.add(key="k").value, inner):
        # Field 8 of a value: its place in a table of texts that only profiles have.
        value.MergeFromString(b"\x40\x05")
    [batch] = encode("logs", request, "none", "a")
    [message] = decode("logs", PayloadStreams("logs", MOST).read(batch), MOST)
    [found] = message.resource_logs[0].scope_logs[0].log_records
    assert (found.severity_text, [each.key for each in found.attributes]) == ("kept", ["in a list", "k"])
    assert found.attributes[1].value.WhichOneof("value") is None


def test_ids_of_a_wrong_length_are_none() -> None:
    request = sample("logs", 0, items=1)
    log = request.resource_logs[0].scope_logs[0].log_records[0]
    log.trace_id, log.span_id = b"short", bytes(8)
    [batch] = encode("logs", request, "none", "a")
    [message] = decode("logs", PayloadStreams("logs", MOST).read(batch), MOST)
    found = message.resource_logs[0].scope_logs[0].log_records[0]
    assert (found.trace_id, found.span_id) == (b"", b"")


# Ids.


def ids_of(encoding: str | None, values: list[int | None]) -> list[int]:
    field = pa.field("id", U16, metadata={"encoding": encoding} if encoding else None)
    batch = pa.RecordBatch.from_arrays([pa.array(values, U16)], schema=pa.schema([field]))
    return Table("test", batch).ids("id", U16)


def test_ids_are_sums_unless_they_are_plain() -> None:
    assert ids_of(None, [1, 1, None, 2]) == [1, 2, -1, 4]
    assert ids_of("delta", [65_535, 2]) == [65_535, 1]
    assert ids_of("plain", [7, 3]) == [7, 3]
    with pytest.raises(FormatError):
        ids_of("other", [1])
    with pytest.raises(FormatError, match="twice"):
        ids_of("delta", [1, 0])


def test_ids_of_parents_are_sums_among_rows_that_are_alike() -> None:
    """The table of the specification, with nulls that the reference takes for zeros."""
    columns = {
        "parent_id": pa.array([0, 1, 1, 1, 1, 2, 1, 1], U32),
        "int_value": pa.array([1, 1, 2, None, None, None, None, None], I64),
        "double_value": pa.array([None, None, None, 1.0, 1.0, 2.0, None, None], F64),
    }
    table = Table("test", pa.record_batch(columns))
    alike = table.alike((("int_value", I64), ("double_value", F64)))
    assert table.parents(U32, alike) == [0, 1, 1, 1, 2, 2, 1, 2]


# CBOR.


def round_trip(value: Any) -> Any:
    out = bytearray()
    write_value(value, out)
    found = AnyValue()
    Reader().read(bytes(out), found)
    return found


def _list(values: list[Any]) -> Any:
    made = AnyValue()
    made.array_value.SetInParent()
    made.array_value.values.extend(values)
    return made


def _map(values: dict[str, Any]) -> Any:
    made = AnyValue()
    made.kvlist_value.SetInParent()
    for key, value in values.items():
        made.kvlist_value.values.add(key=key, value=value)
    return made


VALUES = st.recursive(
    st.builds(AnyValue)
    | st.builds(lambda each: AnyValue(int_value=each), st.integers(-(2**63), 2**63 - 1))
    | st.builds(lambda each: AnyValue(string_value=each), st.text(max_size=300))
    | st.builds(lambda each: AnyValue(bytes_value=each), st.binary(max_size=300))
    | st.builds(lambda each: AnyValue(bool_value=each), st.booleans())
    | st.builds(lambda each: AnyValue(double_value=each), st.floats(allow_nan=False)),
    lambda inner: (
        st.lists(inner, max_size=4).map(_list) | st.dictionaries(st.text(max_size=4), inner).map(_map)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_cbor_there_and_back(value: Any) -> None:
    assert round_trip(value) == value


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("f93e00", AnyValue(double_value=1.5)),
        ("fa3fc00000", AnyValue(double_value=1.5)),
        ("c11a514b67b0", AnyValue(int_value=1363896240)),
        ("9f0102ff", _list([AnyValue(int_value=1), AnyValue(int_value=2)])),
        ("bf6161f5ff", _map({"a": AnyValue(bool_value=True)})),
        ("7f657374726561646d696e67ff", AnyValue(string_value="streaming")),
        ("f7", AnyValue()),
    ],
)
def test_cbor_of_others_is_understood(data: str, expected: Any) -> None:
    """Examples of RFC 8949: short floats, tags, lengths that are not known before."""
    found = AnyValue()
    Reader().read(bytes.fromhex(data), found)
    assert found == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x9b" + b"\xff" * 8,  # a list of 2^64 values
        b"\x5b" + b"\xff" * 8,  # bytes of that length
        b"\x81" * 1_000,
        b"\x9f" * 1_000,
        b"\xa1\x01\x02",  # a key that is a number
        b"\x1b" + b"\xff" * 8,  # an integer of 64 bits without a sign
        b"\x3b" + b"\xff" * 8,
        b"\x01\x02",
        b"\x63\xff\xff\xff",
        b"\x7f\x41a\xff",
        b"\x7f\x7f\xff\xff",
        b"\x1c",
        b"\xf8\x20",
        b"\xff",
    ],
)
def test_hostile_cbor_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Reader().read(data, AnyValue())


@given(st.binary(max_size=60))
def test_any_cbor_is_read_or_refused(data: bytes) -> None:
    with suppress(FormatError):
        Reader().read(data, AnyValue())


def test_the_deepest_value_still_fits_into_otlp() -> None:
    value = AnyValue(int_value=1)
    for _ in range(DEPTH_MAX):
        value = _map({"k": value})
    request = sample("traces", 0, items=2)
    span = request.resource_spans[0].scope_spans[0].spans[1]
    span.events.add(name="deep").attributes.add(key="deep", value=value)
    [batch] = encode("traces", request, "none", "a")
    found = decode("traces", PayloadStreams("traces", MOST).read(batch), MOST)
    assert [parse(SIGNALS["traces"], each.SerializeToString()) for each in found] == found


# Hostile bytes.

PAYLOADS = {signal: [data for _, data in vectors(f"{signal}-samples")] for signal in sorted(SIGNALS)}


@settings(max_examples=150)
@given(st.data())
def test_damaged_payloads_are_read_or_refused(data: st.DataObject) -> None:
    """Bits turned over anywhere in a real batch: no crash, no hang, no error but the two that are meant."""
    signal = data.draw(st.sampled_from(sorted(SIGNALS)))
    streams = PayloadStreams(signal, 1 << 20)
    for original in PAYLOADS[signal]:
        batch = Batch.FromString(original)
        payload = batch.payloads[data.draw(st.integers(0, len(batch.payloads) - 1))]
        record = bytearray(payload.record)
        for _ in range(data.draw(st.integers(0, 3))):
            record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        payload.record = bytes(record)
        try:
            tables = streams.read(batch)
        except (FormatError, LimitExceeded):
            return
        with suppress(FormatError, LimitExceeded):
            for message in decode(signal, tables, 1 << 20):
                parse(SIGNALS[signal], message.SerializeToString())


def test_points_of_a_metric_of_another_type_are_refused() -> None:
    request = sample("metrics", 0)
    [batch] = encode("metrics", request, "none", "a")
    [root] = [each for each in batch.payloads if each.type == PayloadType.METRICS]
    tables = PayloadStreams("metrics", MOST).read(batch)
    table = tables[PayloadType.METRICS]
    index = table.schema.get_field_index("metric_type")
    kinds = pa.array([5] * table.num_rows, pa.uint8())
    tables[PayloadType.METRICS] = table.set_column(index, "metric_type", kinds)
    assert root.record
    with pytest.raises(FormatError, match="another type"):
        decode("metrics", tables, MOST)
