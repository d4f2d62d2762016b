"""Values that are Arrow IPC streams: each is a table of its own, so one record gives many rows, or none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from forebay.spark.export._decode import (
    Decoded,
    Rows,
    Seen,
    cast_table,
    dropped_fields,
    missing_columns,
    reason_of,
)

__all__ = ["ArrowDecoder"]


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
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
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


def _tables(values: pa.BinaryArray) -> tuple[list[tuple[int, pa.Table]], list[tuple[int, str]]]:
    good: list[tuple[int, pa.Table]] = []
    bad: list[tuple[int, str]] = []
    for number in range(len(values)):  # A record is a whole table here, so this is a loop over batches.
        try:
            with pa.ipc.open_stream(values[number].as_buffer()) as stream:
                good.append((number, stream.read_all()))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError) as error:
            bad.append((number, reason_of(error)))
    return good, bad
