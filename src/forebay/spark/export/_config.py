"""What an export is told: where records come from, what they are, and which table they go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import pyarrow as pa

from forebay.errors import UsageError

__all__ = ["DeadLetterSpec", "ExportConfig", "Format", "SourceSpec", "TargetSpec"]

Format: TypeAlias = Literal["raw", "json", "avro", "arrow"]
MIB = 1024 * 1024

FORMATS = ("raw", "json", "avro", "arrow")
COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")
TABLES = ("delta", "parquet", "iceberg")


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where records come from. Plain text, so that it can travel to a task."""

    kind: Literal["log", "buffer", "stream"]
    names: tuple[str, ...]
    """Topics of a log; the manifest's key of a buffer; the name of a stream."""
    store: str
    """Directory or URL of the store."""
    coordinator: str | None = None
    """URL of the coordinator; None: the embedded one of the directory, or none for a buffer."""

    @classmethod
    def parse(cls, text: str, store: str, coordinator: str | None) -> SourceSpec:
        """`orders,clicks`, `log:orders`, `buffer:ingest/manifest` or `stream:NAME`."""
        kind, colon, rest = text.partition(":")
        if not colon:
            kind, rest = "log", text
        names = tuple(name.strip() for name in rest.split(",") if name.strip())
        if kind not in ("log", "buffer", "stream") or not names or (kind != "log" and len(names) > 1):
            raise UsageError(
                f"{text!r} is no source", hint="TOPIC[,TOPIC...], buffer:MANIFEST or stream:NAME"
            )
        return cls(kind, names, store, coordinator)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Which table."""

    kind: Literal["delta", "parquet", "iceberg"]
    location: str
    """Directory or URL of a Delta or Parquet table; `CATALOG/namespace.table` of an Iceberg one."""

    @classmethod
    def parse(cls, text: str) -> TargetSpec:
        """`delta:PATH`, `parquet:PATH` or `iceberg:CATALOG/namespace.table`."""
        kind, _, location = text.partition(":")
        if kind not in TABLES or not location:
            raise UsageError(f"{text!r} is no table", hint="delta:PATH, parquet:PATH or iceberg:CATALOG/NAME")
        return cls(kind, location)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class DeadLetterSpec:
    """Where records go that cannot be decoded."""

    topic: str | None = None
    table: TargetSpec | None = None

    @classmethod
    def parse(cls, text: str) -> DeadLetterSpec:
        """`topic:NAME`, or a table as `TargetSpec.parse` takes it."""
        kind, _, name = text.partition(":")
        if kind == "topic" and name:
            return cls(topic=name)
        return cls(table=TargetSpec.parse(text))


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """One export: a source, a format, a table."""

    source: SourceSpec
    target: TargetSpec
    format: Format = "raw"
    """What a record's value is: bytes as they are, a JSON object, an Avro datum, an Arrow IPC stream."""
    schema: pa.Schema | None = None
    """Columns of the values. Needed for Avro (or `avro_schema`), optional for JSON and Arrow, where they are
    otherwise taken from the first records. Only looked at where the table does not exist yet."""
    avro_schema: str | None = None
    """The writer's schema as JSON text. Needed for Avro."""
    partition_by: tuple[str, ...] = ()
    """Columns; `date` stands for `_date`, the day of `_timestamp`; `date(c)` for `c_date`, the day of `c`."""
    dead_letter: DeadLetterSpec | None = None
    """Where bad records go. None: the first one ends the export, and nothing of its round is committed."""
    name: str = "forebay"
    """Name of the export. Two exports of one topic into one table need two names."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a partition begins that the table does not know yet."""
    new_columns: Literal["add", "ignore"] = "add"
    """What becomes of fields and columns of the values that the table does not have."""
    on_data_loss: Literal["fail", "skip"] = "fail"
    """What to do where records were trimmed before they were exported: an error, or go on behind the gap."""
    acknowledge: bool = False
    """Whether a buffer's batches are acknowledged once they are committed. Takes the buffer over from any
    other consumer."""
    task_bytes_min: int = 16 * MIB
    """Stored bytes below which records are not spread over more tasks. At least 1."""
    task_bytes_max: int = 64 * MIB
    """Stored bytes of one task, unless one object is larger: it is held in memory. At least 1."""
    commit_bytes_max: int = 4096 * MIB
    """Stored bytes of one commit, about. At least 1."""
    dead_letter_bytes_max: int = 64 * MIB
    """Bytes of bad records of one task; beyond it the format is wrong rather than the records."""
    attempts_max: int = 10
    """Rounds against other exporters of the same table before giving up. At least 1."""
    compression: str = "zstd"
    """Codec of the Parquet files: zstd, snappy, lz4, gzip or none."""

    def __post_init__(self) -> None:
        for field in ("task_bytes_max", "task_bytes_min", "commit_bytes_max", "attempts_max"):
            if getattr(self, field) < 1:
                raise UsageError(f"{field} is {getattr(self, field)}", hint="at least 1")
        if self.format not in FORMATS:
            raise UsageError(f"format is {self.format!r}", hint=f"one of {', '.join(FORMATS)}")
        if self.compression not in COMPRESSIONS:
            raise UsageError(f"compression is {self.compression!r}", hint=f"one of {', '.join(COMPRESSIONS)}")
        if not self.name or "/" in self.name:
            raise UsageError(f"name is {self.name!r}", hint="at least a letter, and no slash")
        if self.format == "raw" and self.schema is not None:
            raise UsageError(
                "raw values have the columns key and value", hint="leave --schema out, or give --format"
            )
        if self.format == "avro" and self.avro_schema is None:
            raise UsageError("Avro values need their schema", hint="give --schema FILE.avsc")
        if self.acknowledge and self.source.kind != "buffer":
            raise UsageError("only a buffer is acknowledged", hint="leave --acknowledge out")
