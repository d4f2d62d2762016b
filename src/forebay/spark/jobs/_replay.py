"""Replay: the records of a time range into another topic, exactly once per job.

    plan       offsets of the range, per partition; written once, put-if-absent, under the job's id
    task       a partition: chunks of its range, in order, as idempotent appends
               producer id = job id + partition, sequence = number of the chunk

    Invariant: chunk n of a partition holds the same records whenever and wherever it is read, and is appended
    under sequence n. The target's partition takes each sequence once, and in order.

    killed before the plan is written     nothing happened; the next run makes a plan
    killed after it                       the next run reads the plan: later records do not move the range
    killed between two chunks             the target says which sequence it expects; the task goes on there
    two tasks for one partition           both append the same chunks under the same numbers
    killed after the last chunk           the same; `done` is written behind it, so that a job run again
                                          when the target has forgotten the producer changes nothing
    the range is trimmed meanwhile        `ReplayTrimmed`, for good: where a chunk begins follows from all
                                          that are before it

Partition p goes to partition p modulo the target's number, so records keep their order. Keys, timestamps and
headers are kept.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import ForebayError, FormatError, NotFound, PreconditionFailed, UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.log import AppendGroup, Catalog, LogReader, LogWriter, OffsetOutOfRange, OutOfSequence
from forebay.spark.export._spread import spread
from forebay.spark.jobs._place import Place
from forebay.storage import ABSENT, ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ReplayTrimmed", "ReplayedPartition", "replay", "replay_partition"]

CHUNK_RECORDS: Final = 5_000
"""Records of one append. Part of the plan, so it may change between versions."""
CHUNK_BYTES: Final = 16 * 1024 * 1024
"""Bytes of keys, values and headers at which an append ends, with the record that reaches them. Part of the
plan."""
HEADER_BYTES: Final = 8
"""What a header counts for beside its name and its value."""
PREFIX: Final = "forebay-jobs/replay"
JOB_CHARS_MAX: Final = 100
"""Longest id of a replay."""


class _Range(msgspec.Struct, frozen=True):
    partition: int
    start: int
    end: int


class _Plan(msgspec.Struct, frozen=True):
    source: str
    target: str
    from_ms: int
    to_ms: int
    chunk_records: int
    target_partitions: int
    ranges: list[_Range]
    chunk_bytes: int = sys.maxsize
    """Not in the plans of the first version."""
    counts_headers: bool = False
    """Whether they are part of `chunk_bytes`; not in the plans of the first versions."""


class ReplayTrimmed(ForebayError):
    """The source no longer has all records of a replay that was planned, and begun."""

    final = True
    """A second attempt of the task would meet it again."""

    def __init__(self, subject: str, job: str, *, start: int, end: int, earliest: int) -> None:
        super().__init__(
            f"{subject}: job {job!r} is to replay offsets {start:,} to {end:,}, and the source now begins at "
            f"{earliest:,}",
            hint="it cannot be ended any more, and what it appended stays: replay what is left into another "
            "topic under a new job id, and keep records longer than replays take",
        )
        self.subject = subject
        self.earliest = earliest


@dataclass(frozen=True, slots=True)
class ReplayedPartition:
    """What became of one partition."""

    topic: str
    partition: int
    start_offset: int
    end_offset: int
    """One past the last record of the range."""
    appended: int = 0
    """Records that this run appended."""
    found: int = 0
    """Records that an earlier run, or attempt, had appended."""


def replay(
    place: Place,
    source: str,
    target: str,
    *,
    job: str,
    from_ms: int,
    to_ms: int,
    spark: SparkSession | None = None,
    told: Callable[[], None] | None = None,
) -> list[ReplayedPartition]:
    """Append what was appended to `source` in [from_ms, to_ms) to `target`. Run it again under the same `job`
    as often as needed: every record is appended once."""
    if source == target:
        raise UsageError(f"{source!r} into itself", hint="replay into another topic")
    if not job or len(job) > JOB_CHARS_MAX or not job.replace("-", "").replace("_", "").isalnum():
        raise UsageError(f"{job[:200]!r} is no job id", hint="letters, digits, - and _, up to 100")
    if from_ms >= to_ms:
        raise UsageError(f"{from_ms} to {to_ms} ends before it begins", hint="the end is not included")
    mine, parts = place.opened()
    reader = mine.reader(place.store, place.coordinator)
    plan = mine.run(_planned(place.catalog(), reader, parts.store, job, (source, target, from_ms, to_ms)))
    work = partial(replay_partition, place, job, plan)
    found = spread(work, [each for each in plan.ranges if each.start < each.end], spark=spark, told=told)
    return sorted(found, key=lambda each: each.partition)


async def _planned(
    catalog: Catalog, reader: LogReader, store: ObjectStore, job: str, wanted: tuple[str, str, int, int]
) -> _Plan:
    """The job's plan, made now where there is none."""
    key = f"{PREFIX}/{job}/plan.json"
    source, target, from_ms, to_ms = wanted
    try:
        plan = _decode((await store.get(key)).data, key)
    except NotFound:
        ranges = []
        for number in range((await catalog.describe(source)).partitions):
            start = await reader.offset_for_time(source, number, from_ms)
            ranges.append(_Range(number, start, await reader.offset_for_time(source, number, to_ms)))
        partitions = (await catalog.describe(target)).partitions
        plan = _Plan(source, target, from_ms, to_ms, CHUNK_RECORDS, partitions, ranges, CHUNK_BYTES, True)
        try:
            await store.put(key, msgspec.json.encode(plan), ABSENT)
        except PreconditionFailed:
            plan = _decode((await store.get(key)).data, key)
    if (plan.source, plan.target, plan.from_ms, plan.to_ms) != wanted:
        raise UsageError(
            f"job {job!r} is {plan.source} to {plan.target}, {plan.from_ms} to {plan.to_ms}",
            hint="choose another job id for another replay",
        )
    return plan


def _decode(data: bytes, key: str) -> _Plan:
    try:
        return msgspec.json.decode(data, type=_Plan)
    except msgspec.DecodeError as error:
        raise FormatError(f"{key} is no plan: {error}", hint="choose another job id") from error


def replay_partition(place: Place, job: str, plan: _Plan, wanted: _Range) -> ReplayedPartition:
    """What a task does."""
    mine, parts = place.opened()
    reader = mine.reader(place.store, place.coordinator)
    batches = reader.scan(plan.source, wanted.partition, wanted.start, wanted.end)
    writer = mine.writer(place.store, place.coordinator)
    chunks = _chunks(batches, plan.chunk_records, plan.chunk_bytes, plan.counts_headers)
    try:
        return mine.run(_append_all(parts.store, writer, chunks, job, plan, wanted))
    except OffsetOutOfRange as error:
        subject = f"{plan.source}:{wanted.partition}"
        raise ReplayTrimmed(
            subject, job, start=wanted.start, end=wanted.end, earliest=error.earliest
        ) from error


async def _append_all(
    store: ObjectStore,
    writer: LogWriter,
    chunks: AsyncIterator[pa.Table],
    job: str,
    plan: _Plan,
    wanted: _Range,
) -> ReplayedPartition:
    done = f"{PREFIX}/{job}/done-{wanted.partition}"
    count = wanted.end - wanted.start
    told = (plan.source, wanted.partition, wanted.start, wanted.end)
    try:
        await store.head(done)
        return ReplayedPartition(*told, appended=0, found=count)
    except NotFound:
        pass
    producer = "replay-" + hashlib.sha256(f"{job}/{wanted.partition}".encode()).hexdigest()[:40]
    number = appended = expected = 0
    async for chunk in chunks:
        if number >= expected:
            group = AppendGroup(
                plan.target, wanted.partition % plan.target_partitions, _batch(chunk), producer, number
            )
            [result] = await writer.append_shared([group])
            if isinstance(result.error, OutOfSequence) and result.error.expected > number:
                expected = result.error.expected  # All below it are there.
            else:
                result.unwrap()
                appended += 0 if result.duplicate else chunk.num_rows
        number += 1
    await writer.close()
    await store.put(done, b"{}")
    return ReplayedPartition(*told, appended=appended, found=count - appended)


async def _chunks(
    batches: AsyncIterator[pa.RecordBatch], records: int, size: int, counts_headers: bool
) -> AsyncIterator[pa.Table]:
    """The same records as tables, however they lie in the log: each ends with the record that makes so many,
    or reaches so many bytes."""
    waiting: list[pa.RecordBatch] = []
    rows = held = 0
    async for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        held += int(_sizes(batch, counts_headers).sum())
        while rows >= records or held >= size:
            table = pa.Table.from_batches(waiting)
            ends = np.cumsum(_sizes(table, counts_headers))
            count = min(records, int(np.searchsorted(ends, size)) + 1)
            yield table.slice(0, count)
            waiting = table.slice(count).to_batches()
            rows -= count
            held -= int(ends[count - 1])
    if rows:
        yield pa.Table.from_batches(waiting)


def _sizes(records: pa.RecordBatch | pa.Table, counts_headers: bool) -> npt.NDArray[np.int64]:
    """Bytes of the key and the value of each record, and of its headers where they count."""
    found = _lengths(records.column("key")) + _lengths(records.column("value"))
    return found + _header_sizes(records.column("headers")) if counts_headers else found


def _lengths(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int64]:
    return np.asarray(pc.binary_length(column).fill_null(0).cast(pa.int64()))


def _header_sizes(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int64]:
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    last = np.cumsum(np.asarray(lists.value_lengths().fill_null(0)))
    entries = lists.flatten()
    each = _lengths(entries.field("key")) + _lengths(entries.field("value")) + HEADER_BYTES
    ends = np.concatenate([[0], np.cumsum(each)])[last]
    return np.asarray(np.diff(ends, prepend=0), np.int64)


def _batch(chunk: pa.Table) -> BytesBatch:
    columns = {name: chunk.column(name).combine_chunks() for name in ("value", "key", "headers", "timestamp")}
    keys, headers = columns["key"], columns["headers"]
    return BytesBatch.of(
        columns["value"],
        keys=None if keys.null_count == len(keys) else keys,
        timestamps_ms=columns["timestamp"].cast(pa.int64()).to_numpy(),
        headers=None if headers.null_count == len(headers) else headers,
    )
