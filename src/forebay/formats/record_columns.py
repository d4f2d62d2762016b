"""Records as Arrow: the one schema that every door hands out, with the column names of Spark's Kafka source.

    topic, partition, offset, timestamp, key, value, headers

A batch becomes a record batch without touching single records. Values, keys and headers are the arrays the
decoder made, which are views of the bytes as they were read; offsets are a range; topic and partition are one
value, repeated by Arrow.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from forebay.formats.bytes_batch import HEADERS_TYPE, BytesBatch

__all__ = ["RECORD_SCHEMA", "record_batch"]

RECORD_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("headers", HEADERS_TYPE),
    ]
)
"""What reads return. `timestamp` is the record's own time, or that of its append where it has none."""


def record_batch(
    topic: str, partition: int, start_offset: int, batch: BytesBatch, time_ms: int
) -> pa.RecordBatch:
    """The records of one batch, whose first has `start_offset` and whose append was at `time_ms`."""
    count = len(batch)
    if batch.timestamps_ms is None:
        times = np.full(count, time_ms, np.int64)
    else:
        times = np.ascontiguousarray(batch.timestamps_ms, np.int64)
    columns = [
        pa.repeat(pa.scalar(topic, pa.string()), count),
        pa.repeat(pa.scalar(partition, pa.int32()), count),
        pa.array(np.arange(start_offset, start_offset + count, dtype=np.int64)),
        pa.Array.from_buffers(RECORD_SCHEMA.field("timestamp").type, count, [None, pa.py_buffer(times)]),
        pa.nulls(count, pa.binary()) if batch.keys is None else batch.keys,
        batch.values,
        pa.nulls(count, HEADERS_TYPE) if batch.headers is None else batch.headers,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
