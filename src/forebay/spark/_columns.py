"""From batches of a log to the exact Arrow that Spark takes.

Spark compares the first batch of a task with the declared schema, type by type: `binary` is 32-bit offsets
and nothing else, a timestamp is microseconds in UTC, a list's child is called `element`. Everything of ours
goes through `exact`, in this one place.

Only the columns of the schema are made: a user's schema is how columns are left out. Small appends are fused,
since a batch costs Spark as much as ten thousand records do; a large object is cut into parts. Values are
copied only where several appends become one batch.
"""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from forebay.errors import UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.log import FetchedBatch

__all__ = ["LOG_SCHEMA", "LogColumns", "arrow_schema", "check_schema", "exact", "fused", "timestamps"]

LOG_SCHEMA: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField(
            "headers",
            ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
        ),
    ]
)
"""Columns of a log, in the order of Spark's Kafka source."""
NEVER_NULL: Final = frozenset({"value", "topic", "partition", "offset", "stream", "sequence", "index"})
"""Columns of topics, queues and streams that every record has."""
BATCH_ROWS: Final = 10_000
"""Records at which a batch is handed to Spark; fewer where they are large."""
BATCH_BYTES: Final = 2 * 1024 * 1024
"""Bytes of keys and values at which it is, however few records that are: fusing more would only copy."""
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Largest batch, unless a single record is larger."""
BATCH_ROWS_MAX: Final = 65_536
"""Most records of one batch."""
TIME_MS_MAX: Final = (2**63 - 1) // 1000
"""Latest time, and earliest with a minus before it, that Spark's microseconds can hold."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark will compare with."""
    return to_arrow_schema(schema, timezone="UTC")


def check_schema(
    chosen: StructType, offered: StructType, never_null: Collection[str] = NEVER_NULL
) -> StructType:
    """The user's schema, if it is a choice of the columns there are; raises a `UsageError` otherwise.

    `never_null` are the columns that may be declared as such. Of others Spark would be told that a null is a
    value: `where key is null` finds nothing then, whatever the rows hold.
    """
    known = {field.name.lower(): field for field in offered.fields}
    if not chosen.fields:
        # Arrow counts the rows of a batch by its columns: every count would be 0.
        raise UsageError("no column is chosen", hint=f"columns: {', '.join(known)}")
    names = [field.name.lower() for field in chosen.fields]
    for number, field in enumerate(chosen.fields):
        if names[number] in names[:number]:
            raise UsageError(f"column {field.name!r} is chosen twice", hint="name each column once")
        found = known.get(field.name.lower())
        if found is None:
            near = difflib.get_close_matches(field.name.lower(), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"columns: {', '.join(known)}"
            raise UsageError(f"there is no column {field.name!r}", hint=hint)
        if found.dataType.simpleString() != field.dataType.simpleString():
            kinds = f"{found.dataType.simpleString()}, not {field.dataType.simpleString()}"
            raise UsageError(
                f"column {field.name!r} is {kinds}",
                hint="choose columns by the schema and cast them with select",
            )
        if not field.nullable and field.name.lower() not in never_null:
            raise UsageError(
                f"column {field.name!r} may hold nulls, and the schema says that it never does",
                hint="leave NOT NULL out, and filter with select",
            )
    return chosen


def exact(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same values in exactly this type."""
    if array.type == kind and _names_match(array.type, kind):
        return array
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if pa.types.is_fixed_size_binary(array.type) and pa.types.is_binary(kind):
        # Arrow has no cast from fixed sizes that keeps nulls apart in every release; by way of large binary.
        array = array.cast(pa.large_binary())
    if pa.types.is_timestamp(array.type) and array.type.tz is None and getattr(kind, "tz", None):
        array = array.cast(pa.timestamp(array.type.unit, tz="UTC"))
    return array.cast(kind, safe=False)


def _names_match(one: pa.DataType, other: pa.DataType) -> bool:
    """Types are equal to Arrow whatever a list's child is called; Spark looks at the name as well."""
    return not one.num_fields or str(one) == str(other)


class LogColumns:
    """Makes record batches of the columns that were asked for."""

    def __init__(self, schema: StructType) -> None:
        self.schema = arrow_schema(schema)
        self._columns = [(field.name.lower(), field.type) for field in self.schema]
        self._alike: dict[tuple[str, str | int | None], pa.Array] = {}

    def batch(self, run: Sequence[FetchedBatch]) -> pa.RecordBatch:
        """The records of neighbouring batches of one partition, as one."""
        rows = sum([len(each) for each in run])
        arrays = [self._column(name, kind, run, rows) for name, kind in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, name: str, kind: pa.DataType, run: Sequence[FetchedBatch], rows: int) -> pa.Array:
        if name == "value":
            return exact(_joined([each.batch.values for each in run]), kind)
        if name == "key":
            return self._optional(name, kind, [each.batch.keys for each in run], run, rows)
        if name == "headers":
            return self._optional(name, kind, [each.batch.headers for each in run], run, rows)
        if name == "offset":
            first = run[0].start_offset
            return _numbers(np.arange(first, first + rows, dtype=np.int64), kind)
        if name == "timestamp":
            return _times(run, kind)
        return self._all(run[0].partition if name == "partition" else run[0].topic, name, kind, rows)

    def _optional(
        self,
        name: str,
        kind: pa.DataType,
        found: Sequence[pa.Array | None],
        run: Sequence[FetchedBatch],
        rows: int,
    ) -> pa.Array:
        present = [array for array in found if array is not None]
        if not present:
            return self._all(None, name, kind, rows)
        if len(present) < len(found):
            missing = present[0].type
            present = [
                pa.nulls(len(each), missing) if array is None else array
                for each, array in zip(run, found, strict=True)
            ]
        return exact(_joined(present), kind)

    def _all(self, value: str | int | None, name: str, kind: pa.DataType, rows: int) -> pa.Array:
        """The same value in every row: made once, and handed out in parts."""
        made = self._alike.get((name, value))
        if made is None or len(made) < rows:
            count = 2 * rows
            made = _nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)
            self._alike[name, value] = made
        return made.slice(0, rows)


def _nulls(rows: int, kind: pa.DataType) -> pa.Array:
    """Nulls without what Arrow puts below a list of them: as many zeros again for each field of what it could
    hold, all of which would be sent to Spark."""
    if not pa.types.is_list(kind):
        return pa.nulls(rows, kind)
    zeros = pa.py_buffer(bytes(4 * (rows + 1)))
    below = pa.array([], kind.value_type)
    return pa.Array.from_buffers(kind, rows, [zeros, zeros], rows, children=[below])


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _numbers(values: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _times(run: Sequence[FetchedBatch], kind: pa.DataType) -> pa.Array:
    [first, *more] = run
    if not more and first.batch.timestamps_ms is None and abs(first.time_ms) <= TIME_MS_MAX:
        return _numbers(np.full(len(first), first.time_ms * 1000, np.int64), kind)
    parts = [
        np.full(len(each), each.time_ms, np.int64)
        if each.batch.timestamps_ms is None
        else each.batch.timestamps_ms
        for each in run
    ]
    millis = (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64, copy=False)
    return timestamps(millis, kind)


def timestamps(millis: npt.NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """Milliseconds since 1970 as Spark's timestamps."""
    times = millis * 1000
    # A producer may give any number. What Spark's microseconds cannot hold has no time, not another one.
    validity = None
    if len(millis) and (int(millis.max()) > TIME_MS_MAX or int(millis.min()) < -TIME_MS_MAX):
        inside = (millis <= TIME_MS_MAX) & (millis >= -TIME_MS_MAX)
        validity = pa.py_buffer(np.packbits(inside, bitorder="little"))
    return pa.Array.from_buffers(kind, len(times), [validity, pa.py_buffer(times)])


async def fused(batches: AsyncIterator[FetchedBatch]) -> AsyncIterator[list[FetchedBatch]]:
    """Neighbouring batches, together as large as Spark likes them; larger ones in parts."""
    run: list[FetchedBatch] = []
    rows = size = 0
    async for batch in batches:
        for part in _parts(batch):
            if run and rows + len(part) > BATCH_ROWS_MAX:
                yield run
                run, rows, size = [], 0, 0
            run.append(part)
            rows, size = rows + len(part), size + _bytes(part.batch)
            if size >= BATCH_BYTES or rows >= BATCH_ROWS:
                yield run
                run, rows, size = [], 0, 0
    if run:
        yield run


def _parts(batch: FetchedBatch) -> list[FetchedBatch]:
    rows, size = len(batch), _bytes(batch.batch)
    count = max(-(-size // BATCH_BYTES_MAX), -(-rows // BATCH_ROWS_MAX))
    if count <= 1:
        return [batch]
    step = -(-rows // min(count, rows))
    return [batch.part(batch.start_offset + first, min(step, rows - first)) for first in range(0, rows, step)]


def _bytes(batch: BytesBatch) -> int:
    size = 0
    for column in (batch.values, batch.keys):
        if column is not None:
            ends = np.frombuffer(column.buffers()[1], np.int32)
            size += int(ends[column.offset + len(column)]) - int(ends[column.offset])
    return size
