"""A table of a batch, column by column: the right type or an error, values as lists.

Columns may be absent, which means that all their values are the default, and may be dictionaries, which means
nothing. A dictionary makes much of little, so the table is measured before any column is spread out.

**Ids** are numbers that were made small for the wire, and a field's metadata may say how:

    plain        the number itself
    delta        the difference to the row above; rows without an id are passed over
    quasidelta   the difference to the row above where the two are alike, otherwise the number itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import FormatError

__all__ = ["NO_ID", "Table", "spread_bytes"]

NO_ID: Final = -1
"""In place of an id that is null."""
ROW_BYTES: Final = 16
"""What a row counts besides its values."""

_Mask = npt.NDArray[np.bool_]
_Ids = npt.NDArray[np.int64]


class Table:
    """One table."""

    def __init__(self, name: str, batch: pa.RecordBatch) -> None:
        self.name = name
        self.rows: int = batch.num_rows
        self._batch = batch

    def column(self, path: str, kind: pa.DataType, *, required: bool = False) -> pa.Array | None:
        """A column, not a dictionary any more; `resource.id` is a column inside another."""
        found = self._find(path)
        if found is None:
            if required:
                raise self.wrong(f"there is no column {path}")
            return None
        array, field = found
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if not _is_same(array.type, kind):
            raise self.wrong(f"{path} is {field.type}, not {kind}")
        return array

    def values(self, path: str, kind: pa.DataType, default: Any, *, required: bool = False) -> Sequence[Any]:
        """The values of a column, `default` for those that are null."""
        array = self.column(path, kind, required=required)
        if array is None:
            return [default] * self.rows
        if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
            array = array.view(pa.int64())
        if array.null_count:
            if default is None or not pa.types.is_primitive(array.type):
                return [default if each is None else each for each in array.to_pylist()]
            array = array.fill_null(default)
        if pa.types.is_primitive(array.type):
            plain: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
            return plain
        listed: list[Any] = array.to_pylist()
        return listed

    def optional_ids(self, path: str, kind: pa.DataType) -> list[bytes]:
        """A column of ids of spans or traces; those that are null or all zeros, which is no id, are empty."""
        none = bytes(kind.byte_width)
        return [b"" if each == none else each for each in self.values(path, kind, b"")]

    def pairs(self, path: str, names: tuple[str, str]) -> list[list[tuple[float, float]]]:
        """A column of lists of two doubles each."""
        found = self._find(path)
        if found is None:
            return [[]] * self.rows
        kind = found[1].type
        if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
            raise self.wrong(f"{path} is {kind}, not a list of structs")
        first, second = names
        return [
            [(each.get(first) or 0.0, each.get(second) or 0.0) for each in values or () if each is not None]
            for values in found[0].to_pylist()
        ]

    def ids(self, path: str, kind: pa.DataType) -> list[int]:
        """A column of ids; `NO_ID` where there is none. All others differ."""
        array = self.column(path, kind)
        if array is None:
            return [NO_ID] * self.rows
        ids = self._undo_delta(path, array, kind)
        real = ids[ids != NO_ID]
        if path == "id" and len(np.unique(real)) != len(real):
            raise self.wrong("an id comes twice")
        found: list[int] = ids.tolist()
        return found

    def parents(self, kind: pa.DataType, alike: _Mask | None) -> list[int]:
        """The column `parent_id`. `alike`: rows that are like the one above; none: every row is."""
        array = self.column("parent_id", kind, required=True)
        assert array is not None
        if array.null_count:
            raise self.wrong("parent_id is null")
        if alike is None:
            ids = self._undo_delta("parent_id", array, kind)
        else:
            ids = array.to_numpy().astype(np.int64)
            if self._encoding("parent_id") != "plain" and self.rows:
                begins = np.where(alike, 0, np.arange(self.rows))
                first = np.maximum.accumulate(begins)
                sums = np.cumsum(ids)
                ids = (sums - (sums[first] - ids[first])) & _mask(kind)
        found: list[int] = ids.tolist()
        return found

    def alike(self, paths: Sequence[tuple[str, pa.DataType]]) -> _Mask | None:
        """Rows that in these columns are like the one above; none where there are no such columns."""
        found = [self._find(path) for path, kind in paths if self.column(path, kind) is not None]
        if not found:
            return None
        every: _Mask = np.logical_and.reduce([_like_above_raw(each[0]) for each in found if each])
        return every

    def wrong(self, what: str) -> FormatError:
        """An error about this table."""
        return FormatError(f"{self.name}: {what}", hint="send what the OTAP specification describes")

    def _undo_delta(self, path: str, array: pa.Array, kind: pa.DataType) -> _Ids:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        numbers = array.fill_null(0).to_numpy().astype(np.int64)
        if self._encoding(path) != "plain":
            numbers = np.cumsum(np.where(valid, numbers, 0)) & _mask(kind)
        return np.where(valid, numbers, NO_ID)

    def _encoding(self, path: str) -> str:
        found = self._find(path)
        assert found is not None
        encoding: str = (found[1].metadata or {}).get(b"encoding", b"").decode("ascii", "replace")
        if encoding not in ("", "plain", "delta", "quasidelta"):
            raise self.wrong(f"{path} is encoded as {encoding[:20]!r}")
        return encoding

    def _find(self, path: str) -> tuple[pa.Array, pa.Field] | None:
        outer, _, inner = path.partition(".")
        index = self._batch.schema.get_field_index(outer)
        if index < 0:
            return None
        array, field = self._batch.column(index), self._batch.schema.field(index)
        if not inner:
            return array, field
        if not pa.types.is_struct(field.type):
            raise self.wrong(f"{outer} is {field.type}, not a struct")
        index = field.type.get_field_index(inner)
        if index < 0:
            return None
        # Null where the struct is.
        return pc.struct_field(array, [index]), field.type.field(index)


def _is_same(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether they are equal but for time zones and names of items."""
    types = pa.types
    if types.is_timestamp(kind) and types.is_timestamp(wanted):
        return bool(kind.unit == wanted.unit)
    if types.is_list(kind) and types.is_list(wanted):
        return bool(kind.value_type == wanted.value_type)
    return bool(kind == wanted)


def like_above(column: pa.Array) -> _Mask:
    """Which values are equal to the one above. Nulls are equal."""
    if pa.types.is_floating(column.type):
        column = column.view(pa.uint64())
    codes = column.dictionary_encode().indices.fill_null(-1).to_numpy()
    alike = np.zeros(len(codes), np.bool_)
    alike[1:] = codes[1:] == codes[:-1]
    return alike


def _like_above_raw(column: pa.Array) -> _Mask:
    """The same as the reference compares outside of attributes: by what is stored, where a null is a zero."""
    if pa.types.is_dictionary(column.type):
        column = column.indices
    return like_above(column.fill_null(0) if pa.types.is_primitive(column.type) else column)


def spread_bytes(batch: pa.RecordBatch) -> int:
    """Bytes that the values of a batch take when each stands for itself. Raises `ValueError`."""
    return int(batch.num_rows) * ROW_BYTES + sum(_spread(column) for column in batch.columns)


def _spread(column: pa.Array) -> int:
    kind = column.type
    if pa.types.is_struct(kind):
        return sum(_spread(column.field(index)) for index in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        if not len(column.dictionary):
            return 0
        lengths = _lengths(column.dictionary)
        codes = column.indices.drop_null().to_numpy()
        return int(lengths[codes].sum())
    if not _is_plain(kind):
        raise ValueError(f"a column of type {kind}")
    return int(column.nbytes)


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    if pa.types.is_binary(values.type) or pa.types.is_string(values.type):
        return pc.binary_length(values).fill_null(0).to_numpy().astype(np.int64)  # type: ignore[no-any-return]
    if not _is_plain(values.type) or pa.types.is_list(values.type):
        raise ValueError(f"a dictionary of {values.type}")
    width = max(1, values.type.bit_width // 8)
    return np.full(len(values), width, np.int64)


def _is_plain(kind: pa.DataType) -> bool:
    """Whether a type stores each value where it stands."""
    types = pa.types
    if types.is_list(kind):
        inner = kind.value_type
        if types.is_struct(inner):
            return all(types.is_floating(inner.field(index).type) for index in range(inner.num_fields))
        return types.is_primitive(inner)  # type: ignore[no-any-return]
    simple = (types.is_primitive, types.is_string, types.is_binary, types.is_fixed_size_binary)
    return any(is_it(kind) for is_it in simple)


def _mask(kind: pa.DataType) -> int:
    return (1 << int(kind.bit_width)) - 1
