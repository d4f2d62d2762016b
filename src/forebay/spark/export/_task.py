"""What one task does: read ranges, decode them, write Parquet, and describe the files. No Spark in it.

Reading and writing are fused: no row leaves the process. A task is a function of its description; running it
twice, or twice at once, writes other files with the same rows, of which a commit names one set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import LimitExceeded
from forebay.spark.export._arrow import ArrowDecoder
from forebay.spark.export._avro import AvroDecoder
from forebay.spark.export._clients import Clients, clients
from forebay.spark.export._config import ExportConfig
from forebay.spark.export._decode import Decoded, Decoder, RawDecoder, Seen, add_seen
from forebay.spark.export._facts import DEAD_SCHEMA, EXAMPLES_MAX, METADATA, DataFile, Span, Task, TaskResult
from forebay.spark.export._files import describe, encode_parquet, file_name
from forebay.spark.export._json import JsonDecoder
from forebay.spark.export._partitioning import Partitioning
from forebay.spark.export._sources import SOURCE_SCHEMA, open_source
from forebay.spark.export._types import is_name
from forebay.storage import ABSENT

__all__ = ["decoder_of", "joined", "payload_of", "run_task"]

CHUNK_BYTES: Final = 16 * 1024 * 1024
"""Bytes of records decoded at a time: small appends are put together, which the parsers like."""
HELD_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Bytes of decoded rows at which a task writes its files, and goes on with further ones."""
TIME_MS_MIN: Final = -62_135_596_800_000
TIME_MS_MAX: Final = 253_402_300_799_999
"""The first and the last millisecond of the years 1 to 9999."""


def decoder_of(config: ExportConfig) -> Decoder:
    """The decoder for the values of an export."""
    if config.format == "json":
        return JsonDecoder(infer=config.new_columns == "add")
    if config.format == "avro":
        assert config.avro_schema is not None
        return AvroDecoder(config.avro_schema)
    return ArrowDecoder() if config.format == "arrow" else RawDecoder()


def payload_of(schema: pa.Schema, partitioning: Partitioning) -> pa.Schema:
    """The columns of a table that come from the values themselves."""
    added = {*METADATA.names, *(name for name, _ in partitioning.derived)}
    return pa.schema([field for field in schema if field.name not in added])


def run_task(config: ExportConfig, store: str, task: Task) -> TaskResult:
    """Export the ranges of one task into files below `store`."""
    return _Run(config, task, store, clients()).run()


class _Run:
    """One run of one task."""

    def __init__(self, config: ExportConfig, task: Task, store: str, opened: Clients) -> None:
        self._config = config
        self._task = task
        self._store = store
        self._clients = opened
        self._source = open_source(config.source, opened)
        self._partitioning = Partitioning.parse(config.partition_by)
        self._payload = payload_of(task.schema, self._partitioning)
        self._decoder = decoder_of(config)
        self._tables: list[pa.Table] = []
        self._held = 0
        self._files: list[DataFile] = []
        self._dead: list[pa.Table] = []
        self._dead_count = 0
        self._missing: Seen = {}
        self._dropped: set[str] = set()
        self._records: dict[str, int] = {}
        self._bytes = 0

    def run(self) -> TaskResult:
        began = time.thread_time()
        for span in joined(self._task.spans):
            self._read(span)
        wanted = self._new_columns() if self._config.new_columns == "add" else {}
        lacking = set(self._missing) - set(wanted) - set(self._payload.names)
        ignored = tuple(sorted(lacking | self._dropped))
        if wanted:
            return TaskResult(self._task.number, missing_columns=wanted, ignored_columns=ignored)
        if sum(table.nbytes for table in self._dead) > self._task.dead_bytes_max:
            return TaskResult(self._task.number, has_too_many_dead=True)
        self._write()
        return TaskResult(
            self._task.number,
            tuple(self._files),
            self._records,
            sum(file.rows for file in self._files),
            self._dead_letters(),
            self._dead_count,
            ignored_columns=ignored,
            bytes_read=self._bytes,
            cpu_s=time.thread_time() - began,
        )

    def _read(self, span: Span) -> None:
        batches_only = self._config.source.kind == "buffer"
        # A read that lacks a batch of a buffer raises; one without records is there, and does not show.
        count = span.end - span.start if batches_only else 0
        for chunk in _chunks(self._source.read(span)):
            if not chunk.num_rows:
                continue
            records = _in_calendar(chunk)
            count += 0 if batches_only else records.num_rows
            self._bytes += records.column("value").nbytes
            # As it is, a value needs no neighbour: chunks are copied together only to be parsed.
            raw = self._config.format == "raw"
            while records.num_rows:
                values, keys = records.column("value"), records.column("key")
                decoded = self._decoder.decode(values if raw else _plain(values), keys, self._payload)
                self._keep(span.lane, records, decoded)
                records = records.slice(records.num_rows if decoded.count is None else decoded.count)
        self._records[span.lane] = self._records.get(span.lane, 0) + count

    def _keep(self, lane: str, records: pa.Table, decoded: Decoded) -> None:
        add_seen(self._missing, decoded.missing)
        self._dropped |= decoded.dropped
        table = self._with_metadata(records, decoded)
        # Delta keeps the values of partitions in its log, the others in the names of directories.
        folders = self._config.target.kind != "delta"
        if outside := self._partitioning.misplaced(table, folders=folders):
            table = _without(table, decoded, outside)
        self._tables.append(table)
        self._bury(lane, records, decoded)
        self._held += table.nbytes
        if self._held >= HELD_BYTES_MAX:
            if self._config.new_columns == "add" and self._new_columns():
                self._tables.clear()  # The task is run again when the table has the columns.
            self._write()

    def _with_metadata(self, records: pa.Table, decoded: Decoded) -> pa.Table:
        kept = records.select(["topic", "partition", "offset", "timestamp"])
        if decoded.rows is not None:
            kept = kept.take(pa.array(decoded.rows))
        # Put together by columns: a table without any, as there is at the beginning, forgets its rows.
        added = [column.cast(field.type) for field, column in zip(METADATA, kept.columns, strict=True)]
        schema = pa.schema([*decoded.table.schema, *METADATA])
        return pa.Table.from_arrays([*decoded.table.columns, *added], schema=schema)

    def _bury(self, lane: str, records: pa.Table, decoded: Decoded) -> None:
        """Keep the bad records for the driver, but for those that are kept already."""
        if not decoded.bad:
            return
        bad = sorted(decoded.bad)
        self._dead_count += len(bad)
        rows = pa.array([row for row, _ in bad], pa.int64())
        dead = records.select(DEAD_SCHEMA.names[:-1]).take(rows)
        dead = dead.append_column("reason", pa.array([reason for _, reason in bad], pa.string()))
        floor = self._task.dead_from.get(lane, 0)
        dead = dead.filter(pc.greater_equal(dead.column("offset"), floor)).cast(DEAD_SCHEMA)
        if self._config.dead_letter is None:  # They are told, and not kept.
            dead = dead.slice(0, EXAMPLES_MAX - sum(table.num_rows for table in self._dead))
        self._dead.append(dead)
        size = sum(table.nbytes for table in self._dead)
        if size > self._config.dead_letter_bytes_max:
            raise LimitExceeded(
                "bytes of bad records in one task",
                limit=self._config.dead_letter_bytes_max,
                actual=size,
                hint=f"is it the right format? the first is bad because: {bad[0][1]}",
            )

    def _dead_letters(self) -> bytes:
        dead = pa.concat_tables(self._dead) if self._dead else DEAD_SCHEMA.empty_table()
        if not dead.num_rows:
            return b""
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, DEAD_SCHEMA) as stream:
            stream.write_table(
                dead.sort_by([("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")])
            )
        return bytes(out.getvalue().to_pybytes())

    def _new_columns(self) -> Seen:
        """Columns to add, or to add fields to: not those whose name is none, or is taken: a table cannot tell
        names apart by case."""
        taken = {name.lower() for name in self._task.schema.names}
        known = set(self._payload.names)
        return {
            name: kinds
            for name, kinds in self._missing.items()
            if name in known or (is_name(name) and name.lower() not in taken)
        }

    def _write(self) -> None:
        tables, self._tables, self._held = self._tables, [], 0
        if not any(table.num_rows for table in tables):
            return
        table = self._partitioning.add(pa.concat_tables(tables))
        table = table.select(self._task.schema.names)
        kind = self._config.target.kind
        store = self._clients.store(self._store)
        for partition, rows in self._partitioning.cut(table):
            # Iceberg reads the partition from the file; the others keep it outside.
            body = rows if kind == "iceberg" else rows.drop_columns(list(partition))
            data, footer = encode_parquet(body, self._config.compression)
            path = file_name(partition, hive=kind != "delta")
            self._clients.run(store.put(path, memoryview(data), ABSENT))
            self._files.append(describe(path, data, footer, partition))


def _without(table: pa.Table, decoded: Decoded, outside: Mapping[int, str]) -> pa.Table:
    """The table without the records of some rows, which are bad ones from now on."""
    rows = np.arange(table.num_rows) if decoded.rows is None else decoded.rows
    bad = {int(rows[row]): reason for row, reason in outside.items()}
    decoded.bad += bad.items()
    return table.filter(pa.array(~np.isin(rows, list(bad))))


def joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Neighbouring spans as one, so that one scan reads ahead over all of them."""
    current: Span | None = None
    for span in spans:
        if current is not None and (current.lane, current.end) == (span.lane, span.start):
            current = Span(span.lane, current.start, span.end, current.bytes + span.bytes)
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


def _chunks(batches: Iterator[list[pa.RecordBatch]]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    size = 0
    for some in batches:
        for batch in some:
            waiting.append(batch)
            size += batch.column(SOURCE_SCHEMA.get_field_index("value")).nbytes
            if size >= CHUNK_BYTES:
                yield pa.Table.from_batches(waiting, SOURCE_SCHEMA)
                waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting, SOURCE_SCHEMA)


def _in_calendar(records: pa.Table) -> pa.Table:
    """The records, without a time where no table can hold it: a producer may give any number."""
    times = records.column("timestamp")
    ends = pc.min_max(times.cast(pa.int64()))
    if ends["min"].as_py() >= TIME_MS_MIN and ends["max"].as_py() <= TIME_MS_MAX:
        return records
    numbers = times.cast(pa.int64())
    inside = pc.and_(pc.greater_equal(numbers, TIME_MS_MIN), pc.less_equal(numbers, TIME_MS_MAX))
    kept = pc.if_else(inside, times, pa.scalar(None, times.type))
    return records.set_column(records.schema.get_field_index("timestamp"), "timestamp", kept)


def _plain(column: pa.ChunkedArray) -> pa.BinaryArray:
    """One array, whose offset may be anything."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
