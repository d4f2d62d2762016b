"""Topics read as streams: each batch follows from its two dictionaries, and nothing is missed or repeated."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType
from tests.spark.bed import drain, fill, golden, rows, run, stream

import forebay
from forebay.log import Compactor, CompactorConfig
from forebay.spark import DataLossFound
from forebay.spark._columns import LOG_SCHEMA
from forebay.spark._log_source import LogStreamReader
from forebay.spark._options import LogOptions, Options


def seen(spark: SparkSession, base: Path) -> list[Any]:
    return rows(spark.read.parquet(str(base / "out")))


def reader(data: Path, **options: object) -> LogStreamReader:
    """The reader itself, without Spark around it."""
    given = {"path": str(data), "startingOffsets": "earliest"} | {k: str(v) for k, v in options.items()}
    return LogStreamReader(LogOptions.parse(Options(given), streaming=True), LOG_SCHEMA)


def test_available_now_ends_with_partitions_in_any_order(spark: SparkSession, tmp_path: Path) -> None:
    data, numbers = tmp_path / "data", list(range(12))
    random.Random(5).shuffle(numbers)
    for number in numbers:
        fill(data, "t", number, [b"%d" % number] * 10, partitions=12)
    frame = stream(spark, data, subscribe="t", maxOffsetsPerTrigger=50)
    batches = drain(frame, tmp_path)
    assert sum(batches) == 120 and max(batches) <= 50
    assert drain(frame, tmp_path) == []
    assert seen(spark, tmp_path) == golden(data, "t")


def test_new_partitions_and_topics_are_picked_up_from_their_beginning(
    spark: SparkSession, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    fill(data, "one", 0, [b"a"] * 5)
    frame = stream(spark, data, subscribePattern="one|two")
    assert sum(drain(frame, tmp_path)) == 5
    with forebay.connect(data) as bay:
        bay.topics.alter("one", partitions=3)
    fill(data, "one", 2, [b"b"] * 7)
    fill(data, "two", 0, [b"c"] * 3)
    fill(data, "three", 0, [b"d"] * 3)
    assert sum(drain(frame, tmp_path)) == 10
    assert seen(spark, tmp_path) == golden(data, "one", "two")


def test_a_restart_reads_what_is_missing_and_options_may_change(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "one", 0, [b"a"] * 100)
    fill(data, "two", 0, [b"x"] * 10)
    drain(stream(spark, data, subscribe="one", maxOffsetsPerTrigger=30), tmp_path)
    fill(data, "one", 0, [b"b"] * 50)
    # Another limit, another selection, a starting offset that only a new query would heed.
    changed = stream(
        spark, data, subscribe="one,two", maxBytesPerTrigger="20", startingOffsets="latest", minPartitions=3
    )
    assert sum(drain(changed, tmp_path)) == 60
    assert seen(spark, tmp_path) == golden(data, "one", "two")


def test_trimmed_offsets_fail_or_are_skipped_and_reported(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"%d" % number for number in range(10)])
    strict = stream(spark, data, subscribe="t")
    drain(strict, tmp_path)
    fill(data, "t", 0, [b"%d" % number for number in range(10, 20)])
    with forebay.connect(data) as bay:
        bay.trim("t", partition=0, offset=15)
    with pytest.raises(
        StreamingQueryException, match="offset 11 cannot be read any more, the earliest offset is 15"
    ):
        drain(strict, tmp_path)
    assert sum(drain(stream(spark, data, subscribe="t", failOnDataLoss="false"), tmp_path)) == 6
    assert [offset for _, _, offset, _ in seen(spark, tmp_path)] == [*range(1, 11), *range(15, 21)]


def test_a_stream_begins_at_the_latest_offset_by_default(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"old"] * 3)
    frame = spark.readStream.format("forebay").option("path", str(data)).option("subscribe", "t").load()
    assert drain(frame, tmp_path) == []
    fill(data, "t", 0, [b"new"])
    assert drain(frame, tmp_path) == [1]


def test_offsets_are_stable_text(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in (10, 2, 0):
        fill(data, "t", number, [b"x"], partitions=11)
    source = reader(data, subscribe="t")
    first = source.initialOffset()
    assert json.dumps(first) == json.dumps(source.latestOffset(first, ReadMaxRows(0)))
    assert list(first["t"]) == sorted(first["t"]) == sorted(map(str, range(11)))
    # As Spark gives it back: through JSON, with its keys in whatever order.
    shuffled = {"t": dict(reversed(json.loads(json.dumps(first))["t"].items()))}
    assert json.dumps(source.latestOffset(shuffled, ReadAllAvailable())) == json.dumps(
        source.latestOffset(first, ReadAllAvailable())
    )


def test_a_replay_has_the_same_rows_after_compaction(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(20):
        fill(data, "t", 0, [b"%d-%d" % (number, each) for each in range(10)])
    source = reader(data, subscribe="t")
    start, end = {"t": {"0": 34}}, {"t": {"0": 177}}

    def replay() -> list[tuple[int, bytes]]:
        tasks = source.partitions(start, end)
        batches = [batch for task in tasks for batch in source.read(task)]
        return [(row["offset"], row["value"]) for batch in batches for row in batch.to_pylist()]

    before = replay()
    assert [offset for offset, _ in before] == list(range(34, 177))
    client = source._client
    parts = client.bay.parts
    compactor = Compactor(
        parts.store,
        parts.coordinator,
        clock=parts.clock,
        ids=parts.ids,
        randomness=parts.randomness,
        config=CompactorConfig(min_age_ms=0, wait_for_full_ms=0),
    )
    assert client.run(compactor.compact_once("t", 0)).progressed
    assert replay() == before


def test_a_limit_in_rows_is_shared_fairly(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for partition, count in enumerate((5, 100, 100)):
        fill(data, "t", partition, [b"x"] * count, partitions=3)
    source = reader(data, subscribe="t")
    end = source.latestOffset(source.initialOffset(), ReadMaxRows(65))
    assert end == {"t": {"0": 6, "1": 31, "2": 31}}


def test_a_limit_in_bytes_stops_between_appends_and_never_stands_still(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for partition in range(2):
        for _ in range(6):
            fill(data, "t", partition, [b"x" * 1000] * 10, partitions=2)
    source = reader(data, subscribe="t")
    start = source.initialOffset()
    assert source.latestOffset(start, ReadMaxBytes(41_000)) == {"t": {"0": 21, "1": 21}}
    assert source.latestOffset(start, ReadMaxBytes(1)) == {"t": {"0": 11, "1": 1}}


def test_a_deleted_topic_is_a_loss_and_its_successor_begins_behind_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"a"] * 5)
    fill(data, "u", 0, [b"b"] * 5)
    strict, lenient = (
        reader(data, subscribePattern="."),
        reader(data, subscribePattern=".", failOnDataLoss=False),
    )
    start = strict.latestOffset(strict.initialOffset(), ReadAllAvailable())
    with forebay.connect(data) as bay:
        bay.topics.delete("t")
    with pytest.raises(DataLossFound, match="its topic is gone"):
        strict.latestOffset(start, ReadAllAvailable())
    assert lenient.latestOffset(start, ReadAllAvailable()) == start
    fill(data, "t", 0, [b"again"] * 2)
    end = strict.latestOffset(start, ReadAllAvailable())
    assert end["t"]["0"] - start["t"]["0"] == 2
    batches = [batch for task in strict.partitions(start, end) for batch in strict.read(task)]
    assert sum(batch.num_rows for batch in batches) == 2


def test_a_topic_that_is_deleted_between_plan_and_task_is_a_loss_or_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"a"] * 5)
    strict, lenient = reader(data, subscribe="t"), reader(data, subscribe="t", failOnDataLoss=False)
    start = strict.initialOffset()
    tasks = strict.partitions(start, strict.latestOffset(start, ReadAllAvailable()))
    with forebay.connect(data) as bay:
        bay.topics.delete("t")
    with pytest.raises(DataLossFound, match="its topic is gone"):
        [list(strict.read(task)) for task in tasks]
    assert [list(lenient.read(task)) for task in tasks] == [[]]
    assert "t:0 is gone" in caplog.text


def test_a_log_that_is_shorter_than_the_checkpoint_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"a"] * 5)
    behind = {"t": {"0": 50}}
    with pytest.raises(DataLossFound, match="the log ends at 6"):
        reader(data, subscribe="t").latestOffset(behind, ReadAllAvailable())
    lenient = reader(data, subscribe="t", failOnDataLoss=False)
    assert lenient.latestOffset(behind, ReadAllAvailable()) == behind
    assert "the log ends at 6" in caplog.text


def test_what_was_trimmed_uses_up_no_limit(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"a"] * 1_000)
    with forebay.connect(data) as bay:
        bay.trim("t", partition=0, offset=991)
    start = {"t": {"0": 1}}
    lenient = reader(data, subscribe="t", failOnDataLoss=False)
    assert lenient.latestOffset(start, ReadMaxRows(4)) == {"t": {"0": 995}}
    strict = reader(data, subscribe="t")
    with pytest.raises(DataLossFound, match="the earliest offset is 991"):
        strict.partitions(start, strict.latestOffset(start, ReadMaxRows(4)))


def test_a_stream_takes_no_ending_offsets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no ending offsets"):
        reader(tmp_path, subscribe="t", endingOffsets="latest")


def test_a_pruned_schema_reaches_the_tasks(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "t", 0, [b"a"] * 5)
    source = reader(data, subscribe="t")
    source.schema = StructType([LOG_SCHEMA["offset"], LOG_SCHEMA["topic"]])
    [task] = source.partitions(source.initialOffset(), {"t": {"0": 4}})
    [batch] = source.read(task)
    assert batch.to_pydict() == {"offset": [1, 2, 3], "topic": ["t"] * 3}


GOLDEN = '{"clicks": {"0": 5, "1": 1, "10": 1, "2": 3}, "orders": {"0": 4}}'
"""Positions as checkpoints in the field hold them. This text never changes."""


def test_positions_have_the_text_that_checkpoints_in_the_field_have(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fill(data, "clicks", 0, [b"x"] * 4, partitions=11)
    fill(data, "clicks", 2, [b"x"] * 2)
    fill(data, "orders", 0, [b"x"] * 3)
    source = reader(data, assign='{"clicks": [10, 2, 1, 0], "orders": [0]}')
    assert json.dumps(source.latestOffset(source.initialOffset(), ReadAllAvailable())) == GOLDEN
    assert json.dumps(source.reportLatestOffset()) == GOLDEN
    assert json.dumps(source.latestOffset(json.loads(GOLDEN), ReadAllAvailable())) == GOLDEN


@pytest.mark.parametrize("committed", [True, False])
def test_a_checkpoint_written_by_hand_gives_exactly_the_rows_that_are_missing(
    spark: SparkSession, tmp_path: Path, committed: bool
) -> None:
    data, checkpoint = tmp_path / "data", tmp_path / "checkpoint-out"
    for partition in range(2):
        fill(data, "t", partition, [b"%d-%d" % (partition, each) for each in range(20)], partitions=2)
    batches = ['{"t": {"0": 3, "1": 1}}', '{"t": {"0": 11, "1": 18}}']
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "commits").mkdir()
    (checkpoint / "metadata").write_text('{"id":"5d2f5ad7-0b3e-4c43-a2b5-4b7d2a1f6b11"}')
    facts = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1, "conf": {}})
    for number, offsets in enumerate(batches):
        (checkpoint / "offsets" / str(number)).write_text(f"v1\n{facts}\n{offsets}")
        if number == 0 or committed:
            (checkpoint / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    frame = stream(spark, data, subscribe="t").selectExpr("concat(partition, '-', offset) value")
    run(frame.writeStream.format("forebay").option("path", str(data)).option("topic", "out"), tmp_path)
    first = {0: 11, 1: 18} if committed else {0: 3, 1: 1}
    expected = [b"%d-%d" % (each, offset) for each in (0, 1) for offset in range(first[each], 21)]
    assert sorted(value for *_, value in golden(data, "out")) == sorted(expected)
