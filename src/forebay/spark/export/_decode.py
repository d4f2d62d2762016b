"""From values to columns, a whole batch at a time.

A decoder gets the values of a few thousand records and returns a table with one row for each good one, which
source row each came from, and the bad ones with the reason. A batch without a bad record is decoded by a
handful of calls into compiled code. Only where such a call fails is the batch cut in halves, and those again,
until the bad records stand alone: the cost is that of the bad ones, not of their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.spark.export._types import grown, is_hollow

__all__ = [
    "Decoded",
    "Decoder",
    "RawDecoder",
    "Seen",
    "add_seen",
    "cast_table",
    "decode_halves",
    "dropped_fields",
    "fields_beside",
]

HALVES_MIN: Final = 16
"""Records below which a failing piece is decoded one by one."""
REASON_CHARS_MAX: Final = 300
"""Longest reason kept with a bad record."""

Rows: TypeAlias = npt.NDArray[np.int64]
Seen: TypeAlias = dict[str, dict[pa.DataType, int]]
"""Columns, the types they were seen with, and in how many rows."""


@dataclass(slots=True)
class Decoded:
    """What became of a batch of values."""

    table: pa.Table
    """The payload columns of the good records, in order."""
    rows: Rows | None = None
    """For each row of `table` the record it came from; None: row n is record n."""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Records that are not in `table`, with the reason."""
    missing: Seen = field(default_factory=dict)
    """Columns that were seen and that the wanted schema does not have, or has with fewer fields inside."""
    dropped: frozenset[str] = frozenset()
    """Fields inside of a wanted column that its type has no place for, as `column.field`."""
    count: int | None = None
    """Records that were looked at, from the first on; the others come again. None: all of them."""


class Decoder(Protocol):
    """Decodes values to a schema."""

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray, wanted: pa.Schema) -> Decoded:
        """The values as rows with exactly the columns of `wanted`."""

    def look(self, values: pa.BinaryArray) -> Seen:
        """Which columns the values have."""


class RawDecoder:
    """Key and value as they are."""

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray, wanted: pa.Schema) -> Decoded:
        """One row per record."""
        return Decoded(cast_table(pa.table({"key": keys, "value": values}), wanted))

    def look(self, values: pa.BinaryArray) -> Seen:
        """Always the same two."""
        return {"key": {pa.binary(): len(values)}, "value": {pa.binary(): len(values)}}


def cast_table(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The wanted columns with their types; a column that is not there is null."""
    columns = [
        # Tables have microseconds, and nanoseconds are common.
        table.column(each.name).cast(options=pc.CastOptions(each.type, allow_time_truncate=True))
        if each.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, each.type)])
        for each in wanted
    ]
    return pa.Table.from_arrays(columns, schema=wanted)


def decode_halves(
    whole: Callable[[pa.BinaryArray], pa.Table],
    values: pa.BinaryArray,
    failures: type[Exception] | tuple[type[Exception], ...],
) -> tuple[list[tuple[int, pa.Table]], list[tuple[int, str]]]:
    """Tables of the runs of good records, each with its first record, and the bad records.

    `whole` gives one row per record or raises. Runs are decoded as large as they can be.
    """
    good: list[tuple[int, pa.Table]] = []
    bad: list[tuple[int, str]] = []
    pieces = [(0, len(values))]
    while pieces:
        first, count = pieces.pop()
        if not count:
            continue
        try:
            good.append((first, whole(values.slice(first, count))))
        except failures as error:
            if count == 1:
                bad.append((first, reason_of(error)))
                continue
            step = 1 if count <= HALVES_MIN else (count + 1) // 2
            starts = range(first, first + count, step)
            pieces += [(at, min(step, first + count - at)) for at in reversed(starts)]
    return good, bad


def reason_of(error: Exception) -> str:
    """Why a record is bad, in one line."""
    return " ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__


def rows_of(good: Sequence[tuple[int, pa.Table]]) -> Rows:
    """The record numbers of the rows of some runs."""
    runs = [np.arange(first, first + table.num_rows, dtype=np.int64) for first, table in good]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def missing_columns(tables: Sequence[pa.Table], wanted: pa.Schema | None) -> Seen:
    """Columns of the tables that `wanted` lacks, or has with fewer fields inside, with the types they were
    seen with; not those of which nothing is known yet."""
    found: Seen = {}
    rows: dict[pa.Schema, int] = {}
    for table in tables:
        rows[table.schema] = rows.get(table.schema, 0) + table.num_rows
    for schema, count in rows.items():
        for each in schema:
            place = -1 if wanted is None else wanted.get_field_index(each.name)
            if wanted is None or place < 0:
                is_new = not is_hollow(each.type)
            else:
                known = wanted.field(place).type
                is_new = pa.types.is_nested(known) and grown(known, each.type) != known
            if is_new:
                add_seen(found, {each.name: {each.type: count}})
    return found


def dropped_fields(tables: Sequence[pa.Table], wanted: pa.Schema) -> frozenset[str]:
    """Fields inside of the wanted columns that a cast to their types leaves out; not those all null."""
    return frozenset(
        name
        for schema in {table.schema for table in tables}
        for each in wanted
        if (found := schema.get_field_index(each.name)) >= 0
        for name in fields_beside(each.name, schema.field(found).type, each.type)
    )


def fields_beside(name: str, found: pa.DataType, wanted: pa.DataType) -> Iterator[str]:
    """Fields inside of `found` that `wanted` does not have, as `column.field`."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        yield from fields_beside(name, found.value_type, wanted.value_type)
    if pa.types.is_map(found) and pa.types.is_map(wanted):
        yield from fields_beside(name, found.item_type, wanted.item_type)
    if not (pa.types.is_struct(found) and pa.types.is_struct(wanted)):
        return
    for field_found in found:
        place = wanted.get_field_index(field_found.name)
        inner = f"{name}.{field_found.name}"
        if place >= 0:
            yield from fields_beside(inner, field_found.type, wanted.field(place).type)
        elif not is_hollow(field_found.type):
            yield inner


def add_seen(total: Seen, more: Mapping[str, Mapping[pa.DataType, int]]) -> None:
    """Add up how often columns were seen with which types."""
    for name, kinds in more.items():
        known = total.setdefault(name, {})
        for kind, rows in kinds.items():
            known[kind] = known.get(kind, 0) + rows


def together(tables: Sequence[pa.Table], wanted: pa.Schema) -> pa.Table:
    """Several tables as one with the wanted columns."""
    return (
        pa.concat_tables([cast_table(table, wanted) for table in tables]) if tables else wanted.empty_table()
    )
