"""The data source `forebay`: which reader or writer an engine has.

`spark.read.format("forebay").option("path", ...).option("subscribe", "orders").load()`. With the package
installed Spark finds it by itself (see `pyspark_forebay`); `forebay.spark.session` registers it as well.

What an engine or a sink needs is imported when it is asked for: Spark plans every query in new processes, and
each pays for what it imports.

There is no `pushFilters`: Spark keeps one plan per DataFrame, and a second filter on the same one would
silently change the first. Ranges are options, columns are chosen by the schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from forebay._connect import check_there
from forebay.errors import UsageError
from forebay.spark._columns import LOG_SCHEMA, check_schema
from forebay.spark._errors import with_hints
from forebay.spark._log_source import LogBatchReader, LogStreamReader
from forebay.spark._options import WRITE, LogOptions, Options

__all__ = ["ForebaySource"]


class ForebaySource(DataSource):
    """Topics, queues, streams and Quiver stores of Forebay, for Spark."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "forebay"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._options = Options(dict(options))

    def schema(self) -> StructType:
        """All columns of the engine."""
        with with_hints():
            engine = self._options.engine
        if engine == "buffer":
            from forebay.spark._buffer_source import BUFFER_SCHEMA

            return BUFFER_SCHEMA
        if engine == "stream":
            from forebay.spark._stream_source import STREAM_SCHEMA

            return STREAM_SCHEMA
        if engine == "quiver":
            return self._quiver_schema()
        return LOG_SCHEMA

    def _quiver_schema(self) -> StructType:
        """The columns that the segments of a store have."""
        from forebay.spark._quiver_source import QuiverOptions, quiver_schema

        with with_hints():
            # Which options are allowed is looked at when a reader is made.
            found = quiver_schema(QuiverOptions.parse(self._options, streaming=True))
            if found is None:
                raise UsageError(
                    "the store holds no segment yet, so its columns are not known",
                    hint='.schema("timestamp long, message string") names them',
                )
            return found

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        with with_hints():
            if self._options.engine == "quiver":
                from forebay.spark._quiver_source import QuiverBatchReader, QuiverOptions, check_quiver_schema

                quiver = QuiverOptions.parse(self._options, streaming=False)
                return QuiverBatchReader(quiver, check_quiver_schema(quiver, schema))
            options, chosen = self._options, check_schema(schema, self.schema())
            if options.engine == "buffer":
                from forebay.spark._buffer_source import BufferBatchReader, BufferOptions

                return BufferBatchReader(BufferOptions.parse(options, streaming=False), chosen)
            if options.engine == "stream":
                from forebay.spark._stream_source import StreamBatchReader, StreamOptions

                return StreamBatchReader(StreamOptions.parse(options, streaming=False), chosen)
            return LogBatchReader(_of_what_is_there(LogOptions.parse(options, streaming=False)), chosen)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For `spark.readStream`."""
        with with_hints():
            if self._options.engine == "quiver":
                from forebay.spark._quiver_source import (
                    QuiverOptions,
                    QuiverStreamReader,
                    check_quiver_schema,
                )

                quiver = QuiverOptions.parse(self._options, streaming=True)
                return QuiverStreamReader(quiver, check_quiver_schema(quiver, schema))
            options, chosen = self._options, check_schema(schema, self.schema())
            if options.engine == "buffer":
                from forebay.spark._buffer_source import BufferOptions, BufferStreamReader

                return BufferStreamReader(BufferOptions.parse(options, streaming=True), chosen)
            if options.engine == "stream":
                from forebay.spark._stream_source import StreamOptions, StreamStreamReader

                return StreamStreamReader(StreamOptions.parse(options, streaming=True), chosen)
            return LogStreamReader(_of_what_is_there(LogOptions.parse(options, streaming=True)), chosen)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For `df.write`."""
        with with_hints():
            _check_append(overwrite, self._options)
            if self._options.engine == "buffer":
                from forebay.spark._buffer_sink import BufferBatchWriter, BufferSinkOptions

                return BufferBatchWriter(BufferSinkOptions.parse(self._options, schema))
            from forebay.spark._log_sink import LogBatchWriter, LogSinkOptions

            return LogBatchWriter(LogSinkOptions.parse(self._options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """For `df.writeStream`."""
        with with_hints():
            _check_append(overwrite, self._options)
            if self._options.engine == "buffer":
                from forebay.spark._buffer_sink import BufferSinkOptions, BufferStreamWriter

                return BufferStreamWriter(BufferSinkOptions.parse(self._options, schema))
            from forebay.spark._log_sink import LogSinkOptions, LogStreamWriter

            return LogStreamWriter(LogSinkOptions.parse(self._options, schema))


def _of_what_is_there(options: LogOptions) -> LogOptions:
    """The options, where reading makes no file: a directory of something else would get a coordinator."""
    deployment = options.deployment
    if deployment.coordinator is not None or Path(deployment.path).is_dir():
        check_there(deployment.path, deployment.coordinator)
    return options


def _check_append(overwrite: bool, options: Options) -> None:
    if overwrite:
        raise UsageError("nothing here is overwritten", hint='mode("append") or outputMode("append")')
    if options.engine not in WRITE:
        hint = "write into topics (engine=log) or a queue (engine=buffer)"
        raise UsageError(f"there is no sink into a {options.engine}", hint=hint)
