"""Reading topics: the batch reader and the stream reader.

Both plan on the driver and read in workers. What crosses between them is offsets and names.

The stream reader holds no state that matters. `latestOffset` is one round trip to the coordinator for all
partitions; `partitions` and `read` follow from the two dictionaries that Spark keeps in its checkpoint, so
that a batch that is run again has the same rows. There is no `commit` and no `stop`: Spark calls the first
too late to rely on and the second never.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from forebay.errors import UsageError
from forebay.log import (
    FetchedBatch,
    LogReader,
    OffsetOutOfRange,
    PositionsSeen,
    Span,
    Topic,
    UnknownPartition,
    UnknownTopic,
)
from forebay.spark._clients import Client, client
from forebay.spark._columns import LogColumns, fused
from forebay.spark._errors import DataLossFound, with_hints
from forebay.spark._log_plan import LogRange, LogTask, plan, resolve, skip_or_fail
from forebay.spark._offsets import Offsets, as_offset, from_offset, share
from forebay.spark._options import LogOptions
from forebay.spark._worker import begin, settle

__all__ = ["LogBatchReader", "LogStreamReader"]

log = logging.getLogger("forebay.spark")


class _Reading:
    """What both readers do."""

    def __init__(self, options: LogOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    @property
    def _client(self) -> Client:
        return client(self.options.deployment, reading=True)

    def _look(self, known: tuple[Topic, ...] = ()) -> PositionsSeen:
        """Where the wanted partitions stand; raises `UnknownTopic` for one that was named and is not
        there."""
        options = self.options
        seen = self._client.run(
            self._client.positions.look(lambda topic: options.wants_topic(topic.topic), known)
        )
        wanted = tuple(each for each in seen.offsets if options.wants(each.topic, each.partition))
        return PositionsSeen(seen.topics, wanted)

    def _check_named(self, seen: PositionsSeen, started: Mapping[str, Any]) -> None:
        """Raise for what was named, is not there, and was not read before either."""
        sizes = {each.topic: each.partitions for each in seen.topics}
        named = self.options.topics or {topic for topic, _ in self.options.assigned or ()}
        for topic in sorted(named):
            if topic not in started and topic not in sizes:
                raise UnknownTopic(topic)
        for topic, partition in self.options.assigned or ():
            if partition >= sizes.get(topic, partition + 1) and str(partition) not in started.get(topic, ()):
                raise UnknownPartition(topic, partition, hint=f"it has 0 to {sizes[topic] - 1}")

    def _plan(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        found = plan(self._client.positions, self.options, start, end)
        return [*self._client.run(found)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, as Arrow."""
        if not isinstance(partition, LogTask):  # An empty plan still reaches a batch reader, as one task.
            return
        begin()
        with with_hints():
            columns, reader = LogColumns(self.schema), self._client.reader
            for wanted in partition.ranges:
                for run in self._client.iterate(fused(self._scan(reader, wanted))):
                    yield columns.batch(run)
        settle()

    async def _scan(self, reader: LogReader, wanted: LogRange) -> AsyncIterator[FetchedBatch]:
        position = wanted.start
        while position < wanted.end:
            try:
                async for batch in reader.scan_batches(wanted.topic, wanted.partition, position, wanted.end):
                    yield batch
                    position = batch.end_offset + 1
            except OffsetOutOfRange as error:
                loss = DataLossFound(
                    f"{wanted.topic}:{wanted.partition}", start=position, earliest=error.earliest
                )
                if error.earliest <= position:
                    raise
                position = skip_or_fail(self.options, loss)
            except UnknownTopic as error:  # It was deleted since this task was planned.
                subject = f"{wanted.topic}:{wanted.partition}"
                if self.options.fail_on_data_loss:
                    raise DataLossFound(subject, start=position, earliest=None) from error
                log.warning("data loss: %s is gone, from offset %d on", subject, position)
                return
            else:
                break
        if position < wanted.end and self.options.fail_on_data_loss:
            raise DataLossFound(
                f"{wanted.topic}:{wanted.partition}",
                start=position,
                earliest=position,
                reason=f"the log ends before {wanted.end}",
            )


class LogBatchReader(_Reading, DataSourceReader):
    """Reads what the options say, as the log is at the moment of planning."""

    def partitions(self) -> list[InputPartition]:
        """The tasks."""
        with with_hints():
            seen = self._look()
            self._check_named(seen, {})
            reader, options = self._client.reader, self.options
            start = self._client.run(resolve(reader, options, seen.offsets, options.start, start=True))
            end = self._client.run(resolve(reader, options, seen.offsets, options.end, start=False))
            self._check_order(seen, start, end)
            return self._plan(start, end)

    def _check_order(self, seen: PositionsSeen, start: Offsets, end: Offsets) -> None:
        """Raise for offsets that were given and are not there: a mistake, or a log that was lost."""
        given = isinstance(self.options.start.offsets, dict)
        ending = isinstance(self.options.end.offsets, dict)
        for each in seen.offsets:
            key, subject = (each.topic, each.partition), f"{each.topic}:{each.partition}"
            if given and start[key] > each.next and self.options.fail_on_data_loss:
                raise DataLossFound(
                    subject, start=start[key], earliest=each.next, reason=f"the log ends at {each.next}"
                )
            if given and ending and start[key] > end[key]:
                raise UsageError(
                    f"{subject} is to be read from {start[key]} to {end[key]}",
                    hint="endingOffsets are not below startingOffsets",
                )
            if ending and end[key] > each.next and self.options.fail_on_data_loss:
                raise UsageError(
                    f"{subject} is to be read up to {end[key]}, and ends at {each.next} so far",
                    hint="-1 is the end as it is; failOnDataLoss=false reads what is there",
                )


class LogStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is appended, batch after batch."""

    def __init__(self, options: LogOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: PositionsSeen | None = None
        self._last: PositionsSeen | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a new query begins."""
        with with_hints():
            seen = self._seen()
            self._check_named(seen, {})
            reader, options = self._client.reader, self.options
            found = resolve(reader, options, seen.offsets, options.start, start=True)
            return as_offset(self._client.run(found))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """What the options say; where both limits are given, both hold."""
        if self.options.rows_max is not None:
            return ReadMaxRows(self.options.rows_max)
        if self.options.bytes_max is not None:
            return ReadMaxBytes(self.options.bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Freeze the end: what comes later is for the next run."""
        with with_hints():
            self._target = self._look()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes."""
        with with_hints():
            begin = from_offset(start)
            seen = self._target or self._seen()
            self._check_named(seen, start)
            # What was trimmed uses up no limit: a query that may skip it would do so in thousands of batches.
            for each in seen.offsets:
                key = each.topic, each.partition
                if key in begin:
                    begin[key] = max(begin[key], each.earliest)
            latest = self._reachable(begin, seen)
            if isinstance(limit, ReadMaxRows):
                latest = share(begin, latest, limit.max_rows)
            bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.bytes_max
            if bytes_max is not None and not isinstance(limit, ReadAllAvailable):
                latest = self._client.run(self._within(begin, latest, bytes_max))
        return as_offset(latest)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the log, for the lag that Spark shows: as `latestOffset` has just seen it."""
        with with_hints():
            seen = self._last or self._look()
        return as_offset({(each.topic, each.partition): each.next for each in seen.offsets})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of one batch."""
        with with_hints():
            return self._plan(from_offset(start), from_offset(end))

    def _seen(self) -> PositionsSeen:
        self._last = self._look(self._last.topics if self._last else ())
        return self._last

    def _reachable(self, start: Offsets, seen: PositionsSeen) -> Offsets:
        """The end of every partition: what is new begins at its earliest, what is gone stays where it was."""
        latest = dict(start)
        found = {(each.topic, each.partition): each for each in seen.offsets}
        for key, each in found.items():
            if key not in start:
                latest[key] = each.earliest
            elif each.next >= start[key]:
                latest[key] = each.next
            else:
                loss = DataLossFound(
                    f"{each.topic}:{each.partition}",
                    start=start[key],
                    earliest=each.next,
                    reason=f"the log ends at {each.next}",
                )
                if self.options.fail_on_data_loss:
                    raise loss
                log.warning("data loss: %s", loss.message)
        for topic, partition in start.keys() - found.keys():
            wanted = self.options.wants_topic(topic) and self.options.wants(topic, partition)
            if wanted and self.options.fail_on_data_loss:
                raise DataLossFound(f"{topic}:{partition}", start=start[topic, partition], earliest=None)
        return latest

    async def _within(self, start: Offsets, latest: Offsets, bytes_max: int) -> Offsets:
        """As far as so many bytes go, by turns; at least one entry, so that a query never stands still."""
        open_keys = [key for key in sorted(latest) if start.get(key, latest[key]) < latest[key]]
        listed = await asyncio.gather(
            *[self._listed(*key, start[key], latest[key], bytes_max) for key in open_keys]
        )
        end = latest | {key: start[key] for key in open_keys}
        turns = [(0, number) for number in range(len(open_keys))]
        waiting = [iter(spans) for spans in listed]
        left, moved = bytes_max, False
        while turns:
            taken, number = heapq.heappop(turns)
            span = next(waiting[number], None)
            if span is None:
                continue
            if span.size_bytes > left and moved:
                continue
            end[open_keys[number]], moved = span.end, True
            left -= span.size_bytes
            heapq.heappush(turns, (taken + span.size_bytes, number))
        return end

    async def _listed(self, topic: str, partition: int, start: int, end: int, bytes_max: int) -> list[Span]:
        positions = self._client.positions
        try:
            return await positions.spans(topic, partition, start, end, bytes_max=bytes_max)
        except OffsetOutOfRange as error:
            loss = DataLossFound(f"{topic}:{partition}", start=start, earliest=error.earliest)
            earliest = skip_or_fail(self.options, loss)
            if earliest >= end:
                return [Span(topic, partition, start, end, 0)]
            return await positions.spans(topic, partition, earliest, end, bytes_max=bytes_max)
        except UnknownTopic:
            return []
