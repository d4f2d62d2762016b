"""A Python source that hands out batches it has made before, and a sink that throws them away: the floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

__all__ = ["Discard", "Prepared"]

BATCH_ROWS = 10_000
COLUMNS = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)


class Prepared(DataSource):
    """One batch, made once per worker and handed out as often as rows are asked for."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "prepared"

    def schema(self) -> str:
        """Those of a topic."""
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        options = {name: int(value) for name, value in dict(self.options).items()}
        return _Reader(schema, options["rows"], options["bytes"], options["partitions"])


class _Reader(DataSourceReader):
    def __init__(self, schema: StructType, rows: int, value_bytes: int, partitions: int) -> None:
        self.schema = schema
        self.rows, self.value_bytes, self.count = rows, value_bytes, partitions

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self.count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(self.schema, timezone="UTC")
        rows = max(1, min(BATCH_ROWS, 4_000_000 // self.value_bytes))
        made = {
            "key": _bytes(rows, 16),
            "value": _bytes(rows, self.value_bytes),
            "topic": pa.repeat("t", rows),
            "partition": pa.array(np.zeros(rows, np.int32)),
            "offset": pa.array(np.arange(rows)),
            "timestamp": pa.array(np.arange(rows), pa.timestamp("us", tz="UTC")),
        }
        arrays = [made[field.name] if field.name in made else pa.nulls(rows, field.type) for field in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        left = self.rows // self.count
        while left > 0:
            yield batch.slice(0, min(rows, left))
            left -= rows


def _bytes(rows: int, width: int) -> pa.BinaryArray:
    data = pa.py_buffer(np.random.default_rng(1).integers(0, 256, rows * width, np.uint8).tobytes())
    offsets = pa.py_buffer(np.arange(0, (rows + 1) * width, width, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), rows, [None, offsets, data])


@dataclass
class _Gone(WriterCommitMessage):
    rows: int


class Discard(DataSource):
    """A sink that only takes."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "discard"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For `df.write`."""
        return _Writer()


class _Writer(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        return _Gone(sum(batch.num_rows for batch in iterator))
