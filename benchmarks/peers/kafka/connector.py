"""Spark's own connector for Kafka: its jars, and readers and writers of one node through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.kafka.server import KafkaServer
from benchmarks.peers.maven import jars_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["LARGE_FETCHES", "Connector", "connector_jars"]

POM = Path(__file__).with_name("connector-pom.xml")
LARGE_FETCHES = {
    "kafka.max.partition.fetch.bytes": "8388608",
    "kafka.fetch.min.bytes": "1048576",
    "kafka.max.poll.records": "20000",
    "kafka.receive.buffer.bytes": "1048576",
}
"""What somebody would set who reads whole topics."""


def connector_jars(say: Callable[[str], None] = lambda _: None) -> str:
    """The value of `spark.jars`. Raises `CannotMeasure` where the jars cannot be had."""
    jars = jars_of(POM, "Spark Kafka connector", say)
    return ",".join(str(path) for path in sorted(jars.glob("*.jar")))


class Connector:
    """Topics of one node as data frames."""

    def __init__(self, spark: SparkSession, server: KafkaServer) -> None:
        self._spark, self._address = spark, server.address

    def _options(self, **more: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self._address, **more}

    def read(self, topic: str, **options: str) -> DataFrame:
        """All of a topic."""
        given = self._options(subscribe=topic, **options)
        return self._spark.read.format("kafka").options(**given).load()

    def stream(self, topic: str, **options: str) -> DataFrame:
        """A topic from its beginning."""
        given = self._options(subscribe=topic, startingOffsets="earliest", **options)
        return self._spark.readStream.format("kafka").options(**given).load()

    def write(self, frame: DataFrame, topic: str) -> None:
        """Append rows, with the connector's own settings."""
        frame.write.format("kafka").options(**self._options(topic=topic)).save()
