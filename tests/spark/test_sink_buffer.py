"""Rows written into a queue by Spark: once, whatever is repeated or fails after it took effect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from tests.spark.bed import fill, run, stream

from forebay.buffer import BufferConfig, Consumer, Reader
from forebay.spark import ForebaySource
from forebay.spark._buffer_sink import BufferSinkOptions, BufferStreamWriter
from forebay.spark._options import Options


def queued(queue: Path, **config: Any) -> list[bytes]:
    async def work() -> list[bytes]:
        async with Reader(BufferConfig(url=str(queue), **config)) as reader:
            batches = [await reader.read(entry) for entry in await reader.entries()]
        return [record for batch in batches for record in batch.entries]

    return asyncio.run(work())


def consumed(queue: Path) -> list[bytes]:
    """Take everything out."""

    async def work() -> list[bytes]:
        found: list[bytes] = []
        async with Consumer(BufferConfig(url=str(queue))) as consumer:
            await consumer.initialize()
            while (batch := await consumer.next_batch()) is not None:
                found += batch.entries
                await consumer.ack(batch.sequence)
        return found

    return asyncio.run(work())


def save(frame: Any, queue: Path, **options: object) -> None:
    writer = (
        frame.write.format("forebay").mode("append").option("path", str(queue)).option("engine", "buffer")
    )
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save()


class BrokenQueueSink(ForebaySource):
    """Fails once where a test wants it to, around the commit of the second batch."""

    @classmethod
    def name(cls) -> str:
        return "brokenqueue"

    def streamWriter(self, schema: Any, overwrite: bool) -> BufferStreamWriter:
        options = dict(self.options)
        marker, when = Path(options.pop("marker")), options.pop("fail")
        return BrokenWriter(BufferSinkOptions.parse(Options(options), schema), when, marker)


class BrokenWriter(BufferStreamWriter):
    """See above."""

    def __init__(self, options: BufferSinkOptions, when: str, marker: Path) -> None:
        super().__init__(options)
        self.when, self.marker = when, marker

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        fails = batchId == 1 and not self.marker.exists()
        if fails:
            self.marker.touch()
        if fails and self.when == "before":
            raise RuntimeError("failed before")
        super().commit(messages, batchId)
        if fails:
            raise RuntimeError("failed after")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_failed_before_or_after_its_effect_repeats_nothing(
    spark: SparkSession, tmp_path: Path, when: str
) -> None:
    import tests.spark.test_sink_buffer as here
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(here)  # type: ignore[no-untyped-call]
    spark.dataSource.register(here.BrokenQueueSink)
    data, queue = tmp_path / "data", tmp_path / "queue"
    sent = [b"%03d" % number for number in range(60)]
    fill(data, "in", 0, sent)
    frame = stream(spark, data, subscribe="in", minPartitions=2, maxOffsetsPerTrigger=20).select("value")
    writer = frame.writeStream.format("brokenqueue").option("path", str(queue)).option("engine", "buffer")
    writer = writer.option("fail", when).option("marker", str(tmp_path / "marker"))
    with pytest.raises(StreamingQueryException, match=f"failed {when}"):
        run(writer, tmp_path)
    # A consumer takes what is there before the query comes back: nothing of it may come again.
    found = consumed(queue)
    run(writer, tmp_path)
    assert found + queued(queue) == sent


def test_batches_keep_their_order_and_their_metadata(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql(
        "select concat('v', id) value, if(id < 3, 'first', if(id < 5, 'second', null)) metadata from range(7)"
    ).coalesce(1)
    save(frame, tmp_path, compression="zstd", manifest="q/manifest", prefix="q")

    async def work() -> list[Any]:
        async with Reader(BufferConfig(url=str(tmp_path), manifest_path="q/manifest")) as reader:
            return [await reader.read(entry) for entry in await reader.entries()]

    [batch] = asyncio.run(work())
    assert list(batch.entries) == [b"v%d" % number for number in range(7)]
    assert [(item.start_index, item.payload) for item in batch.metadata] == [
        (0, b"first"),
        (3, b"second"),
        (5, b""),
    ]


def test_a_write_with_an_id_happens_once_and_others_leave_nothing_behind(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.sql("select cast(id as string) value from range(10)")
    for _ in range(2):
        save(frame, tmp_path, writeId="load-7")
    assert len(queued(tmp_path)) == 10
    save(frame, tmp_path)
    assert len(queued(tmp_path)) == 20
    assert [each.name for each in (tmp_path / "ingest" / "forebay-publications").iterdir()] == ["load-7"]


@pytest.mark.parametrize(
    ("query", "options", "message"),
    [
        ("select 1 value", {}, "it is binary or string"),
        ("select 'a' metadata", {}, "no column 'value'"),
        ("select 'a' value, 'b' key", {}, "a queue has no column 'key'"),
        ("select 'a' value", {"topic": "t"}, "has no option 'topic'"),
        ("select 'a' value", {"compression": "gzip"}, "none or zstd"),
        ("select 'a' value", {"onUnknown": "maybe"}, "fail, append_again, skip"),
        ("select cast(null as string) value", {}, "a row has no value"),
        ("select 'a' value", {"engine": "stream"}, "no sink into a stream"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    spark: SparkSession, tmp_path: Path, query: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        save(spark.sql(query), tmp_path, **options)
    assert queued(tmp_path) == []
