"""The data source `forebay`: which reader or writer an engine has.

`spark.read.format("forebay").option("path", ...).option("subscribe", "orders").load()`. With the package
installed Spark finds it by itself (see `pyspark_forebay`); `forebay.spark.session` registers it as well.

There is no `pushFilters`: Spark keeps one plan per DataFrame, and a second filter on the same one would
silently change the first. Ranges are options, columns are chosen by the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from forebay.errors import UsageError
from forebay.spark._buffer_source import (
    BUFFER_SCHEMA,
    BufferBatchReader,
    BufferOptions,
    BufferStreamReader,
)
from forebay.spark._columns import LOG_SCHEMA, check_schema
from forebay.spark._errors import with_hints
from forebay.spark._log_sink import LogBatchWriter, LogSinkOptions, LogStreamWriter
from forebay.spark._log_source import LogBatchReader, LogStreamReader
from forebay.spark._options import Engine, LogOptions, Options
from forebay.spark._stream_source import (
    STREAM_SCHEMA,
    StreamBatchReader,
    StreamOptions,
    StreamStreamReader,
)

__all__ = ["ForebaySource"]

SCHEMAS: Final[Mapping[Engine, StructType]] = {
    "log": LOG_SCHEMA,
    "buffer": BUFFER_SCHEMA,
    "stream": STREAM_SCHEMA,
}
"""Columns of every engine."""


class ForebaySource(DataSource):
    """Topics, queues, streams and stores of Forebay, for Spark."""

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
            return SCHEMAS[self._options.engine]

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        with with_hints():
            chosen = check_schema(schema, self.schema())
            if self._options.engine == "buffer":
                return BufferBatchReader(BufferOptions.parse(self._options, streaming=False), chosen)
            if self._options.engine == "stream":
                return StreamBatchReader(StreamOptions.parse(self._options, streaming=False), chosen)
            return LogBatchReader(LogOptions.parse(self._options, streaming=False), chosen)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For `spark.readStream`."""
        with with_hints():
            chosen = check_schema(schema, self.schema())
            if self._options.engine == "buffer":
                return BufferStreamReader(BufferOptions.parse(self._options, streaming=True), chosen)
            if self._options.engine == "stream":
                return StreamStreamReader(StreamOptions.parse(self._options, streaming=True), chosen)
            return LogStreamReader(LogOptions.parse(self._options, streaming=True), chosen)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For `df.write`."""
        with with_hints():
            _check_append(overwrite, self._options)
            return LogBatchWriter(LogSinkOptions.parse(self._options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """For `df.writeStream`."""
        with with_hints():
            _check_append(overwrite, self._options)
            return LogStreamWriter(LogSinkOptions.parse(self._options, schema))


def _check_append(overwrite: bool, options: Options) -> None:
    if overwrite:
        raise UsageError("nothing here is overwritten", hint='mode("append") or outputMode("append")')
    if options.engine != "log":
        raise UsageError(f"there is no sink into a {options.engine}", hint="write into topics: engine=log")
