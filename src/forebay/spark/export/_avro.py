"""Avro datums to columns: the values become one block of one Avro file, which fastavro reads at once.

    value 0, mark, value 1, mark, ...        read as records {datum, mark} in one block

A datum carries neither its length nor a checksum, and the bytes of one that is too short would be filled up
from its neighbour. The mark behind each value, sixteen random bytes that must come out as they went in, shows
that every datum ended exactly where its value did.

An enum is a number, which the reader takes for an index of a Python list: -1 is the last symbol. So each enum
gets more symbols, all of them one random word: what comes out with that word is no datum. The branch of a
union is such a number, too, and each union gets more branches, all of them an enum of that word. A number so
far below zero that it comes round to a real one is not seen; damage and mistakes are of one byte.
"""

from __future__ import annotations

import io
import json
import secrets
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import Unsupported, UsageError
from forebay.spark.export._decode import (
    Decoded,
    Seen,
    cast_table,
    decode_halves,
    dropped_fields,
    missing_columns,
    rows_of,
    together,
)
from forebay.spark.export._types import DECIMAL_DIGITS_MAX, TIMESTAMP

__all__ = ["AvroDecoder", "arrow_schema_of"]

MARK_BYTES: Final = 16
SYNC_BYTES: Final = 16
INDEX_BYTE_MAX: Final = 64
"""Numbers below zero that take one byte: -1 to -64."""
BRANCH: Final = "logicalType"
"""Name of the enum that is the branches below zero. The reader searches every union that it reads for this
word, from the first branch on: with another name it goes through all of them each time, at three times the
cost of the whole."""
_PRIMITIVE: Final = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Final = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): TIMESTAMP,
    ("long", "timestamp-micros"): TIMESTAMP,
}
"""Logical types that tables have, beside decimals. Others come as the numbers, texts and bytes they are."""
NO_DATUM: Final = "the value is no datum of this schema, or has bytes behind it"


class AvroDecoder:
    """One datum of a record schema per value, without any framing."""

    def __init__(self, schema: str) -> None:
        self._none = f"forebay_{secrets.token_hex(8)}_"
        self._columns = arrow_schema_of(schema)
        self._schema = _padded(_parsed(schema), self._none, {})

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray, wanted: pa.Schema) -> Decoded:
        """A row per value that is a datum of the schema and nothing more, and fits the columns."""
        import fastavro

        failures = (
            EOFError, ValueError, TypeError, IndexError, KeyError, OverflowError, MemoryError,
            UnicodeDecodeError, pa.ArrowException, fastavro.read.SchemaResolutionError,
        )  # fmt: skip

        def whole(part: pa.BinaryArray) -> pa.Table:
            return cast_table(self._parse(part), wanted)

        good, bad = decode_halves(whole, values, failures)
        table = together([each for _, each in good], wanted)
        # The schema of the values may have grown since the table was made.
        known = [self._columns.empty_table()]
        missing, dropped = missing_columns(known, wanted), dropped_fields(known, wanted)
        return Decoded(table, rows_of(good) if bad else None, bad, missing, dropped)

    def look(self, values: pa.BinaryArray) -> Seen:
        """Those of the schema."""
        return {each.name: {each.type: len(values)} for each in self._columns}

    def _parse(self, values: pa.BinaryArray) -> pa.Table:
        import fastavro

        mark = secrets.token_bytes(MARK_BYTES)
        file = io.BytesIO(self._file(values, mark))
        try:
            found = list(fastavro.reader(file))
        except (EOFError, IndexError) as error:  # Its words are of the reader's own lists and buffers.
            raise ValueError(NO_DATUM) from error
        rows = pa.array(
            found, pa.struct([("v", pa.struct(list(self._columns))), ("m", pa.binary(MARK_BYTES))])
        )
        if len(rows) != len(values) or not pc.all(pc.equal(rows.field("m"), pa.scalar(mark))).as_py():
            raise ValueError(NO_DATUM)
        if _holds(rows.field("v"), self._none):
            raise ValueError(NO_DATUM)
        return pa.Table.from_batches([pa.RecordBatch.from_struct_array(rows.field("v"))])

    def _file(self, values: pa.BinaryArray, mark: bytes) -> bytes:
        """A whole Avro file with one block."""
        lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
        body: bytes = pc.binary_join(lists, mark)[0].as_py() + mark
        fixed = {"type": "fixed", "name": "forebay_mark", "size": MARK_BYTES}
        fields = [{"name": "v", "type": self._schema}, {"name": "m", "type": fixed}]
        schema = json.dumps({"type": "record", "name": "forebay_marked", "fields": fields}).encode()
        sync = bytes(SYNC_BYTES)
        header = b"Obj\x01" + _long(1) + _bytes(b"avro.schema") + _bytes(schema) + _long(0) + sync
        return header + _long(len(values)) + _long(len(body)) + body + sync


def _long(number: int) -> bytes:
    """A zigzag varint."""
    rest = number << 1
    found = bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*found, rest])


def _bytes(data: bytes) -> bytes:
    return _long(len(data)) + data


def _load(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the Avro schema is no JSON: {error}", hint="give the .avsc file") from None
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise UsageError("the Avro schema is no record", hint="values of a table are records")
    return dict(_plain(schema))


def _plain(schema: Any) -> Any:
    """The schema without logical types that tables lack, of which the reader would make objects."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _plain(each) if key in _NESTED else each for key, each in schema.items()}
    if not _is_kept(schema):
        kept.pop("logicalType", None)
    return kept


def _padded(schema: Any, word: str, names: dict[str, str]) -> Any:
    """The schema with symbols and branches for the numbers below zero. Types get names without a namespace,
    in which the enum of those branches could not be named; `names` has those met so far."""
    if isinstance(schema, str):
        return names.get(schema, schema)
    if isinstance(schema, list):
        found = [_padded(each, word, names) for each in schema]
        if BRANCH in names.values():
            return [*found, *[BRANCH] * INDEX_BYTE_MAX]
        names[""] = BRANCH
        made = {"type": "enum", "name": BRANCH, "symbols": [word]}
        return [*found, made, *[BRANCH] * (INDEX_BYTE_MAX - 1)]
    padded = {key: schema[key] for key in _KEPT if key in schema}
    if schema["type"] in _NAMED:
        padded["name"] = names[schema["name"]] = f"type{len(names)}"
    else:
        padded["type"] = _padded(schema["type"], word, names)
    if schema["type"] == "enum":
        padded["symbols"] = [*schema["symbols"], *(f"{word}{number}" for number in range(INDEX_BYTE_MAX))]
    if schema["type"] == "record":
        padded["fields"] = [
            {"name": each["name"], "type": _padded(each["type"], word, names)} for each in schema["fields"]
        ]
    for key in ("items", "values"):
        if key in schema:
            padded[key] = _padded(schema[key], word, names)
    return padded


def _holds(array: pa.Array, word: str) -> bool:
    """Whether a text begins with the word. Arrow takes a text for bytes where it has to."""
    kind = array.type
    if pa.types.is_struct(kind):
        return any(_holds(array.field(number), word) for number in range(kind.num_fields))
    if pa.types.is_map(kind):
        return _holds(array.items, word)
    if pa.types.is_list(kind):
        return _holds(array.values, word)
    is_text = pa.types.is_string(kind) or pa.types.is_binary(kind)
    return is_text and bool(pc.any(pc.starts_with(array, word)).as_py())


_NAMED: Final = ("record", "enum", "fixed")
_KEPT: Final = ("type", "size", "logicalType", "precision", "scale")
"""What else the reader needs of a type."""
_NESTED: Final = ("type", "items", "values", "fields")
"""What holds the types inside of a type."""


def _is_kept(schema: dict[str, Any]) -> bool:
    kind, logical = str(schema.get("type")), schema.get("logicalType")
    return (kind, logical) in _LOGICAL or (logical == "decimal" and kind in ("bytes", "fixed"))


def arrow_schema_of(text: str) -> pa.Schema:
    """The columns of an Avro record schema."""
    return pa.schema(list(_arrow_type(_parsed(text), {})))


def _parsed(text: str) -> Any:
    """The schema with the full names of its types."""
    try:
        import fastavro
    except ImportError as error:
        raise Unsupported("fastavro is not installed", hint="pip install 'forebay[spark]'") from error
    try:
        return fastavro.parse_schema(_load(text))
    except (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType, KeyError) as error:
        words = " ".join(str(error).split())[:200]
        raise UsageError(f"the Avro schema is none: {words}", hint="give the .avsc file") from error


def _arrow_type(schema: Any, names: dict[str, pa.DataType | None]) -> pa.DataType:
    """`names` holds the named types met so far; None while one is being looked at."""
    if isinstance(schema, list):
        return _union(schema, names)
    if isinstance(schema, str):
        found = _PRIMITIVE.get(schema, names.get(schema))
        if found is None:
            raise UsageError(f"{schema!r} contains itself", hint="a table has no recursive columns")
        return found
    kind, logical = schema["type"], schema.get("logicalType")
    if kind == "fixed" and not schema["size"]:
        # As for an array of nulls: of nothing there may be any number.
        raise UsageError(
            f"{schema['name']!r} is an Avro fixed of no bytes", hint="leave it out of the schema"
        )
    if logical == "decimal":
        return _decimal(schema, names)
    if logical is not None:
        return _LOGICAL[kind, logical]
    if kind == "array":
        element = _arrow_type(schema["items"], names)
        if _takes_no_bytes(element):
            # A few bytes could then ask for any number of them.
            raise UsageError(
                "an Avro array of nulls", hint="leave the field out of the schema, or give it values"
            )
        return pa.list_(pa.field("element", element))
    if kind == "map":
        return pa.map_(pa.string(), _arrow_type(schema["values"], names))
    return _named(schema, names) if kind in ("record", "enum", "fixed") else _arrow_type(kind, names)


def _decimal(schema: dict[str, Any], names: dict[str, pa.DataType | None]) -> pa.DataType:
    digits = schema["precision"]
    if digits > DECIMAL_DIGITS_MAX:
        raise UsageError(f"an Avro decimal of {digits} digits", hint=f"up to {DECIMAL_DIGITS_MAX}")
    found = pa.decimal128(digits, schema.get("scale", 0))
    if schema["type"] == "fixed":
        names[schema["name"]] = found
    return found


def _takes_no_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (
        pa.types.is_struct(kind) and all(_takes_no_bytes(each.type) for each in kind)
    )


def _named(schema: dict[str, Any], names: dict[str, pa.DataType | None]) -> pa.DataType:
    names[schema["name"]] = None
    if schema["type"] == "record":
        fields = [pa.field(each["name"], _arrow_type(each["type"], names)) for each in schema["fields"]]
        found = pa.struct(fields)
    else:
        found = pa.string() if schema["type"] == "enum" else pa.binary()
    names[schema["name"]] = found
    return found


def _union(branches: list[Any], names: dict[str, pa.DataType | None]) -> pa.DataType:
    real = [branch for branch in branches if branch != "null"]
    if len(real) != 1:
        raise UsageError(f"a union of {len(real)} types", hint="a column has one type, or null")
    return _arrow_type(real[0], names)
