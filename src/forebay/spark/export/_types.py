"""Types that every table format has, and how Arrow's many types become them.

Delta, Iceberg and Spark share a small set. What is outside of it is widened where nothing is lost (an
unsigned 32-bit number becomes a 64-bit one) and refused where something would be.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping

import pyarrow as pa

from forebay.errors import UsageError

__all__ = [
    "COLUMNS_MAX",
    "NESTING_MAX",
    "WIDE",
    "choose",
    "columns_in",
    "depth_of",
    "grown",
    "is_hollow",
    "is_name",
    "parse_schema",
    "schema_of",
    "table_schema",
    "table_type",
]

TIMESTAMP = pa.timestamp("us", tz="UTC")
DECIMAL_DIGITS_MAX = 38
"""Digits of a decimal number that every table has."""
NESTING_MAX = 32
"""Objects and lists inside of one another: Delta's schemas end at some forty."""
NAME_CHARS_MAX = 255
"""Characters of a column's name: catalogs of databases have no more."""
COLUMNS_MAX = 5_000
"""Columns of a table, fields inside of others included, beyond which none is added."""
WIDE = f"more than {COLUMNS_MAX:,} fields"
"""Why a record is bad that has more of them than any table."""
_WIDENED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.null(): pa.string(),
    pa.date64(): pa.date32(),
}
_WORDS = {
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_ARRAY = re.compile(r"array<(.+)>")
_SPLIT = re.compile(r",(?![^(<]*[)>])")


def table_type(kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911 - one line per family of types
    """The type a column of a table has for values of an Arrow type."""
    types = pa.types
    if kind in _WIDENED:
        return _WIDENED[kind]
    if types.is_timestamp(kind):
        return TIMESTAMP
    if types.is_dictionary(kind):
        return table_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", table_type(kind.value_type)))
    if types.is_map(kind):
        return pa.map_(table_type(kind.key_type), table_type(kind.item_type))
    if types.is_struct(kind):
        return _struct(kind)
    plain = (*_WORDS.values(),)
    if kind in plain or types.is_decimal128(kind):
        return kind
    raise UsageError(f"no table has a column of type {kind}", hint="convert it before it is produced")


def _struct(kind: pa.StructType) -> pa.DataType:
    """Of names that differ only in case the first: no table can tell them apart."""
    fields: dict[str, pa.Field] = {}
    for field in kind:
        if is_name(field.name) and not is_hollow(field.type):
            fields.setdefault(field.name.lower(), pa.field(field.name, table_type(field.type)))
    return pa.struct(list(fields.values()))


def table_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of a table for values of a schema. All of them may be null."""
    names = [field.name for field in schema]
    if len({name.lower() for name in names}) != len(names):
        raise UsageError("two columns differ only in case", hint="give --schema with the columns you want")
    return pa.schema(
        [
            pa.field(field.name, table_type(field.type))
            for field in schema
            if pa.types.is_null(field.type) or not is_hollow(field.type)
        ]
    )


def is_name(name: str) -> bool:
    """Whether a column may be called so. A name with a zero byte ends there, on its way to a table."""
    return 0 < len(name) <= NAME_CHARS_MAX and "\0" not in name


def is_hollow(kind: pa.DataType) -> bool:
    """Whether nothing is known of the values yet: nulls, objects without fields, empty lists. No table has
    such a column, and what it will be is told by the first value."""
    if pa.types.is_struct(kind):
        return all(is_hollow(field.type) or not is_name(field.name) for field in kind)
    return bool(pa.types.is_null(kind) or (pa.types.is_list(kind) and is_hollow(kind.value_type)))


def depth_of(kind: pa.DataType) -> int:
    """How many objects and lists are inside of one another; without recursion, for it may be thousands."""
    depth, level = 0, [kind]
    while level := [each.field(number).type for each in level for number in range(each.num_fields)]:
        depth += 1
    return depth


def columns_in(kinds: Iterable[pa.DataType]) -> int:
    """How many columns these are, with the fields inside of them."""
    inner = ([kind.field(number).type for number in range(kind.num_fields)] for kind in kinds)
    return sum(columns_in(each) if each else 1 for each in inner)


def grown(known: pa.DataType, seen: pa.DataType) -> pa.DataType:
    """`known` with the fields that `seen` has beside it, at any depth. What is known stays as it is; of names
    that differ only in case the first stays."""
    if pa.types.is_list(known) and pa.types.is_list(seen):
        return pa.list_(pa.field("element", grown(known.value_type, seen.value_type)))
    if pa.types.is_map(known) and pa.types.is_map(seen):
        return pa.map_(known.key_type, grown(known.item_type, seen.item_type))
    if not (pa.types.is_struct(known) and pa.types.is_struct(seen)):
        return known
    fields = {field.name.lower(): field for field in known}
    for field in seen:
        found = fields.get(field.name.lower())
        if found is None and is_name(field.name) and not is_hollow(field.type):
            fields[field.name.lower()] = pa.field(field.name, table_type(field.type))
        elif found is not None and found.name == field.name:
            fields[field.name.lower()] = pa.field(field.name, grown(found.type, field.type))
    return pa.struct(list(fields.values()))


def choose(seen: Mapping[pa.DataType, int]) -> pa.DataType:
    """One type for a column that was seen with several, each in so many rows.

    The type of most rows wins, those counted together that widen to one; others widen it where that loses
    nothing. What does not fit it then is a bad record: one price given as text must not turn all prices into
    text.
    """
    kinds = [kind for kind in seen if not is_hollow(kind)]
    if not kinds:
        return pa.string()
    rows = {one: sum(seen[kind] for kind in kinds if kind == one or _is_alike(one, kind)) for one in kinds}
    kinds.sort(key=lambda kind: (-rows[kind], -seen[kind], str(kind)))
    found = kinds[0]
    for kind in kinds[1:]:
        if _is_alike(found, kind):
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError):
                pair = [pa.schema([("c", found)]), pa.schema([("c", kind)])]
                found = pa.unify_schemas(pair, promote_options="permissive").field(0).type
    return table_type(found)


def _is_alike(one: pa.DataType, other: pa.DataType) -> bool:
    types = pa.types
    numbers = [types.is_integer(kind) or types.is_floating(kind) for kind in (one, other)]
    nested = [types.is_nested(kind) for kind in (one, other)]
    return all(numbers) or (all(nested) and one.id == other.id)


def schema_of(seen: Mapping[str, Mapping[pa.DataType, int]]) -> pa.Schema:
    """A schema of columns that were seen with these types."""
    return pa.schema([pa.field(name, choose(kinds)) for name, kinds in seen.items()])


def parse_schema(text: str) -> pa.Schema:
    """`id long, name string, at timestamp, price decimal(10,2), tags array<string>`."""
    fields = []
    for part in _SPLIT.split(text):
        words = part.strip().split(None, 1)
        if len(words) != 2:
            raise UsageError(f"{part.strip()!r} is no column", hint="write NAME TYPE, NAME TYPE, ...")
        fields.append(pa.field(words[0].strip(":"), _parse_type(words[1].strip().lower())))
    return pa.schema(fields)


def _parse_type(text: str) -> pa.DataType:
    if text in _WORDS:
        return _WORDS[text]
    if match := _DECIMAL.fullmatch(text):
        precision, scale = int(match[1]), int(match[2])
        if not 1 <= precision <= DECIMAL_DIGITS_MAX or scale > precision:
            raise UsageError(f"{text!r} is no type", hint=f"decimal(p,s): s <= p <= {DECIMAL_DIGITS_MAX}")
        return pa.decimal128(precision, scale)
    if match := _ARRAY.fullmatch(text):
        return pa.list_(pa.field("element", _parse_type(match[1].strip())))
    known = ", ".join(sorted(_WORDS))
    raise UsageError(f"{text!r} is no type", hint=f"known are {known}, decimal(p,s), array<type>")
