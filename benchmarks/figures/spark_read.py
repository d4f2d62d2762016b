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
query (0.4 s of processor time, two thirds of it imports of Spark's own). What is asked for is the rate, so
streams read four million rows, the larger ones from two topics; beside it, without a target, a single million
with the start of its query.

One core against two: the same session, once with all tasks in one slot and all its processes kept to one
processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.figures._memory import memory_in_use
from benchmarks.figures._spark import (
    KEY_BYTES,
    PARTITIONS,
    cpu_seconds,
    fill,
    job,
    megabytes,
    on_one_core,
    prepared_rows,
    records,
    session,
    to_nowhere,
    to_nowhere_as_stream,
    warm,
)
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Variant, Variants, at_least, at_most
from benchmarks.peers.kafka import LARGE_FETCHES, Connector, KafkaServer, connector_jars, kafka_jars

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["spark_read_large", "spark_read_small"]

FILES = 8
SMALL, SMALL_ROWS = 100, 4_000_000
LARGE, LARGE_ROWS = 1_000, 1_000_000
STREAM_ROWS = 4_000_000
"""Rows of a stream, of either size."""
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


class _Reads:
    """The jobs. Topics have the same names and records on both sides; batches read `t`."""

    def __init__(self, spark: SparkSession, kafka: Connector, place: Path, topics: dict[str, int]) -> None:
        self._spark, self._kafka, self._place, self._topics = spark, kafka, place, topics

    def _ours(self, *names: str) -> dict[str, str]:
        return {"path": str(self._place / "data"), "subscribe": ",".join(names)}

    def topic(self, name: str = "t") -> DataFrame:
        """A topic of ours."""
        return self._spark.read.format("forebay").options(**self._ours(name)).load()

    def batch(self, frame: DataFrame) -> float:
        """All rows of what has as many as `t`."""
        to_nowhere(frame)
        return self._topics["t"]

    def on_one_core(self) -> float:
        """A topic of ours in one task."""
        with on_one_core():
            return self.batch(self.topic().coalesce(1))

    def stream(self, *names: str) -> float:
        """Topics of ours."""
        reader = self._spark.readStream.format("forebay").options(**self._ours(*names))
        return self._stream(reader.option("startingOffsets", "earliest").load(), *names)

    def stream_of_kafka(self, *names: str) -> float:
        """The same of Kafka's."""
        return self._stream(self._kafka.stream(",".join(names)), *names)

    def _stream(self, frame: DataFrame, *names: str) -> float:
        to_nowhere_as_stream(frame, self._place / "checkpoint")
        return sum(self._topics[name] for name in names)

    def copy_to_kafka(self, server: KafkaServer) -> None:
        """The same records for Kafka."""
        for name, rows in self._topics.items():
            server.create_topic(name, PARTITIONS)
            self._kafka.write(self.topic(name).select("key", "value", "partition"), name)
            assert self._kafka.read(name).count() == rows, "Kafka has not got the same records"


def _variants(bench: Bench, rows: int, value_bytes: int, topics: dict[str, int]) -> Iterator[Variants]:
    folders = data, files, brokers = [bench.directory / name for name in ("data", "parquet", "kafka")]
    jars, connector = kafka_jars(bench.say), connector_jars(bench.say)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_in_use(bench))
        bench.say("filling topics")
        for name, count in topics.items():
            asyncio.run(fill(data, count, value_bytes, name))
        _parquet(files, rows, value_bytes)
        bench.say("starting Kafka and Spark")
        server = stack.enter_context(KafkaServer(jars, brokers))
        spark = stack.enter_context(session(spark_jars=connector))
        kafka = Connector(spark, server)
        reads = _Reads(spark, kafka, bench.directory, topics)
        bench.say("the same records for Kafka")
        reads.copy_to_kafka(server)
        for folder in folders:
            memory.hold(folder)
        prepared = prepared_rows(spark, rows, value_bytes, FILES)

        def ours(work: Callable[[], float]) -> Variant:
            return job(work, lambda: cpu_seconds(aside=server.pid))

        topic, speed = megabytes(
            ours(lambda: reads.batch(reads.topic())), KEY_BYTES + value_bytes + FACTS_BYTES
        )
        variants = {
            "topic": topic,
            "topic, MB": speed,
            "topic, availableNow": ours(lambda: reads.stream(*topics)),
            "prepared batches": ours(lambda: reads.batch(prepared.load())),
            "Parquet in the JVM": ours(lambda: reads.batch(spark.read.parquet(str(files)))),
            "topic, one core": ours(reads.on_one_core),
            "connector": job(lambda: reads.batch(kafka.read("t"))),
            "connector, large fetches": job(lambda: reads.batch(kafka.read("t", **LARGE_FETCHES))),
            "connector, availableNow": job(lambda: reads.stream_of_kafka(*topics)),
        }
        if len(topics) > 1:
            variants |= {
                "topic, availableNow of one": ours(lambda: reads.stream("t")),
                "connector, availableNow of one": job(lambda: reads.stream_of_kafka("t")),
            }
        yield warm(variants, memory.refill)


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
    yield from _variants(bench, SMALL_ROWS, SMALL, {"t": SMALL_ROWS})


@suite.benchmark(
    "spark-read-1k",
    "Spark reads a topic of 1 KiB records for half of what its Kafka connector and the broker take.",
    *_FIGURES,
    Figure(
        "availableNow of a million rows: CPU of the connector and its broker",
        "topic, availableNow of one",
        "connector, availableNow of one",
        measure=Measure.CPU,
    ),
    jobs=True,
)
def spark_read_large(bench: Bench) -> Iterator[Variants]:
    """A million rows of 1 KiB, four million as a stream."""
    topics = {"t": LARGE_ROWS, "more": STREAM_ROWS - LARGE_ROWS}
    yield from _variants(bench, LARGE_ROWS, LARGE, topics)
