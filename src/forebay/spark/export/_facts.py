"""Plain values that travel between the driver and its tasks: ranges to export, and what became of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

__all__ = ["DEAD_SCHEMA", "EXAMPLES_MAX", "METADATA", "DataFile", "Span", "Task", "TaskResult"]

EXAMPLES_MAX: Final = 3
"""Bad records named in an error."""

METADATA = pa.schema(
    [
        pa.field("_topic", pa.string()),
        pa.field("_partition", pa.int32()),
        pa.field("_offset", pa.int64()),
        pa.field("_timestamp", pa.timestamp("us", tz="UTC")),
    ]
)
"""Columns that every table has, last. Of a buffer `_offset` is the sequence of the batch."""

DEAD_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("reason", pa.string()),
    ]
)
"""A bad record as it was, and why it is one."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one lane: a partition of a topic, a buffer, or a stream."""

    lane: str
    start: int
    end: int
    """One past the last position."""
    bytes: int
    """Stored bytes, as far as known."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one task reads and writes."""

    number: int
    spans: tuple[Span, ...]
    schema: pa.Schema
    """Columns of the table now, in order, those it is partitioned by included."""
    dead_from: Mapping[str, int] = field(default_factory=dict)
    """Per lane the position below which bad records are known to be kept already."""
    dead_bytes_max: int = sys.maxsize
    """Bytes of bad records that the driver takes from this task."""

    @property
    def bytes(self) -> int:
        """Stored bytes to read."""
        return sum(span.bytes for span in self.spans)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that was written and that nobody names yet."""

    path: str
    """Key below the table's own directory."""
    size: int
    rows: int
    partition: Mapping[str, str | None] = field(default_factory=dict)
    """Values of the columns the table is partitioned by, as text."""
    stats: str = ""
    """Statistics as Delta writes them."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task did."""

    number: int
    files: tuple[DataFile, ...] = ()
    records: Mapping[str, int] = field(default_factory=dict)
    """Records read, or batches of a buffer, by lane."""
    rows: int = 0
    """Rows in the files."""
    dead: bytes = b""
    """Bad records, as an Arrow IPC stream of `DEAD_SCHEMA`; empty where there are none."""
    dead_count: int = 0
    """Bad records met, those that were kept by an earlier round included."""
    has_too_many_dead: bool = False
    """Whether their bytes are more than the driver takes. There is nothing else here: run fewer tasks at
    once."""
    missing_columns: Mapping[str, Mapping[pa.DataType, int]] = field(default_factory=dict)
    """Columns that the table lacks, the types they were seen with, and in how many rows. Nothing was written:
    add them, and run again."""
    ignored_columns: tuple[str, ...] = ()
    """Columns, and fields inside of columns, that were left out."""
    bytes_read: int = 0
    """Bytes of the values."""
    cpu_s: float = 0.0
    """Processor seconds of the task's own thread."""
