"""Parquet files: written to memory, put into the store under a name nobody ever had, and described.

The name has a random part, so that a task that is tried again never touches the file of its first attempt. A
file that is written and never named by a commit is an orphan: it is in nobody's way, and `orphans` lists it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import LimitExceeded
from forebay.spark.export._facts import DataFile

__all__ = ["encode_parquet", "file_name", "folder_name", "statistics"]

ROW_GROUP_ROWS: Final = 500_000
"""Rows of one row group."""
SPARE_BYTES: Final = 64 * 1024
"""Room for what a file has beside its columns."""
STATISTICS_COLUMNS_MAX: Final = 64
"""Columns that get statistics in a commit."""
FOLDER_CHARS_MAX: Final = 240
"""Longest directory of a partition: as long as a part of a key may be."""
FOLDERS_CHARS_MAX: Final = 840
"""Longest directories of a partition together: as long as a key may be, without the name of the file."""
HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


def file_name(partition: Mapping[str, str | None], *, hive: bool) -> str:
    """A new name. With `hive` the partition is spelled in directories, as readers of plain Parquet expect."""
    name = f"part-{uuid.uuid4().hex}.parquet"
    if not hive or not partition:
        return name
    folders = [folder_name(key, value) for key, value in partition.items()]
    longest = max(map(len, folders))
    if longest > FOLDER_CHARS_MAX:
        raise LimitExceeded(
            "characters of a partition's directory",
            limit=FOLDER_CHARS_MAX,
            actual=longest,
            hint="partition by a column with short values, or export to delta:, which has no directories",
        )
    return "/".join([*folders, name])


def folder_name(column: str, value: str | None) -> str:
    """The directory of a partition's value."""
    return f"{quote(column, safe='')}={HIVE_NULL if value is None else quote(value, safe='')}"


def encode_parquet(table: pa.Table, compression: str) -> tuple[pa.Buffer, pq.FileMetaData]:
    """A file's bytes and its footer. Columns whose lowest or highest value Python cannot say, times in no
    calendar, have no statistics: pyiceberg would end there."""
    data = _encoded(table, compression, statistics=True)
    footer = pq.read_metadata(pa.BufferReader(data))
    names = [footer.schema.column(number).path for number in range(footer.num_columns)]
    said = [name for number, name in enumerate(names) if _is_said(footer, number)]
    if len(said) < len(names):
        data = _encoded(table, compression, statistics=said or False)
        footer = pq.read_metadata(pa.BufferReader(data))
    return data, footer


def _is_said(footer: pq.FileMetaData, number: int) -> bool:
    kind = footer.schema.column(number).logical_type.type
    if kind not in ("DATE", "TIMESTAMP"):
        return True
    for group in range(footer.num_row_groups):
        ends = footer.row_group(group).column(number).statistics
        try:
            _ = ends is not None and ends.has_min_max and (ends.min, ends.max)
        except (OverflowError, ValueError):
            return False
    return True


def _encoded(table: pa.Table, compression: str, *, statistics: bool | list[str]) -> pa.Buffer:
    # What grows is copied whenever it does, a sixth of the work where values are large. A file is hardly ever
    # larger than its columns are in memory, and room that is not used is never touched.
    room = pa.allocate_buffer(table.nbytes + table.nbytes // 16 + SPARE_BYTES)
    out = pa.FixedSizeBufferWriter(room)
    try:
        _write(table, out, compression, statistics)
    except OSError:  # It is larger: many levels of nesting, or a dictionary that is written out.
        growing = pa.BufferOutputStream()
        _write(table, growing, compression, statistics)
        return growing.getvalue()
    return room.slice(0, out.tell())


def _write(table: pa.Table, out: pa.NativeFile, compression: str, statistics: bool | list[str]) -> None:
    # Binary values are mostly all different: trying a dictionary first costs a tenth of the time.
    dictionary = [each.name for each in table.schema if pa.types.is_string(each.type)]
    pq.write_table(
        table,
        out,
        row_group_size=ROW_GROUP_ROWS,
        compression=compression,
        use_dictionary=dictionary or False,
        write_statistics=statistics,
        coerce_timestamps="us",
        store_schema=False,
    )


def describe(
    path: str, data: pa.Buffer, footer: pq.FileMetaData, partition: Mapping[str, str | None]
) -> DataFile:
    """What a commit needs to know of a file."""
    return DataFile(path, data.size, footer.num_rows, dict(partition), statistics(footer))


def statistics(footer: pq.FileMetaData) -> str:
    """Row count, and lowest and highest values of plain columns, as Delta writes them."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    names = [footer.schema.column(number).path for number in range(footer.num_columns)]
    for number, name in enumerate(names[:STATISTICS_COLUMNS_MAX]):
        found = [group.column(number).statistics for group in groups]
        if "." in name or not all(each is not None and each.has_null_count for each in found):
            continue
        nulls[name] = sum(each.null_count for each in found)
        ends = [each for each in found if each.has_min_max]
        if ends and len(ends) == sum(each.num_values > 0 for each in found):
            _add_ends(name, ends, low, high)
    stats = {"numRecords": footer.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}
    return json.dumps(stats)


def _add_ends(name: str, ends: Sequence[Any], low: dict[str, Any], high: dict[str, Any]) -> None:
    try:
        lowest, highest = min(each.min for each in ends), max(each.max for each in ends)
        if isinstance(lowest, bool) or not isinstance(lowest, int | datetime | date):
            return
        found = _spell(lowest, up=False), _spell(highest, up=True)
    except (OverflowError, ValueError):  # A day that is not in Python's calendar.
        return
    low[name], high[name] = found


def _spell(value: int | datetime | date, *, up: bool) -> int | str:
    """Times are kept in milliseconds: the highest is rounded up, so that nothing lies outside."""
    if isinstance(value, datetime):
        rest = value.microsecond % 1000
        value += timedelta(microseconds=1000 - rest if up and rest else -rest)
        return value.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
    return value.isoformat() if isinstance(value, date) else value
