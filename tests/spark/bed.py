"""Logs to read and ways to read them, shared by the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import forebay

Row = tuple[str, int, int, bytes]
"""Topic, partition, offset, value."""
CONNECT_ATTEMPTS = 3


def fill(
    data: Path, topic: str, partition: int, values: Sequence[bytes], *, partitions: int = 1, **columns: Any
) -> None:
    """Append records to a partition; the topic is created where it is new."""
    with forebay.connect(data) as bay:
        if topic not in {each.topic for each in bay.topics.list()}:
            bay.topics.create(topic, partitions=partitions)
        with bay.producer() as out:
            out.send(topic, list(values), partition=partition, **columns).result(timeout=60)


def golden(data: Path, *topics: str) -> list[Row]:
    """Every record, read without Spark."""
    found: list[Row] = []
    with forebay.connect(data) as bay:
        for topic in topics:
            table = bay.read(topic).read_all()
            names = ("topic", "partition", "offset", "value")
            found += zip(*(table.column(name).to_pylist() for name in names), strict=True)
    return sorted(found)


def rows(frame: DataFrame) -> list[Row]:
    """Every row of a frame with the columns of a log."""
    table = frame.select("topic", "partition", "offset", "value").toArrow()
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))


def read(spark: SparkSession, data: Path, **options: object) -> DataFrame:
    """A batch read."""
    frame: DataFrame = _with(spark.read.format("forebay"), data, options).load()
    return frame


def stream(spark: SparkSession, data: Path, **options: object) -> DataFrame:
    """A stream from the earliest offset on, unless told otherwise."""
    chosen = {"startingOffsets": "earliest"} | options
    frame: DataFrame = _with(spark.readStream.format("forebay"), data, chosen).load()
    return frame


def _with(reader: Any, data: Path, options: dict[str, Any]) -> Any:
    reader = reader.option("path", str(data))
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader


def drain(frame: DataFrame, base: Path, *, to: str = "out") -> list[int]:
    """Run a stream to the end of the log into Parquet; the rows of each batch that had any."""
    return run(frame.writeStream.format("parquet").option("path", str(base / to)), base, to)


def run(writer: Any, base: Path, name: str = "out") -> list[int]:
    """Run a streaming write to its end; the rows of each batch that had any."""
    writer = writer.option("checkpointLocation", str(base / f"checkpoint-{name}")).trigger(availableNow=True)
    for attempt in range(CONNECT_ATTEMPTS):
        query = writer.start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            # Spark gives a new Python ten seconds, which is little on a machine under load. Nothing ran yet.
            if "failed to connect back" not in str(error) or attempt == CONNECT_ATTEMPTS - 1:
                raise
        else:
            break
    return [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]
