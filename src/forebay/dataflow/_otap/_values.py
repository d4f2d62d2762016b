"""Values of any type in columns: attributes, and bodies of logs.

    type     0 nothing   1 text   2 integer   3 double   4 truth value   5 map   6 list   7 bytes
    column               str      int         double     bool            ser     ser      bytes

The other columns of a row mean nothing. Maps and lists are CBOR. A column that is not there has the default
of its type. Two rows of attributes are alike, for the encoding of `parent_id`, if type, key and value are
equal and the value is not null; nothing, maps and lists are never alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.dataflow._otap._cbor import Reader
from forebay.dataflow._otap._table import Table, like_above

__all__ = ["BOOL", "BYTES", "DOUBLE", "EMPTY", "INT", "MAP", "SLICE", "TEXT", "Values", "alike", "attach"]

EMPTY, TEXT, INT, DOUBLE, BOOL, MAP, SLICE, BYTES = range(8)

COLUMNS: Final[dict[int, tuple[str, pa.DataType, Any]]] = {
    TEXT: ("str", pa.string(), ""),
    INT: ("int", pa.int64(), 0),
    DOUBLE: ("double", pa.float64(), 0.0),
    BOOL: ("bool", pa.bool_(), False),
    BYTES: ("bytes", pa.binary(), b""),
}
"""Column, its type and default of every type that is not CBOR."""
_FIELDS: Final = {
    TEXT: "string_value",
    INT: "int_value",
    DOUBLE: "double_value",
    BOOL: "bool_value",
    BYTES: "bytes_value",
}


class Values:
    """The columns of values of a table; `prefix` where they are inside another column."""

    def __init__(self, table: Table, reader: Reader, prefix: str = "") -> None:
        self.types: Sequence[int] = table.values(f"{prefix}type", pa.uint8(), EMPTY, required=not prefix)
        self._reader = reader
        self._columns: dict[int, Sequence[Any]] = {}
        present = set(self.types)
        if present and max(present) > BYTES:
            raise table.wrong(f"a value of type {max(present)}")
        for kind, (name, arrow, default) in COLUMNS.items():
            if kind in present:
                self._columns[kind] = table.values(f"{prefix}{name}", arrow, default)
        if present & {MAP, SLICE}:
            serialized = table.values(f"{prefix}ser", pa.binary(), b"")
            self._columns[MAP] = self._columns[SLICE] = serialized

    def setter(self) -> Callable[[int, Any], None]:
        """A function that puts the value of a row into a message `AnyValue`."""
        types, columns, read = self.types, self._columns, self._reader.read
        names, texts = _FIELDS, columns.get(TEXT, ())

        def put(row: int, into: Any) -> None:
            kind = types[row]
            if kind == TEXT:
                into.string_value = texts[row]
                return
            name = names.get(kind)
            if name is not None:
                setattr(into, name, columns[kind][row])
            elif kind:
                data = columns[kind][row]
                if data:
                    read(data, into)

        return put


def attach(
    table: Table | None,
    owners: Mapping[int, Any],
    reader: Reader,
    ids: pa.DataType,
    field: str = "attributes",
) -> None:
    """Hang the rows of a table of attributes on their owners. Rows without one are passed over."""
    if table is None or not table.rows:
        return
    keys = table.values("key", pa.string(), "", required=True)
    values = Values(table, reader)
    parents = table.parents(ids, alike(table))
    put = values.setter()
    adders = {ident: getattr(owner, field).add for ident, owner in owners.items()}
    for row, (parent, key) in enumerate(zip(parents, keys, strict=True)):
        add = adders.get(parent)
        if add is not None:
            put(row, add(key=key).value)


def alike(table: Table) -> npt.NDArray[np.bool_]:
    """Rows of attributes that are like the one above."""
    kinds = np.array(table.values("type", pa.uint8(), EMPTY), np.uint8)
    keys = table.column("key", pa.string(), required=True)
    value_alike = np.zeros(table.rows, np.bool_)
    for kind, (name, arrow, _) in COLUMNS.items():
        column = table.column(name, arrow)
        if column is not None:
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            value_alike |= (kinds == kind) & valid & like_above(column)
    same_kind = np.zeros(table.rows, np.bool_)
    same_kind[1:] = kinds[1:] == kinds[:-1]
    return value_alike & same_kind & like_above(keys)
