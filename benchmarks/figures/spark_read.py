"""Reading a topic with Spark, beside Spark's own Kafka connector and beside what Spark makes possible.

Rows have a key of 16 bytes and a value of 100 or of 1,000 (132 bytes and 1 KiB with offset and time), in four
partitions of a log in a directory, as appends of 4 MiB; the very same records lie in four partitions of one
Kafka node on the same cores. Every column of every row goes to the sink that discards, as a batch and as a
query with `availableNow`. Processor time is that of the JVM and of all Python workers; for the connector that
of Kafka's broker comes on top, since our tasks read from the store themselves. The connector has its default
settings, and beside them settings for large fetches.

Also beside it: a Python source that only hands out batches it has prepared (nothing a Python source does can
cost less), and Parquet files through Spark's own reader in the JVM.

Before the first turn every job has run twice: the JVM goes on compiling for a while. What is fixed, whatever
the rows, counts on every side: planning, and for our stream the Python process that Spark starts for each
query (about half a second of processor time, of which Spark's own imports are the larger part).

One core against two: the same session, once with all tasks in one slot and all its processes kept to one
processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.figures._spark import (
    KEY_BYTES,
    PARTITIONS,
    cpu_seconds,
    fill,
    job,
    megabytes,
    memory_in_use,
    on_one_core,
    prepared_rows,
    records,
    session,
    to_nowhere,
    to_nowhere_as_stream,
    warm,
)
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Variants, at_least, at_most
from benchmarks.peers.kafka import LARGE_FETCHES, Connector, KafkaServer, connector_jars, kafka_jars

__all__ = ["spark_read_large", "spark_read_small"]

FILES = 8
SMALL, SMALL_ROWS = 100, 4_000_000
LARGE, LARGE_ROWS = 1_000, 1_000_000
FACTS_BYTES = 16
"""Offset and time of a row, which count as its bytes."""


def _parquet(data: Path, rows: int, value_bytes: int) -> None:
    """The same columns as zstd Parquet, in eight files."""
    data.mkdir()
    for number in range(FILES):
        keys, values = records(rows // FILES, value_bytes, number)
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
    data, files, checkpoint = (bench.directory / name for name in ("data", "parquet", "checkpoint"))
    jars, connector = kafka_jars(bench.say), connector_jars(bench.say)
    with ExitStack() as stack:
        stack.enter_context(memory_in_use(bench))
        bench.say("filling a topic")
        asyncio.run(fill(data, rows, value_bytes))
        _parquet(files, rows, value_bytes)
        bench.say("starting Kafka and Spark")
        server = stack.enter_context(KafkaServer(jars, bench.directory / "kafka"))
        spark = stack.enter_context(session(spark_jars=connector))
        server.create_topic("t", PARTITIONS)
        kafka = Connector(spark, server)
        prepared = prepared_rows(spark, rows, value_bytes, FILES)
        options = {"path": str(data), "subscribe": "t"}
        ours = spark.read.format("forebay").options(**options)
        bench.say("the same records for Kafka")
        kafka.write(ours.load().select("key", "value", "partition"), "t")
        assert kafka.read("t").count() == rows, "Kafka has not got the same records"

        def topic() -> float:
            to_nowhere(ours.load())
            return rows

        def topic_on_one_core() -> float:
            with on_one_core():
                to_nowhere(ours.load().coalesce(1))
            return rows

        def topic_as_stream() -> float:
            reader = spark.readStream.format("forebay").options(**options)
            to_nowhere_as_stream(reader.option("startingOffsets", "earliest").load(), checkpoint)
            return rows

        def connected(**settings: str) -> float:
            to_nowhere(kafka.read("t", **settings))
            return rows

        def connected_as_stream() -> float:
            to_nowhere_as_stream(kafka.stream("t"), checkpoint)
            return rows

        def from_batches() -> float:
            to_nowhere(prepared.load())
            return rows

        def from_parquet() -> float:
            to_nowhere(spark.read.parquet(str(files)))
            return rows

        def without_broker() -> float:
            return cpu_seconds(aside=server.pid)

        batch, speed = megabytes(job(topic, without_broker), KEY_BYTES + value_bytes + FACTS_BYTES)
        variants = {
            "topic": batch,
            "topic, MB": speed,
            "topic, availableNow": job(topic_as_stream, without_broker),
            "prepared batches": job(from_batches, without_broker),
            "Parquet in the JVM": job(from_parquet, without_broker),
            "topic, one core": job(topic_on_one_core, without_broker),
            "connector": job(connected),
            "connector, large fetches": job(lambda: connected(**LARGE_FETCHES)),
            "connector, availableNow": job(connected_as_stream),
        }
        yield warm(variants)


_FIGURES = (
    Figure("CPU of the connector and its broker", "topic", "connector", at_most(0.5), measure=Measure.CPU),
    Figure("rows/s of the connector", "topic", "connector", at_least(2)),
    Figure(
        "availableNow: CPU of the connector and its broker",
        "topic, availableNow",
        "connector, availableNow",
        at_most(0.5),
        measure=Measure.CPU,
    ),
    Figure(
        "availableNow: rows/s of the connector", "topic, availableNow", "connector, availableNow", at_least(2)
    ),
    Figure("CPU of prepared batches", "topic", "prepared batches", at_most(1.3), measure=Measure.CPU),
    Figure("CPU of spark.read.parquet", "topic", "Parquet in the JVM", at_most(2.2), measure=Measure.CPU),
    Figure("two cores against one", "topic", "topic, one core", at_least(1.7)),
    Figure("CPU of the connector, large fetches", "topic", "connector, large fetches", measure=Measure.CPU),
    Figure("MB/s", "topic, MB", measure=Measure.PLAIN),
)


@suite.benchmark(
    "spark-read-132",
    "Spark reads a topic of 132-byte records for half of what its Kafka connector and the broker take.",
    *_FIGURES,
    jobs=True,
)
def spark_read_small(bench: Bench) -> Iterator[Variants]:
    """Four million small rows."""
    yield from _variants(bench, SMALL_ROWS, SMALL)


@suite.benchmark(
    "spark-read-1k",
    "Spark reads a topic of 1 KiB records for half of what its Kafka connector and the broker take.",
    *_FIGURES,
    jobs=True,
)
def spark_read_large(bench: Bench) -> Iterator[Variants]:
    """A million rows of 1 KiB."""
    yield from _variants(bench, LARGE_ROWS, LARGE)
