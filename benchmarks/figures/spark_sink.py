"""Writing into a topic with Spark, against a sink that throws everything away.

A million rows with a key of 16 bytes and a value of 100 come from a source that hands out prepared batches
and go into a topic of four partitions in a directory, by key. Beside it the same rows go to a Python sink
that only takes them: crossing from the JVM into Python is most of the cost of any sink. Rates are rows per
second of processor time of all processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.figures._spark import per_cpu_second, per_second, session
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Variants, at_least

__all__ = ["spark_sink"]

ROWS, VALUE_BYTES = 1_000_000, 100


@suite.benchmark(
    "spark-sink",
    "Writing rows into a topic costs little more than taking them from Spark.",
    Figure("against discarding", of="topic", against="discard", target=at_least(1 / 1.25)),
)
def spark_sink(bench: Bench) -> Iterator[Variants]:
    """The same rows, kept and not."""
    from pyspark import cloudpickle

    from benchmarks.figures import _spark_prepared

    numbers = itertools.count()
    with session() as spark:
        cloudpickle.register_pickle_by_value(_spark_prepared)  # type: ignore[no-untyped-call]
        spark.dataSource.register(_spark_prepared.Prepared)
        spark.dataSource.register(_spark_prepared.Discard)
        source = spark.read.format("prepared").option("rows", ROWS).option("bytes", VALUE_BYTES)
        frame = source.option("partitions", 4).schema("key binary, value binary").load()

        def topic() -> float:
            writer = frame.write.format("forebay").mode("append").option("partitions", 4)
            writer.option("path", str(bench.directory / "data")).option("topic", f"t{next(numbers)}").save()
            return ROWS

        def discard() -> float:
            frame.write.format("discard").mode("append").save()
            return ROWS

        topic()
        discard()
        yield {
            "topic": per_cpu_second(topic),
            "discard": per_cpu_second(discard),
            "topic, by the clock": per_second(topic),
        }
