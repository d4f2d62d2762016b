"""Streams read by Spark from their remote tier."""

from __future__ import annotations

import asyncio
import pickle
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from forebay.errors import UsageError
from forebay.kit.clock import SystemClock
from forebay.spark import DataLossFound
from forebay.spark._columns import arrow_schema
from forebay.spark._options import Options
from forebay.spark._stream_source import (
    STREAM_SCHEMA,
    StreamBatchReader,
    StreamOptions,
    StreamStreamReader,
    StreamTask,
    _Columns,
)
from forebay.storage import open_store
from forebay.stream import RetentionPolicy, StreamTier, StreamWriter, TierConfig


def tiered(base: Path, *chunks: list[bytes], **config: Any) -> Path:
    """A bucket that holds a stream `orders` of these chunks."""

    async def work() -> None:
        clock = SystemClock()
        with StreamWriter(base / "local" / "orders", epoch=1, clock=clock) as writer:
            for chunk in chunks:
                writer.append(chunk)
            writer.commit()
        store = open_store(base / "bucket")
        tier = StreamTier(
            base / "local" / "orders",
            store,
            config=TierConfig(**{"fragment_bytes": 100_000} | config),
            clock=clock,
            randomness=random.Random(1),
        )
        await tier.run_once()
        await store.close()

    asyncio.run(work())
    return base / "bucket"


def options(bucket: Path, **given: object) -> Options:
    chosen = {name: str(value) for name, value in given.items()}
    return Options({"path": str(bucket), "engine": "stream", "subscribe": "orders"} | chosen)


def batch(bucket: Path, **given: object) -> StreamBatchReader:
    return StreamBatchReader(StreamOptions.parse(options(bucket, **given), streaming=False), STREAM_SCHEMA)


def rows(source: Any, tasks: Any) -> list[tuple[int, bytes]]:
    carried = pickle.loads(pickle.dumps(tasks))
    found = [row for task in carried for part in source.read(task) for row in part.to_pylist()]
    return [(row["offset"], row["value"]) for row in found]


CHUNKS = [[b"%d-%d" % (chunk, number) for number in range(10)] for chunk in range(5)]
EVERY = [(offset, value) for offset, value in enumerate(value for chunk in CHUNKS for value in chunk)]


def test_a_stream_is_read_with_its_columns(spark: SparkSession, tmp_path: Path) -> None:
    bucket = tiered(tmp_path, *CHUNKS)
    reader = spark.read.format("forebay").option("path", str(bucket)).option("engine", "stream")
    frame = reader.option("subscribe", "orders").load()
    table = frame.orderBy("offset").toArrow()
    assert table.schema.names == ["value", "stream", "offset", "timestamp"]
    assert list(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True)) == EVERY
    assert set(table["stream"].to_pylist()) == {"orders"}


def test_ranges_begin_and_end_inside_of_chunks(tmp_path: Path) -> None:
    bucket = tiered(tmp_path, *CHUNKS)
    source = batch(bucket, startingOffsets=7, endingOffsets=33, minPartitions=5)
    tasks = source.partitions()
    assert len(tasks) == 5
    assert rows(source, tasks) == EVERY[7:33]
    assert all(len(batch(bucket, minPartitions=least).partitions()) == least for least in range(1, 51))


def test_a_streaming_read_is_limited_and_replays_alike(tmp_path: Path) -> None:
    bucket = tiered(tmp_path, *CHUNKS)
    parsed = StreamOptions.parse(options(bucket, startingOffsets="earliest"), streaming=True)
    source = StreamStreamReader(parsed, STREAM_SCHEMA)
    start = source.initialOffset()
    middle = source.latestOffset(start, ReadMaxRows(23))
    assert (start, middle) == ({"offset": 0}, {"offset": 23})
    end = source.latestOffset(middle, ReadAllAvailable())
    assert end == source.reportLatestOffset() == {"offset": 50}
    source.prepareForTriggerAvailableNow()
    assert source.latestOffset(end, ReadAllAvailable()) == end
    for _ in range(2):
        assert rows(source, source.partitions(start, middle)) == EVERY[:23]
    assert rows(source, source.partitions(middle, end)) == EVERY[23:]


def test_offsets_that_are_not_there_are_a_loss_or_are_skipped(tmp_path: Path) -> None:
    bucket = tiered(tmp_path, *CHUNKS)
    with pytest.raises(DataLossFound, match="the stream has offsets 0 to 49"):
        batch(bucket, startingOffsets=60).partitions()
    with pytest.raises(UsageError, match="endingOffsets is 60, and 'orders' ends at 50"):
        batch(bucket, startingOffsets=40, endingOffsets=60).partitions()
    lenient = batch(bucket, startingOffsets=40, endingOffsets=60, failOnDataLoss=False)
    assert rows(lenient, lenient.partitions()) == EVERY[40:]


def test_what_retention_takes_between_plan_and_task_is_a_loss_or_is_skipped(tmp_path: Path) -> None:
    """A reader of a stream begins with what is there, wherever it is told to begin."""
    bucket = tiered(tmp_path, *CHUNKS, fragment_bytes=1)
    tasks = batch(bucket).partitions()
    tiered(tmp_path, retention=RetentionPolicy(max_bytes=1))
    strict, lenient = batch(bucket), batch(bucket, failOnDataLoss=False)
    with pytest.raises(DataLossFound, match="offset 0 cannot be read any more, the earliest offset is 40"):
        rows(strict, tasks)
    assert rows(lenient, tasks) == EVERY[40:]
    parsed = StreamOptions.parse(options(bucket, failOnDataLoss=False), streaming=True)
    following = StreamStreamReader(parsed, STREAM_SCHEMA).latestOffset({"offset": 3}, ReadMaxRows(5))
    assert following == {"offset": 45}, "what is gone uses up no limit"
    with pytest.raises(DataLossFound, match="has offsets 40 to 49"):
        rows(strict, [StreamTask(45, 60)])


def test_reading_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        batch(tmp_path / "typo").partitions()
    assert not (tmp_path / "typo").exists()


def test_a_time_that_spark_cannot_hold_is_none() -> None:
    columns = _Columns("orders", arrow_schema(STREAM_SCHEMA))
    columns.add(pa.array([b"a"], pa.binary()), 0, 2**62)
    columns.add(pa.array([b"b"], pa.binary()), 1, 1_000)
    assert columns.take()["timestamp"].to_pylist() == [None, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]


def test_a_stream_that_ends_before_the_checkpoint_is_another_one(tmp_path: Path) -> None:
    """It began anew under its name: waiting for the old offset would pass over everything up to there."""
    bucket = tiered(tmp_path, *CHUNKS)
    parsed = StreamOptions.parse(options(bucket), streaming=True)
    source = StreamStreamReader(parsed, STREAM_SCHEMA)
    for _ in range(2):
        with pytest.raises(DataLossFound, match="offset 60 cannot be read any more"):
            source.latestOffset({"offset": 60}, ReadAllAvailable())
        source.prepareForTriggerAvailableNow()
    lenient = StreamOptions.parse(options(bucket, failOnDataLoss=False), streaming=True)
    waiting = StreamStreamReader(lenient, STREAM_SCHEMA).latestOffset({"offset": 60}, ReadAllAvailable())
    assert waiting == {"offset": 60}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subscribe": ""}, "no stream is named"),
        ({"startingOffsets": "x"}, "earliest or latest or an offset"),
        ({"assign": "{}"}, "no option 'assign'"),
        ({"startingOffsets": "latest"}, "a batch from the latest on is empty"),
        ({"startingOffsets": "30", "endingOffsets": "10"}, "are not below startingOffsets"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    tmp_path: Path, given: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        batch(tmp_path, **given)
    assert message in f"{caught.value.message} {caught.value.hint}"
