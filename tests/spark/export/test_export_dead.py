"""Dead letters of several exports in one place, and places that cannot hold them."""

from __future__ import annotations

import zlib

import pyarrow as pa
import pytest
from tests.spark.export.bed import KINDS, Bed, order

import forebay
from forebay.errors import UsageError
from forebay.spark.export import export
from forebay.spark.export._dead import APPEND_BYTES_MAX, _portion
from forebay.spark.export._facts import DEAD_SCHEMA

pytestmark = pytest.mark.xdist_group("export")

NUMBERS = pa.schema([("id", pa.int64()), ("amount", pa.float64())])
TEXTS = pa.schema([("id", pa.int64()), ("amount", pa.string())])


@pytest.mark.parametrize("place", ["topic", "delta", "parquet", "iceberg"])
def test_what_only_one_of_two_exports_cannot_decode_is_kept(bed: Bed, place: str) -> None:
    """Both have the name that is given to whoever gives none, and one place for what is bad."""
    bed.send([b'{"id": 1, "amount": "ten"}', b'{"id": 2, "amount": 2.5}', b"{broken", b'{"id": 3}'])
    dead = "topic:dead" if place == "topic" else f"{place}:{bed.target(place, 'dead').location}"
    for table, schema in (("numbers", NUMBERS), ("texts", TEXTS)):
        config = bed.config("parquet", table, schema=schema, new_columns="ignore", dead_letter=dead)
        report = export(config)
        assert (report.rows, report.dead_letters) == (2, 2)
        assert export(config).commits == 0
    rows = bed.read_topic("dead") if place == "topic" else bed.rows(place, "dead").to_pylist()
    offsets = sorted(
        int(next(each["value"] for each in row["headers"] if each["key"] == "forebay-offset"))
        if place == "topic"
        else row["offset"]
        for row in rows
    )
    assert offsets == [1, 2, 3, 3]


@pytest.mark.parametrize("partitions", [3, 7])
@pytest.mark.parametrize("when", ["dead", "committed"])
def test_a_topic_of_dead_letters_that_is_grown_after_a_crash_gets_none_twice(
    bed: Bed, when: str, partitions: int
) -> None:
    """Both lanes had another partition by their hash then, where nobody knew what was kept."""
    assert all(zlib.crc32(f"orders:{number}".encode()) % partitions for number in range(2))
    bed.send([b"{one", order(1)], partition=0)
    bed.send([b"{two", order(2)], partition=1)
    config = bed.config(dead_letter="topic:dead")

    def step(what: str, *_: int) -> None:
        if what == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(config, step=step)
    with forebay.connect(bed.bay_directory) as bay:
        bay.topics.alter("dead", partitions=partitions)
    bed.send([b"{three"], partition=0)
    export(config)
    bed.send([b"{four"], partition=1)
    export(config)
    wanted = [b"{four", b"{one", b"{three", b"{two"]
    assert sorted(row["value"] for row in bed.read_topic("dead")) == wanted
    assert bed.rows().num_rows == 2


def test_lanes_go_to_all_partitions_of_a_topic_of_dead_letters(bed: Bed) -> None:
    with forebay.connect(bed.bay_directory) as bay:
        bay.topics.create("dead", partitions=3)
    bed.send([b"{one"], partition=0)
    bed.send([b"{two"], partition=1)
    export(bed.config(dead_letter="topic:dead"))
    assert sorted((row["partition"], row["value"]) for row in bed.read_topic("dead")) == [
        (1, b"{one"),
        (2, b"{two"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_cannot_hold_dead_letters_is_refused(bed: Bed, kind: str) -> None:
    """Its rows would have been files that no reader of the table can make anything of."""
    bed.send([order(1)])
    export(bed.config(kind, "other"))
    bed.send([b"{broken"])
    dead = f"{kind}:{bed.target(kind, 'other').location}"
    with pytest.raises(UsageError, match="no table of dead letters: it has no column 'topic'"):
        export(bed.config(kind, dead_letter=dead))
    assert bed.rows(kind, "other").num_rows == 1


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_tables_inside_of_one_another_are_refused(bed: Bed, kind: str) -> None:
    """A full vacuum of the outer one deleted the dead letters."""
    bed.send([b"{broken", order(1)])
    for table, dead in (("table", "table/dead"), ("outer/table", "outer")):
        with pytest.raises(UsageError, match="inside of one another"):
            export(bed.config(kind, table, dead_letter=f"{kind}:{bed.target(kind, dead).location}"))
    beside = f"{kind}:{bed.target(kind, 'table-dead').location}"
    assert export(bed.config(kind, dead_letter=beside)).dead_letters == 1


def test_appends_of_dead_letters_are_bounded_by_their_keys_too() -> None:
    row = {"key": bytes(APPEND_BYTES_MAX // 2), "value": b"bad", "reason": "", "topic": "t", "partition": 0}
    rows = pa.Table.from_pylist([row | {"offset": offset} for offset in range(4)], DEAD_SCHEMA)
    assert _portion(rows).num_rows == 1
