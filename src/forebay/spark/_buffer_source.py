"""Reading a queue: as a snapshot, as a stream that only looks, or as its one consumer, exactly once.

The offset of a queue is the sequence of a batch; Spark's dictionary is `{"sequence": next}`. Entries never
change, so a task carries the locations it reads, taken from the manifest; no object is touched in planning.

With `acknowledge=true` the stream is the queue's consumer. It takes over when it first asks for new batches,
at which point every batch before is in the sink, and shuts out every consumer before it. Spark's
`commit(end)` comes only after the sink has committed the batch that ends there, and only then is it
acknowledged and may leave the queue; it comes late, so some batches wait in the queue longer than they need
to. A restart replays what is in Spark's checkpoint and not in the sink, all of which is still queued.

A consumer that is shut out gets `Fenced` at its next question and the query ends: it can neither acknowledge
nor go on. What makes rows exactly once is the sink, by the ids of query and batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StructField,
    StructType,
    TimestampType,
)

from forebay.buffer import BatchMissing, BufferConfig, ConsumedBatch, Consumer
from forebay.errors import ForebayError, FormatError, NotFound, UsageError
from forebay.formats.buffer_manifest import Entry, Manifest
from forebay.spark._bundles import bundles
from forebay.spark._clients import Client, Deployment, client
from forebay.spark._columns import arrow_schema, exact, timestamps
from forebay.spark._errors import DataLossFound, own_position, with_hints
from forebay.spark._options import BUFFER_READ, Options, check_range, is_number
from forebay.spark._queue_config import queue_config

__all__ = ["BUFFER_SCHEMA", "BufferBatchReader", "BufferOptions", "BufferStreamReader"]

BUFFER_SCHEMA: Final = StructType(
    [
        StructField("value", BinaryType()),
        StructField("sequence", LongType()),
        StructField("index", IntegerType()),
        StructField("ingestion_time", TimestampType()),
        StructField("metadata", BinaryType()),
    ]
)
"""Columns of a queue: the record, its batch, its place in the batch, when it came and what came with it."""
ENTRY_BYTES_ASSUMED: Final = 1024 * 1024
"""What a batch counts for where its entry does not tell its size."""

log = logging.getLogger("forebay.spark")


@dataclass(frozen=True, slots=True)
class BufferOptions:
    """Which queue, and how it is read."""

    deployment: Deployment
    manifest: str
    prefix: str
    acknowledge: bool
    start: int | None
    """First sequence; None: the earliest. -1: what comes next."""
    end: int | None
    """One past the last sequence; None: the latest."""
    fail_on_data_loss: bool
    batches_max: int | None
    bytes_max: int | None
    tasks_min: int | None

    @classmethod
    def parse(cls, options: Options, *, streaming: bool) -> BufferOptions:
        """Check everything that can be checked without looking at the queue."""
        options.check(BUFFER_READ)
        acknowledge = options.flag("acknowledge", False)
        if acknowledge and not streaming:
            raise UsageError("a batch read acknowledges nothing", hint="consume with readStream")
        if streaming and options.given("endingOffsets"):
            raise UsageError("a stream has no ending offsets", hint="use trigger(availableNow=True)")
        default = "latest" if streaming and not acknowledge else "earliest"
        if not streaming and options.text("startingOffsets", default).lower() == "latest":
            raise UsageError(
                "startingOffsets of a batch is latest", hint="a batch from the latest on is empty"
            )
        if options.text("endingOffsets", "latest").lower() == "earliest":
            raise UsageError("endingOffsets of a batch is earliest", hint="use latest or a sequence")
        start = _sequence(
            options.text("startingOffsets", default), "startingOffsets", {"earliest": None, "latest": -1}
        )
        end = _sequence(options.text("endingOffsets", "latest"), "endingOffsets", {"latest": None})
        check_range(start, end)
        queue = queue_config(options)
        return cls(
            options.deployment,
            queue.manifest_path,
            queue.data_path_prefix,
            acknowledge,
            start,
            end,
            options.flag("failOnDataLoss", True),
            options.count("maxOffsetsPerTrigger"),
            options.size("maxBytesPerTrigger"),
            options.count("minPartitions"),
        )

    @property
    def config(self) -> BufferConfig:
        """As the engine takes it. Nothing is collected here: the event loop runs too rarely for that."""
        return BufferConfig(manifest_path=self.manifest, data_path_prefix=self.prefix, gc_enabled=False)


def _sequence(text: str, option: str, words: dict[str, int | None]) -> int | None:
    if text.lower() in words:
        return words[text.lower()]
    if not is_number(text):
        raise UsageError(f"{option} is {text[:200]!r}", hint="earliest, latest or a sequence")
    return int(text)


def _place(offset: Mapping[str, Any]) -> int:
    """Of a position as Spark keeps it."""
    with own_position("buffer"):
        return int(offset["sequence"])


@dataclass(frozen=True)
class BufferTask(InputPartition):
    """Batches that one task reads."""

    entries: tuple[Entry, ...]


def tasks_of(entries: Sequence[Entry], tasks_min: int | None) -> Iterator[BufferTask]:
    """Entries in order, bundled by what the manifest knows of their sizes."""
    for bundle in bundles(entries, [_size(entry) for entry in entries], tasks_min):
        yield BufferTask(bundle)


def _size(entry: Entry) -> int:
    told = entry.extension()
    return ENTRY_BYTES_ASSUMED if told is None or told.object_bytes is None else told.object_bytes


class _Reading:
    """What both readers do."""

    def __init__(self, options: BufferOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    @property
    def _client(self) -> Client:
        return client(self.options.deployment, reading=True)

    def _manifest(self) -> Manifest:
        return self._client.run(self._client.buffer(self.options.config).manifest())

    def _entries(self, start: int, end: int) -> list[Entry]:
        """The entries of a range; those that were consumed by somebody are a loss."""
        manifest = self._manifest()
        first = manifest.first_sequence
        if start < min(first, end):
            self._consumed(start, first)
        if end > manifest.next_sequence:
            raise DataLossFound(
                self.options.manifest,
                start=end,
                earliest=None,
                reason=f"the queue has only reached {manifest.next_sequence}",
            )
        found = [manifest.entry(sequence) for sequence in range(max(start, first), end)]
        return [entry for entry in found if entry is not None]

    def _consumed(self, start: int, first: int) -> None:
        reason = f"somebody consumed the batches up to {first - 1}"
        self._lost(DataLossFound(self.options.manifest, start=start, earliest=first, reason=reason))

    def _beyond(self, start: int, manifest: Manifest) -> None:
        """The queue ends before the place that is to be read on from: it is not the queue that was read."""
        reached = f"the queue has only reached {manifest.next_sequence}"
        self._lost(DataLossFound(self.options.manifest, start=start, earliest=None, reason=reached))

    def _lost(self, loss: ForebayError) -> None:
        if self.options.fail_on_data_loss:
            raise loss
        log.warning("data loss: %s", loss.message)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, a batch of the queue at a time."""
        if not isinstance(partition, BufferTask):  # An empty plan still reaches a batch reader, as one task.
            return
        schema = arrow_schema(self.schema)
        reader = self._client.buffer(self.options.config)
        with with_hints():
            for entry in partition.entries:
                try:
                    found = self._client.run(reader.read(entry))
                except (BatchMissing, FormatError) as error:
                    self._lost(error)
                    continue
                yield _rows(found, schema)


def _rows(batch: ConsumedBatch, schema: pa.Schema) -> pa.RecordBatch:
    count = len(batch)
    starts = np.array([item.start_index for item in batch.metadata] or [0])
    # The item that covers a record is the last that starts at or before it; items are few, records many.
    item = np.searchsorted(starts, np.arange(count), side="right") - 1

    def column(name: str, kind: pa.DataType) -> pa.Array:
        if name == "value":
            return exact(batch.to_arrow(), kind)
        if name == "sequence":
            return pa.array(np.full(count, batch.sequence, np.int64))
        if name == "index":
            return pa.array(np.arange(count, dtype=np.int32))
        if not batch.metadata:
            return pa.nulls(count, kind)
        indices = pa.array(item, mask=item < 0)
        if name == "metadata":
            return pa.array([each.payload for each in batch.metadata], kind).take(indices)
        times = np.array([each.ingestion_time_ms for each in batch.metadata], np.int64)
        return timestamps(times, kind).take(indices)

    arrays = [column(field.name.lower(), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class BufferBatchReader(_Reading, DataSourceReader):
    """Reads what waits in the queue, and leaves it there."""

    def partitions(self) -> list[InputPartition]:
        """The tasks."""
        with with_hints():
            manifest = self._manifest()
            self._check_there(manifest)
            start = manifest.first_sequence if self.options.start is None else self.options.start
            end = manifest.next_sequence if self.options.end is None else self.options.end
            if start > manifest.next_sequence:
                self._beyond(start, manifest)
            if end > manifest.next_sequence:
                if self.options.fail_on_data_loss:
                    raise UsageError(
                        f"endingOffsets is {end}, and the queue has only reached {manifest.next_sequence}",
                        hint="endingOffsets=latest, or failOnDataLoss=false to read what is there",
                    )
                end = manifest.next_sequence
            return [*tasks_of(self._entries(start, end), self.options.tasks_min)]

    def _check_there(self, manifest: Manifest) -> None:
        """Raise for a queue that never was: a misspelt path must not pass for an empty queue."""
        reader = self._client.buffer(self.options.config)
        if not manifest.next_sequence and not self._client.run(reader.stats()).exists:
            raise NotFound(self.options.manifest, hint="there is no queue here; check path and manifest")


class BufferStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is enqueued, batch after batch, and acknowledges what the sink has."""

    def __init__(self, options: BufferOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: int | None = None
        self._consumer: Consumer | None = None
        self._first = self._handed_out = 0

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a new query begins."""
        with with_hints():
            manifest = self._manifest()
        start = self.options.start
        if start is None:
            start = manifest.first_sequence
        return {"sequence": int(manifest.next_sequence if start == -1 else start)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """What the options say. A row limit counts batches of the queue: a sequence is an offset."""
        if self.options.batches_max is not None:
            return ReadMaxRows(self.options.batches_max)
        if self.options.bytes_max is not None:
            return ReadMaxBytes(self.options.bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Freeze the end: what comes later is for the next run."""
        with with_hints():
            self._target = self._manifest().next_sequence

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes."""
        with with_hints():
            begin = _place(start)
            manifest = self._manifest()
            latest = manifest.next_sequence
            if begin > latest:
                self._beyond(begin, manifest)
            if self.options.acknowledge:
                if self._consumer is None and begin < manifest.first_sequence:
                    self._consumed(begin, manifest.first_sequence)  # Before anybody is shut out for it.
                self._take_part(begin)
            latest = latest if self._target is None else min(latest, self._target)
            # What others consumed uses up no limit.
            origin = max(begin, min(manifest.first_sequence, latest))
            end = self._within(origin, max(begin, latest), limit)
            if self._consumer is not None and end > self._handed_out:
                self._client.run(self._consumer.next_descriptors(end - self._handed_out))
                self._handed_out = end
        return {"sequence": int(end)}

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the queue, for the lag that Spark shows."""
        with with_hints():
            return {"sequence": int(self._manifest().next_sequence)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of one batch."""
        with with_hints():
            entries = self._entries(_place(start), _place(end))
            return [*tasks_of(entries, self.options.tasks_min)]

    def commit(self, end: dict[str, Any]) -> None:
        """The sink has everything before `end`: let the queue forget it."""
        through = _place(end) - 1
        consumer = self._consumer
        # What was gone before this consumer took over is nothing that it could acknowledge.
        if consumer is None or through < self._first or through >= self._handed_out:
            return
        acked = consumer.last_acked_sequence
        if acked is None or through > acked:
            with with_hints():
                self._client.run(consumer.ack_through(through))

    def _take_part(self, begin: int) -> None:
        """Become the consumer, once; a consumer that was shut out since raises `Fenced` here."""
        if self._consumer is None:
            consumer = Consumer(
                replace(self.options.config, allow_gap=not self.options.fail_on_data_loss),
                store=self._client.store,
            )
            first = self._manifest().first_sequence
            self._client.run(consumer.initialize(None if begin <= first else begin - 1))
            self._consumer, self._first = consumer, max(begin, first)
            self._handed_out = self._first
        else:
            self._client.run(self._consumer.flush())

    def _within(self, begin: int, latest: int, limit: ReadLimit) -> int:
        if isinstance(limit, ReadMaxRows):
            latest = min(latest, begin + limit.max_rows)
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self.options.bytes_max
        if bytes_max is None or isinstance(limit, ReadAllAvailable) or latest <= begin:
            return latest
        end, left = begin, bytes_max
        for entry in self._entries(begin, latest):
            left -= _size(entry)
            if left < 0 and end > begin:
                break
            end = entry.sequence + 1
        return end
