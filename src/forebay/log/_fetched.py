"""What is asked of a reader and what it answers, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from forebay.errors import UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.record_columns import record_batch
from forebay.kit.retry import RetryPolicy

__all__ = ["Fetched", "FetchedBatch", "ReadRequest", "ReaderConfig", "fitting"]


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """How much at once, and how patiently."""

    bytes_max: int = 8 * 1024 * 1024
    """Bytes one read returns at most, unless a single record is larger. At least 1."""
    lookup_entries_max: int = 64
    """Index entries one lookup of a read asks for. 1 to 1,000."""
    scan_entries_max: int = 500
    """Index entries one lookup of a scan asks for. 1 to 1,000."""
    prefetch_bytes_max: int = 32 * 1024 * 1024
    """Bytes a scan fetches ahead, unless a single object is larger. At least 1."""
    requests_max: int = 16
    """Objects fetched at the same time by one reader, for all its reads. At least 1."""
    cache_bytes_max: int = 128 * 1024 * 1024
    """Bytes of decoded batches kept for further reads of the same object. 0 keeps none."""
    maps_objects: bool = False
    """Whether what a local store has cached is read where it lies. A failing disk then ends the process."""
    attempts_max: int = 6
    """Lookups of one offset before an object that stays missing counts as lost. At least 1."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """For every single request to the store and the coordinator, and between lookups."""

    def __post_init__(self) -> None:
        low = min(self.bytes_max, self.prefetch_bytes_max, self.requests_max, self.attempts_max)
        entries = (self.lookup_entries_max, self.scan_entries_max)
        if low < 1 or self.cache_bytes_max < 0 or not all(1 <= each <= 1000 for each in entries):
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Records of one partition from an offset on."""

    topic: str
    partition: int
    offset: int
    bytes_max: int | None = None
    """None: as the reader is configured."""
    records_max: int | None = None
    """None: no bound but the bytes."""


@dataclass(frozen=True, slots=True)
class FetchedBatch:
    """Records of one append or of a part of a compacted range, in order, without a gap."""

    topic: str
    partition: int
    start_offset: int
    batch: BytesBatch
    time_ms: int
    """Time of the append: that of every record without a time of its own."""

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def end_offset(self) -> int:
        """Offset of the last record."""
        return self.start_offset + len(self.batch) - 1

    def to_arrow(self) -> pa.RecordBatch:
        """The records with the columns of `RECORD_SCHEMA`."""
        return record_batch(self.topic, self.partition, self.start_offset, self.batch, self.time_ms)

    def part(self, start_offset: int, count: int) -> FetchedBatch:
        """Some of the records, without copying."""
        if start_offset == self.start_offset and count == len(self.batch):
            return self
        part = self.batch.slice(start_offset - self.start_offset, count)
        return FetchedBatch(self.topic, self.partition, start_offset, part, self.time_ms)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer to a read. No batches: the offset is the next to be written."""

    topic: str
    partition: int
    batches: list[FetchedBatch]
    next_offset: int
    """Where to read on."""
    earliest: int
    """First offset of the partition, as far as known."""
    high_watermark: int
    """One past the last record that is known to be written."""
    from_cache: bool = False
    """Answered from the tail cache, without any request."""

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def records(self) -> list[bytes]:
        """The values as a list: for small reads and tests."""
        return [value for batch in self.batches for value in batch.batch.records()]


def fitting(batches: list[FetchedBatch], bytes_max: int, records_max: int | None) -> list[FetchedBatch]:
    """The first records that stay within the bounds, at least one."""
    kept: list[FetchedBatch] = []
    records_left = records_max
    for batch in batches:
        count = len(batch) if records_left is None else min(records_left, len(batch))
        sizes = _running_bytes(batch.batch, count)
        within = int(np.searchsorted(sizes, bytes_max, side="right"))
        if within < count and not (kept or within):
            within = 1
        if within:
            kept.append(batch.part(batch.start_offset, within))
        bytes_max -= int(sizes[within - 1]) if within else 0
        if records_left is not None:
            records_left -= within
        if within < len(batch) or bytes_max <= 0 or records_left == 0:
            break
    return kept


def _running_bytes(batch: BytesBatch, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Bytes of values and keys up to and including each of the first records."""
    sizes = np.zeros(count, np.int64)
    for column in (batch.values, batch.keys):
        if column is not None:
            ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + count + 1]
            sizes += ends[1:].astype(np.int64) - int(ends[0])
    return sizes
