"""Topics, buffers and streams to Delta, Parquet and Iceberg tables, exactly once, with or without Spark."""

from forebay.spark.export._clients import close_clients
from forebay.spark.export._config import DeadLetterSpec, ExportConfig, SourceSpec, TargetSpec
from forebay.spark.export._errors import BadRecords, CommitConflict, CommitUnknown, RecordsTrimmed
from forebay.spark.export._exporter import Exporter, ExportReport
from forebay.spark.export._run import export, export_forever, orphans
from forebay.spark.export._runners import local_runner, spark_runner
from forebay.spark.export._types import parse_schema

__all__ = [
    "BadRecords",
    "CommitConflict",
    "CommitUnknown",
    "DeadLetterSpec",
    "ExportConfig",
    "ExportReport",
    "Exporter",
    "RecordsTrimmed",
    "SourceSpec",
    "TargetSpec",
    "close_clients",
    "export",
    "export_forever",
    "local_runner",
    "orphans",
    "parse_schema",
    "spark_runner",
]
