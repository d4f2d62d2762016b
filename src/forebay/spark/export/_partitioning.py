"""Which rows go into which file: the columns a table is partitioned by, and how a table is cut along them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import LimitExceeded, UsageError
from forebay.spark.export._files import FOLDER_CHARS_MAX, FOLDERS_CHARS_MAX, folder_name

__all__ = ["Partitioning"]

FILES_PER_TASK_MAX: Final = 1_000
"""Most partitions that one task may write to: each is a file of its own."""
DAY_MIN: Final = -719_162
DAY_MAX: Final = 2_932_896
"""The first day of the year 1 and the last of 9999, counted from 1970."""
NO_DAY: Final = "a time to partition by is outside of the years 1 to 9999"
TOO_LONG: Final = "the value to partition by is too long for the name of a directory"
_DATE: Final = re.compile(r"date\((\w+)\)")


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Columns a table is partitioned by, and those of them that are derived from another."""

    columns: tuple[str, ...] = ()
    derived: tuple[tuple[str, str], ...] = ()
    """Name of a date column, and of the column whose day it is."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Partitioning:
        """`country`, `date` (the day of `_timestamp`), `date(c)` (the day of `c`)."""
        columns: list[str] = []
        derived: list[tuple[str, str]] = []
        for word in words:
            match = _DATE.fullmatch(word)
            if word == "date":
                derived.append(("_date", "_timestamp"))
            elif match:
                derived.append((f"{match[1]}_date", match[1]))
            columns.append(derived[-1][0] if word == "date" or match else word)
        if len(set(columns)) != len(columns):
            raise UsageError(f"partitioned twice by the same: {words}", hint="name every column once")
        return cls(tuple(columns), tuple(derived))

    def fields(self) -> list[pa.Field]:
        """The columns that are added for it."""
        return [pa.field(name, pa.date32()) for name, _ in self.derived]

    def check(self, schema: pa.Schema) -> None:
        """Raise `UsageError` where a column is not there or cannot be partitioned by."""
        for name in self.columns:
            if schema.get_field_index(name) < 0:
                known = ", ".join(schema.names)
                raise UsageError(f"there is no column {name!r} to partition by", hint=f"there are {known}")
            if pa.types.is_nested(schema.field(name).type) or pa.types.is_binary(schema.field(name).type):
                raise UsageError(f"{name!r} is no column to partition by", hint="choose a plain one")
        for name, origin in self.derived:
            found = schema.get_field_index(origin)
            if found < 0 or not pa.types.is_temporal(schema.field(origin).type):
                raise UsageError(f"{name!r} needs a timestamp column {origin!r}", hint="choose another one")

    def misplaced(self, table: pa.Table, *, folders: bool) -> dict[int, str]:
        """Rows that belong to no partition, and why: days and times outside of the years 1 to 9999 have no
        name, and with `folders` texts may be too long for one."""
        found: dict[int, str] = {}
        origins = dict(self.derived)
        for name in self.columns:
            column = table.column(origins.get(name, name))
            if pa.types.is_temporal(column.type):
                days = column.cast(pa.date32(), safe=False).cast(pa.int32())
                outside = pc.or_(pc.less(days, DAY_MIN), pc.greater(days, DAY_MAX))
                found |= dict.fromkeys(_where(outside), NO_DAY)
            elif folders and pa.types.is_string(column.type):
                found |= dict.fromkeys(_where(self._too_long(name, column)), TOO_LONG)
        return found

    def _too_long(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        chars_max = min(FOLDER_CHARS_MAX, FOLDERS_CHARS_MAX // len(self.columns))
        # A byte is spelled with three characters at most, so that few texts have to be spelled at all.
        perhaps = pc.greater(pc.binary_length(column), (chars_max - len(folder_name(name, ""))) // 3)
        texts = pc.unique(column.filter(perhaps)).to_pylist()
        long = [text for text in texts if len(folder_name(name, text)) > chars_max]
        return pc.is_in(column, pa.array(long, pa.string()))

    def add(self, table: pa.Table) -> pa.Table:
        """The table with its derived columns."""
        for name, origin in self.derived:
            days = table.column(origin).cast(pa.date32(), safe=False)
            table = table.append_column(pa.field(name, pa.date32()), days)
        return table

    def cut(self, table: pa.Table) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
        """The rows of each partition, in their order, with the partition's values as text."""
        if not self.columns or not table.num_rows:
            yield {}, table
            return
        codes, values = _codes([table.column(name) for name in self.columns])
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        if len(starts) > FILES_PER_TASK_MAX:
            raise LimitExceeded(
                "partitions written by one task",
                limit=FILES_PER_TASK_MAX,
                actual=len(starts),
                hint="partition by fewer columns, or by coarser ones",
            )
        sorted_table = table if len(starts) == 1 else table.take(pa.array(order))
        ends = [*starts[1:].tolist(), len(ordered)]
        for start, end in zip(starts.tolist(), ends, strict=True):
            texts = [column[int(order[start])] for column in values]
            yield dict(zip(self.columns, texts, strict=True)), sorted_table.slice(start, end - start)


def _where(chosen: pa.ChunkedArray) -> list[int]:
    """The rows that are chosen."""
    rows: list[int] = np.flatnonzero(chosen.fill_null(False).to_numpy()).tolist()
    return rows


def _codes(columns: Sequence[pa.ChunkedArray]) -> tuple[npt.NDArray[np.int64], list[_Texts]]:
    """A number per row that is the same for the same values, and the values as text."""
    codes = np.zeros(len(columns[0]), np.int64)
    values = []
    for column in columns:
        encoded = pc.dictionary_encode(column, null_encoding="encode").combine_chunks()
        numbers = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        codes = codes * (len(encoded.dictionary) + 1) + numbers
        values.append(_Texts(numbers, [_text(each) for each in encoded.dictionary]))
    return codes, values


@dataclass(frozen=True, slots=True)
class _Texts:
    numbers: npt.NDArray[np.int64]
    texts: list[str | None]

    def __getitem__(self, row: int) -> str | None:
        return self.texts[int(self.numbers[row])]


def _text(value: pa.Scalar) -> str | None:
    """A partition's value as Delta writes it. The empty string means null there, so it is null."""
    if not value.is_valid:
        return None
    if pa.types.is_boolean(value.type):
        return "true" if value.as_py() else "false"
    if pa.types.is_timestamp(value.type):
        return str(value.as_py().strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
    return str(value.as_py()) or None
