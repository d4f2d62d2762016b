"""Which records a query reads, and which task reads which.

A plan is made of offsets, never of objects: compaction may rewrite what lies under them between two attempts,
and both must give the same rows. Sizes come from the index, so that planning touches no data.

A Python task costs Spark some 25 ms of processor time before it reads its first byte, as much as 25 MB of
records do, so small ranges are bundled until there is enough to do, and there are no more tasks than needed.
What a range costs follows its bytes and its records. Where `forebay.spark.session` has started Spark, the
number of its slots is known: each gets a large task and then a small one, or a slot that was quick with its
large one gets two, so that all end at about the same time. Spark begins with the tasks that come first.
Elsewhere there are tasks for the cores of most machines, all alike. Ranges of many objects are cut between
two objects, and inside one only where the user asks for more tasks than there are objects.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import InputPartition

from forebay.errors import UsageError
from forebay.log import LogReader, OffsetOutOfRange, PartitionOffsets, Positions, Span, UnknownTopic
from forebay.log._meta import FIRST_OFFSET
from forebay.spark._errors import DataLossFound
from forebay.spark._offsets import EARLIEST, LATEST, Offsets, TopicPartition
from forebay.spark._options import LogOptions, Start
from forebay.spark._worker import SLOTS_VARIABLE

__all__ = ["LogRange", "LogTask", "bundled", "plan", "resolve", "skip_or_fail"]

TASK_COST_MIN: Final = 32 * 1024 * 1024
"""Bytes, and `ROW_COST` for each record, below which a task is not worth its start."""
TASK_COST_MAX: Final = 1024 * 1024 * 1024
"""Above this a range is cut, where there is an object's end to cut it at: what a killed task repeats."""
TASK_COST_SPREAD: Final = 256 * 1024 * 1024
"""Above this it is cut where the slots are not known: there may be many."""
ROW_COST: Final = 256
"""Bytes that cost Spark as much as one more record does, however small."""
LARGE_TASK: Final = 3
"""How many times as large as the last tasks of a plan the others are, where the slots are known."""
TASKS_AIM: Final = 16
"""Tasks of a plan where they are not known."""

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
    # Kafka's offsets begin at 0, ours at 1. What never was is no loss: 0 means the first.
    return {EARLIEST: each.earliest, LATEST: each.next}.get(position, max(position, FIRST_OFFSET))


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
    return bundled([span for part in spans for span in part], options.partitions_min)


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


def bundled(spans: Sequence[Span], tasks_min: int | None = None) -> list[LogTask]:
    """Spans in order, as tasks: the large ones first."""
    tasks = list(_shared(spans, _shares(sum(_cost(span) for span in spans)), _cost))
    if tasks_min is None or len(tasks) >= tasks_min:
        return tasks
    alike = [1] * tasks_min
    tasks = list(_shared(_cut(spans, tasks_min, _cost), alike, _cost))
    if len(tasks) < tasks_min:
        # Sizes differ so much that some shares fall into a single record: by their number, then.
        tasks = list(_shared(_cut(spans, tasks_min, _records), alike, _records))
    return tasks


def _shares(total: int) -> list[int]:
    """How much of the whole each task gets, in proportion."""
    slots = _slots()
    if not slots:
        return [1] * max(1, min(TASKS_AIM, total // TASK_COST_MIN), -(-total // TASK_COST_SPREAD))
    if total < (LARGE_TASK + 1) * slots * TASK_COST_MIN:
        return [1] * max(1, min(slots, total // TASK_COST_MIN))
    rounds = -(-total // (slots * TASK_COST_MAX))
    return [LARGE_TASK] * (rounds * slots) + [1] * slots


def _shared(spans: Sequence[Span], shares: Sequence[int], cost: Callable[[Span], int]) -> Iterator[LogTask]:
    """At most a task for each share. It ends with the span that reaches it, so that no error adds up."""
    ranges: list[LogRange] = []
    total, whole = sum(cost(span) for span in spans), sum(shares)
    bounds = itertools.accumulate(shares)
    bound, done = next(bounds), 0
    for span in spans:
        last = ranges[-1] if ranges else None
        if last and (last.topic, last.partition, last.end) == (span.topic, span.partition, span.start):
            ranges[-1] = LogRange(last.topic, last.partition, last.start, span.end)
        else:
            ranges.append(LogRange(span.topic, span.partition, span.start, span.end))
        done += cost(span)
        if done * whole >= bound * total:
            yield LogTask(tuple(ranges))
            ranges = []
            while bound < whole and bound * total <= done * whole:
                bound = next(bounds)


def _cost(span: Span) -> int:
    return span.size_bytes + ROW_COST * span.records


def _records(span: Span) -> int:
    return span.records


def _slots() -> int:
    """Tasks that run at once; 0 where nobody knows."""
    told = os.environ.get(SLOTS_VARIABLE, "")
    return int(told) if told.isdecimal() else 0


def _cut(spans: Sequence[Span], tasks_min: int, cost: Callable[[Span], int]) -> list[Span]:
    """The same records in spans of which none is more than its share, as far as records can be cut."""
    target = max(1, sum(cost(span) for span in spans) // tasks_min)
    return [part for span in spans for part in _parts(span, min(-(-cost(span) // target), span.records))]


def _parts(span: Span, count: int) -> Iterator[Span]:
    if count <= 1:
        yield span
        return
    step = -(-span.records // count)
    for start in range(span.start, span.end, step):
        end = min(start + step, span.end)
        yield Span(span.topic, span.partition, start, end, span.size_bytes * (end - start) // span.records)
