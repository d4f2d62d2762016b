"""Writing into a queue: tasks stage batches, the driver enqueues all of them in one write of the manifest.

A task uploads its rows as batches of the queue that no manifest names yet and tells the driver where they
lie; the driver's `commit` enqueues them under the query's id and the batch's number (`_buffer_publication`).
So a batch of a query becomes visible at once and as a whole, in the order of its tasks, and once. `abort`
does nothing: Spark calls it also after a commit that took effect. What was staged and never enqueued goes
with the queue's garbage collection.

Rows: `value`, and optionally `metadata`: neighbouring rows with the same one share an item of it.
"""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from forebay.buffer import BufferConfig
from forebay.errors import ForebayError, OutcomeUnknown, Unavailable, UsageError
from forebay.formats import buffer_batch
from forebay.formats.buffer_manifest import Metadata, NewEntry
from forebay.formats.entry_tail import EntryTail, encode_tail
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.retry import retry
from forebay.spark._buffer_publication import OnUnknown, QueuePublications, StagedBatch
from forebay.spark._clients import Client, Deployment, client
from forebay.spark._errors import with_hints
from forebay.spark._log_sink import current_task
from forebay.spark._options import WRITE, Options
from forebay.spark._queue_config import queue_config
from forebay.spark._sink_columns import check_columns, refuse_write_id

__all__ = ["BufferBatchWriter", "BufferSinkOptions", "BufferStreamWriter"]

STAGE_BYTES: Final = 16 * 1024 * 1024
"""Bytes of rows a task gathers for one batch of the queue: a consumer holds a batch in memory."""
COLUMNS: Final = {"value": ("binary", "string"), "metadata": ("binary", "string")}
"""Columns a sink takes and the types each may have."""
ON_UNKNOWN: Final[tuple[OnUnknown, ...]] = ("fail", "append_again", "skip")


@dataclass(frozen=True, slots=True)
class BufferSinkOptions:
    """Where rows go."""

    deployment: Deployment
    config: BufferConfig
    write_id: str | None
    """Name under which a batch write is enqueued; None: a new one each time."""
    on_unknown: OnUnknown

    @classmethod
    def parse(cls, options: Options, schema: StructType) -> BufferSinkOptions:
        """Check options and columns before anything runs."""
        options.check(WRITE["buffer"])
        check_columns(schema, COLUMNS, of="a queue")
        codec = options.text("compression", "none").lower()
        if codec not in ("none", "zstd"):
            raise UsageError(f"compression is {codec!r}", hint="none or zstd")
        on_unknown = options.text("onUnknown", "fail").lower()
        if on_unknown not in ON_UNKNOWN:
            raise UsageError(f"onUnknown is {on_unknown!r}", hint=f"one of {', '.join(ON_UNKNOWN)}")
        config = queue_config(options, batch_compression=codec, entry_extension=True)
        return cls(options.deployment, config, options.identifier("writeId"), on_unknown)


@dataclass(frozen=True)
class StagedBatches(WriterCommitMessage):
    """What one task staged."""

    name: str
    """Query id, or the id of a batch write."""
    batches: tuple[StagedBatch, ...]
    rows: int


class _Task:
    """Stages the rows of one task."""

    def __init__(self, options: BufferSinkOptions, opened: Client) -> None:
        self._config = options.config
        self._client = opened
        self._store = opened.store
        self._clock = SystemClock()
        self._random = random.SystemRandom()
        self._ids = IdSource(self._clock, self._random)
        self._producer = uuid.uuid4().bytes
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self.staged: list[StagedBatch] = []
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows; stage when there are enough for a batch."""
        self.rows += batch.num_rows
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= STAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Stage what has gathered."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            for batch in pa.Table.from_batches(waiting).combine_chunks().to_batches():
                self.staged.append(self._client.run(self._put(batch)))

    async def _put(self, batch: pa.RecordBatch) -> StagedBatch:
        values = batch.column("value").cast(pa.binary())
        if values.null_count:
            raise UsageError("a row has no value", hint="filter such rows out, or coalesce(value, '')")
        now_ms = self._clock.now_ms()
        data = buffer_batch.encode(values, self._config.batch_compression)
        tail = EntryTail(len(data), crc32c(data), self._producer, len(self.staged), len(values))
        location = f"{self._config.data_path_prefix}/{self._ids.ulid()}.batch"
        # The name is new and the bytes are the same every time: a put of unknown outcome may be repeated.
        await retry(
            lambda: self._store.put(location, data),
            policy=self._config.upload_retry,
            clock=self._clock,
            randomness=self._random,
            retryable=lambda error: isinstance(error, (Unavailable, OutcomeUnknown)),
        )
        return StagedBatch(NewEntry(location, _metadata(batch, now_ms), encode_tail(tail)), now_ms)


def _metadata(batch: pa.RecordBatch, now_ms: int) -> tuple[Metadata, ...]:
    """An item for each run of rows with the same metadata."""
    if "metadata" not in batch.schema.names:
        return (Metadata(0, now_ms, b""),)
    given = batch.column("metadata").cast(pa.binary()).fill_null(b"")
    runs = pc.run_end_encode(given)
    starts = [0, *runs.run_ends.to_pylist()[:-1]]
    return tuple(
        Metadata(start, now_ms, each) for start, each in zip(starts, runs.values.to_pylist(), strict=True)
    )


class _Writing:
    """What both writers do."""

    def __init__(self, options: BufferSinkOptions) -> None:
        self.options = options

    def _stage(self, iterator: Iterator[pa.RecordBatch], name: str) -> StagedBatches:
        with with_hints():
            task = _Task(self.options, client(self.options.deployment))
            for batch in iterator:
                if batch.num_rows:
                    task.add(batch)
            task.flush()
        return StagedBatches(name, tuple(task.staged), task.rows)

    def _publish(
        self, messages: Sequence[WriterCommitMessage | None], batch: int, *, forget: bool = False
    ) -> None:
        staged = [message for message in messages if isinstance(message, StagedBatches)]
        if not staged:
            return
        opened, clock, randomness = client(self.options.deployment), SystemClock(), random.SystemRandom()
        publications = QueuePublications(
            opened.store,
            self.options.config,
            clock=clock,
            ids=IdSource(clock, randomness),
            randomness=randomness,
            on_unknown=self.options.on_unknown,
        )
        batches = [each for message in staged for each in message.batches]
        with with_hints():
            opened.run(publications.publish(staged[0].name, batch, batches))
        if forget:
            # It is enqueued whatever becomes of this: a record that stays takes up room and does no harm.
            with contextlib.suppress(ForebayError):
                opened.run(publications.forget(staged[0].name))


class BufferBatchWriter(_Writing, DataSourceArrowWriter):
    """For `df.write`: enqueued once, under `writeId` or a name of its own."""

    def __init__(self, options: BufferSinkOptions) -> None:
        super().__init__(options)
        self.name = options.write_id or f"write-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedBatches:
        """In a task: stage."""
        return self._stage(iterator, self.name)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: enqueue."""
        self._publish(messages, 0, forget=self.options.write_id is None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what was staged is left to garbage collection."""


class BufferStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """For `df.writeStream`: each batch enqueued once, under the id of the query."""

    def __init__(self, options: BufferSinkOptions) -> None:
        refuse_write_id(options.write_id)
        super().__init__(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedBatches:
        """In a task: stage."""
        query: Any = current_task().getLocalProperty("sql.streaming.queryId")
        if query is None:
            raise UsageError("this is no streaming query", hint="use df.write for a batch")
        return self._stage(iterator, query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver: enqueue."""
        self._publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: it is called also after a commit that took effect."""
