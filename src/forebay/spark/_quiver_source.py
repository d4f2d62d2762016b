"""Reading a Quiver store: what is finished, as a snapshot or as a stream that only looks.

Nothing is locked, registered or acknowledged. A store deletes what all its subscribers have had, and a look
pins nothing: from a bucket to which segments are forwarded a stream gets every segment once; from a live
directory it gets those that are there when it looks.

A batch of a stream follows from its two positions (see `_quiver_segments`). Segments of other signals than
the one asked for are passed over and count as read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

from forebay.errors import ForebayError, FormatError, UsageError
from forebay.spark._bundles import bundles
from forebay.spark._clients import Client, Deployment, client
from forebay.spark._columns import arrow_schema, check_schema
from forebay.spark._errors import DataLossFound, with_hints
from forebay.spark._options import QUIVER_READ, Options, check_times
from forebay.spark._quiver_columns import asked_for, merged, rows_of, schema_in
from forebay.spark._quiver_segments import (
    Numbers,
    Segment,
    as_offset,
    find,
    from_offset,
    head,
    view,
)

__all__ = ["QuiverBatchReader", "QuiverOptions", "QuiverStreamReader", "quiver_schema"]

NEVER_NULL: Final = frozenset({"_source", "_segment", "_signal"})
"""Columns that every row has."""
SCHEMAS_LOOKED_AT_MAX: Final = 200
"""Forwarded segments whose schema is looked at: the newest of all sources and signals."""

log = logging.getLogger("forebay.spark")


@dataclass(frozen=True, slots=True)
class QuiverOptions:
    """Which store, and what of it."""

    deployment: Deployment
    prefix: str | None
    """Of forwarded segments; None: a directory of a store, else `quiver`."""
    signal: str | None
    since_ms: int | None
    """First ingestion time."""
    until_ms: int | None
    """One past the last ingestion time."""
    from_latest: bool
    fail_on_data_loss: bool
    segments_max: int | None
    bytes_max: int | None
    tasks_min: int | None

    @classmethod
    def parse(cls, options: Options, *, streaming: bool) -> QuiverOptions:
        """Check everything that can be checked without looking at the store."""
        options.check(QUIVER_READ)
        start = options.text("startingOffsets", "latest" if streaming else "earliest").lower()
        if start not in ("earliest", "latest") or (start == "latest" and not streaming):
            hint = "earliest or latest" if streaming else "startingTimestamp chooses rows of a batch by time"
            raise UsageError(f"startingOffsets is {start!r}", hint=hint)
        since_ms, until_ms = options.moment("startingTimestamp"), options.moment("endingTimestamp")
        check_times(since_ms, until_ms)
        return cls(
            options.deployment,
            options.given("prefix"),
            options.given("signal"),
            since_ms,
            until_ms,
            start == "latest",
            options.flag("failOnDataLoss", True),
            options.count("maxOffsetsPerTrigger"),
            options.size("maxBytesPerTrigger"),
            options.count("minPartitions"),
        )

    @property
    def client(self) -> Client:
        """Of this process."""
        return client(self.deployment)

    def find(self) -> list[Segment]:
        """Every segment there is."""
        return find(self.client, self.deployment.path, self.prefix)

    def wants(self, segment: Segment) -> bool:
        """Whether its rows may be asked for, as far as can be told without a look at it."""
        return self.signal is None or segment.signal == self.signal


def quiver_schema(options: QuiverOptions) -> StructType | None:
    """All columns of the store as it is; None where it holds nothing yet."""
    schemas = _schemas(options, options.find())
    return merged(schemas) if schemas else None


def check_quiver_schema(options: QuiverOptions, chosen: StructType) -> StructType:
    """The user's schema, if the store has such columns, or nothing yet."""
    schemas = _schemas(options, options.find())
    if not schemas:
        return chosen
    try:
        offered = merged(schemas)
    except ForebayError:
        offered = asked_for(schemas, chosen)
    return check_schema(chosen, offered, NEVER_NULL)


def _schemas(options: QuiverOptions, segments: Sequence[Segment]) -> list[pa.Schema]:
    """Oldest first, so that columns come in the order in which they were added."""
    kinds: dict[object, Segment] = {}
    for segment in sorted(segments, key=lambda each: each.number, reverse=True):
        if options.wants(segment):
            kinds.setdefault(segment.schema_hash or (segment.source, segment.number), segment)
    chosen = [*kinds.values()]
    if all(each.schema_hash is None for each in chosen):
        chosen = chosen[:SCHEMAS_LOOKED_AT_MAX]
    schemas = []
    for segment, data in zip(chosen, head(options.client, chosen), strict=True):
        if data is None:
            continue
        try:
            schemas.append(schema_in(data) or view(options.client, segment).schema)
        except DataLossFound:
            continue  # Gone since.
        except FormatError:
            if options.fail_on_data_loss:
                raise
    return schemas[::-1]


@dataclass(frozen=True)
class QuiverTask(InputPartition):
    """Segments that one task reads."""

    segments: tuple[Segment, ...]


class _Reading:
    """What both readers do."""

    def __init__(self, options: QuiverOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    def _tasks(self, segments: Sequence[Segment]) -> list[InputPartition]:
        """Segments in order, bundled by their sizes."""
        wanted = [each for each in segments if self.options.wants(each)]
        sizes = [each.size_bytes for each in wanted]
        return [QuiverTask(bundle) for bundle in bundles(wanted, sizes, self.options.tasks_min)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        if not isinstance(partition, QuiverTask):  # An empty plan still reaches a batch reader, as one task.
            return
        options, schema = self.options, arrow_schema(self.schema)
        with with_hints():
            for segment in partition.segments:
                try:
                    found = view(options.client, segment)
                    if found.bad_parts:
                        self._lost(_damaged(segment, found.bad_parts))
                except DataLossFound as loss:
                    self._lost(loss)
                    continue
                except FormatError as error:
                    if options.fail_on_data_loss:
                        raise
                    log.warning("data loss: %s, %s", segment.where, error.message)
                    continue
                yield from rows_of(found, segment, schema, options.since_ms, options.until_ms)

    def _lost(self, loss: DataLossFound) -> None:
        if self.options.fail_on_data_loss:
            raise loss
        log.warning("data loss: %s", loss.message)


def _damaged(segment: Segment, parts: list[int]) -> DataLossFound:
    reason = f"parts {parts} are damaged"
    return DataLossFound(
        f"segment {segment.number} of {segment.source!r}",
        start=segment.number,
        earliest=None,
        reason=reason,
    )


class QuiverBatchReader(_Reading, DataSourceReader):
    """Reads the segments that are there at the moment of planning."""

    def partitions(self) -> list[InputPartition]:
        """The tasks."""
        with with_hints():
            return self._tasks(self.options.find())


class QuiverStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is finished or forwarded, batch after batch."""

    def __init__(self, options: QuiverOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: list[Segment] | None = None
        self._last: list[Segment] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a new query begins."""
        with with_hints():
            return as_offset(_including({}, self.options.find() if self.options.from_latest else []))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """What the options say. A limit of offsets counts segments."""
        if self.options.segments_max is not None:
            return ReadMaxRows(self.options.segments_max)
        if self.options.bytes_max is not None:
            return ReadMaxBytes(self.options.bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Freeze the end: what comes later is for the next run."""
        with with_hints():
            self._target = self.options.find()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes."""
        with with_hints():
            begin = from_offset(start)
            self._last = self.options.find() if self._target is None else self._target
        new = [each for each in self._last if each.number not in begin.get(each.source, Numbers())]
        return as_offset(_including(begin, self._within(new, limit)))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Everything there is, for the lag that Spark shows: as `latestOffset` has just seen it."""
        with with_hints():
            return as_offset(_including({}, self.options.find() if self._last is None else self._last))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of one batch."""
        with with_hints():
            before, after = from_offset(start), from_offset(end)
            there = {(each.source, each.number): each for each in self.options.find()}
            chosen = []
            for source in sorted(after):
                for number in after[source].without(before.get(source, Numbers())):
                    segment = there.get((source, number))
                    if segment is not None:
                        chosen.append(segment)
                        continue
                    subject = f"segment {number} of {source!r}"
                    self._lost(DataLossFound(subject, start=number, earliest=None, reason="its file is gone"))
            return self._tasks(chosen)

    def _within(self, new: list[Segment], limit: ReadLimit) -> list[Segment]:
        """As many as the limits allow, lowest numbers first over all sources, and at least one."""
        if isinstance(limit, ReadAllAvailable):
            return new
        count = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.bytes_max
        taken: list[Segment] = []
        wanted = bytes_taken = 0
        for segment in sorted(new, key=lambda each: (each.number, each.source)):
            if self.options.wants(segment):
                bytes_taken += segment.size_bytes
                over = (count is not None and wanted >= count) or (size is not None and bytes_taken > size)
                if wanted and over:
                    break
                wanted += 1
            taken.append(segment)
        return taken


def _including(positions: dict[str, Numbers], segments: Sequence[Segment]) -> dict[str, Numbers]:
    numbers: dict[str, list[int]] = {}
    for each in segments:
        numbers.setdefault(each.source, []).append(each.number)
    found = dict(positions)
    for source, added in numbers.items():
        found[source] = found.get(source, Numbers()).including(added)
    return found
