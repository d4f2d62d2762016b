"""Topics read as batches: every row once, exactly typed, as the options say."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from tests.spark.bed import fill, golden, read, rows

import forebay
from forebay.errors import UsageError
from forebay.spark._options import LogOptions, Options


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two topics: `orders` of three partitions in several appends, `clicks` of one."""
    data = tmp_path_factory.mktemp("source") / "data"
    for partition in range(3):
        for append in range(4):
            values = [b"o-%d-%d-%d" % (partition, append, number) for number in range(25)]
            fill(data, "orders", partition, values, partitions=3, keys=[b"k%d" % partition] * 25)
    fill(
        data, "clicks", 0, [b"c1", b"c2"], headers=[{"a": b"1", "b": None}, {}], timestamps_ms=[1_000, 2_500]
    )
    return data


def test_every_record_is_read_once(spark: SparkSession, data: Path) -> None:
    assert rows(read(spark, data, subscribe="orders, clicks")) == golden(data, "orders", "clicks")


def test_columns_are_those_of_the_kafka_source(spark: SparkSession, data: Path) -> None:
    frame = read(spark, data, subscribe="clicks")
    assert frame.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    table = frame.orderBy("offset").toArrow().to_pylist()
    assert [row["key"] for row in table] == [None, None]
    assert table[0]["headers"] == [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]
    assert [row["timestamp"].timestamp() for row in table] == [1.0, 2.5]


def test_the_schema_chooses_columns(spark: SparkSession, data: Path) -> None:
    reader = spark.read.format("forebay").option("path", str(data)).option("subscribe", "orders")
    frame = reader.schema("offset long, partition int").load()
    assert frame.columns == ["offset", "partition"]
    assert frame.groupBy("partition").max("offset").count() == 3
    assert reader.schema("value binary").load().where("value like 'o-1%'").count() == 100


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("offst long", "did you mean 'offset'"),
        ("offset string", "is bigint, not string"),
        ("value binary not null, key binary not null", "column 'key' may hold nulls"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(
    spark: SparkSession, data: Path, schema: str, message: str
) -> None:
    reader = spark.read.format("forebay").option("path", str(data)).option("subscribe", "orders")
    with pytest.raises(PySparkException, match=message):
        reader.schema(schema).load().count()


def test_filters_on_one_frame_do_not_change_each_other(spark: SparkSession, data: Path) -> None:
    frame = read(spark, data, subscribe="orders")
    first, second = frame.where("partition = 0"), frame.where("partition = 1")
    assert first.union(second).groupBy("partition").count().orderBy("partition").collect() == [
        (0, 100),
        (1, 100),
    ]
    assert frame.count() == 300


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribePattern": "ord.*"}, 300),
        ({"subscribePattern": "rd"}, 0),
        ({"assign": '{"orders": [0, 2], "clicks": [0]}'}, 202),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {"0": 91, "1": -2, "2": 101}}'}, 110),
        (
            {
                "assign": '{"orders": [1]}',
                "startingOffsets": '{"orders": {"1": 20}}',
                "endingOffsets": '{"orders": {"1": 61}}',
            },
            41,
        ),
        ({"assign": '{"orders": [1]}', "endingOffsets": '{"orders": {"1": -1}}'}, 100),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {"0": 0, "1": 0, "2": 1}}'}, 300),
        ({"subscribe": "orders", "startingTimestamp": "0"}, 300),
        ({"subscribe": "orders", "endingTimestamp": "1000"}, 0),
        ({"subscribe": "orders", "minPartitions": "12"}, 300),
        (
            {
                "subscribe": "orders",
                "startingTimestamp": "99999999999999",
                "startingOffsetsByTimestampStrategy": "latest",
            },
            0,
        ),
    ],
)
def test_options_choose_what_is_read(
    spark: SparkSession, data: Path, options: dict[str, str], expected: int
) -> None:
    assert read(spark, data, **options).count() == expected


def test_times_are_those_of_the_appends(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"early"])
    with forebay.connect(data) as bay:
        before = int(bay.read("t").read_all()["timestamp"][0].as_py().timestamp() * 1000)
    while int(datetime.now(UTC).timestamp() * 1000) <= before:
        pass
    fill(data, "t", 0, [b"late"])
    late = read(spark, data, subscribe="t", startingTimestamp=before + 1)
    assert [value for *_, value in rows(late)] == [b"late"]
    early = read(spark, data, subscribe="t", endingOffsetsByTimestamp=json.dumps({"t": {"0": before + 1}}))
    assert [value for *_, value in rows(early)] == [b"early"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"subscribe": "orders", "assign": "{}"}, "exactly one"),
        ({"subscribe": "nothing"}, "no topic 'nothing'"),
        ({"subscribe": "orders", "failOnDataLos": "false"}, "did you mean 'failOnDataLoss'"),
        ({"subscribe": "orders", "failOnDataLoss": "perhaps"}, "true or false"),
        ({"subscribe": "orders", "engine": "kafka"}, "log, buffer, stream"),
        ({"subscribe": "orders", "startingOffsets": "latest"}, "from the latest on is empty"),
        ({"subscribe": "orders", "endingOffsets": "earliest"}, "use latest or offsets"),
        (
            {"subscribe": "orders", "startingOffsets": '{"orders": {"0": 1}}'},
            "orders:1, orders:2 are missing",
        ),
        ({"subscribe": "clicks", "startingOffsets": '{"clicks": {"0": 1, "7": 1}}'}, "clicks:7 do not exist"),
        ({"subscribe": "clicks", "startingOffsets": '{"clicks": {"0": "1"}}'}, "for example"),
        ({"subscribe": "clicks", "startingOffsets": "[1]"}, "for example"),
        ({"subscribe": "orders", "startingTimestamp": "99999999999999"}, "no record at or after"),
        (
            {
                "subscribe": "clicks",
                "startingOffsets": '{"clicks": {"0": 50}}',
                "endingOffsets": '{"clicks": {"0": 60}}',
            },
            "the log ends at 3",
        ),
        ({"assign": '{"orders": [1, 3]}'}, "has no partition 3"),
        ({"assign": '{"orders": "0"}'}, r"for example .*\[0, 1\]"),
        ({"assign": '{"orders": [0.5]}'}, r"for example .*\[0, 1\]"),
        ({"assign": '{"orders": [true]}'}, r"for example .*\[0, 1\]"),
        ({"assign": '{"orders": [-1]}'}, r"for example .*\[0, 1\]"),
        ({"assign": "{}"}, r"\[0, 1\]"),
        ({"subscribe": "clicks", "startingOffsets": '{"clicks": {"0": 50}}'}, "the log ends at 3"),
        (
            {
                "subscribe": "clicks",
                "startingOffsets": '{"clicks": {"0": 2}}',
                "endingOffsets": '{"clicks": {"0": 1}}',
            },
            "are not below startingOffsets",
        ),
        ({"subscribe": "clicks", "endingOffsets": '{"clicks": {"0": 60}}'}, "up to 60, and ends at 3 so far"),
        ({"subscribePattern": "("}, "regular expression"),
        ({"subscribe": "orders", "minPartitions": "0"}, "from 1 on"),
        ({"subscribe": "orders", "minPartitions": "9" * 5000}, "from 1 on"),
        ({"subscribe": "orders", "startingTimestamp": "9" * 5000}, "milliseconds since 1970"),
        ({"subscribe": "orders", "maxBytesPerTrigger": "some"}, "maxBytesPerTrigger is 'some'"),
        ({"subscribe": "orders", "maxBytesPerTrigger": "0"}, "maxBytesPerTrigger is '0'"),
        (
            {"subscribe": "orders", "startingTimestamp": "2", "endingTimestamp": "1"},
            "is not before the starting",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    spark: SparkSession, data: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        read(spark, data, **options).count()


@pytest.mark.parametrize(
    "given",
    [
        {"startingOffsets": '{"t": {"' + "9" * 5000 + '": 1}}'},
        {"startingOffsets": '{"t":' * 100_000},
        {"endingOffsetsByTimestamp": '{"t": {"0": -1}}'},
        {"startingOffsetsByTimestamp": '{"t": {"0": 2}}', "endingOffsetsByTimestamp": '{"t": {"0": 1}}'},
    ],
)
def test_positions_that_cannot_be_meant_are_refused_before_anything_is_looked_at(
    given: dict[str, str],
) -> None:
    with pytest.raises(UsageError, match=r"OffsetsByTimestamp is|startingOffsets is|the starting time is"):
        LogOptions.parse(Options({"path": "data", "subscribe": "t"} | given), streaming=False)


def test_reading_makes_no_directory(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="there is no directory"):
        read(spark, tmp_path / "typo", subscribe="orders").count()
    with pytest.raises(PySparkException, match="there is no directory"):
        read(spark, f"file://{tmp_path}/typo", subscribe="orders").count()  # type: ignore[arg-type]
    assert not (tmp_path / "typo").exists()


def test_a_start_behind_the_end_of_the_log_can_be_allowed(spark: SparkSession, data: Path) -> None:
    start = '{"clicks": {"0": 50}}'
    frame = read(spark, data, subscribe="clicks", startingOffsets=start, failOnDataLoss="false")
    assert frame.count() == 0


def test_an_end_behind_the_end_of_the_log_can_be_allowed(spark: SparkSession, data: Path) -> None:
    end = '{"clicks": {"0": 60}}'
    assert read(spark, data, subscribe="clicks", endingOffsets=end, failOnDataLoss="false").count() == 2


def test_a_path_is_needed(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="'path' is missing"):
        spark.read.format("forebay").option("subscribe", "orders").load().count()


def test_trimmed_offsets_are_an_error_or_are_skipped(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"%d" % number for number in range(10)])
    with forebay.connect(data) as bay:
        bay.trim("t", partition=0, offset=6)
    start: dict[str, Any] = {"subscribe": "t", "startingOffsets": '{"t": {"0": 2}}'}
    with pytest.raises(PySparkException, match="the earliest offset is 6"):
        read(spark, data, **start).count()
    assert [offset for _, _, offset, _ in rows(read(spark, data, **start, failOnDataLoss="false"))] == [
        6,
        7,
        8,
        9,
        10,
    ]
    assert read(spark, data, subscribe="t").count() == 5


def test_an_empty_topic_and_a_view_over_a_topic(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.connect(data) as bay:
        bay.topics.create("empty", partitions=5)
    assert read(spark, data, subscribe="empty").count() == 0
    fill(data, "empty", 3, [b"x", b"y"])
    options = f"path '{data}', subscribe 'empty'"
    spark.sql(f"create temporary view spark_log using forebay options ({options})")
    try:
        assert spark.sql("select sum(offset) from spark_log where partition = 3").collect() == [(3,)]
    finally:
        spark.sql("drop view spark_log")


def test_a_table_of_the_catalog_says_that_a_view_is_wanted(spark: SparkSession, data: Path) -> None:
    """Spark takes the options of such a table and hands on none of them."""
    spark.sql(f"create table spark_topic using forebay options (path '{data}', subscribe 'orders')")
    try:
        with pytest.raises(PySparkException, match="create temporary view"):
            spark.sql("select count(*) from spark_topic").collect()
    finally:
        spark.sql("drop table spark_topic")
    assert data.is_dir()
