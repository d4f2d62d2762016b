"""Reading a topic with Spark, against what Spark itself makes possible.

Rows have a key of 16 bytes and a value of 100 or of 1,000, in four partitions of a log in a directory, as
appends of 4 MiB. Every column of every row goes to the sink that discards. Beside it the same rows from a
Python source that only hands out batches it has prepared (nothing a Python source does can cost less), and
from Parquet files through Spark's own reader in the JVM. What is compared is processor time, of the JVM and
of all Python workers together: the rate is rows per second of it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.figures._spark import KEY_BYTES, per_cpu_second, per_second, records, session, to_nowhere
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Variants, at_least
from forebay import aio
from forebay.log import AppendGroup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark_read_large", "spark_read_small"]

PARTITIONS = 4
APPEND_BYTES = 4 * 1024 * 1024
SMALL, SMALL_ROWS = 100, 2_000_000
LARGE, LARGE_ROWS = 1_000, 1_000_000


async def _fill(data: Path, rows: int, value_bytes: int) -> None:
    async with aio.connect(data) as bay:
        await bay.topics.create("t", partitions=PARTITIONS)
        step = APPEND_BYTES // (KEY_BYTES + value_bytes)
        for number, first in enumerate(range(0, rows, step)):
            keys, values = records(min(step, rows - first), value_bytes, number)
            group = AppendGroup.of("t", number % PARTITIONS, values, keys=keys)
            [result] = await bay.writer.append_shared([group])
            result.unwrap()


def _prepared(spark: SparkSession, rows: int, value_bytes: int) -> Any:
    """A source that only hands out what it has."""
    from pyspark import cloudpickle

    from benchmarks.figures import _spark_prepared

    cloudpickle.register_pickle_by_value(_spark_prepared)  # type: ignore[no-untyped-call]
    spark.dataSource.register(_spark_prepared.Prepared)
    reader = spark.read.format("prepared").option("rows", rows).option("bytes", value_bytes)
    return reader.option("partitions", 8)


def _parquet(data: Path, rows: int, value_bytes: int) -> None:
    """The same columns as zstd Parquet, in eight files."""
    data.mkdir()
    for number in range(8):
        keys, values = records(rows // 8, value_bytes, number)
        count = len(keys)
        table = pa.table(
            {
                "key": keys,
                "value": values,
                "topic": pa.repeat("t", count),
                "partition": pa.array(np.full(count, number % PARTITIONS, np.int32)),
                "offset": pa.array(np.arange(count)),
                "timestamp": pa.array(np.arange(count), pa.timestamp("us", tz="UTC")),
                "headers": pa.nulls(
                    count, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
                ),
            }
        )
        pq.write_table(table, data / f"{number}.parquet", compression="zstd")


def _variants(bench: Bench, rows: int, value_bytes: int) -> Iterator[Variants]:
    data, files = bench.directory / "data", bench.directory / "parquet"
    asyncio.run(_fill(data, rows, value_bytes))
    _parquet(files, rows, value_bytes)
    with session() as spark:
        prepared = _prepared(spark, rows, value_bytes)
        ours = spark.read.format("forebay").option("path", str(data)).option("subscribe", "t")

        def topic() -> float:
            to_nowhere(ours.load())
            return rows

        def topic_as_stream() -> float:
            checkpoint = bench.directory / "checkpoint"
            reader = spark.readStream.format("forebay").option("path", str(data)).option("subscribe", "t")
            frame = reader.option("startingOffsets", "earliest").load()
            query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
            query.trigger(availableNow=True).start().awaitTermination()
            shutil.rmtree(checkpoint)
            return rows

        def from_batches() -> float:
            to_nowhere(prepared.load())
            return rows

        def from_parquet() -> float:
            to_nowhere(spark.read.parquet(str(files)))
            return rows

        for warm in (topic, topic_as_stream, from_batches, from_parquet):
            warm()
        yield {
            "topic": per_cpu_second(topic),
            "topic, availableNow": per_cpu_second(topic_as_stream),
            "prepared batches": per_cpu_second(from_batches),
            "Parquet in the JVM": per_cpu_second(from_parquet),
            "topic, by the clock": per_second(topic),
        }


_FIGURES = (
    Figure("against prepared batches", of="topic", against="prepared batches", target=at_least(1 / 1.3)),
    Figure("against Parquet", of="topic", against="Parquet in the JVM", target=at_least(1 / 2.2)),
    Figure("as a stream", of="topic, availableNow", against="prepared batches"),
)


@suite.benchmark(
    "spark-read-small",
    "Spark reads a topic of small records for little more than handing over costs.",
    *_FIGURES,
)
def spark_read_small(bench: Bench) -> Iterator[Variants]:
    """Records of 132 bytes with everything."""
    yield from _variants(bench, SMALL_ROWS, SMALL)


@suite.benchmark(
    "spark-read-large",
    "Spark reads a topic of 1 KiB records for little more than handing over costs.",
    *_FIGURES,
)
def spark_read_large(bench: Bench) -> Iterator[Variants]:
    """Records of 1 KiB."""
    yield from _variants(bench, LARGE_ROWS, LARGE)
