"""Rows of attributes and of items, on their way from OTLP messages into tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from forebay.dataflow._otap import _values as v
from forebay.dataflow._otap._build import Column, column, ids, make_struct, make_table, parents, required
from forebay.dataflow._otap._cbor import write_value
from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap._types import BOOL, F64, I64, TEXT, U8, U16, U32

__all__ = ["Attributes", "Item", "common_columns", "fixed", "signed", "value_columns", "value_row"]

_SIGN: Final = 1 << 63
_Row = tuple[Any, ...]
_NOTHING: Final[_Row] = (v.EMPTY, None, None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class Item:
    """A span, log record or metric, and the groups that it is in, with their numbers."""

    resource: int
    resource_group: Any
    scope: int
    scope_group: Any
    item: Any


class Attributes:
    """Collects one table of attributes. Parents come in rising order."""

    def __init__(self, kind: PayloadType, width: pa.DataType) -> None:
        self.kind = kind
        self._width = width
        self._parents: list[int] = []
        self._keys: list[str] = []
        self._values: list[_Row] = []

    def add(self, parent: int, pairs: Iterable[Any]) -> None:
        """The attributes of one owner."""
        for pair in pairs:
            self._parents.append(parent)
            self._keys.append(pair.key)
            # Most values are texts; asking which kind a value is costs as much as all the rest.
            text = pair.value.string_value
            row = (v.TEXT, text, None, None, None, None, None) if text else value_row(pair.value)
            self._values.append(row)

    def table(self) -> pa.RecordBatch | None:
        """The table, none where there are no attributes."""
        if not self._keys:
            return None
        batch = make_table([required("key", TEXT, self._keys), *value_columns(self._values)])
        return parents(self.kind, batch, self._parents, self._width, v.alike)


def value_row(value: Any) -> _Row:
    """A message `AnyValue` as type and columns. A kind that OTAP lacks is nothing: profiles have one."""
    make = _VALUE_ROWS.get(value.WhichOneof("value"))
    return _NOTHING if make is None else make(value)


def value_columns(rows: Sequence[_Row]) -> list[Column | None]:
    """The columns of values."""
    types, texts, integers, doubles, booleans, binaries, serialized = zip(*rows, strict=True)
    return [
        required("type", U8, types),
        column("str", TEXT, texts),
        column("int", I64, integers),
        column("double", F64, doubles),
        column("bool", BOOL, booleans),
        column("bytes", pa.binary(), binaries),
        column("ser", pa.binary(), serialized),
    ]


def common_columns(rows: Sequence[Item], attributes: list[Attributes]) -> list[Column | None]:
    """Columns that the first table of every signal has; attributes of resources and scopes are added."""
    of_resources = Attributes(PayloadType.RESOURCE_ATTRS, U16)
    of_scopes = Attributes(PayloadType.SCOPE_ATTRS, U16)
    attributes += [of_resources, of_scopes]
    seen: set[tuple[str, int]] = set()
    for row in rows:
        if ("resource", row.resource) not in seen:
            seen.add(("resource", row.resource))
            of_resources.add(row.resource, row.resource_group.resource.attributes)
        if ("scope", row.scope) not in seen:
            seen.add(("scope", row.scope))
            of_scopes.add(row.scope, row.scope_group.scope.attributes)
    resources = [row.resource_group for row in rows]
    scopes = [row.scope_group.scope for row in rows]
    return [
        ids("id", U16, range(len(rows))),
        make_struct(
            "resource",
            [
                ids("id", U16, [row.resource for row in rows]),
                column("schema_url", TEXT, [each.schema_url for each in resources], ""),
                column(
                    "dropped_attributes_count",
                    U32,
                    [each.resource.dropped_attributes_count for each in resources],
                    0,
                ),
            ],
        ),
        make_struct(
            "scope",
            [
                ids("id", U16, [row.scope for row in rows]),
                column("name", TEXT, [each.name for each in scopes], ""),
                column("version", TEXT, [each.version for each in scopes], ""),
                column(
                    "dropped_attributes_count", U32, [each.dropped_attributes_count for each in scopes], 0
                ),
            ],
        ),
        column("schema_url", TEXT, [row.scope_group.schema_url for row in rows], ""),
    ]


def signed(number: int) -> int:
    """64 bits without a sign as 64 bits with one."""
    return number if number < _SIGN else number - 2 * _SIGN


def fixed(data: bytes, length: int) -> bytes | None:
    """An id, none where it has not the length of one."""
    return data if len(data) == length else None


def _serialized(value: Any) -> bytes:
    out = bytearray()
    write_value(value, out)
    return bytes(out)


_VALUE_ROWS: Final[dict[str, Callable[[Any], _Row]]] = {
    "string_value": lambda value: (v.TEXT, value.string_value, None, None, None, None, None),
    "int_value": lambda value: (v.INT, None, value.int_value, None, None, None, None),
    "double_value": lambda value: (v.DOUBLE, None, None, value.double_value, None, None, None),
    "bool_value": lambda value: (v.BOOL, None, None, None, value.bool_value, None, None),
    "kvlist_value": lambda value: (v.MAP, None, None, None, None, None, _serialized(value)),
    "array_value": lambda value: (v.SLICE, None, None, None, None, None, _serialized(value)),
    "bytes_value": lambda value: (v.BYTES, None, None, None, None, value.bytes_value, None),
}
