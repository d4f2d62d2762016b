"""Which records a query reads, and which task reads which.

A plan is made of offsets, never of objects: compaction may rewrite what lies under them between two attempts,
and both must give the same rows. Sizes come from the index, so that planning touches no data.

A Python task costs about 35 ms before it reads its first byte, so small ranges are bundled until there is
enough to do; ranges of many objects are cut between two objects, and inside one only where the user asks for
more tasks than there are objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import InputPartition

from forebay.errors import UsageError
from forebay.log import LogReader, OffsetOutOfRange, PartitionOffsets, Positions, Span, UnknownTopic
from forebay.spark._errors import DataLossFound
from forebay.spark._offsets import EARLIEST, LATEST, Offsets, TopicPartition
from forebay.spark._options import LogOptions, Start

__all__ = ["LogRange", "LogTask", "bundled", "plan", "resolve", "skip_or_fail"]

TASK_BYTES_MIN: Final = 16 * 1024 * 1024
"""Below this a task has too little to do for what it costs to start."""
TASK_BYTES_MAX: Final = 64 * 1024 * 1024
"""Above this a range is cut, where there is an object's end to cut it at."""
TASKS_AIM: Final = 16
"""Tasks a plan has before their size is raised: enough for the cores of most machines."""
TASK_ROWS: Final = 500_000
"""Records at which a task is full, however small they are."""

log = logging.getLogger("forebay.spark")


@dataclass(frozen=True, slots=True)
class LogRange:
    """Offsets of one partition, the end not included."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class LogTask(InputPartition):
    """What one task reads."""

    ranges: tuple[LogRange, ...]


def skip_or_fail(options: LogOptions, error: DataLossFound) -> int:
    """Where to go on; raises where the query must not lose anything."""
    if options.fail_on_data_loss or error.earliest is None:
        raise error
    log.warning("data loss: %s; going on from offset %d", error.message, error.earliest)
    return error.earliest


async def resolve(
    reader: LogReader,
    options: LogOptions,
    offsets: Sequence[PartitionOffsets],
    boundary: Start,
    *,
    start: bool,
) -> Offsets:
    """The offsets that a boundary means for these partitions, now."""
    if boundary.offsets == "earliest":
        return {(each.topic, each.partition): each.earliest for each in offsets}
    if boundary.offsets == "latest":
        return {(each.topic, each.partition): each.next for each in offsets}
    if isinstance(boundary.offsets, dict):
        _check_all_named(boundary.offsets, offsets)
        return {key: _given(boundary.offsets[key], each) for each in offsets for key in [_key(each)]}
    times = boundary.times_ms
    if times is not None:
        _check_all_named(times, offsets)
    found = await asyncio.gather(
        *[
            reader.offset_for_time(
                each.topic, each.partition, times[_key(each)] if times else boundary.time_ms or 0
            )
            for each in offsets
        ]
    )
    for each, offset in zip(offsets, found, strict=True):
        if start and options.strict_times and offset >= each.next:
            raise UsageError(
                f"{each.topic}:{each.partition} has no record at or after the starting time",
                hint="set startingOffsetsByTimestampStrategy=latest to begin with what comes next",
            )
    return {_key(each): offset for each, offset in zip(offsets, found, strict=True)}


def _key(each: PartitionOffsets) -> TopicPartition:
    return each.topic, each.partition


def _given(position: int, each: PartitionOffsets) -> int:
    return {EARLIEST: each.earliest, LATEST: each.next}.get(position, position)


def _check_all_named(named: Mapping[TopicPartition, int], offsets: Sequence[PartitionOffsets]) -> None:
    present = {_key(each) for each in offsets}
    missing, strange = present - named.keys(), named.keys() - present
    if missing or strange:
        what = "are missing" if missing else "do not exist"
        names = ", ".join(f"{topic}:{number}" for topic, number in sorted(missing or strange)[:10])
        raise UsageError(
            f"the positions given: {names} {what}", hint="name every partition that is read, and no other"
        )


async def plan(positions: Positions, options: LogOptions, start: Offsets, end: Offsets) -> list[LogTask]:
    """Tasks that together read everything from `start` to before `end`, each record once."""
    wanted = [
        LogRange(topic, partition, start[topic, partition], end[topic, partition])
        for topic, partition in sorted(end)
        if (topic, partition) in start and start[topic, partition] < end[topic, partition]
    ]
    spans = await asyncio.gather(*[_spans(positions, options, each) for each in wanted])
    return list(bundled([span for part in spans for span in part], options.partitions_min))


async def _spans(positions: Positions, options: LogOptions, wanted: LogRange) -> list[Span]:
    start = wanted.start
    subject = f"{wanted.topic}:{wanted.partition}"
    try:
        spans = await positions.spans(wanted.topic, wanted.partition, start, wanted.end)
    except OffsetOutOfRange as error:
        beyond = f"the log ends at {error.next}" if start > error.next else ""
        loss = DataLossFound(subject, start=start, earliest=error.earliest, reason=beyond)
        start = min(skip_or_fail(options, loss), wanted.end)
        if start >= wanted.end or beyond:
            return []
        spans = await positions.spans(wanted.topic, wanted.partition, start, wanted.end)
    except UnknownTopic as error:
        if options.fail_on_data_loss:
            raise DataLossFound(subject, start=start, earliest=None) from error
        log.warning("data loss: %s is gone, from offset %d on", subject, start)
        return []
    if not spans or spans[-1].end < wanted.end:
        last = spans[-1].end if spans else start
        loss = DataLossFound(subject, start=last, earliest=last, reason=f"the log ends at {last}")
        skip_or_fail(options, loss)
    return spans


def bundled(spans: Sequence[Span], tasks_min: int | None = None) -> Iterator[LogTask]:
    """Spans in order, as tasks of about the same size."""
    total = sum(span.size_bytes for span in spans)
    rows_max = TASK_ROWS
    if tasks_min is not None:
        rows = sum(span.records for span in spans)
        target, rows_max = max(1, total // tasks_min), max(1, min(TASK_ROWS, rows // tasks_min))
        spans = [part for span in spans for part in _cut(span, target)]
    else:
        target = min(max(total // TASKS_AIM, TASK_BYTES_MIN), TASK_BYTES_MAX)
    ranges: list[LogRange] = []
    size = rows = 0
    for span in spans:
        last = ranges[-1] if ranges else None
        if last and (last.topic, last.partition, last.end) == (span.topic, span.partition, span.start):
            ranges[-1] = LogRange(last.topic, last.partition, last.start, span.end)
        else:
            ranges.append(LogRange(span.topic, span.partition, span.start, span.end))
        size, rows = size + span.size_bytes, rows + span.records
        if size >= target or rows >= rows_max:
            yield LogTask(tuple(ranges))
            ranges, size, rows = [], 0, 0
    if ranges:
        yield LogTask(tuple(ranges))


def _cut(span: Span, target: int) -> Iterator[Span]:
    count = min(-(-span.size_bytes // target), span.records)
    if count <= 1:
        yield span
        return
    step = -(-span.records // count)
    for start in range(span.start, span.end, step):
        end = min(start + step, span.end)
        yield Span(span.topic, span.partition, start, end, span.size_bytes * (end - start) // span.records)
