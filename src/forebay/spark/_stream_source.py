"""Reading a stream's remote tier: chunks found by offset, cut to the range.

Offsets of a stream are dense but for tracking chunks, which take offsets and hold no records; so a range may
have fewer rows than it is long. Spark's dictionary is `{"offset": next}`. The manifest knows where chunks are
and not how large each is: ranges are cut by records.

Reads the bucket only. What is still in the local tier of a broker comes with the next run of its sidecar.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from forebay.errors import UsageError
from forebay.formats.osiris_entry import decode_records
from forebay.spark._clients import Client, Deployment, client
from forebay.spark._columns import BATCH_BYTES, BATCH_ROWS_MAX, arrow_schema, exact, timestamps
from forebay.spark._errors import DataLossFound, own_position, with_hints
from forebay.spark._options import STREAM_READ, Options, check_range, is_number
from forebay.stream import OffsetOutOfRange, Overtaken, Spec, StreamReader

__all__ = ["STREAM_SCHEMA", "StreamBatchReader", "StreamOptions", "StreamStreamReader"]

STREAM_SCHEMA: Final = StructType(
    [
        StructField("value", BinaryType()),
        StructField("stream", StringType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
"""Columns of a stream: the record, where it comes from, its offset and the time of its chunk."""
TASK_ROWS: Final = 200_000
"""Records of one task."""

log = logging.getLogger("forebay.spark")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Which stream, and how much of it."""

    deployment: Deployment
    stream: str
    start: int | None
    """First offset; None: the earliest. -1: what comes next."""
    end: int | None
    """One past the last offset; None: the latest."""
    fail_on_data_loss: bool
    rows_max: int | None
    tasks_min: int | None

    @classmethod
    def parse(cls, options: Options, *, streaming: bool) -> StreamOptions:
        """Check everything that can be checked without looking at the stream."""
        options.check(STREAM_READ)
        stream = options.given("subscribe")
        if not stream:
            raise UsageError("no stream is named", hint='.option("subscribe", "orders")')
        if streaming and options.given("endingOffsets"):
            raise UsageError("a stream has no ending offsets", hint="use trigger(availableNow=True)")
        first = options.text("startingOffsets", "latest" if streaming else "earliest")
        if not streaming and first.lower() == "latest":
            raise UsageError(
                "startingOffsets of a batch is latest", hint="a batch from the latest on is empty"
            )
        start = _offset(first, "startingOffsets", {"earliest": None, "latest": -1})
        end = _offset(options.text("endingOffsets", "latest"), "endingOffsets", {"latest": None})
        check_range(start, end)
        return cls(
            options.deployment,
            stream,
            start,
            end,
            options.flag("failOnDataLoss", True),
            options.count("maxOffsetsPerTrigger"),
            options.count("minPartitions"),
        )


def _offset(text: str, option: str, words: dict[str, int | None]) -> int | None:
    if text.lower() in words:
        return words[text.lower()]
    if not is_number(text):
        raise UsageError(f"{option} is {text[:200]!r}", hint=f"{' or '.join(words)} or an offset")
    return int(text)


def _place(offset: Mapping[str, Any]) -> int:
    """Of a position as Spark keeps it."""
    with own_position("stream"):
        return int(offset["offset"])


@dataclass(frozen=True)
class StreamTask(InputPartition):
    """Offsets that one task reads, the end not included."""

    start: int
    end: int


class _Reading:
    """What both readers do."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    @property
    def _client(self) -> Client:
        return client(self.options.deployment, reading=True)

    def _look(self) -> tuple[int, int]:
        """The first offset there is, and the one behind the last."""
        reader = self._client.stream(self.options.stream)
        self._client.run(reader.refresh())
        return reader.first_offset, reader.next_offset

    def _tasks(self, start: int, end: int) -> list[InputPartition]:
        first, following = self._look()
        if start < min(first, end) or max(start, end) > following:
            self._lost(start, first, following)
            start, end = max(start, first), min(end, following)
        rows = max(0, end - start)
        count = max(-(-rows // TASK_ROWS), min(rows, self.options.tasks_min or 0))
        bounds = [start + rows * number // count for number in range(count)]
        return [StreamTask(low, high) for low, high in itertools.pairwise([*bounds, end])]

    def _lost(self, start: int, first: int, following: int) -> None:
        reason = f"the stream has offsets {first} to {following - 1}"
        loss = DataLossFound(self.options.stream, start=start, earliest=first, reason=reason)
        if self.options.fail_on_data_loss:
            raise loss
        log.warning("data loss: %s", loss.message)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        if not isinstance(partition, StreamTask):  # An empty plan still reaches a batch reader, as one task.
            return
        schema, opened = arrow_schema(self.schema), self._client
        with with_hints():
            reader = opened.stream(self.options.stream)
            opened.run(reader.refresh())
            columns = _Columns(self.options.stream, schema)
            for values, offset, time_ms in opened.iterate(self._scan(reader, partition)):
                if columns.add(values, offset, time_ms):
                    yield columns.take()
            if columns.rows:
                yield columns.take()

    async def _scan(self, reader: StreamReader, task: StreamTask) -> AsyncIterator[tuple[pa.Array, int, int]]:
        start = task.start
        while start < task.end:
            try:
                async for chunk in reader.chunks(await self._attached(reader, start)):
                    header = chunk.header
                    low = max(start - header.chunk_id, 0)
                    high = min(task.end - header.chunk_id, header.records)
                    if high <= 0:
                        return
                    if low < high:
                        found = decode_records(chunk.data, entries=header.entries, records=header.records)
                        values = pa.array(found[low:high], pa.binary())
                        yield values, header.chunk_id + low, header.timestamp
                    start = header.chunk_id + header.records
            except Overtaken as error:
                if self.options.fail_on_data_loss:
                    raise DataLossFound(
                        self.options.stream, start=error.offset, earliest=error.resume_offset
                    ) from error
                log.warning("data loss: %s", error.message)
                start = error.resume_offset
            else:
                if reader.next_offset < task.end:
                    self._lost(start, reader.first_offset, reader.next_offset)
                return

    async def _attached(self, reader: StreamReader, offset: int) -> int:
        """The chunk that holds an offset. Retention may have been faster than this task since it was planned,
        and a reader that begins anywhere begins with what is there: raises `Overtaken` where it is gone."""
        try:
            place = await reader.attach(Spec("abs", offset))
        except OffsetOutOfRange as error:
            place = error.first_offset if offset < error.first_offset else error.next_offset
        if place > offset:
            raise Overtaken(self.options.stream, offset=offset, resume_offset=place)
        return place


class _Columns:
    """Chunks on their way into one batch."""

    def __init__(self, stream: str, schema: pa.Schema) -> None:
        self._stream = stream
        self._schema = schema
        self._parts: list[tuple[pa.Array, int, int]] = []
        self._bytes = 0
        self.rows = 0

    def add(self, values: pa.Array, offset: int, time_ms: int) -> bool:
        """Whether there is enough for a batch."""
        self._parts.append((values, offset, time_ms))
        self.rows += len(values)
        self._bytes += values.nbytes
        return self.rows >= BATCH_ROWS_MAX or self._bytes >= BATCH_BYTES

    def take(self) -> pa.RecordBatch:
        """Everything that was added, as one batch."""
        parts, rows = self._parts, self.rows
        self._parts, self.rows, self._bytes = [], 0, 0
        offsets = [np.arange(first, first + len(values)) for values, first, _ in parts]
        times = [np.full(len(values), time_ms, np.int64) for values, _, time_ms in parts]
        made = {
            "value": lambda: pa.concat_arrays([values for values, _, _ in parts]),
            "stream": lambda: pa.repeat(pa.scalar(self._stream, pa.string()), rows),
            "offset": lambda: pa.array(np.concatenate(offsets)),
            "timestamp": lambda: timestamps(np.concatenate(times), pa.timestamp("us", tz="UTC")),
        }
        arrays = [exact(made[field.name.lower()](), field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class StreamBatchReader(_Reading, DataSourceReader):
    """Reads what is in the bucket at the moment of planning."""

    def partitions(self) -> list[InputPartition]:
        """The tasks."""
        with with_hints():
            first, following = self._look()
            start = first if self.options.start is None else self.options.start
            end = following if self.options.end is None else self.options.end
            if end > following and self.options.fail_on_data_loss:
                raise UsageError(
                    f"endingOffsets is {end}, and {self.options.stream!r} ends at {following} so far",
                    hint="endingOffsets=latest, or failOnDataLoss=false to read what is there",
                )
            return self._tasks(following if start == -1 else start, end)


class StreamStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is tiered, batch after batch."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: tuple[int, int] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a new query begins."""
        with with_hints():
            first, following = self._look()
        start = first if self.options.start is None else self.options.start
        return {"offset": int(following if start == -1 else start)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """What the options say."""
        return ReadAllAvailable() if self.options.rows_max is None else ReadMaxRows(self.options.rows_max)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Freeze the end: what comes later is for the next run."""
        with with_hints():
            self._target = self._look()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes."""
        with with_hints():
            begin = _place(start)
            first, latest = self._look() if self._target is None else self._target
            if begin > latest:
                self._lost(begin, first, latest)
        end = max(begin, latest)
        if isinstance(limit, ReadMaxRows):
            # What retention took uses up no limit.
            end = min(end, max(begin, first) + limit.max_rows)
        return {"offset": int(end)}

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the stream, for the lag that Spark shows."""
        with with_hints():
            return {"offset": int(self._look()[1])}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of one batch."""
        with with_hints():
            return self._tasks(_place(start), _place(end))
