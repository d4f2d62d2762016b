from __future__ import annotations

import io
import json
import random
import re
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.spark.export import parse_schema
from forebay.spark.export._arrow import ArrowDecoder
from forebay.spark.export._avro import AvroDecoder, arrow_schema_of
from forebay.spark.export._decode import Decoded, Decoder
from forebay.spark.export._json import JsonDecoder
from forebay.spark.export._types import choose, schema_of, table_schema, table_type

pytestmark = pytest.mark.xdist_group("export")

WANTED = pa.schema([("id", pa.int64()), ("who", pa.string())])


def decode(decoder: Decoder, values: list[bytes], wanted: pa.Schema = WANTED) -> Decoded:
    array = pa.array(values, pa.binary())
    decoded = decoder.decode(array, pa.nulls(len(values), pa.binary()), wanted)
    assert decoded.table.schema.equals(wanted)
    return decoded


def rows(decoded: Decoded, count: int) -> list[int]:
    """The records that are rows; together with the bad ones they are all records, each once."""
    good = list(range(decoded.table.num_rows)) if decoded.rows is None else decoded.rows.tolist()
    assert sorted([*good, *(row for row, _ in decoded.bad)]) == list(range(count))
    return good


# -- JSON

BAD_JSON = [
    b"",
    b"   ",
    b"\n",
    b"{",
    b"}",
    b"null",
    b"[]",
    b"7",
    b'"{}"',
    b'{"id": 1',
    b'{"id": 1}{"id": 2}',
    b'{"id": 1} {"id": 2}',
    b'{"id": 1}\n{"id": 2}',
    b'{"id": "one"}',
    b'{"id": 1, "who": 3}',
    b'{"id": 1}}',
    b'{{"id": 1}',
    b'{"who": "}',
    b'{"}',
    b'{"id": 1,}',
    b'{"id":{}',
    b',"id":{}}',
    b"\xff\xfe{}",
    b'{"id": 99999999999999999999}',
]


@pytest.mark.parametrize("bad", BAD_JSON)
def test_a_bad_value_is_bad_alone_and_among_good_ones(bad: bytes) -> None:
    assert rows(decode(JsonDecoder(), [bad]), 1) == []
    values = [b'{"id": %d, "who": "w%d"}' % (number, number) for number in range(50)]
    values[17] = bad
    decoded = decode(JsonDecoder(), values)
    assert rows(decoded, 50) == [number for number in range(50) if number != 17]
    assert decoded.table.column("id").to_pylist() == [number for number in range(50) if number != 17]
    [(row, reason)] = decoded.bad
    assert row == 17 and reason and "\n" not in reason


@given(st.lists(st.one_of(st.integers(0, 10**6), st.sampled_from(BAD_JSON)), max_size=60))
def test_every_row_is_the_value_it_came_from(plan: list[int | bytes]) -> None:
    values = [b'{"id":%d}' % each if isinstance(each, int) else each for each in plan]
    decoded = decode(JsonDecoder(), values)
    good = rows(decoded, len(values))
    assert [plan[row] for row in good] == decoded.table.column("id").to_pylist()
    assert len(decoded.bad) == sum(isinstance(each, bytes) for each in plan)


def test_an_empty_value_and_a_double_one_do_not_even_out() -> None:
    values = [b'{"id":1}', b"", b'{"id":2}{"id":3}', b'{"id":4}']
    decoded = decode(JsonDecoder(), values)
    assert rows(decoded, 4) == [0, 3]
    assert decoded.table.column("id").to_pylist() == [1, 4]


def test_newlines_between_tokens_are_allowed_and_inside_of_strings_are_not() -> None:
    values = [b'{\n "id": 1,\r\n "who": "a"\n}', b'{"id": 2, "who": "a\nb"}', b'{"id": 3, "who": "a\\nb"}']
    decoded = decode(JsonDecoder(), values)
    assert 0 in rows(decoded, 3) and 2 in rows(decoded, 3)
    assert decoded.table.column("who").to_pylist()[0] == "a"
    assert decoded.table.column("who").to_pylist()[-1] == "a\nb"


def test_space_around_an_object_is_allowed() -> None:
    values = [b'{"id": 1}\n', b' \t{"id": 2}', b'\r\n{"id": 3} ', b" ", b'{"id": 5}', b"\n7\n"]
    decoded = decode(JsonDecoder(), values)
    assert decoded.table.column("id").to_pylist() == [1, 2, 3, 5]
    assert rows(decoded, 6) == [0, 1, 2, 4]
    assert sorted(decoded.bad) == [(3, "the value is empty"), (5, "the value is no JSON object")]


def test_a_slice_of_a_larger_array_is_decoded_as_itself() -> None:
    values = pa.array([b'{"id":%d}' % number for number in range(10)], pa.binary()).slice(3, 4)
    decoded = JsonDecoder().decode(values, pa.nulls(4, pa.binary()), WANTED)
    assert decoded.table.column("id").to_pylist() == [3, 4, 5, 6]


def test_fields_the_schema_lacks_are_reported_or_passed_over() -> None:
    values = [b'{"id":1,"new":2.5,"nothing":null}', b'{"id":2,"new":3}']
    assert schema_of(decode(JsonDecoder(), values).missing) == pa.schema([("new", pa.float64())])
    assert decode(JsonDecoder(infer=False), values).missing == {}


def test_one_odd_record_does_not_decide_the_type_of_a_column() -> None:
    values = [b'{"id":%d}' % number for number in range(20)] + [b'{"id":"text"}', b"{bad"]
    seen = JsonDecoder().look(pa.array(values, pa.binary()))
    assert schema_of(seen) == pa.schema([("id", pa.int64())])


@pytest.mark.parametrize(
    "value",
    [
        b'{"id": 1, "id": 2}',
        b'{"id": 1, "id": 1}',
        b'{"id": 1, "\\u0069d": 2}',
        b'{"id": 1, "new": 1, "new": 2}',
        b'{"id": 1, "inner": {"x": 1, "x": 2}}',
        b'{"id": 1, "lines": [{"x": 1, "x": 2}]}',
    ],
)
def test_a_field_that_is_there_twice_makes_a_bad_record(value: bytes) -> None:
    """Which of the two was meant, nobody can say."""
    wanted = pa.schema([*WANTED, ("inner", pa.struct([("x", pa.int64())]))])
    decoded = decode(JsonDecoder(), [b'{"id": 1}', value, b'{"id": 3}'], wanted)
    assert rows(decoded, 3) == [0, 2]
    assert "twice" in decoded.bad[0][1]


def test_days_and_nanoseconds_of_json_are_what_everybody_writes() -> None:
    """A day was good only as a number, and the nanoseconds of Go and Java made every record bad."""
    wanted = parse_schema("day date, at timestamp, days array<date>, id long")
    values = [
        b'{"id": 0, "day": "2026-11-16", "at": "2026-11-16T09:30:00.123456Z", "days": ["2026-11-17", null]}',
        b'{"id": 1, "day": 20773, "at": "2026-11-16T09:30:00Z", "days": [20774]}',
        b'{"id": 2, "day": null, "at": "2026-11-16T09:30:00.123456789Z", "new": {"day": "2026-11-16"}}',
        b'{"id": 3, "day": "9999-12-31", "at": "9999-12-31T23:59:59Z"}',
        b'{"id": 4, "day": "2026-11-16T09:30:00Z"}',
        b'{"id": 5, "day": "tomorrow"}',
        b'{"id": 6, "at": "2026-11-16T09:30:00.1234567891Z"}',
    ]
    decoded = decode(JsonDecoder(), values, wanted)
    assert rows(decoded, len(values)) == [0, 1, 2, 3]
    assert "tomorrow" in dict(decoded.bad)[5]
    texts = [decoded.table.column(name).cast(pa.string()).to_pylist() for name in ("day", "at")]
    assert texts[0] == ["2026-11-16", "2026-11-16", None, "9999-12-31"]
    assert [text[:26] for text in texts[1]] == [
        "2026-11-16 09:30:00.123456",
        "2026-11-16 09:30:00.000000",
        "2026-11-16 09:30:00.123456",
        "9999-12-31 23:59:59.000000",
    ]
    days = decoded.table.column("days").to_pylist()
    assert [str(day) for day in [*days[0], *days[1]]] == ["2026-11-17", "None", "2026-11-17"]
    assert list(decoded.missing) == ["new"]


def test_good_batches_are_parsed_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    parse = JsonDecoder._parse

    def counted(self: JsonDecoder, values: pa.BinaryArray, wanted: pa.Schema | None) -> pa.Table:
        calls.append(len(values))
        return parse(self, values, wanted)

    monkeypatch.setattr(JsonDecoder, "_parse", counted)
    decode(JsonDecoder(), [b'{"id":1}'] * 10_000)
    assert len(calls) == 1
    calls.clear()
    decode(JsonDecoder(), [b'{"id":1}'] * 5_000 + [b'{"id":"x"}'] + [b'{"id":1}'] * 5_000)
    assert len(calls) < 60


# -- Avro

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "who", "type": ["null", "string"]},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "tags", "type": {"type": "array", "items": "string"}},
            {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        ],
    }
)


def avro(number: int) -> bytes:
    out = io.BytesIO()
    datum = {"id": number, "who": f"w{number}", "at": 1_700_000_000_000 + number, "tags": ["x"], "kind": "B"}
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(AVRO)), datum)
    return out.getvalue()


def test_avro_datums_become_rows_with_their_logical_types() -> None:
    schema = arrow_schema_of(AVRO)
    decoded = decode(AvroDecoder(AVRO), [avro(number) for number in range(100)], schema)
    assert decoded.rows is None and not decoded.bad
    row = decoded.table.slice(5, 1).to_pylist()[0]
    assert (row["id"], row["who"], row["tags"], row["kind"]) == (5, "w5", ["x"], "B")
    assert row["at"].timestamp() == pytest.approx(1_700_000_000.005)


@pytest.mark.parametrize("seed", range(5))
def test_a_datum_that_is_too_short_takes_nothing_from_its_neighbour(seed: int) -> None:
    values = [avro(number) for number in range(40)]
    bad = sorted(random.Random(seed).sample(range(0, 39, 2), 3))
    for row in bad:
        # What one loses its neighbour gets: joined, all bytes are there.
        values[row], values[row + 1] = values[row][:-2], values[row][-2:] + values[row + 1]
    decoded = decode(AvroDecoder(AVRO), values, arrow_schema_of(AVRO))
    good = rows(decoded, 40)
    assert {row for row, _ in decoded.bad} >= set(bad)
    assert [decoded.table.column("id")[at].as_py() for at in range(len(good))] == good


@pytest.mark.parametrize("bad", [b"", b"\x00", b"\xff" * 40, avro(1) + b"\x00", avro(1)[:-1]])
def test_a_value_that_is_no_datum_is_bad(bad: bytes) -> None:
    decoded = decode(AvroDecoder(AVRO), [avro(1), bad, avro(3)], arrow_schema_of(AVRO))
    assert rows(decoded, 3) == [0, 2]


@pytest.mark.parametrize(
    ("kind", "written", "expected"),
    [
        ({"type": "string", "logicalType": "uuid"}, str(UUID(int=1)), str(UUID(int=1))),
        ({"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}, bytes(16), bytes(16)),
        ({"type": "int", "logicalType": "time-millis"}, 3_723_000, 3_723_000),
        ({"type": "long", "logicalType": "time-micros"}, 7, 7),
        ({"type": "long", "logicalType": "local-timestamp-millis"}, 1_700_000_000_000, 1_700_000_000_000),
        (["null", {"type": "array", "items": {"type": "string", "logicalType": "uuid"}}], ["a"], ["a"]),
        ({"type": "string", "logicalType": "timestamp-millis"}, "noon", "noon"),
    ],
)
def test_avro_types_that_tables_lack_come_as_what_they_are_made_of(
    kind: Any, written: Any, expected: Any
) -> None:
    def schema(field: Any) -> dict[str, Any]:
        return {"type": "record", "name": "R", "fields": [{"name": "f", "type": field}]}

    plain = json.loads(re.sub(r', "logicalType": "[a-z-]+"', "", json.dumps(kind)))
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema(plain)), {"f": written})
    text = json.dumps(schema(kind))
    decoded = decode(AvroDecoder(text), [file.getvalue()], arrow_schema_of(text))
    assert decoded.bad == []
    assert decoded.table.column("f").to_pylist() == [expected]


@pytest.mark.parametrize(
    "field",
    [
        {"name": "f", "type": "lng"},
        {"name": "f"},
        {"name": "f", "type": {"type": "enum", "name": "E"}},
        {"name": "f", "type": {"type": "bytes", "logicalType": "decimal", "precision": 50}},
    ],
)
def test_an_avro_schema_that_is_none_is_refused_in_a_sentence(field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Avro"):
        arrow_schema_of(json.dumps({"type": "record", "name": "R", "fields": [field]}))


def test_an_avro_value_that_ends_too_early_says_so() -> None:
    decoded = decode(AvroDecoder(AVRO), [b""], arrow_schema_of(AVRO))
    assert "no datum of this schema" in decoded.bad[0][1]


COLOURS = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "c", "type": {"type": "enum", "name": "colour", "symbols": ["red", "blue"]}},
        {"name": "list", "type": {"type": "array", "items": "colour"}},
        {
            "name": "inner",
            "type": {"type": "record", "name": "i", "fields": [{"name": "x", "type": "colour"}]},
        },
        {"name": "map", "type": {"type": "map", "values": ["null", "colour"]}},
    ],
}


def test_an_avro_symbol_below_the_first_or_behind_the_last_is_bad() -> None:
    """To the reader -1 is the last symbol."""
    decoder = AvroDecoder(json.dumps(COLOURS))
    good = b"\x02\x02\x00\x00\x02\x02\x02k\x02\x00\x00"
    [row] = decode(decoder, [good], decoder._columns).table.to_pylist()
    assert row == {"c": "blue", "list": ["red"], "inner": {"x": "blue"}, "map": [("k", "red")]}
    for place in (0, 2, 4, 9):  # Every symbol in it.
        for index in (*range(1, 128, 2), *range(4, 128, 2)):  # -1 to -64, 2 to 63.
            value = good[:place] + bytes([index]) + good[place + 1 :]
            decoded = decode(decoder, [good, value], decoder._columns)
            assert [number for number, _ in decoded.bad] == [1], (place, index)


BRANCHES = {
    "type": "record",
    "name": "r",
    "namespace": "a.b",
    "fields": [
        {"name": "text", "type": ["null", "string"]},
        {"name": "data", "type": ["bytes", "null"]},
        {"name": "number", "type": ["null", "long"]},
        {"name": "list", "type": {"type": "array", "items": ["null", "string"]}},
        {"name": "map", "type": {"type": "map", "values": ["null", "bytes"]}},
        {
            "name": "inner",
            "type": [
                "null",
                {"type": "record", "name": "i", "fields": [{"name": "x", "type": ["null", "string"]}]},
            ],
        },
        {"name": "lists", "type": ["null", {"type": "array", "items": "string"}]},
    ],
}


def test_an_avro_branch_below_the_first_or_behind_the_last_is_bad() -> None:
    """To the reader -1 is the last branch of a union, and -2 the one before it."""
    decoder = AvroDecoder(json.dumps(BRANCHES))
    good = b"\x02\x02t\x00\x02d\x02\x08\x02\x02\x02e\x00\x02\x02k\x02\x02v\x00"
    good += b"\x02\x02\x02y\x02\x02\x02z\x00"
    [row] = decode(decoder, [good], decoder._columns).table.to_pylist()
    assert (row["text"], row["data"], row["number"], row["inner"]) == ("t", b"d", 4, {"x": "y"})
    assert (row["list"], row["map"], row["lists"]) == (["e"], [("k", b"v")], ["z"])
    for place in (0, 3, 6, 9, 16, 20, 21, 24):  # Every branch in it.
        for index in (*range(1, 128, 2), *range(4, 128, 2)):  # -1 to -64, 2 to 63.
            value = good[:place] + bytes([index]) + good[place + 1 :]
            decoded = decode(decoder, [good, value], decoder._columns)
            assert [number for number, _ in decoded.bad] == [1], (place, index)


def test_avro_types_are_found_by_their_names_in_any_namespace() -> None:
    """The reader gets other names for them."""
    inner = {"type": "record", "name": "logicalType", "fields": [{"name": "type0", "type": ["null", "int"]}]}
    money = {"type": "fixed", "name": "x.y.money", "size": 4, "logicalType": "decimal", "precision": 8}
    fields = [
        {"name": "one", "type": inner, "doc": "d", "aliases": ["eins"]},
        {"name": "two", "type": ["null", "logicalType"], "default": None},
        {"name": "three", "type": {"type": "array", "items": "a.b.logicalType"}},
        {"name": "four", "type": {"type": "map", "values": money}},
        {"name": "five", "type": ["null", "x.y.money"]},
        {"name": "six", "type": {"type": "enum", "name": "kind", "symbols": ["A", "B"], "default": "A"}},
        {"name": "seven", "type": ["null", {"type": "array", "items": ["null", "a.b.kind"]}]},
    ]
    schema = {"type": "record", "name": "r", "namespace": "a.b", "fields": fields}
    row = {
        "one": {"type0": 1}, "two": {"type0": None}, "three": [{"type0": 2}], "four": {"k": Decimal(7)},
        "five": Decimal(-8), "six": "B", "seven": ["A", None],
    }  # fmt: skip
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema), row)
    decoder = AvroDecoder(json.dumps(schema))
    decoded = decode(decoder, [file.getvalue()], decoder._columns)
    assert decoded.bad == []
    assert decoded.table.to_pylist() == [row | {"four": [("k", Decimal(7))]}]


def test_a_grown_avro_schema_tells_of_its_new_fields() -> None:
    decoder = AvroDecoder(json.dumps(COLOURS))
    decoded = decode(decoder, [], pa.schema([("c", pa.string()), ("inner", pa.struct([]))]))
    assert set(decoded.missing) == {"inner", "list", "map"}


def test_an_avro_value_that_does_not_fit_its_column_is_bad_alone() -> None:
    schema = {"type": "record", "name": "r", "fields": [{"name": "n", "type": "long"}]}
    values = [b"\x02", b"\x80\x80\x80\x80\x80\x80\x01", b"\x04"]
    decoded = decode(AvroDecoder(json.dumps(schema)), values, pa.schema([("n", pa.int32())]))
    assert decoded.table.column("n").to_pylist() == [1, 2]
    assert [number for number, _ in decoded.bad] == [1]


def test_an_avro_array_whose_elements_take_no_bytes_is_refused() -> None:
    empty = {"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]}
    for items in ("null", empty):
        field = {"name": "a", "type": {"type": "array", "items": items}}
        with pytest.raises(UsageError, match="array of nulls"):
            arrow_schema_of(json.dumps({"type": "record", "name": "R", "fields": [field]}))


def test_an_avro_fixed_of_no_bytes_is_refused() -> None:
    """Six bytes could ask for an array of a billion of them."""
    fixed = {"type": "fixed", "name": "F", "size": 0}
    for kind in (fixed, {"type": "array", "items": fixed}, {"type": "array", "items": ["null", fixed]}):
        schema = json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": kind}]})
        with pytest.raises(UsageError, match="'F' is an Avro fixed of no bytes"):
            AvroDecoder(schema)


def test_recursive_records_and_wide_unions_are_refused() -> None:
    node: dict[str, Any] = {"type": "record", "name": "N", "fields": [{"name": "n", "type": ["null", "N"]}]}
    with pytest.raises(UsageError, match="contains itself"):
        arrow_schema_of(json.dumps(node))
    wide = {"type": "record", "name": "W", "fields": [{"name": "u", "type": ["int", "string"]}]}
    with pytest.raises(UsageError, match="union"):
        arrow_schema_of(json.dumps(wide))
    with pytest.raises(UsageError, match="no record"):
        arrow_schema_of('"string"')


# -- Arrow


def ipc(table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return bytes(out.getvalue().to_pybytes())


def test_arrow_values_give_many_rows_each_and_know_their_record() -> None:
    one = ipc(pa.table({"id": pa.array([1, 2], pa.int32()), "who": ["a", "b"]}))
    none = ipc(pa.table({"id": pa.array([], pa.int64())}))
    more = ipc(pa.table({"id": pa.array([3], pa.int64()), "new": [1.5]}))
    wrong = ipc(pa.table({"id": ["x"]}))
    decoded = decode(ArrowDecoder(), [one, b"junk", none, more, wrong])
    assert decoded.rows is not None and decoded.rows.tolist() == [0, 0, 3]
    assert decoded.table.to_pylist() == [
        {"id": 1, "who": "a"},
        {"id": 2, "who": "b"},
        {"id": 3, "who": None},
    ]
    assert [row for row, _ in decoded.bad] == [1, 4]
    assert schema_of(decoded.missing) == pa.schema([("new", pa.float64())])


# -- types


def test_types_of_tables_lose_nothing() -> None:
    assert table_type(pa.uint32()) == pa.int64()
    assert table_type(pa.uint64()) == pa.decimal128(20, 0)
    assert table_type(pa.timestamp("ns")) == pa.timestamp("us", tz="UTC")
    assert table_type(pa.dictionary(pa.int8(), pa.large_string())) == pa.string()
    assert table_type(pa.struct([("a", pa.list_(pa.uint8()))])) == pa.struct(
        [("a", pa.list_(pa.field("element", pa.int16())))]
    )
    with pytest.raises(UsageError):
        table_type(pa.month_day_nano_interval())
    with pytest.raises(UsageError, match="case"):
        table_schema(pa.schema([("a", pa.int64()), ("A", pa.int64())]))


def test_the_type_of_most_rows_wins_and_numbers_widen() -> None:
    assert choose({pa.int64(): 5, pa.float64(): 1}) == pa.float64()
    assert choose({pa.int64(): 5, pa.string(): 1}) == pa.int64()
    assert choose({pa.int64(): 1, pa.string(): 5}) == pa.string()
    assert choose({pa.null(): 9}) == pa.string()


def test_a_schema_is_written_as_in_sql() -> None:
    schema = parse_schema("id long, price decimal(10,2), at timestamp, tags array<string>")
    assert schema.names == ["id", "price", "at", "tags"]
    assert schema.field("price").type == pa.decimal128(10, 2)
    for wrong in ("id", "id what", "id long,,x int"):
        with pytest.raises(UsageError):
            parse_schema(wrong)
