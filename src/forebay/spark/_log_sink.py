"""Writing into topics: tasks stage, the driver publishes.

A task uploads its rows into objects that belong to no partition yet and tells the driver where they lie. The
driver's `commit` publishes all of them under the query's id and the batch's number, in one decision (see
`forebay.log._staged`). That is what makes it exactly once: a task that is tried again, a batch that is run
again, even one that splits differently, and a commit that failed after its effect all end in the same list of
appends, applied once. Appending straight from tasks would need every replay to split alike.

`abort` does nothing: Spark calls it also after a commit that took effect. What was staged and never published
is named by nobody, and the vacuum takes it after its grace.

Rows: `value`, and optionally `key`, `headers`, `topic`, `partition`, `timestamp`. Without `partition` the key
chooses; rows without a key go to one partition per task.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from forebay.errors import ForebayError, UsageError
from forebay.formats.bytes_batch import HEADERS_TYPE, BytesBatch, Codec
from forebay.formats.bytes_batch_piece import pieces_of
from forebay.log import AppendGroup, Catalog, Publications, Published, StagedAppend, stage
from forebay.log._keys import PARTITION_MAX, validate_topic
from forebay.spark._clients import Client, Deployment, client
from forebay.spark._errors import with_hints
from forebay.spark._options import WRITE, Options
from forebay.spark._routing import targets
from forebay.spark._sink_columns import check_columns, refuse_write_id
from forebay.spark._worker import begin, settle

__all__ = ["LogBatchWriter", "LogSinkOptions", "LogStreamWriter", "current_task"]

STAGE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of rows a task gathers for one object."""
ROWS_PER_PARTITION: Final = 256
"""Rows for each partition of all topics that are routed together: every part of a batch has its price."""
COLUMNS: Final = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
    "headers": ("array<struct<key:string,value:binary>>",),
}
"""Columns a sink takes and the types each may have."""


@dataclass(frozen=True, slots=True)
class LogSinkOptions:
    """Where rows go."""

    deployment: Deployment
    topic: str | None
    """For rows without a topic of their own."""
    partitions: int
    """Partitions of a topic that the sink creates."""
    codec: Codec
    write_id: str | None
    """Name under which a batch write is published; None: a new one each time."""

    @classmethod
    def parse(cls, options: Options, schema: StructType) -> LogSinkOptions:
        """Check options and columns before anything runs."""
        options.check(WRITE["log"])
        check_columns(schema, COLUMNS, of="a sink")
        if options.given("topic") is None and "topic" not in schema.fieldNames():
            raise UsageError("no topic is named", hint='.option("topic", "orders"), or a column topic')
        if (topic := options.given("topic")) is not None:
            validate_topic(topic)
        partitions = options.count("partitions") or 1
        if partitions > PARTITION_MAX + 1:
            raise UsageError(f"partitions is {partitions}", hint=f"a topic has up to {PARTITION_MAX + 1}")
        codec = options.text("compression", "none").lower()
        if codec not in ("none", "zstd"):
            raise UsageError(f"compression is {codec!r}", hint="none or zstd")
        return cls(
            options.deployment,
            topic,
            partitions,
            cast("Codec", codec),
            options.identifier("writeId"),
        )


@dataclass(frozen=True)
class StagedRows(WriterCommitMessage):
    """What one task staged."""

    name: str
    """Query id, or the id of a batch write."""
    appends: tuple[StagedAppend, ...]
    rows: int


class _Task:
    """Stages the rows of one task."""

    def __init__(self, options: LogSinkOptions, open_client: Client, turn: int) -> None:
        self._options = options
        self._client = open_client
        self._turn = turn
        self._partitions: dict[str, int] = {}
        self._arrived: list[pa.RecordBatch] = []
        self._arrived_rows = 0
        self._routed: list[AppendGroup] = []
        self._bytes = 0
        self.staged: list[StagedAppend] = []
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows; stage when there are enough for an object.

        They are put in the order of their partitions as they come, while they are in the processor's cache.
        """
        self.rows += batch.num_rows
        self._bytes += batch.nbytes
        self._arrived.append(batch)
        self._arrived_rows += batch.num_rows
        if self._arrived_rows >= ROWS_PER_PARTITION * (sum(self._partitions.values()) or 1):
            self._route()
        if self._bytes >= STAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Stage what has gathered."""
        self._route()
        routed, self._routed, self._bytes = self._routed, [], 0
        if routed:
            bay = self._client.bay
            self.staged += self._client.run(stage(bay.writer, routed, bay.parts.clock))

    def _route(self) -> None:
        arrived, self._arrived, self._arrived_rows = self._arrived, [], 0
        self._routed += [group for batch in _together(arrived) for group in self._groups(batch)]

    def _groups(self, batch: pa.RecordBatch) -> Iterator[AppendGroup]:
        if "topic" not in batch.schema.names:
            yield from self._groups_of(str(self._options.topic), batch)
            return
        topics = batch.column("topic")
        if self._options.topic is not None:
            topics = topics.fill_null(self._options.topic)
        elif topics.null_count:
            raise UsageError("a row has no topic", hint='fill the column, or .option("topic", ...)')
        encoded = topics.dictionary_encode()
        counts, order = _sorted(np.asarray(encoded.indices))
        if len(counts) > 1:
            batch = batch.take(pa.array(order))
        bounds = [0, *itertools.accumulate(counts.tolist())]
        for topic, (first, last) in zip(
            encoded.dictionary.to_pylist(), itertools.pairwise(bounds), strict=True
        ):
            yield from self._groups_of(topic, batch.slice(first, last - first))

    def _groups_of(self, topic: str, batch: pa.RecordBatch) -> Iterator[AppendGroup]:
        records = _records(batch)
        chosen = self._chosen(topic, batch, records)
        if isinstance(chosen, int):
            yield AppendGroup(topic, chosen, records)
            return
        counts, order = _sorted(chosen)
        partitions = np.flatnonzero(counts)
        pieces = pieces_of(_taken(records, order), counts[partitions].tolist())
        for partition, piece in zip(partitions.tolist(), pieces, strict=True):
            yield AppendGroup(topic, partition, piece)

    def _chosen(self, topic: str, batch: pa.RecordBatch, records: BytesBatch) -> int | npt.NDArray[np.int32]:
        """The partition of all rows, or of each."""
        count = self._partitions_of(topic)
        by_key: int | npt.NDArray[np.int32] = self._turn % count
        if records.keys is not None and count > 1:
            by_key = targets(records.keys, count, self._turn % count)
        elif records.keys is not None:
            by_key = 0
        if "partition" not in batch.schema.names:
            return by_key
        given = batch.column("partition")
        chosen = np.broadcast_to(np.asarray(by_key, np.int32), (len(given),)).copy()
        present = given.is_valid().to_numpy(zero_copy_only=False)
        chosen[present] = given.drop_null().to_numpy()
        if int(chosen.min()) < 0 or int(chosen.max()) >= count:
            raise UsageError(
                f"{topic!r} has partitions 0 to {count - 1}, rows ask for {chosen.min()} to {chosen.max()}",
                hint="add partitions to the topic, or correct the column partition",
            )
        return chosen

    def _partitions_of(self, topic: str) -> int:
        """How many the topic has; it is created where it does not exist."""
        found = self._partitions.get(topic)
        if found is None:
            catalog: Catalog = self._client.bay.writer.catalog
            found = self._client.run(catalog.ensure(topic, self._options.partitions)).partitions
            self._partitions[topic] = found
        return found


def _together(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) <= 1:
        return list(batches)
    return list(pa.Table.from_batches(batches).combine_chunks().to_batches())


def _sorted(places: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many rows each place has, and the rows in the order of their places."""
    counts = np.bincount(places)
    # A stable sort of few bits is a radix sort.
    return counts, np.argsort(places.astype(np.min_scalar_type(len(counts))), kind="stable")


def _records(batch: pa.RecordBatch) -> BytesBatch:
    def column(name: str, kind: pa.DataType) -> pa.Array | None:
        if name not in batch.schema.names:
            return None
        found = batch.column(name)
        return None if found.null_count == len(found) else found.cast(kind)

    values = column("value", pa.binary())
    if values is None or values.null_count:
        raise UsageError("a row has no value", hint="filter such rows out, or coalesce(value, '')")
    times = column("timestamp", pa.timestamp("us", tz="UTC"))
    if times is not None and times.null_count:
        raise UsageError("only some rows have a timestamp", hint="fill the column, or leave it out")
    return BytesBatch(
        values,
        column("key", pa.binary()),
        # Spark has microseconds, a log milliseconds: rounded down, also before 1970.
        None if times is None else np.asarray(times.cast(pa.int64())) // 1000,
        column("headers", HEADERS_TYPE),
    )


def _taken(records: BytesBatch, order: npt.NDArray[np.int64]) -> BytesBatch:
    indices = pa.array(order)
    return BytesBatch(
        _gathered(records.values, indices),
        None if records.keys is None else _gathered(records.keys, indices),
        None if records.timestamps_ms is None else records.timestamps_ms[order],
        None if records.headers is None else records.headers.take(indices),
    )


def _gathered(column: pa.BinaryArray, indices: pa.Array) -> pa.BinaryArray:
    """Rows in another order. Those of one width are moved in half of the time."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    lengths = np.diff(offsets)
    width = int(lengths[0])
    # The indices come from a sort: none is out of bounds.
    if not width or column.null_count or int(lengths.min()) != int(lengths.max()):
        return pc.take(column, indices, boundscheck=False)
    data = column.buffers()[2][int(offsets[0]) : int(offsets[-1])]
    rows = pa.Array.from_buffers(pa.binary(width), len(column), [None, data])
    moved = pc.take(rows, indices, boundscheck=False)
    places = pa.py_buffer(np.arange(0, len(data) + 1, width, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), len(column), [None, places, moved.buffers()[1]])


class _Writing:
    """What both writers do."""

    def __init__(self, options: LogSinkOptions) -> None:
        self.options = options

    def _stage(self, iterator: Iterator[pa.RecordBatch], name: str, turn: int) -> StagedRows:
        begin()
        task = _Task(self.options, client(self.options.deployment, self.options.codec), turn)
        with with_hints():
            for batch in iterator:
                if batch.num_rows:
                    task.add(batch)
            task.flush()
        settle()
        return StagedRows(name, tuple(task.staged), task.rows)

    def _publish(
        self, messages: Sequence[WriterCommitMessage | None], batch: int, *, forget: bool = False
    ) -> None:
        staged = [message for message in messages if isinstance(message, StagedRows)]
        if not staged:
            return
        opened = client(self.options.deployment)
        parts = opened.bay.parts
        publications = Publications(
            opened.bay.writer, parts.store, parts.coordinator, clock=parts.clock, ids=parts.ids
        )
        appends = [append for message in staged for append in message.appends]
        with with_hints():
            published = opened.run(publications.publish(staged[0].name, batch, appends))
            self._check_topics(appends, published)
        # It is published whatever becomes of the rest, which spares others work: were it to fail, a write
        # that is done would be tried again.
        with contextlib.suppress(ForebayError):
            opened.run(opened.bay.writer.materialize_idle(idle_ms=0))
        if forget:
            with contextlib.suppress(ForebayError):
                opened.run(publications.forget(staged[0].name))

    def _check_topics(self, appends: Sequence[StagedAppend], published: Published) -> None:
        """Raise where a write was taken for a repetition of one that went elsewhere."""
        elsewhere = {append.topic for append in appends} - set(published.topics)
        if self.options.write_id is not None and published.topics and elsewhere:
            raise UsageError(
                f"writeId {self.options.write_id!r} is that of a write into {', '.join(published.topics)}; "
                f"nothing was written into {', '.join(sorted(elsewhere))}",
                hint="a writeId names one write in all of the deployment: choose another for this one",
            )


class LogBatchWriter(_Writing, DataSourceArrowWriter):
    """For `df.write`: published once, under `writeId` or a name of its own."""

    def __init__(self, options: LogSinkOptions) -> None:
        super().__init__(options)
        self.name = options.write_id or f"write-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """In a task: stage."""
        return self._stage(iterator, self.name, current_task().partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """On the driver: publish. Under a name of its own nobody can come back, so nothing is kept of it."""
        self._publish(messages, 0, forget=self.options.write_id is None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what was staged is left to the vacuum."""


class LogStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """For `df.writeStream`: each batch published once, under the id of the query."""

    def __init__(self, options: LogSinkOptions) -> None:
        refuse_write_id(options.write_id)
        super().__init__(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """In a task: stage."""
        task = current_task()
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise UsageError("this is no streaming query", hint="use df.write for a batch")
        return self._stage(iterator, query, task.partitionId() + int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver: publish."""
        self._publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: it is called also after a commit that took effect."""


def current_task() -> Any:
    """The task that this process runs."""
    task = TaskContext.get()
    assert task is not None, "writers run in tasks"
    return task
