"""The data source `forebay`: which reader or writer an engine has.

`spark.read.format("forebay").option("path", ...).option("subscribe", "orders").load()`. With the package
installed Spark finds it by itself (see `pyspark_forebay`); `forebay.spark.session` registers it as well.

There is no `pushFilters`: Spark keeps one plan per DataFrame, and a second filter on the same one would
silently change the first. Ranges are options, columns are chosen by the schema.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from forebay.spark._columns import LOG_SCHEMA, check_schema
from forebay.spark._log_source import LogBatchReader, LogStreamReader
from forebay.spark._options import LogOptions, Options

__all__ = ["ForebaySource"]


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
        return LOG_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        chosen = check_schema(schema, self.schema())
        return LogBatchReader(LogOptions.parse(self._options, streaming=False), chosen)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For `spark.readStream`."""
        chosen = check_schema(schema, self.schema())
        return LogStreamReader(LogOptions.parse(self._options, streaming=True), chosen)
