"""Values that are Arrow IPC streams: each is a table of its own, so one record gives many rows, or none.

Values come from anybody. Arrow reads a stream without looking at what its offsets point to, and whoever
follows a wrong one ends the process; so every table is checked before anything is done with it.

Nor has Arrow a bound for what becomes of a few bytes: compressed buffers, dictionaries of which each row
shows a long text, lists of nulls. So what a value becomes is added up first, from what its messages say of
their buffers (`formats/arrow_messages.py`), then from the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import UsageError
from forebay.formats.arrow_messages import message_facts
from forebay.spark.export._decode import (
    Decoded,
    Rows,
    Seen,
    add_seen,
    cast_table,
    dropped_fields,
    missing_columns,
    reason_of,
)
from forebay.spark.export._types import COLUMNS_MAX, NESTING_MAX, WIDE, columns_in, depth_of, table_type

__all__ = ["ArrowDecoder"]

ROWS_MAX: Final = 10_000_000
"""Rows of one value."""
VALUE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of one value once nothing in it is compressed, and each row has what it shows."""
PORTION_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of the values that are decoded together, with the one that reaches them."""
OFFSET_BYTES: Final = 4
"""What a null takes in a column of texts."""
VIEW_BYTES: Final = 16
"""Bytes of one view; its first four are the length of what it shows."""


class ArrowDecoder:
    """One IPC stream per value."""

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray, wanted: pa.Schema) -> Decoded:
        """All rows of all good values, or of the first ones where that is enough for once."""
        bad: list[tuple[int, str]] = []
        found, count = _portion(values, bad)
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
        return Decoded(decoded, joined, bad, missing, dropped, count)

    def look(self, values: pa.BinaryArray) -> Seen:
        """The columns of the good ones."""
        seen: Seen = {}
        for _, table, _ in _each(values, []):
            add_seen(seen, missing_columns([table], None))
        return seen


def _read(stream: pa.RecordBatchStreamReader) -> pa.Table:
    """All of it, unless it is too much: nulls take no bytes, so any number of them fits a short value."""
    batches, rows = [], 0
    for batch in stream:
        batches.append(batch)
        rows += batch.num_rows
        if rows > ROWS_MAX:
            raise pa.ArrowInvalid(f"{rows:,} rows in one value, of {ROWS_MAX:,} at most")
    return pa.Table.from_batches(batches, stream.schema)


@lru_cache(maxsize=256)
def _is_flat(schema: pa.Schema) -> bool:
    """Whether all columns are numbers and texts, which take what they take. Raises where a table of no format
    has one of them. Most records of a topic have the same schema."""
    if len(set(schema.names)) < len(schema.names):
        raise pa.ArrowInvalid(f"several columns have the same name: {schema.names}")
    if columns_in(schema.types) > COLUMNS_MAX:
        raise pa.ArrowInvalid(WIDE)
    for each in schema:
        table_type(each.type)
        if depth_of(each.type) >= NESTING_MAX:
            raise pa.ArrowInvalid(f"column {each.name!r} is nested more than {NESTING_MAX} deep")
    texts = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    return all(pa.types.is_primitive(kind) or any(each(kind) for each in texts) for kind in schema.types)


def _each(values: pa.BinaryArray, bad: list[tuple[int, str]]) -> Iterator[tuple[int, pa.Table, int]]:
    """The good ones with their bytes, one at a time; the others are added to `bad`."""
    for number in range(len(values)):  # A record is a whole table here, so this is a loop over batches.
        try:
            value = values[number].as_buffer()
            size = sum(facts.size for facts in message_facts(value))
            _check_bytes(size)
            with pa.ipc.open_stream(value) as stream:
                table = _read(stream)
            table.validate(full=True)
            if not _is_flat(table.schema):
                size = _written_bytes(table)
                _check_bytes(size)
        except (pa.ArrowException, OSError, UsageError, ValueError) as error:
            bad.append((number, reason_of(error)))
            continue
        yield number, table, size


def _portion(values: pa.BinaryArray, bad: list[tuple[int, str]]) -> tuple[list[tuple[int, pa.Table]], int]:
    """The first good ones, as many as are decoded together, and how many values were looked at for them."""
    found: list[tuple[int, pa.Table]] = []
    total = 0
    for number, table, size in _each(values, bad):
        found.append((number, table))
        total += size
        if total >= PORTION_BYTES_MAX:
            return found, number + 1
    return found, len(values)


def _check_bytes(size: int) -> None:
    if size > VALUE_BYTES_MAX:
        raise pa.ArrowInvalid(f"{size:,} bytes unpacked in one value, of {VALUE_BYTES_MAX:,} at most")


def _written_bytes(table: pa.Table) -> int:
    return sum(_bytes_of(chunk) for column in table.columns for chunk in column.chunks)


def _bytes_of(array: pa.Array) -> int:
    """Bytes of an array when each of its rows has what it shows."""
    kind, types = array.type, pa.types
    if types.is_null(kind):
        return OFFSET_BYTES * len(array)
    if types.is_dictionary(kind):
        return _spread_bytes(array)
    if types.is_struct(kind):
        return sum(_bytes_of(array.field(number)) for number in range(kind.num_fields))
    if types.is_map(kind):
        return _bytes_of(array.keys) + _bytes_of(array.items) + OFFSET_BYTES * len(array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _bytes_of(array.values) + OFFSET_BYTES * len(array)
    if types.is_binary_view(kind) or types.is_string_view(kind):
        lengths = np.frombuffer(array.buffers()[1], np.int32)[:: VIEW_BYTES // OFFSET_BYTES]
        lengths = lengths[array.offset : array.offset + len(array)]
        return int(lengths[np.asarray(array.is_valid())].sum(dtype=np.int64)) + OFFSET_BYTES * len(array)
    return int(array.nbytes)


def _spread_bytes(array: pa.DictionaryArray) -> int:
    values, types = array.dictionary, pa.types
    texts = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    if any(is_it(values.type) for is_it in texts):
        lengths = pc.binary_length(values).cast(pa.int64()).take(array.indices)
        return int(pc.sum(lengths).as_py() or 0) + OFFSET_BYTES * len(array)
    try:
        width = int(values.type.bit_width)
    except ValueError:  # Any of them may be the largest.
        return len(array) * _bytes_of(values)
    return len(array) * max(width // 8, 1)
