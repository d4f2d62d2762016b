"""Rows written into topics: once, whatever is repeated, killed, or fails after it took effect."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from tests.spark.bed import fill, golden, run, stream

import forebay
from forebay.coordination import open_coordinator
from forebay.log import partition_of
from forebay.spark import ForebaySource
from forebay.spark._log_sink import LogSinkOptions, LogStreamWriter, StagedRows
from forebay.spark._options import Options
from forebay.spark._routing import targets


def sink(frame: Any, data: Path, **options: object) -> Any:
    writer = frame.writeStream.format(options.pop("format", "forebay")).option("path", str(data))
    for name, value in options.items():
        writer = writer.option(name, str(value))
    return writer


def values(data: Path, topic: str) -> Counter[bytes]:
    return Counter(value for *_, value in golden(data, topic))


class BrokenSink(ForebaySource):
    """Fails where a test wants it to: `fail` is before, after, or the number of a task."""

    @classmethod
    def name(cls) -> str:
        return "brokensink"

    def streamWriter(self, schema: Any, overwrite: bool) -> LogStreamWriter:
        options = dict(self.options)
        marker = Path(options.pop("marker"))
        when = options.pop("fail")
        return BrokenWriter(LogSinkOptions.parse(Options(options), schema), when, marker)


class BrokenWriter(LogStreamWriter):
    """Fails once."""

    def __init__(self, options: LogSinkOptions, when: str, marker: Path) -> None:
        super().__init__(options)
        self.when = when
        self.marker = marker

    def _fail(self, when: str) -> None:
        if self.when == when and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError(f"failed {when}")

    def write(self, iterator: Any) -> StagedRows:
        staged = super().write(iterator)
        self._fail("after staging")
        return staged

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        self._fail("before commit")
        super().commit(messages, batchId)
        self._fail("after commit")


@pytest.mark.parametrize("when", ["before commit", "after commit", "after staging"])
def test_a_failure_around_the_commit_repeats_and_loses_nothing(
    spark: SparkSession, tmp_path: Path, when: str
) -> None:
    import tests.spark.test_sink_log as here
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(here)  # type: ignore[no-untyped-call]
    spark.dataSource.register(here.BrokenSink)
    data = tmp_path / "data"
    fill(data, "in", 0, [b"a%d" % number for number in range(50)], partitions=2)
    fill(data, "in", 1, [b"b%d" % number for number in range(50)])

    def write() -> None:
        frame = stream(spark, data, subscribe="in", minPartitions=5).select("key", "value")
        options = {"format": "brokensink", "topic": "out", "fail": when, "marker": tmp_path / "marker"}
        run(sink(frame, data, **options), tmp_path)

    if when == "after staging":
        write()  # A task that failed is tried again by itself.
    else:
        with pytest.raises(StreamingQueryException, match=when):
            write()
        fill(data, "in", 0, [b"c%d" % number for number in range(10)])
        write()
    assert (tmp_path / "marker").exists()
    assert values(data, "out") == values(data, "in")
    assert set(values(data, "out").values()) == {1}


def test_batches_land_by_key_with_all_columns(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.connect(data) as bay:
        bay.topics.create("keyed", partitions=4)
    frame = spark.sql(
        "select cast(concat('k', id % 10) as binary) key, concat('v', id) value, "
        "timestamp_millis(1000 + id) timestamp, "
        "array(named_struct('key', 'h', 'value', cast(id as string))) headers_text from range(200)"
    ).selectExpr(
        "key",
        "value",
        "timestamp",
        "transform(headers_text, h -> named_struct('key', h.key, 'value', cast(h.value as binary))) headers",
    )
    frame.write.format("forebay").mode("append").option("path", str(data)).option("topic", "keyed").save()
    with forebay.connect(data) as bay:
        table = bay.read("keyed").read_all().to_pylist()
    assert len(table) == 200
    for row in table:
        number = int(row["value"][1:])
        assert row["partition"] == partition_of(row["key"], 4)
        assert row["key"] == b"k%d" % (number % 10)
        assert row["timestamp"].timestamp() == pytest.approx((1000 + number) / 1000)
        assert row["headers"] == [{"key": "h", "value": b"%d" % number}]


def test_topic_and_partition_columns_choose_where_rows_go(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with forebay.connect(data) as bay:
        bay.topics.create("t1", partitions=3)
    frame = spark.sql(
        "select if(id % 2 = 0, 't1', null) topic, cast(if(id % 2 = 0, id % 3, null) as int) partition, "
        "cast(id as string) value from range(60)"
    )
    writer = frame.write.format("forebay").mode("append").option("path", str(data))
    writer.option("topic", "rest").option("compression", "zstd").save()
    assert {(partition, int(value) % 3) for _, partition, _, value in golden(data, "t1")} == {
        (0, 0),
        (1, 1),
        (2, 2),
    }
    assert values(data, "rest") == Counter(b"%d" % number for number in range(1, 60, 2))


def test_a_write_with_an_id_happens_once(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for _ in range(2):
        frame = spark.sql("select cast(id as string) value from range(10)")
        writer = frame.write.format("forebay").mode("append").option("path", str(data)).option("topic", "t")
        writer.option("writeId", "load-2026-11-16").save()
    assert sum(values(data, "t").values()) == 10


def test_an_id_that_named_a_write_into_another_topic_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Taken for a repetition, the rows were nowhere, and nobody was told."""
    data = tmp_path / "data"
    frame = spark.sql("select cast(id as string) value from range(10)")
    writer = frame.write.format("forebay").mode("append").option("path", str(data)).option("writeId", "today")
    writer.option("topic", "orders").save()
    with pytest.raises(
        PySparkException, match=r"'today' is that of a write into orders; nothing .* into clicks"
    ):
        writer.option("topic", "clicks").save()
    writer.option("topic", "orders").save()
    assert sum(values(data, "orders").values()) == 10


def publications(data: Path) -> list[str]:
    async def work() -> list[str]:
        async with open_coordinator(data) as keys:
            return await keys.list("llog-publications/0", "llog-publications/~")

    return asyncio.run(work())


def test_only_a_write_with_an_id_leaves_a_record_of_itself(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for given in ({}, {"writeId": "kept"}):
        frame = spark.sql("select cast(id as string) value from range(10)")
        frame.write.format("forebay").mode("append").options(path=str(data), topic="t", **given).save()
    assert publications(data) == ["llog-publications/kept"]
    assert sum(values(data, "t").values()) == 20


@pytest.mark.parametrize(
    ("query", "options", "message"),
    [
        ("select 1 value", {"topic": "t"}, "it is binary or string"),
        ("select 'a' key", {"topic": "t"}, "no column 'value'"),
        ("select 'a' value", {}, "no topic is named"),
        ("select 'a' value, 1L offset", {"topic": "t"}, "no column 'offset'"),
        ("select 'a' value", {"topic": "t", "topics": "t"}, "did you mean 'topic'"),
        ("select 'a' value", {"topic": "t", "compression": "gzip"}, "none or zstd"),
        ("select cast(null as string) value", {"topic": "t"}, "a row has no value"),
        ("select 'a' value, 7 partition", {"topic": "t"}, "partitions 0 to 0, rows ask for 7"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    spark: SparkSession, tmp_path: Path, query: str, options: dict[str, str], message: str
) -> None:
    writer = spark.sql(query).write.format("forebay").mode("append").option("path", str(tmp_path / "data"))
    for name, value in options.items():
        writer = writer.option(name, value)
    with pytest.raises(PySparkException, match=message):
        writer.save()


def test_nothing_is_overwritten(spark: SparkSession, tmp_path: Path) -> None:
    writer = spark.sql("select 'a' value").write.format("forebay").option("path", str(tmp_path / "data"))
    with pytest.raises(PySparkException, match="nothing here is overwritten"):
        writer.option("topic", "t").mode("overwrite").save()


def test_a_query_into_a_topic_goes_on_after_restarts(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(3):
        fill(data, "in", 0, [b"%d-%d" % (number, each) for each in range(20)])
        frame = stream(spark, data, subscribe="in", maxOffsetsPerTrigger=15).select("value")
        assert sum(run(sink(frame, data, topic="out", partitions=2), tmp_path)) == 20
    assert values(data, "out") == values(data, "in")


@pytest.mark.parametrize("partitions", [1, 3, 16])
@pytest.mark.parametrize(
    "keys",
    [
        [b"%016d" % number for number in range(500)],
        [b"k%d" % number for number in range(500)],
        [b"x" * number for number in range(200)],
        [b"a", None, b"", b"bb", None],
        [b"y" * 100, b"z" * 3],
        [b"%07d" % number for number in range(9_000)],
    ],
)
def test_rows_are_routed_as_the_log_routes_them(keys: list[bytes | None], partitions: int) -> None:
    array = pa.array([b"before", *keys], pa.binary()).slice(1)
    expected = [(2 % partitions) if key is None else partition_of(key, partitions) for key in keys]
    chosen = targets(array, partitions, 2 % partitions)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == (expected if partitions > 1 else [0] * len(keys))
