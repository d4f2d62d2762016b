"""Queues read by Spark: looked at without a trace, or consumed exactly once."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from tests.spark.bed import golden, run

from forebay.buffer import BatchMissing, BufferConfig, BufferStats, Consumer, Fenced, Producer, Reader
from forebay.errors import NotFound, UsageError
from forebay.spark import DataLossFound
from forebay.spark._buffer_source import BUFFER_SCHEMA, BufferBatchReader, BufferOptions, BufferStreamReader
from forebay.spark._options import Options


def produce(queue: Path, *batches: list[bytes], extension: bool = True) -> None:
    async def work() -> None:
        config = BufferConfig(url=str(queue), flush_interval_ms=0, entry_extension=extension)
        async with Producer(config) as producer:
            for number, batch in enumerate(batches):
                handle = await producer.produce(batch, b"m%d" % number)
                await handle.watcher.await_durable()

    asyncio.run(work())


def stats(queue: Path) -> BufferStats:
    async def work() -> BufferStats:
        async with Reader(BufferConfig(url=str(queue))) as reader:
            return await reader.stats()

    return asyncio.run(work())


def options(queue: Path, **given: object) -> Options:
    return Options(
        {"path": str(queue), "engine": "buffer"} | {name: str(value) for name, value in given.items()}
    )


def stream(queue: Path, **given: object) -> BufferStreamReader:
    return BufferStreamReader(BufferOptions.parse(options(queue, **given), streaming=True), BUFFER_SCHEMA)


def batch(queue: Path, **given: object) -> BufferBatchReader:
    return BufferBatchReader(BufferOptions.parse(options(queue, **given), streaming=False), BUFFER_SCHEMA)


def rows(source: Any, tasks: Any) -> list[dict[str, Any]]:
    carried = pickle.loads(pickle.dumps(tasks))
    return [row for task in carried for batch in source.read(task) for row in batch.to_pylist()]


def test_a_queue_is_read_and_left_as_it_is(spark: SparkSession, tmp_path: Path) -> None:
    produce(tmp_path, [b"a", b"b"], [b"c"], [b"d"])
    before = stats(tmp_path)
    frame = spark.read.format("forebay").option("path", str(tmp_path)).option("engine", "buffer").load()
    assert frame.dtypes == [
        ("value", "binary"),
        ("sequence", "bigint"),
        ("index", "int"),
        ("ingestion_time", "timestamp"),
        ("metadata", "binary"),
    ]
    table = frame.orderBy("sequence", "index").toArrow().to_pylist()
    assert [(row["value"], row["sequence"], row["index"], row["metadata"]) for row in table] == [
        (b"a", 0, 0, b"m0"),
        (b"b", 0, 1, b"m0"),
        (b"c", 1, 0, b"m1"),
        (b"d", 2, 0, b"m2"),
    ]
    assert all(row["ingestion_time"].timestamp() > 1_600_000_000 for row in table)
    after = stats(tmp_path)
    assert (after.entries, after.epoch) == (before.entries, before.epoch)


def test_ranges_are_chosen_by_sequence(tmp_path: Path) -> None:
    produce(tmp_path, *[[b"%d" % number] for number in range(6)], extension=False)
    given = BufferOptions.parse(options(tmp_path, startingOffsets=2, endingOffsets=5), streaming=False)
    reader = BufferBatchReader(given, BUFFER_SCHEMA)
    assert [row["sequence"] for row in rows(reader, reader.partitions())] == [2, 3, 4]
    every = BufferOptions.parse(options(tmp_path, minPartitions=3), streaming=False)
    assert len(BufferBatchReader(every, BUFFER_SCHEMA).partitions()) == 3


def test_a_stream_is_limited_by_batches_and_by_bytes(tmp_path: Path) -> None:
    produce(tmp_path, *[[b"x" * 1000] for _ in range(6)])
    source = stream(tmp_path, startingOffsets="earliest")
    start = source.initialOffset()
    assert start == {"sequence": 0}
    assert source.latestOffset(start, ReadMaxRows(4)) == {"sequence": 4}
    assert source.latestOffset(start, ReadMaxBytes(2_500)) == {"sequence": 2}
    assert source.latestOffset(start, ReadMaxBytes(1)) == {"sequence": 1}
    assert source.latestOffset(start, ReadAllAvailable()) == source.reportLatestOffset() == {"sequence": 6}
    assert stream(tmp_path).initialOffset() == {"sequence": 6}
    assert stats(tmp_path).epoch == 0, "a stream that only looks takes nothing over"


def test_batches_are_acknowledged_after_the_sink_has_them_and_not_before(tmp_path: Path) -> None:
    produce(tmp_path, *[[b"%d" % number] for number in range(5)])
    source = stream(tmp_path, acknowledge=True)
    start = source.initialOffset()
    middle = source.latestOffset(start, ReadMaxRows(3))
    assert [row["value"] for row in rows(source, source.partitions(start, middle))] == [b"0", b"1", b"2"]
    assert stats(tmp_path).entries == 5
    end = source.latestOffset(middle, ReadAllAvailable())
    source.commit(middle)
    assert stats(tmp_path).entries == 2
    assert [row["value"] for row in rows(source, source.partitions(middle, end))] == [b"3", b"4"]
    source.commit(middle)
    assert stats(tmp_path).entries == 2, "told twice"

    # The process dies here. The next one replays what the checkpoint says, and then takes over behind it.
    again = stream(tmp_path, acknowledge=True)
    assert [row["value"] for row in rows(again, again.partitions(middle, end))] == [b"3", b"4"]
    assert again.latestOffset(end, ReadAllAvailable()) == end
    assert stats(tmp_path).entries == 0
    with pytest.raises(Fenced):
        source.latestOffset(end, ReadAllAvailable())


def test_a_stream_that_was_shut_out_cannot_acknowledge(tmp_path: Path) -> None:
    produce(tmp_path, [b"a"], [b"b"])
    source = stream(tmp_path, acknowledge=True)
    end = source.latestOffset(source.initialOffset(), ReadMaxRows(1))

    async def take_over() -> None:
        async with Consumer(BufferConfig(url=str(tmp_path), gc_enabled=False)) as consumer:
            await consumer.initialize()

    asyncio.run(take_over())
    with pytest.raises(Fenced):
        source.commit(end)
    assert stats(tmp_path).entries == 2


def test_batches_that_somebody_consumed_are_a_loss_or_are_skipped(tmp_path: Path) -> None:
    produce(tmp_path, [b"a"], [b"b"], [b"c"])

    async def consume() -> None:
        async with Consumer(BufferConfig(url=str(tmp_path), gc_enabled=False)) as consumer:
            await consumer.initialize()
            await consumer.next_batch()
            await consumer.ack_through(0)

    asyncio.run(consume())
    strict, lenient = stream(tmp_path), stream(tmp_path, failOnDataLoss=False)
    with pytest.raises(DataLossFound, match="consumed the batches up to 0"):
        strict.partitions({"sequence": 0}, {"sequence": 3})
    found = rows(lenient, lenient.partitions({"sequence": 0}, {"sequence": 3}))
    assert [row["value"] for row in found] == [b"b", b"c"]
    with pytest.raises(DataLossFound, match="has only reached 3"):
        lenient.partitions({"sequence": 0}, {"sequence": 9})


def consume(queue: Path, count: int) -> None:
    async def work() -> None:
        async with Consumer(BufferConfig(url=str(queue), gc_enabled=False)) as consumer:
            await consumer.initialize()
            for _ in range(count):
                await consumer.next_batch()
            await consumer.ack_through(count - 1)

    asyncio.run(work())


def test_a_stream_that_has_lost_batches_shuts_nobody_out_for_it(tmp_path: Path) -> None:
    produce(tmp_path, *[[b"%d" % number] for number in range(6)])
    consume(tmp_path, 4)
    before = stats(tmp_path).epoch
    with pytest.raises(DataLossFound, match="consumed the batches up to 3"):
        stream(tmp_path, acknowledge=True).latestOffset({"sequence": 2}, ReadAllAvailable())
    assert stats(tmp_path).epoch == before


def test_a_stream_skips_more_lost_batches_than_it_reads_at_once(tmp_path: Path) -> None:
    """It acknowledged what it had never been given, and ended."""
    produce(tmp_path, *[[b"%d" % number] for number in range(6)])
    consume(tmp_path, 4)
    source = stream(tmp_path, acknowledge=True, failOnDataLoss=False)
    place, found = {"sequence": 0}, []
    while (end := source.latestOffset(place, ReadMaxRows(2))) != place:
        source.commit(place)
        found += rows(source, source.partitions(place, end))
        place = end
    source.commit({"sequence": 2})
    source.commit(place)
    assert [row["value"] for row in found] == [b"4", b"5"]
    assert stats(tmp_path).entries == 0


def test_a_batch_whose_object_is_gone_or_damaged_fails_or_is_skipped(tmp_path: Path) -> None:
    produce(tmp_path, [b"a"], [b"b"], [b"c"])
    strict, lenient = stream(tmp_path), stream(tmp_path, failOnDataLoss=False)
    tasks = strict.partitions({"sequence": 0}, {"sequence": 3})
    gone, damaged, _ = sorted((tmp_path / "ingest").glob("*.batch"))
    gone.unlink()
    damaged.chmod(0o600)
    damaged.write_bytes(b"other")
    with pytest.raises(BatchMissing):
        rows(strict, tasks)
    assert [row["value"] for row in rows(lenient, tasks)] == [b"c"]


def test_a_batch_of_a_queue_that_is_not_there_or_not_that_long_is_no_empty_one(tmp_path: Path) -> None:
    produce(tmp_path / "queue", [b"a"])
    with pytest.raises(NotFound, match="typo/manifest"):
        batch(tmp_path / "queue", manifest="typo/manifest").partitions()
    with pytest.raises(UsageError, match="there is no directory"):
        batch(tmp_path / "typo").partitions()
    with pytest.raises(UsageError, match="there is no directory"):
        stream(tmp_path / "typo").initialOffset()
    assert stream(tmp_path).initialOffset() == {"sequence": 0}, "one that has no queue yet is waited for"
    assert not (tmp_path / "typo").exists()
    with pytest.raises(DataLossFound, match="has only reached 1"):
        batch(tmp_path / "queue", startingOffsets=9).partitions()
    with pytest.raises(UsageError, match="endingOffsets is 9, and the queue has only reached 1"):
        batch(tmp_path / "queue", endingOffsets=9).partitions()
    [task] = batch(tmp_path / "queue", endingOffsets=9, failOnDataLoss=False).partitions()
    assert len(task.entries) == 1  # type: ignore[attr-defined]
    assert batch(tmp_path / "queue", startingOffsets=1).partitions() == []
    assert batch(tmp_path / "queue", startingOffsets=9, failOnDataLoss=False).partitions() == []


@pytest.mark.parametrize("acknowledge", [False, True])
def test_a_queue_that_ends_before_the_checkpoint_is_another_one(tmp_path: Path, acknowledge: bool) -> None:
    """It began anew under its name: waiting for the old sequence would pass over everything up to there."""
    produce(tmp_path, [b"a"])
    with pytest.raises(DataLossFound, match="has only reached 1"):
        stream(tmp_path, acknowledge=acknowledge).latestOffset({"sequence": 5}, ReadAllAvailable())
    assert stats(tmp_path).epoch == 0, "nobody is shut out for it"
    waiting = stream(tmp_path, failOnDataLoss=False).latestOffset({"sequence": 5}, ReadAllAvailable())
    assert waiting == {"sequence": 5}
    limited = stream(tmp_path, failOnDataLoss=False).latestOffset({"sequence": 5}, ReadMaxBytes(100))
    assert limited == {"sequence": 5}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"acknowledge": "true"}, "consume with readStream"),
        ({"subscribe": "t"}, "has no option 'subscribe'"),
        ({"startingOffsets": "soon"}, "earliest, latest or a sequence"),
        ({"startingOffsets": "latest"}, "a batch from the latest on is empty"),
        ({"endingOffsets": "earliest"}, "endingOffsets of a batch is earliest"),
        ({"startingOffsets": "8", "endingOffsets": "3"}, "are not below startingOffsets"),
        ({"maxBytesPerTrigger": "some"}, "maxBytesPerTrigger is 'some'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    spark: SparkSession, tmp_path: Path, given: dict[str, str], message: str
) -> None:
    reader = spark.read.format("forebay").option("path", str(tmp_path)).option("engine", "buffer")
    for name, value in given.items():
        reader = reader.option(name, value)
    with pytest.raises(PySparkException, match=message):
        reader.load().count()


def test_a_queue_flows_into_a_topic_exactly_once_over_restarts(spark: SparkSession, tmp_path: Path) -> None:
    queue, data = tmp_path / "queue", tmp_path / "data"
    produced: Counter[bytes] = Counter()
    for round_number in range(2):
        batches = [[b"%d-%d-%d" % (round_number, number, each) for each in range(10)] for number in range(4)]
        produce(queue, *batches)
        produced.update(value for batch in batches for value in batch)
        reader = spark.readStream.format("forebay").option("path", str(queue)).option("engine", "buffer")
        frame = (
            reader.option("acknowledge", "true").option("maxOffsetsPerTrigger", "3").load().select("value")
        )
        writer = frame.writeStream.format("forebay").option("path", str(data)).option("topic", "out")
        assert sum(run(writer, tmp_path)) == 40
    assert Counter(value for *_, value in golden(data, "out")) == produced
    assert stats(queue).entries <= 2, "only the last batch, which is acknowledged by the next run"
