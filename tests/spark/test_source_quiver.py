"""Quiver stores read by Spark: in their directory, beside the process that has it open, and in a bucket."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType
from tests.spark.bed import drain

from forebay.errors import FormatError, NotFound, Unsupported, UsageError
from forebay.quiver import Forwarder, Quiver, QuiverConfig, QuiverCore
from forebay.spark import DataLossFound, ForebaySource
from forebay.spark._options import Options
from forebay.spark._quiver_columns import merged, plain
from forebay.spark._quiver_segments import Numbers
from forebay.spark._quiver_source import (
    QuiverBatchReader,
    QuiverOptions,
    QuiverStreamReader,
    quiver_schema,
)
from forebay.storage import open_store

LOGS = pa.schema([("timestamp", pa.int64()), ("body", pa.dictionary(pa.int8(), pa.string()))])


def logs(*numbers: int) -> pa.RecordBatch:
    bodies = pa.array([f"line {number}" for number in numbers]).dictionary_encode()
    return pa.record_batch(
        [pa.array(numbers, pa.int64()), bodies.cast(pa.dictionary(pa.int8(), pa.string()))], LOGS
    )


def metrics(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch(
        {"timestamp": pa.array(numbers, pa.int64()), "gauge": pa.array(numbers, pa.uint32())}
    )


def ingest(store: Path, *batches: pa.RecordBatch, signal: str = "logs") -> None:
    """A segment for each batch."""

    async def work() -> None:
        async with Quiver(store) as quiver:
            for batch in batches:
                await quiver.ingest(batch, signal=signal, context={"tenant": "blue"})
                await quiver.flush()

    asyncio.run(work())


def forward(store: Path, bucket: Path | str, source: str = "edge1", **config: Any) -> None:
    async def work() -> None:
        async with open_store(bucket) as target, Quiver(store) as quiver:
            sender = Forwarder(quiver, target, source=source, **config)
            await sender.register()
            await sender.run(timeout_s=0)

    asyncio.run(work())


def options(path: Path, **given: object) -> Options:
    chosen = {name: str(value) for name, value in given.items()}
    return Options({"path": str(path), "engine": "quiver"} | chosen)


def whole(parsed: QuiverOptions) -> StructType:
    found = quiver_schema(parsed)
    assert found is not None
    return found


def batch_reader(path: Path, **given: object) -> QuiverBatchReader:
    parsed = QuiverOptions.parse(options(path, **given), streaming=False)
    return QuiverBatchReader(parsed, whole(parsed))


def stream_reader(path: Path, **given: object) -> QuiverStreamReader:
    parsed = QuiverOptions.parse(options(path, startingOffsets="earliest", **given), streaming=True)
    return QuiverStreamReader(parsed, whole(parsed))


def rows(source: Any, tasks: Any) -> list[dict[str, Any]]:
    carried = pickle.loads(pickle.dumps(tasks))
    return [row for task in carried for batch in source.read(task) for row in batch.to_pylist()]


def times(found: list[dict[str, Any]]) -> list[int]:
    return sorted(row["timestamp"] for row in found)


def test_a_store_is_read_by_spark_while_its_process_has_it_open(spark: SparkSession, tmp_path: Path) -> None:
    async def work() -> None:
        async with Quiver(tmp_path / "q") as quiver:
            await quiver.ingest(logs(1, 2), signal="logs", context={"tenant": "blue"})
            await quiver.flush()
            await quiver.ingest(metrics(3), signal="metrics")
            await quiver.flush()
            await quiver.ingest(logs(4), signal="logs")  # In no segment yet.
            frame = spark.read.format("forebay").option("path", str(tmp_path / "q"))
            loaded = frame.option("engine", "quiver").load()
            assert loaded.dtypes == [
                ("timestamp", "bigint"),
                ("body", "string"),
                ("gauge", "bigint"),
                ("_source", "string"),
                ("_segment", "bigint"),
                ("_signal", "string"),
                ("_ingested", "timestamp"),
                ("_context", "map<string,string>"),
            ]
            found = loaded.orderBy("timestamp").toArrow().to_pylist()
            assert [(row["timestamp"], row["body"], row["gauge"], row["_segment"]) for row in found] == [
                (1, "line 1", None, 1),
                (2, "line 2", None, 1),
                (3, None, 3, 2),
            ]
            assert [row["_signal"] for row in found] == ["logs", "logs", "metrics"]
            assert [dict(row["_context"]) for row in found] == [{"tenant": "blue"}, {"tenant": "blue"}, {}]
            assert all(row["_ingested"].timestamp() > 1_600_000_000 for row in found)
            one = frame.option("engine", "quiver").option("signal", "metrics").schema("gauge bigint").load()
            assert one.toArrow().to_pylist() == [{"gauge": 3}]

    asyncio.run(work())


def test_a_forwarded_store_is_the_same_rows(tmp_path: Path) -> None:
    ingest(tmp_path / "q", logs(1, 2), logs(3))
    before = batch_reader(tmp_path / "q")
    here = rows(before, before.partitions())
    forward(tmp_path / "q", tmp_path / "bucket")
    after = batch_reader(tmp_path / "bucket")
    there = rows(after, after.partitions())
    assert {row.pop("_source") for row in here} == {"store"}
    assert {row.pop("_source") for row in there} == {"edge1"}
    assert there == here and times(there) == [1, 2, 3]
    assert times(rows(after, batch_reader(tmp_path / "bucket", prefix="quiver/").partitions())) == [1, 2, 3]


def test_all_cores_of_a_directory_are_one_source(tmp_path: Path) -> None:
    async def work() -> None:
        for core in range(2):
            async with QuiverCore(tmp_path, core, 2) as quiver:
                await quiver.ingest(logs(core))

    asyncio.run(work())
    reader = batch_reader(tmp_path)
    assert {(row["_source"], row["timestamp"]) for row in rows(reader, reader.partitions())} == {
        ("core_0", 0),
        ("core_1", 1),
    }


def test_segments_are_bundled_by_size_and_spread_on_demand(tmp_path: Path) -> None:
    ingest(tmp_path / "q", *[logs(number) for number in range(6)])
    assert len(batch_reader(tmp_path / "q").partitions()) == 1
    spread = batch_reader(tmp_path / "q", minPartitions=3)
    tasks = spread.partitions()
    assert len(tasks) == 3 and times(rows(spread, tasks)) == list(range(6))


def test_rows_are_chosen_by_the_time_of_their_ingestion(tmp_path: Path) -> None:
    ingest(tmp_path / "q", logs(1), logs(2), logs(3))
    every = batch_reader(tmp_path / "q")
    moments = {
        row["timestamp"]: int(row["_ingested"].timestamp() * 1000) for row in rows(every, every.partitions())
    }
    since = batch_reader(tmp_path / "q", startingTimestamp=moments[2])
    until = batch_reader(tmp_path / "q", endingTimestamp=moments[2])
    later, earlier = times(rows(since, since.partitions())), times(rows(until, until.partitions()))
    assert later == [number for number in (1, 2, 3) if moments[number] >= moments[2]]
    assert sorted(earlier + later) == [1, 2, 3]


def test_a_stream_gets_every_forwarded_segment_once_whatever_order_they_come_in(
    spark: SparkSession, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    ingest(tmp_path / "q", *[logs(number) for number in range(1, 7)])
    forward(tmp_path / "q", bucket)
    late = next(bucket.rglob("edge1-0000000000000003-*.arrow"))
    kept, place = late.read_bytes(), late
    late.unlink()
    frame = (
        spark.readStream.format("forebay")
        .option("path", str(bucket))
        .option("engine", "quiver")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 2)
        .load()
        .select("timestamp", "_segment")
    )
    assert drain(frame, tmp_path) == [2, 2, 1]
    place.write_bytes(kept)  # Its upload had to be tried again, and others have overtaken it.
    assert drain(frame, tmp_path) == [1]
    assert drain(frame, tmp_path) == []
    found = spark.read.parquet(str(tmp_path / "out")).toArrow()
    assert sorted(found["timestamp"].to_pylist()) == [1, 2, 3, 4, 5, 6]
    offsets = sorted(
        (tmp_path / "checkpoint-out" / "offsets").glob("[0-9]*"), key=lambda each: int(each.name)
    )
    assert offsets[-1].read_text().splitlines()[-1] == '{"edge1": "1-6"}'


def test_limits_count_segments_and_bytes_and_other_signals_cost_nothing(tmp_path: Path) -> None:
    ingest(tmp_path / "q", logs(1), logs(2))
    ingest(tmp_path / "q", metrics(3), signal="metrics")
    ingest(tmp_path / "q", logs(4))
    source = stream_reader(tmp_path / "q", signal="logs")
    start = source.initialOffset()
    assert start == {}
    assert source.latestOffset(start, ReadMaxRows(2)) == {"store": "1-3"}
    assert source.latestOffset(start, ReadMaxBytes(1)) == {"store": "1"}
    end = source.latestOffset(start, ReadAllAvailable())
    assert end == source.reportLatestOffset() == {"store": "1-4"}
    assert times(rows(source, source.partitions({"store": "1"}, end))) == [2, 4]
    latest = QuiverOptions.parse(options(tmp_path / "q"), streaming=True)
    assert QuiverStreamReader(latest, whole(latest)).initialOffset() == end


def test_positions_are_stable_text(tmp_path: Path) -> None:
    for source in ("b", "a"):
        ingest(tmp_path / source, logs(1))
        forward(tmp_path / source, tmp_path / "bucket", source=source)
    source_reader = stream_reader(tmp_path / "bucket")
    end = source_reader.latestOffset({}, ReadAllAvailable())
    assert json.dumps(end) == '{"a": "1", "b": "1"}'
    assert json.dumps(
        source_reader.latestOffset(dict(reversed(end.items())), ReadAllAvailable())
    ) == json.dumps(end)


def test_a_segment_that_is_gone_or_damaged_fails_or_is_skipped(tmp_path: Path) -> None:
    ingest(tmp_path / "q", logs(1), logs(2), logs(3))
    strict, lenient = stream_reader(tmp_path / "q"), stream_reader(tmp_path / "q", failOnDataLoss=False)
    planned = strict.partitions({}, {"store": "1-3"})
    files = sorted((tmp_path / "q" / "segments").iterdir())
    files[0].unlink()
    with pytest.raises(DataLossFound, match=r"segment 1 of 'store'.*is gone"):
        rows(strict, planned)
    with pytest.raises(DataLossFound, match="segment 1 of 'store'"):
        strict.partitions({}, {"store": "1-3"})
    assert times(rows(lenient, planned)) == [2, 3]
    data = bytearray(files[1].read_bytes())
    data[500] ^= 1
    files[1].chmod(0o600)
    files[1].write_bytes(data)
    with pytest.raises(DataLossFound, match=r"segment 2 of 'store'.*damaged"):
        rows(strict, strict.partitions({}, {"store": "2-3"}))
    assert times(rows(lenient, lenient.partitions({}, {"store": "1-3"}))) == [3]


@pytest.mark.parametrize("signal", ["x", "x61", "xylem", "a/b", "ä"])
def test_a_forwarded_signal_is_found_by_its_name(tmp_path: Path, signal: str) -> None:
    ingest(tmp_path / "q", logs(1), signal=signal)
    forward(tmp_path / "q", tmp_path / "bucket")
    source = batch_reader(tmp_path / "bucket", signal=signal)
    assert times(rows(source, source.partitions())) == [1]


def test_a_forwarded_segment_that_is_no_segment_any_more_fails_or_is_skipped(tmp_path: Path) -> None:
    ingest(tmp_path / "q", logs(1), logs(2))
    forward(tmp_path / "q", tmp_path / "bucket")
    first, _ = sorted((tmp_path / "bucket").rglob("*.arrow"))
    for kept in (1_000, 10):  # Its schema can be read still, and cannot.
        first.chmod(0o600)
        first.write_bytes(first.read_bytes()[:kept])
        with pytest.raises(FormatError):
            rows(strict := batch_reader(tmp_path / "bucket"), strict.partitions())
        lenient = batch_reader(tmp_path / "bucket", failOnDataLoss=False)
        assert times(rows(lenient, lenient.partitions())) == [2]


def test_the_url_of_a_directory_is_that_directory(tmp_path: Path) -> None:
    ingest(tmp_path / "my q", logs(1))
    source = batch_reader(f"file://{tmp_path}/my%20q")  # type: ignore[arg-type]
    assert times(rows(source, source.partitions())) == [1]


def test_two_stores_under_one_name_are_noticed(tmp_path: Path) -> None:
    for name in ("q1", "q2"):
        ingest(tmp_path / name, logs(1))
        forward(tmp_path / name, tmp_path / "bucket")
    with pytest.raises(DataLossFound, match="two stores have forwarded a segment 1"):
        batch_reader(tmp_path / "bucket")


def test_what_was_forwarded_as_parquet_is_left_to_spark(tmp_path: Path) -> None:
    ingest(tmp_path / "q", logs(1))
    forward(tmp_path / "q", tmp_path / "bucket", file_format="parquet")
    with pytest.raises(UsageError, match="as Parquet"):
        batch_reader(tmp_path / "bucket")


def test_columns_grow_and_widen_and_what_cannot_is_refused() -> None:
    old = pa.schema([("n", pa.int32()), ("tags", pa.list_(pa.dictionary(pa.int8(), pa.large_string())))])
    new = pa.schema([("n", pa.int64()), ("at", pa.timestamp("ns")), ("id", pa.binary(16))])
    found = merged([old, new])
    assert [field.simpleString() for field in found.fields][:4] == [
        "n:bigint",
        "tags:array<string>",
        "at:timestamp_ntz",
        "id:binary",
    ]
    with pytest.raises(UsageError, match="do not go together"):
        merged([pa.schema([("n", pa.int64())]), pa.schema([("n", pa.list_(pa.int64()))])])
    with pytest.raises(Unsupported, match="no type for column 'u'"):
        merged([pa.schema([("u", pa.dense_union([pa.field("a", pa.int8())]))])])
    with pytest.raises(Unsupported, match="several columns 'n'"):
        merged([pa.schema([pa.field("n", pa.int8()), pa.field("n", pa.int8())])])
    assert plain(pa.struct([("a", pa.uint64())])) == pa.struct([("a", pa.decimal128(20, 0))])


def test_columns_that_are_null_at_first_get_their_type_from_later_segments(tmp_path: Path) -> None:
    ingest(tmp_path / "q", pa.record_batch({"n": pa.nulls(1), "s": pa.array([{"a": None}])}))
    ingest(tmp_path / "q", pa.record_batch({"n": pa.array([3]), "s": pa.array([{"a": 4}])}))
    source = batch_reader(tmp_path / "q")
    assert source.schema.simpleString().startswith("struct<n:bigint,s:struct<a:bigint>")
    found = [(row["n"], row["s"]) for row in rows(source, source.partitions())]
    assert found == [(None, {"a": None}), (3, {"a": 4})]
    assert merged([pa.schema([("n", pa.null())])])["n"].dataType.simpleString() == "string"


def test_a_schema_reads_what_can_be_read_of_segments_that_do_not_go_together(tmp_path: Path) -> None:
    for number, odd in enumerate([pa.array([1]), pa.array(["x"]), pa.array([1], pa.time32("ms"))]):
        ingest(tmp_path / "q", pa.record_batch({"n": pa.array([number]), "odd": odd}))
    source = ForebaySource({"path": str(tmp_path / "q"), "engine": "quiver"})
    with pytest.raises(UsageError, match="do not go together"):
        source.schema()
    reader = source.reader(StructType().add("n", "long"))
    assert [row["n"] for row in rows(reader, reader.partitions())] == [0, 1, 2]
    reader = source.reader(StructType().add("odd", "string"))
    assert [row["odd"] for row in rows(reader, reader.partitions())] == ["1", "x", "00:00:00.001"]
    reader = source.reader(StructType().add("odd", "long"))
    with pytest.raises(UsageError, match="column 'odd' is string in a segment, and int64 in the query"):
        rows(reader, reader.partitions())
    with pytest.raises(UsageError, match="did you mean 'odd'"):
        source.reader(StructType().add("od", "long"))


def test_columns_that_differ_in_case_only_are_not_taken_for_each_other(tmp_path: Path) -> None:
    ingest(tmp_path / "q", pa.record_batch({"A": pa.array([1]), "a": pa.array(["x"])}))
    source = ForebaySource({"path": str(tmp_path / "q"), "engine": "quiver"})
    with pytest.raises(Unsupported, match="columns 'A' and 'a' are one to Spark"):
        source.schema()
    for name, kind, value in (("A", "long", 1), ("a", "string", "x")):
        reader = source.reader(StructType().add(name, kind))
        assert rows(reader, reader.partitions()) == [{name: value}]
    with pytest.raises(Unsupported, match=r"no type for column 'd', decimal256"):
        merged([pa.schema([("d", pa.decimal256(50, 2))])])


def test_a_column_that_outgrew_the_query_ends_it_and_is_not_wrapped_around(tmp_path: Path) -> None:
    ingest(tmp_path / "q", pa.record_batch({"n": pa.array([1], pa.int32())}))
    source = stream_reader(tmp_path / "q")
    ingest(tmp_path / "q", pa.record_batch({"n": pa.array([1 << 40], pa.int64())}))
    with pytest.raises(UsageError, match="column 'n' is int64 in a segment"):
        rows(source, source.partitions({}, {"store": "1-2"}))


def test_nested_dictionaries_and_every_width_reach_spark(spark: SparkSession, tmp_path: Path) -> None:
    kinds = {
        "u8": pa.array([255], pa.uint8()),
        "u64": pa.array([2**64 - 1], pa.uint64()),
        "half": pa.array([1.5], pa.float16()),
        "ns": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", tz="UTC")),
        "id": pa.array([b"0123456789abcdef"], pa.binary(16)),
        "text": pa.array(["x"], pa.large_string()),
        "nested": pa.array([{"tag": ["a", None]}], pa.struct([("tag", pa.large_list(pa.string()))])),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int16())),
        "none": pa.nulls(1),
    }
    ingest(tmp_path / "q", pa.record_batch(kinds))
    frame = spark.read.format("forebay").option("path", str(tmp_path / "q")).option("engine", "quiver").load()
    [row] = frame.toArrow().to_pylist()
    assert (row["u8"], int(row["u64"]), row["half"]) == (255, 2**64 - 1, 1.5)
    assert (row["id"], row["text"], row["none"]) == (b"0123456789abcdef", "x", None)
    assert row["nested"] == {"tag": ["a", None]} and dict(row["map"]) == {"k": 1}
    assert row["ns"].microsecond == 123_456


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subscribe": "t"}, "has no option 'subscribe'"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"startingOffsets": "latest"}, "startingTimestamp chooses"),
        ({"startingTimestamp": "2", "endingTimestamp": "1"}, "is not before the starting time"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    spark: SparkSession, tmp_path: Path, given: dict[str, str], message: str
) -> None:
    ingest(tmp_path / "q", logs(1))
    reader = spark.read.format("forebay").option("path", str(tmp_path / "q")).option("engine", "quiver")
    for name, value in given.items():
        reader = reader.option(name, value)
    with pytest.raises(PySparkException, match=message):
        reader.load().count()


def test_a_place_without_a_store_and_a_store_without_data_say_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        ForebaySource({"path": str(tmp_path / "nowhere"), "engine": "quiver"}).schema()
    ingest(tmp_path / "q")
    with pytest.raises(UsageError, match="no segment yet"):
        ForebaySource({"path": str(tmp_path / "q"), "engine": "quiver"}).schema()
    source = ForebaySource({"path": str(tmp_path / "q"), "engine": "quiver"})
    reader = source.streamReader(StructType().add("timestamp", "long").add("body", "string"))
    ingest(tmp_path / "q", logs(7))
    with pytest.raises(UsageError, match="did you mean 'body'"):
        source.reader(StructType().add("bodi", "string"))
    end = reader.latestOffset({}, ReadAllAvailable())
    assert rows(reader, reader.partitions({}, end)) == [{"timestamp": 7, "body": "line 7"}]


def test_sets_of_numbers_close_up() -> None:
    some = Numbers().including([3, 1, 2, 7])
    assert str(some) == "1-3,7" and len(some) == 4
    assert 2 in some and 4 not in some and 8 not in some
    assert str(Numbers.parse("1-3,7").including([4, 6, 5])) == "1-7"
    assert Numbers.parse("1-9,12-14").without(Numbers.parse("2,4-5,9-12")) == [1, 3, 6, 7, 8, 13, 14]
    assert Numbers.parse("1-2,4-5").without(Numbers.parse("1-9")) == []
    assert QuiverConfig().segment_codec == "none", "what the tests above read without a copy"


@pytest.mark.integration
def test_a_real_bucket_is_read_by_ranges_and_listings(seaweed: Any, tmp_path: Path) -> None:
    url = seaweed.url("spark-quiver")
    ingest(tmp_path / "q", logs(1, 2), logs(3))
    forward(tmp_path / "q", url)
    parsed = QuiverOptions.parse(
        Options({"path": url, "engine": "quiver", "startingOffsets": "earliest"}), streaming=True
    )
    source = QuiverStreamReader(parsed, whole(parsed))
    end = source.latestOffset({}, ReadAllAvailable())
    assert end == {"edge1": "1-2"}
    assert times(rows(source, source.partitions({}, end))) == [1, 2, 3]
