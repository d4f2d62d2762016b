"""Values that are Arrow IPC streams: each is a table of its own, so one record gives many rows, or none.

Values come from anybody. Arrow reads a stream without looking at what its offsets point to, and whoever
follows a wrong one ends the process; so every table is checked before anything is done with it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from forebay.errors import UsageError
from forebay.spark.export._decode import (
    Decoded,
    Rows,
    Seen,
    cast_table,
    dropped_fields,
    missing_columns,
    reason_of,
)
from forebay.spark.export._types import COLUMNS_MAX, NESTING_MAX, WIDE, columns_in, depth_of, table_type

__all__ = ["ArrowDecoder"]

ROWS_MAX: Final = 10_000_000
"""Rows of one value."""


class ArrowDecoder:
    """One IPC stream per value."""

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray, wanted: pa.Schema) -> Decoded:
        """All rows of all good values."""
        found, bad = _tables(values)
        tables: list[pa.Table] = []
        rows: list[Rows] = []
        for number, table in found:
            try:
                tables.append(cast_table(table, wanted))
            except pa.ArrowException as error:
                bad.append((number, reason_of(error)))
                continue
            rows.append(np.full(table.num_rows, number, np.int64))
        joined = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        missing = missing_columns([table for _, table in found], wanted)
        dropped = dropped_fields([table for _, table in found], wanted)
        decoded = pa.concat_tables(tables) if tables else wanted.empty_table()
        return Decoded(decoded, joined, bad, missing, dropped)

    def look(self, values: pa.BinaryArray) -> Seen:
        """The columns of the good ones."""
        return missing_columns([table for _, table in _tables(values)[0]], None)


def _read(stream: pa.RecordBatchStreamReader) -> pa.Table:
    """All of it, unless it is too much: nulls take no bytes, so any number of them fits a short value."""
    batches, rows = [], 0
    for batch in stream:
        batches.append(batch)
        rows += batch.num_rows
        if rows > ROWS_MAX:
            raise pa.ArrowInvalid(f"{rows:,} rows in one value, of {ROWS_MAX:,} at most")
    return pa.Table.from_batches(batches, stream.schema)


def _checked(table: pa.Table) -> pa.Table:
    """The table; raises where it is damaged, or has a column that no table of any format has."""
    table.validate(full=True)
    _check(table.schema)
    return table


@lru_cache(maxsize=256)
def _check(schema: pa.Schema) -> None:
    """Most records of a topic have the same schema."""
    if len(set(schema.names)) < len(schema.names):
        raise pa.ArrowInvalid(f"several columns have the same name: {schema.names}")
    if columns_in(schema.types) > COLUMNS_MAX:
        raise pa.ArrowInvalid(WIDE)
    for each in schema:
        table_type(each.type)
        if depth_of(each.type) >= NESTING_MAX:
            raise pa.ArrowInvalid(f"column {each.name!r} is nested more than {NESTING_MAX} deep")


def _tables(values: pa.BinaryArray) -> tuple[list[tuple[int, pa.Table]], list[tuple[int, str]]]:
    good: list[tuple[int, pa.Table]] = []
    bad: list[tuple[int, str]] = []
    for number in range(len(values)):  # A record is a whole table here, so this is a loop over batches.
        try:
            with pa.ipc.open_stream(values[number].as_buffer()) as stream:
                good.append((number, _checked(_read(stream))))
        except (pa.ArrowException, OSError, UsageError) as error:
            bad.append((number, reason_of(error)))
    return good, bad
