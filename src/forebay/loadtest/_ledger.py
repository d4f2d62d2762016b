"""What a generator meant, request by request, and what it was told: the client's side of the account."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["ACKED", "FAILED", "UNKNOWN", "Ledger", "read_ledgers"]

ACKED, FAILED, UNKNOWN = 0, 1, 2
"""Durable at the offsets told; certainly not appended; nobody knows."""
SCHEMA: Final = pa.schema(
    [
        ("stream", pa.uint64()),
        ("first", pa.uint64()),
        ("count", pa.uint32()),
        ("partition", pa.uint32()),
        ("outcome", pa.uint8()),
        ("start_offset", pa.int64()),
        ("attempts", pa.uint16()),
        ("ended_s", pa.float64()),
        ("latency_s", pa.float64()),
    ]
)


class Ledger:
    """Grows by a line per request, written once at the end."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, int, int, int, int, int, float, float]] = []

    def add(self, *line: float) -> None:
        """The columns of the schema, in order."""
        self._lines.append(line)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._lines)

    def save(self, path: Path) -> None:
        """As an Arrow file."""
        columns = list(zip(*self._lines, strict=True)) if self._lines else [()] * len(SCHEMA)
        arrays = [pa.array(column, kind.type) for column, kind in zip(columns, SCHEMA, strict=True)]
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))


def read_ledgers(paths: Sequence[Path]) -> dict[str, npt.NDArray[np.generic]]:
    """All lines of all processes, by column."""
    tables = []
    for path in paths:
        with pa.memory_map(str(path)) as source:
            tables.append(pa.ipc.open_file(source).read_all())
    table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    return {name: np.array(table.column(name)) for name in SCHEMA.names}
