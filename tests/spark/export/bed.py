"""A small deployment to export from, and tables read back by somebody else's code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import forebay
from forebay.spark.export import DeadLetterSpec, ExportConfig, SourceSpec, TargetSpec
from forebay.spark.export._clients import clients
from forebay.spark.export._parquet import ParquetTable

KINDS = ("delta", "parquet", "iceberg")


def order(number: int, **more: Any) -> bytes:
    fields = {"id": number, "who": f"user-{number % 7}", "amount": number / 4, "at": "2026-11-16T09:30:00Z"}
    return json.dumps(fields | more).encode()


class Bed:
    """A log in a directory."""

    def __init__(self, directory: Path, partitions: int = 2, *, create: bool = True) -> None:
        self.directory = directory
        self.bay_directory = directory / "bay"
        self.sent = 0
        if create:
            with forebay.connect(self.bay_directory) as bay:
                bay.topics.create("orders", partitions=partitions)
        self.partitions = partitions

    def send(self, records: Sequence[bytes], partition: int = 0, topic: str = "orders") -> None:
        with forebay.connect(self.bay_directory) as bay, bay.producer() as out:
            out.send(topic, list(records), partition=partition).result(timeout=60)
        self.sent += len(records)

    def fill(self, count: int, appends: int = 3) -> None:
        """`count` orders in every partition, in several appends."""
        with forebay.connect(self.bay_directory) as bay, bay.producer() as out:
            for partition in range(self.partitions):
                for append in range(appends):
                    numbers = range(append * count // appends, (append + 1) * count // appends)
                    records = [order(self.sent + number) for number in numbers]
                    if records:
                        out.send("orders", records, partition=partition).result(timeout=60)
                self.sent += count

    def config(self, kind: str = "delta", table: str = "table", **more: Any) -> ExportConfig:
        source = SourceSpec.parse(more.pop("source", "orders"), str(self.bay_directory), None)
        dead = more.pop("dead_letter", None)
        spec = None if dead is None else DeadLetterSpec.parse(dead)
        settings: dict[str, Any] = {"format": "json", "task_bytes_min": 1, "task_bytes_max": 4096} | more
        return ExportConfig(source, self.target(kind, table), dead_letter=spec, **settings)

    def target(self, kind: str, table: str = "table") -> TargetSpec:
        place = self.directory / kind
        return TargetSpec.parse(
            f"{kind}:{place}/db.{table}" if kind == "iceberg" else f"{kind}:{place}/{table}"
        )

    def rows(self, kind: str = "delta", table: str = "table") -> pa.Table:
        return read_table(self.target(kind, table))

    def read_topic(self, topic: str) -> list[dict[str, Any]]:
        with forebay.connect(self.bay_directory) as bay:
            found: list[dict[str, Any]] = bay.read(topic).read_all().to_pylist()
            return found


def open_bed(directory: Path) -> Bed:
    """The bed that another process made."""
    return Bed(directory, create=False)


def read_table(target: TargetSpec) -> pa.Table:
    """All rows of a table; an empty one where there is no table."""
    if target.kind == "delta":
        from deltalake import DeltaTable

        return DeltaTable(target.location).to_pyarrow_table() if Path(target.location).exists() else _NOTHING
    if target.kind == "parquet":
        handle = ParquetTable(target.location, "forebay", clients()).load()
        if handle is None:
            return _NOTHING
        files = [Path(target.location) / path for path in handle.live_files()]
        tables = [pq.read_table(file) for file in files]
        return pa.concat_tables(tables, promote_options="default") if tables else _NOTHING
    from forebay.spark.export._iceberg import IcebergTable

    found = IcebergTable(target.location, "forebay").load()
    return _NOTHING if found is None else found._table.scan().to_arrow()


_NOTHING = pa.table({"_partition": pa.array([], pa.int32()), "_offset": pa.array([], pa.int64())})


def places(table: pa.Table) -> list[tuple[int, int]]:
    """Partition and offset of every row, sorted: a row that is there twice shows twice."""
    columns = [table.column(name).to_pylist() for name in ("_partition", "_offset")]
    return sorted(zip(*columns, strict=True))


def all_places(bed: Bed, count: int) -> list[tuple[int, int]]:
    return [(partition, offset) for partition in range(bed.partitions) for offset in range(1, count + 1)]
