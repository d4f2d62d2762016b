"""Fields that come later, inside of columns too, and fields of which nothing is known yet."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.spark.export.bed import KINDS, Bed, order

import forebay
from forebay.errors import FormatError, LimitExceeded, NotDone, Unavailable, UsageError
from forebay.spark.export import ExportConfig, ExportReport, TargetSpec, _exporter, export, export_forever
from forebay.spark.export._parquet import ParquetHandle
from forebay.spark.export._types import choose, grown

PLACE = pa.struct([("city", pa.string())])


def by_id(bed: Bed, kind: str) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in bed.rows(kind).to_pylist()}


@pytest.mark.parametrize("kind", KINDS)
def test_new_fields_inside_of_columns_are_added(bed: Bed, kind: str) -> None:
    bed.send([order(1, place={"city": "Graz"}, lines=[{"sku": 1}])])
    export(bed.config(kind))
    later = {"city": "Linz", "zip": 4020, "at": {"lat": 48.3}}
    bed.send([order(2, place=later, lines=[{"sku": 2, "count": 3}], note="x")])
    report = export(bed.config(kind))
    assert report.added_columns == ["lines.count", "note", "place.zip", "place.at"]
    assert (report.rows, report.ignored_columns) == (1, [])
    bed.send([order(3, place={"at": {"lon": 14.3}})])
    assert export(bed.config(kind)).added_columns == ["place.at.lon"]
    found = by_id(bed, kind)
    assert found[2]["place"]["zip"] == 4020 and found[2]["place"]["at"]["lat"] == 48.3
    assert found[2]["lines"][0]["count"] == 3 and found[2]["note"] == "x"
    assert found[3]["place"]["at"]["lon"] == 14.3
    assert found[1]["place"]["city"] == "Graz"
    assert export(bed.config(kind)).commits == 0


@pytest.mark.parametrize("kind", KINDS)
def test_objects_without_fields_and_empty_lists_are_no_columns_yet(bed: Bed, kind: str) -> None:
    """No file can hold an object without fields; and what an empty list is a list of, nobody knows."""
    bed.send([order(1, extra={}, tags=[], deep={"a": {}, "b": [None]}, place={"city": "Graz", "box": {}})])
    assert export(bed.config(kind)).rows == 1
    assert not {"extra", "tags", "deep"} & set(bed.rows(kind).column_names)
    bed.send(
        [order(2, extra={"n": 1}, tags=[7], deep={"a": {"n": 2}}, place={"city": "Linz", "box": {"n": 3}})]
    )
    assert export(bed.config(kind)).rows == 1
    found = by_id(bed, kind)[2]
    assert (found["extra"], found["tags"], found["deep"]) == ({"n": 1}, [7], {"a": {"n": 2}})
    assert found["place"] == {"city": "Linz", "box": {"n": 3}}


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_new_fields_that_differ_only_in_case_one_is_added(bed: Bed, kind: str) -> None:
    bed.send([order(1)])
    export(bed.config(kind))
    bed.send([order(2, Note="x"), order(3, note="y")])
    report = export(bed.config(kind))
    assert (report.rows, report.added_columns, report.ignored_columns) == (2, ["Note"], ["note"])
    bed.send([order(4)])
    assert export(bed.config(kind)).rows == 1, "the table can still be loaded"


def test_first_records_with_names_that_cannot_be_columns_do_not_hold_up_the_others(bed: Bed) -> None:
    bed.send([order(1, _offset=5, who2="a", WHO2="b"), order(2)])
    report = export(bed.config())
    assert (report.rows, report.ignored_columns) == (2, ["WHO2", "_offset"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False])
def test_names_that_no_column_can_have_are_left_out_and_named(bed: Bed, kind: str, first: bool) -> None:
    """A zero byte ends a name on its way to Delta: the column that was added was never the one asked for."""
    if not first:
        bed.send([order(1)])
        export(bed.config(kind))
    inner = {"a": 1, "A": 2, "lines": [{"c": 1, "C": 2}], "": 3, "\0": 4}
    bed.send([order(2, x=inner, y={"": 5}, **{"": 6, "a\0b": 7, "n" * 256: 8})])
    report = export(bed.config(kind))
    assert (report.rows, report.added_columns) == (1, [] if first else ["x"])
    names = ["", "a\0b", "n" * 256, "x.", "x.\0", "x.A", "x.lines.C"]
    assert report.ignored_columns == names
    bed.send([order(3)])
    assert export(bed.config(kind)).rows == 1
    assert by_id(bed, kind)[2]["x"] == {"a": 1, "lines": [{"c": 1}]}


def test_columns_that_do_not_come_end_the_export(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.send([order(1)])
    export(bed.config("parquet"))
    bed.send([order(2, note="x")])
    monkeypatch.setattr(ParquetHandle, "add_columns", lambda *_: None)
    with pytest.raises(NotDone, match="added and are not there: note"):
        export(bed.config("parquet"))
    assert export(bed.config("parquet", new_columns="ignore")).rows == 1


@pytest.mark.parametrize("kind", KINDS)
def test_new_fields_inside_of_the_values_of_a_map_are_added(bed: Bed, kind: str) -> None:
    def sent(fields: dict[str, int]) -> None:
        item = pa.struct([(name, pa.int64()) for name in fields])
        table = pa.table({"m": pa.array([[("x", fields)]], pa.map_(pa.string(), item))})
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
        bed.send([out.getvalue().to_pybytes()])

    sent({"a": 1})
    export(bed.config(kind, format="arrow"))
    sent({"a": 2, "b": 3})
    report = export(bed.config(kind, format="arrow"))
    assert (report.rows, report.added_columns, report.ignored_columns) == (1, ["m.b"], [])
    sent({"c": 4})
    assert export(bed.config(kind, format="arrow", new_columns="ignore")).ignored_columns == ["m.c"]
    found = [dict(row["m"])["x"] for row in bed.rows(kind).to_pylist()]
    assert sorted(found, key=str) == [{"a": 1, "b": None}, {"a": 2, "b": 3}, {"a": None, "b": None}]


def test_columns_are_bounded(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exporter, "COLUMNS_MAX", 10)
    bed.send([order(1)])
    export(bed.config())
    bed.send([order(2, seen={f"user-{number}": 1 for number in range(10)})])
    with pytest.raises(LimitExceeded, match="columns of a table: 18 is over the limit of 10"):
        export(bed.config())
    assert export(bed.config(new_columns="ignore")).rows == 1
    with pytest.raises(LimitExceeded, match="columns of a table"):
        export(bed.config(table="other"))


def test_a_column_grows_and_keeps_what_it_has() -> None:
    seen = pa.struct(
        [("City", pa.int64()), ("zip", pa.uint8()), ("ZIP", pa.string()), ("box", pa.struct([]))]
    )
    assert grown(PLACE, seen) == pa.struct([("city", pa.string()), ("zip", pa.int16())])
    assert grown(pa.list_(PLACE), pa.list_(seen)) == pa.list_(grown(PLACE, seen))
    for other in (pa.int64(), pa.list_(PLACE), PLACE, pa.null()):
        assert grown(PLACE, other) == PLACE


def test_objects_with_different_fields_count_together() -> None:
    """Three objects of three kinds are more than one number."""
    objects = [pa.struct([(name, pa.int64())]) for name in "abc"]
    assert choose({pa.int64(): 1, **dict.fromkeys(objects, 1)}) == pa.struct(
        [(name, pa.int64()) for name in "abc"]
    )
    assert choose({pa.int64(): 2, pa.float64(): 2, pa.string(): 3}) == pa.float64()


def test_a_partition_that_is_added_is_read_from_its_beginning(bed: Bed) -> None:
    """--from latest is for topics that are new to the table, not for what is written before the next look."""
    bed.send([order(1)])
    config = bed.config(start="latest", schema=pa.schema([("id", pa.int64())]))
    assert export(config).rows == 0
    with forebay.connect(bed.bay_directory) as bay:
        bay.topics.alter("orders", partitions=3)
    bed.send([order(2)], partition=2)
    bed.send([order(3)], partition=0)
    assert export(config).rows == 2
    assert sorted(row["id"] for row in bed.rows().to_pylist()) == [2, 3]


def test_a_delta_table_is_no_place_for_a_parquet_table(bed: Bed) -> None:
    bed.send([order(1)])
    export(bed.config("delta"))
    spec = bed.config("parquet")
    inside = TargetSpec("parquet", bed.target("delta").location)
    with pytest.raises(UsageError, match="is a Delta table"):
        export(replace(spec, target=inside))
    file = bed.directory / "file"
    file.touch()
    with pytest.raises(UsageError, match="is a file"):
        export(replace(spec, target=TargetSpec("parquet", str(file))))


def test_another_dead_letter_topic_takes_over(bed: Bed) -> None:
    """How far the former one was read says nothing about it."""
    bed.send([b"{broken %d" % number for number in range(5)])
    assert export(bed.config(dead_letter="topic:first")).dead_letters == 5
    bed.send([b"{worse"])
    assert export(bed.config(dead_letter="topic:second")).dead_letters == 1
    assert [row["value"] for row in bed.read_topic("second")] == [b"{worse"]
    assert len(bed.read_topic("first")) == 5


def test_a_delta_table_that_cannot_be_reached_is_waited_for(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deltalake

    bed.send([order(1)])
    export(bed.config())
    table, left = deltalake.DeltaTable, 2

    def refused(*given: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError("Generic S3 error\n  \x1b[31m\u21b3\x1b[0m HTTP error")
        return table(*given, **more)

    monkeypatch.setattr(deltalake, "DeltaTable", refused)
    with pytest.raises(Unavailable, match=r"Generic S3 error \u21b3 HTTP error$"):
        export(bed.config())
    bed.send([order(2)])
    stop, rows = threading.Event(), 0

    def heard(report: ExportReport) -> None:
        nonlocal rows
        rows += report.rows
        stop.set()

    export_forever(bed.config(), interval_s=0.1, stop=stop, each=heard)
    assert rows == 1 and left < 0


def test_a_delta_log_that_is_damaged_is_named(bed: Bed) -> None:
    bed.send([order(1)])
    export(bed.config())
    entry = max(Path(bed.target("delta").location).glob("_delta_log/*.json"))
    entry.write_text("garbage{")
    with pytest.raises(FormatError, match="no Delta table that can be read: ") as caught:
        export(bed.config())
    assert "<unknown>" not in caught.value.message


def test_a_grown_avro_schema_adds_its_columns(bed: Bed) -> None:
    def config(*names: str) -> ExportConfig:
        fields = [{"name": name, "type": "long"} for name in names]
        schema = json.dumps({"type": "record", "name": "r", "fields": fields})
        return bed.config(format="avro", avro_schema=schema)

    bed.send([b"\x02"])
    export(config("id"))
    bed.send([b"\x04\x06"])
    assert export(config("id", "more")).added_columns == ["more"]
    assert sorted((row["id"], row["more"]) for row in bed.rows().to_pylist()) == [(1, None), (2, 3)]
    bed.send([b"\x08\x0a\x0c"])
    report = export(replace(config("id", "more", "most"), new_columns="ignore"))
    assert (report.rows, report.added_columns, report.ignored_columns) == (1, [], ["most"])


def test_raw_values_do_not_go_into_a_table_without_their_columns(bed: Bed) -> None:
    bed.send([order(1)])
    export(bed.config())
    with pytest.raises(UsageError, match="has no column 'key' of type binary"):
        export(bed.config(format="raw"))
    bed.send([b"raw"], partition=1)
    export(bed.config(format="raw", table="other"))
    bed.send([order(2)])
    assert export(bed.config(table="other")).added_columns == ["amount", "at", "id", "who"]
    bed.send([order(3)])
    assert export(bed.config(format="raw", table="other")).rows == 1, "the other columns are null"
