"""Writing into a topic with Spark, beside a sink that throws everything away and beside Kafka.

A million rows with a key of 16 bytes and a value of 100 come from a source that hands out prepared batches
and go into a topic of four partitions in a directory, by key. Beside it the same rows go to a Python sink
that only takes them (crossing from the JVM into Python is most of the cost of any sink), and through Spark's
own connector, with its default settings, into a topic of four partitions of one Kafka node on the same cores.
Ours has synced every object and its commit when the job ends; Kafka's default has them in the page cache.

Processor time is that of the JVM and of all Python workers, and for Kafka that of its broker as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from benchmarks.figures._memory import memory_in_use
from benchmarks.figures._spark import (
    PARTITIONS,
    cpu_seconds,
    job,
    prepared_rows,
    session,
    warm,
)
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Variants, at_least, at_most
from benchmarks.peers.kafka import Connector, KafkaServer, connector_jars, kafka_jars

__all__ = ["spark_sink"]

ROWS, VALUE_BYTES = 1_000_000, 100
JOBS = 4
"""Jobs that make a turn: in the half second that one takes the JVM may compile as much as it works."""


@suite.benchmark(
    "spark-sink",
    "Writing rows into a topic costs little more than taking them from Spark, and is faster than Kafka.",
    Figure("CPU of discarding", "topic", "discard", at_most(1.25), measure=Measure.CPU),
    Figure("rows/s of df.write.format(kafka)", "topic", "Kafka", at_least(1.5)),
    Figure("CPU of df.write.format(kafka) and its broker", "topic", "Kafka", measure=Measure.CPU),
    jobs=True,
)
def spark_sink(bench: Bench) -> Iterator[Variants]:
    """The same rows, kept, thrown away, and sent to Kafka."""
    jars, connector = kafka_jars(bench.say), connector_jars(bench.say)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_in_use(bench))
        bench.say("starting Kafka and Spark")
        server = stack.enter_context(KafkaServer(jars, bench.directory / "kafka"))
        spark = stack.enter_context(session(spark_jars=connector))
        server.create_topic("t", PARTITIONS)
        kafka = Connector(spark, server)
        source = prepared_rows(spark, ROWS, VALUE_BYTES, PARTITIONS)
        frame = source.schema("key binary, value binary").load()

        def topic() -> None:
            writer = frame.write.format("forebay").mode("append").option("partitions", PARTITIONS)
            writer.option("path", str(bench.directory / "data")).option("topic", "t").save()

        def discard() -> None:
            frame.write.format("discard").mode("append").save()

        def sent() -> None:
            kafka.write(frame, "t")

        def turn(write: Callable[[], None]) -> Callable[[], float]:
            def run() -> float:
                for _ in range(JOBS):
                    write()
                return JOBS * ROWS

            return run

        def without_broker() -> float:
            return cpu_seconds(aside=server.pid)

        variants = {
            "topic": job(turn(topic), without_broker),
            "discard": job(turn(discard), without_broker),
            "Kafka": job(turn(sent)),
        }
        yield warm(variants, memory.refill, runs=2)
