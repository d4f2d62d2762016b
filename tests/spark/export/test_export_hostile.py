"""Values from anybody: what would end the exporter, or every reader of its table, is a bad record."""

from __future__ import annotations

import datetime
import json
import re
import struct
from typing import Any

import pyarrow as pa
import pytest
from tests.spark.export.bed import KINDS, Bed, order

import forebay
from forebay.errors import LimitExceeded
from forebay.spark.export import _arrow, _task, export
from forebay.spark.export._files import file_name
from forebay.spark.export._json import BRACKETS_MAX, JsonDecoder
from forebay.spark.export._types import COLUMNS_MAX, NESTING_MAX

GOOD = b'{"id": 1, "who": "a"}'
WANTED = pa.schema([("id", pa.int64()), ("who", pa.string())])


def bad_json(value: bytes) -> str:
    """Why a value is bad, between two good ones that stay."""
    values = pa.array([GOOD, value, GOOD], pa.binary())
    decoded = JsonDecoder().decode(values, pa.nulls(3, pa.binary()), WANTED)
    assert decoded.table.column("id").to_pylist() == [1, 1]
    [(row, reason)] = decoded.bad
    assert row == 1
    return reason


@pytest.mark.parametrize("depth", [NESTING_MAX, 10 * NESTING_MAX, 10 * BRACKETS_MAX, 200_000])
@pytest.mark.parametrize("shape", ["objects", "lists", "lists without an end", "objects behind a text"])
def test_objects_inside_of_one_another_without_end_are_bad(depth: int, shape: str) -> None:
    """The types of 200,000 levels ended the process."""
    value = {
        "objects": b'{"d":' * depth + b"1" + b"}" * depth,
        "lists": b"[" * depth + b"1" + b"]" * depth,
        "lists without an end": b"[" * depth,
        "objects behind a text": b'{"t":"}\\"}","d":' * depth + b"1" + b"}" * depth,
    }[shape]
    reason = bad_json(b'{"who": "x", "deep": ' + value + b"}")
    if shape != "lists without an end" or depth > BRACKETS_MAX:
        assert reason == f"nested more than {NESTING_MAX} deep"


def test_as_deep_as_is_allowed_and_wide_are_good() -> None:
    depth = NESTING_MAX - 1
    deep = b'{"id": 1, "deep": ' + b"[" * depth + b"1" + b"]" * depth + b"}"
    wide = json.dumps({"id": 1, "wide": [{"n": [number]} for number in range(2 * BRACKETS_MAX)]}).encode()
    brackets = json.dumps({"id": 1, "who": "[{" * BRACKETS_MAX}).encode()
    values = pa.array([b"left out", deep, wide, brackets], pa.binary()).slice(1)
    decoded = JsonDecoder().decode(values, pa.nulls(3, pa.binary()), WANTED)
    assert not decoded.bad and decoded.table.column("who")[2].as_py() == "[{" * BRACKETS_MAX


@pytest.mark.parametrize(
    "value", [b'{"id": 2, "who": "\xff\xfe"}', b'{"\xff": 1}', b'{"id": 2, "new": "\xc3"}']
)
def test_json_that_is_no_utf8_is_bad(value: bytes) -> None:
    assert "UTF8" in bad_json(value)


def ipc(table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return bytes(out.getvalue().to_pybytes())


def damaged(table: pa.Table, old: bytes, new: bytes) -> bytes:
    whole = ipc(table)
    assert whole.count(old) == 1
    return whole.replace(old, new)


TEXTS = pa.table({"id": [1, 2, 3], "who": ["x" * 11, "y" * 12, "z"]})
CODES = pa.table({"who": pa.array(["a", "b", "b"]).dictionary_encode()})
HOSTILE = {
    "offsets": damaged(
        TEXTS, struct.pack("<4i", 0, 11, 23, 24), struct.pack("<4i", 0, 11, 2_000_000_000, 24)
    ),
    "no UTF-8": damaged(TEXTS, b"x" * 11, b"\xff" * 11),
    "codes": damaged(CODES, struct.pack("<3i", 0, 1, 1), struct.pack("<3i", 0, 1_000_000, 1)),
    "names": ipc(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"])),
    "types": ipc(pa.table({"id": [1], "took": pa.array([1], pa.duration("s"))})),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_arrow_value_that_is_damaged_or_fits_no_table_is_bad_alone(bed: Bed, what: str) -> None:
    """Wrong offsets ended the process, and the others the export, for as long as the record was there."""
    bed.send([ipc(TEXTS), HOSTILE[what]])
    report = export(bed.config(format="arrow", dead_letter="topic:dead"))
    assert (report.rows, report.dead_letters) == (3, 1)
    assert [row["value"] for row in bed.read_topic("dead")] == [HOSTILE[what]]
    assert sorted(bed.rows().column("id").to_pylist()) == [1, 2, 3]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("format_", ["json", "arrow"])
def test_a_record_with_more_fields_than_any_table_is_bad_alone(bed: Bed, format_: str, first: bool) -> None:
    """It ended every export until it was trimmed."""
    fields = {f"f{number}": number for number in range(COLUMNS_MAX + 1)}
    good: list[dict[str, Any]] = [{"id": 1}, {"id": 2, "x": {"y": 3}}]
    values = [
        json.dumps(row).encode() if format_ == "json" else ipc(pa.Table.from_pylist([row]))
        for row in (good[0], {"id": 3, "wide": fields}, good[1])
    ]
    config = bed.config(format=format_, dead_letter="topic:dead")
    if not first:
        bed.send(values[:1])
        export(config)
    bed.send(values)
    report = export(config)
    assert (report.rows, report.dead_letters) == (2, 1)
    assert [row["value"] for row in bed.read_topic("dead")] == [values[1]]
    assert {row["id"] for row in bed.rows().to_pylist()} == {1, 2}


def test_rows_that_take_no_bytes_are_bounded(bed: Bed) -> None:
    """A value of 224 bytes had more rows than any machine has memory."""
    rows = 12_345_678
    value = ipc(pa.table({"n": pa.nulls(rows)}))
    assert value.count(struct.pack("<q", rows)) == 3
    hostile = value.replace(struct.pack("<q", rows), struct.pack("<q", 10**13))
    bed.send([ipc(TEXTS), hostile])
    report = export(bed.config(format="arrow", dead_letter="topic:dead"))
    assert (report.rows, report.dead_letters) == (3, 1)
    [dead] = bed.read_topic("dead")
    reason = {each["key"]: each["value"] for each in dead["headers"]}["forebay-reason"]
    assert reason == b"10,000,000,000,000 rows in one value, of 10,000,000 at most"


def packed(table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(out, table.schema, options=options) as stream:
        stream.write_table(table)
    return bytes(out.getvalue().to_pybytes())


def nested(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


LONG = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int8()), pa.array(["x" * 100_000]))
SWELLING = {
    "compressed": packed(pa.table({"id": pa.array([0] * 500_000, pa.int64())})),
    "a dictionary": ipc(pa.table({"who": LONG})),
    "a dictionary of large texts": ipc(
        pa.table({"who": pa.DictionaryArray.from_arrays(LONG.indices, LONG.dictionary.cast("large_string"))})
    ),
    "a dictionary in a list": ipc(pa.table({"who": nested(LONG)})),
    "a dictionary of numbers": packed(
        pa.table({"id": pa.array([7] * 500_000, pa.int64()).dictionary_encode()})
    ),
    "a list of nulls": ipc(pa.table({"id": nested(pa.nulls(10_000_000))})),
    "a list of so many nulls": ipc(
        pa.table({"id": pa.FixedSizeListArray.from_arrays(pa.nulls(10_000_000), 10_000_000)})
    ),
    "a struct of them": ipc(pa.table({"x": pa.StructArray.from_arrays([LONG], ["who"])})),
}


@pytest.mark.parametrize("what", SWELLING)
def test_a_value_that_becomes_much_is_bad_alone(bed: Bed, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes of zstd, or of a dictionary, took all memory of whoever exported them."""
    monkeypatch.setattr(_arrow, "VALUE_BYTES_MAX", 1 << 20)
    bed.send([ipc(TEXTS), SWELLING[what], packed(TEXTS)])
    report = export(bed.config(format="arrow", dead_letter="topic:dead"))
    assert (report.rows, report.dead_letters) == (6, 1)
    [dead] = bed.read_topic("dead")
    reason = {each["key"]: each["value"] for each in dead["headers"]}["forebay-reason"]
    assert re.fullmatch(rb"[\d,]+ bytes unpacked in one value, of 1,048,576 at most", reason)


def test_views_that_show_the_same_again_and_again_are_added_up() -> None:
    text = "x" * 1_000
    views = pa.array([text, None, text], pa.string_view())
    assert 2_000 <= _arrow._bytes_of(views) <= 2_100
    assert 1_000 <= _arrow._bytes_of(views.slice(1)) <= 1_100


@pytest.mark.parametrize("name", ["_arrow.PORTION_BYTES_MAX", "_task.HELD_BYTES_MAX"])
def test_values_that_are_much_together_are_decoded_and_written_by_and_by(
    bed: Bed, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [ipc(pa.table({"id": [number, number]})) for number in range(20)]
    values[3] = values[17] = b"broken"
    bed.send(values)
    monkeypatch.setattr(f"forebay.spark.export.{name}", 1)
    report = export(bed.config(format="arrow", dead_letter="topic:dead"))
    assert (report.rows, report.dead_letters) == (36, 2)
    assert sorted(bed.rows().column("id").to_pylist()) == sorted(
        [number for number in range(20) if number not in (3, 17)] * 2
    )
    assert [row["value"] for row in bed.read_topic("dead")] == [b"broken"] * 2


def test_rows_that_are_too_many_to_be_held_go_into_several_files(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_arrow, "PORTION_BYTES_MAX", 1)
    monkeypatch.setattr(_task, "HELD_BYTES_MAX", 1)
    bed.send([ipc(pa.table({"id": [number]})) for number in range(5)])
    report = export(bed.config(format="arrow"))
    assert (report.rows, report.files) == (5, 5)
    bed.send([ipc(pa.table({"id": [5], "new": ["x"]})), ipc(pa.table({"id": [6]}))])
    assert export(bed.config(format="arrow")).added_columns == ["new"]
    found = {row["id"]: row["new"] for row in bed.rows().to_pylist()}
    assert found == {0: None, 1: None, 2: None, 3: None, 4: None, 5: "x", 6: None}


def test_nanoseconds_become_microseconds(bed: Bed) -> None:
    bed.send([ipc(pa.table({"at": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", tz="UTC"))}))])
    assert export(bed.config(format="arrow")).rows == 1
    [found] = bed.rows().column("at").cast(pa.int64()).to_pylist()
    assert found == 1_700_000_000_123_456


@pytest.mark.parametrize("kind", KINDS)
def test_times_in_no_calendar_do_not_end_an_export(bed: Bed, kind: str) -> None:
    """Somebody gives nanoseconds for milliseconds: the record is good, its time is none."""
    times = [0, -1, 1_700_000_000_000_000_000, -(2**63), 253_402_300_800_000]
    records = [order(number) for number in range(4)] + [b"{broken"]
    with forebay.connect(bed.bay_directory) as bay, bay.producer() as out:
        out.send("orders", records, partition=0, timestamps_ms=times).result(timeout=60)
    config = bed.config(kind, partition_by=("date",), dead_letter="topic:dead")
    report = export(config)
    assert (report.rows, report.dead_letters) == (4, 1)
    found = {row["id"]: row["_timestamp"] for row in bed.rows(kind).to_pylist()}
    assert found[2] is found[3] is None
    assert found[1] == datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=datetime.UTC)
    assert [row["value"] for row in bed.read_topic("dead")] == [b"{broken"]


def test_columns_with_times_in_no_calendar_have_no_statistics(bed: Bed) -> None:
    far: dict[str, Any] = {
        "at": pa.array([2**62], pa.timestamp("us", tz="UTC")),
        "day": pa.array([2**30], pa.int32()).cast(pa.date32()),
        "old": pa.array([datetime.datetime(500, 1, 2, 3, 4, 5, 6789, tzinfo=datetime.UTC)]),
        "last": pa.array([datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=datetime.UTC)]),
    }
    bed.send([ipc(pa.table(far))])
    assert export(bed.config(format="arrow")).rows == 1
    from deltalake import DeltaTable

    [row] = pa.table(DeltaTable(bed.target("delta").location).get_add_actions(flatten=True)).to_pylist()
    assert row["min.old"].isoformat() == "0500-01-02T03:04:05.006000+00:00"
    assert row["max.old"].isoformat() == "0500-01-02T03:04:05.007000+00:00"
    assert not {"min.at", "min.day", "min.last"} & {name for name, value in row.items() if value is not None}


def test_a_value_too_long_for_a_directory_says_so() -> None:
    file_name({"who": "x" * 200}, hive=True)
    with pytest.raises(LimitExceeded, match="directory: 304 is over the limit of 240") as caught:
        file_name({"who": "x" * 300}, hive=True)
    assert "delta:" in caught.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_too_long_for_a_directory_is_a_bad_record(bed: Bed, kind: str) -> None:
    """One such value ended every export behind it. Delta has no directories."""
    odd = ["", "a/b=c%", "..", "Größe \U0001f600", "x" * 236, "\0\n"]
    long = ["x" * 237, "ü" * 40, "y" * 100_000]
    bed.send([order(number, who=who) for number, who in enumerate([*odd, None, *long])])
    report = export(bed.config(kind, partition_by=("who",), dead_letter="topic:dead"))
    kept = odd + (long if kind == "delta" else [])
    assert (report.rows, report.dead_letters) == (len(kept) + 1, 10 - len(kept) - 1)
    if kind != "parquet":  # Whose readers take them from the directories.
        found = {row["id"]: row["who"] for row in bed.rows(kind).to_pylist()}
        # The empty text is null where partitions are kept as texts.
        assert [found[number] for number in range(1, len(odd))] == odd[1:]
        assert found[0] == ("" if kind == "iceberg" else None) and found[len(odd)] is None
    reasons = {header["value"] for row in bed.read_topic("dead") for header in row["headers"]}
    assert kind == "delta" or b"the value to partition by is too long for the name of a directory" in reasons


@pytest.mark.parametrize("kind", KINDS)
def test_many_long_values_together_are_too_long_for_a_key(bed: Bed, kind: str) -> None:
    columns = {f"c{number}": str(number) * 230 for number in range(4)}
    bed.send([order(1, **columns), order(2, **dict.fromkeys(columns, "short"))])
    report = export(bed.config(kind, partition_by=tuple(columns), dead_letter="topic:dead"))
    assert (report.rows, report.dead_letters) == ((2, 0) if kind == "delta" else (1, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["at", "date(at)", "day"])
def test_times_in_no_calendar_are_no_partition(bed: Bed, kind: str, by: str) -> None:
    """They ended the export; nothing behind them came into the table."""
    schema = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("day", pa.date32())])
    for time, day in ((0, 2**30), (2**62, 0), (-(2**62), 0), (0, -(2**30)), (7, 7), (None, None)):
        table = pa.table(
            [pa.array([1, time], pa.int64()), pa.array([1, day], pa.int32())], names=schema.names
        )
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, schema) as stream:
            stream.write_table(table.cast(schema))
        bed.send([out.getvalue().to_pybytes()])
    report = export(bed.config(kind, format="arrow", partition_by=(by,), dead_letter="topic:dead"))
    assert (report.records, report.rows, report.dead_letters) == (6, 8, 2)
    assert bed.rows(kind).num_rows == 8
    assert [row["offset"] for row in bed.read_topic("dead")] == [1, 2]
