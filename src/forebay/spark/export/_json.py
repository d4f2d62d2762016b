"""JSON objects to columns: the values are joined by newlines and parsed at once by Arrow.

What has to be proven is that row n is record n. The parser takes objects from a stream of text, whatever lies
between them. Two guards make the stream's objects the records' objects:

* every value begins with `{` and ends with `}`, but for the space around it, or it is bad by itself (looked
  at by numpy, all at once);
* there are as many rows as values.

A value that begins with `{` holds the beginning of at least one object. An object cannot reach from one value
into the next: the next begins with `{`, which may follow neither a `}` without a comma nor anything inside of
a string, because a string cannot hold the newline between them. So every value gives one row or more, and as
many rows as values means one each.

Newlines inside a value are spaces to JSON, and are made spaces where there are any.

Values come from anybody. The parser takes bytes that are no UTF-8, of which it makes text that no reader of
the table can read, and objects inside of one another without end, whose types end the process: both are bad
records before it sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from forebay.spark.export._decode import (
    Decoded,
    Rows,
    Seen,
    decode_halves,
    dropped_fields,
    missing_columns,
    rows_of,
    together,
)
from forebay.spark.export._types import COLUMNS_MAX, NESTING_MAX, TIMESTAMP, WIDE, columns_in, depth_of

__all__ = ["JsonDecoder"]

_OPEN: Final = ord("{")
_CLOSE: Final = ord("}")
_NEWLINE: Final = ord("\n")
_EITHER: Final = np.uint8(0xDF)
"""Takes away the bit in which a brace differs from a bracket."""
_SPACE: Final = " \t\r\n"
"""What JSON calls white space. Many encoders end an object with a newline."""
BRACKETS_MAX: Final = 2_000
"""Opening brackets of a value up to which it is left to the parser to say how deep it is: the stack of a
thread ends at some 20,000 levels."""
_TEXTS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_DEEP: Final = f"nested more than {NESTING_MAX} deep"


_Form: TypeAlias = Mapping[pa.DataType, pa.DataType]
_FORMS: Final[tuple[_Form, ...]] = (
    {pa.date32(): pa.string()},
    {pa.date32(): pa.string(), TIMESTAMP: pa.timestamp("ns", tz="UTC")},
    {},
)
"""What the parser is told of the types of times: it knows a day only as a number and cuts no nanoseconds,
which in turn end in the year 2262."""


class JsonDecoder:
    """One JSON object per value."""

    def __init__(self, *, infer: bool = True) -> None:
        """With `infer` fields that the schema lacks are reported; else they are passed over."""
        self._infer = infer
        self._form = _FORMS[0]

    def decode(self, values: pa.BinaryArray, keys: pa.BinaryArray, wanted: pa.Schema) -> Decoded:
        """A row per value that is an object of the wanted types."""
        runs, bad, whereabouts = self._runs(values, wanted)
        tables = [table for _, table in runs]
        missing = missing_columns(tables, wanted) if self._infer else {}
        rows = rows_of(runs) if bad else None
        if whereabouts is not None and rows is not None:
            rows = whereabouts[rows]
        dropped = dropped_fields(tables, wanted)
        return Decoded(together(tables, wanted), rows, bad, missing, dropped)

    def look(self, values: pa.BinaryArray) -> Seen:
        """The fields of the good ones, as Arrow infers them."""
        runs, _, _ = self._runs(values, None)
        return missing_columns([table for _, table in runs], None)

    def _runs(
        self, values: pa.BinaryArray, wanted: pa.Schema | None
    ) -> tuple[list[tuple[int, pa.Table]], list[tuple[int, str]], Rows | None]:
        """Runs of good values, bad ones, and where the values lay that look like objects, if not all do."""
        shaped = _objects(values)
        if not shaped.all():
            values = _trimmed(values)
            shaped = _objects(values)
        where: Rows | None = None
        bad: list[tuple[int, str]] = []
        shaped[deep := _too_deep(values)] = False
        if not shaped.all():
            bad = [
                (row, _DEEP if row in deep else _why_no_object(values[row].as_py()))
                for row in np.flatnonzero(~shaped).tolist()
            ]
            where = np.flatnonzero(shaped)
            values = values.take(pa.array(where))

        def whole(part: pa.BinaryArray) -> pa.Table:
            return self._parse(part, wanted)

        runs, worse = decode_halves(whole, values, pa.ArrowInvalid)
        bad += [(row if where is None else int(where[row]), reason) for row, reason in worse]
        return runs, bad, where

    def _parse(self, values: pa.BinaryArray, wanted: pa.Schema | None) -> pa.Table:
        """In the first of the forms that times may have in which all of it can be parsed."""
        text = _joined(values.cast(pa.string()).view(pa.binary()))  # Raises for what is no UTF-8.
        if wanted is None:
            return self._parsed(text, len(values), None)
        # Most topics have one form: the one that was right the last time comes first.
        forms = sorted(_FORMS, key=lambda form: form is not self._form)
        errors: list[pa.ArrowInvalid] = []
        tried: list[pa.Schema] = []
        for form in forms:
            schema = pa.schema([(each.name, _in_form(each.type, form)) for each in wanted])
            if schema in tried:
                continue
            tried.append(schema)
            try:
                table = _as_wanted(self._parsed(text, len(values), schema), wanted)
            except pa.ArrowInvalid as error:
                errors.append(error)
            else:
                self._form = form
                return table
        raise errors[0]

    def _parsed(self, text: pa.Buffer, count: int, wanted: pa.Schema | None) -> pa.Table:
        behaviour = "infer" if wanted is None or self._infer else "ignore"
        table = pj.read_json(
            pa.BufferReader(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=wanted, unexpected_field_behavior=behaviour, newlines_in_values=False
            ),
        )
        if table.num_rows != count:
            raise pa.ArrowInvalid(f"{table.num_rows} objects in {count} values")
        if any(depth_of(each.type) >= NESTING_MAX for each in table.schema):
            raise pa.ArrowInvalid(_DEEP)
        if columns_in(table.schema.types) > COLUMNS_MAX:
            raise pa.ArrowInvalid(WIDE)
        return table


def _in_form(kind: pa.DataType, form: _Form) -> pa.DataType:
    """The type that the parser is told."""
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, _in_form(each.type, form)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _in_form(kind.value_type, form)))
    return form.get(kind, kind)


def _as_wanted(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The table with the wanted types where it was parsed with others. Raises for texts that are no days."""
    for each in wanted:
        number = table.schema.get_field_index(each.name)
        column = table.column(number)
        kind = _restored(column.type, each.type)
        if kind != column.type:
            # Tables have microseconds, and nanoseconds are common.
            column = column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))
            table = table.set_column(number, each.name, column)
    return table


def _restored(found: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """What was found, with the wanted types of times. It may have more fields."""
    if pa.types.is_struct(found) and pa.types.is_struct(wanted):
        known = {each.name: each.type for each in wanted}
        return pa.struct(
            [(each.name, _restored(each.type, known.get(each.name, each.type))) for each in found]
        )
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return pa.list_(found.value_field.with_type(_restored(found.value_type, wanted.value_type)))
    return wanted if wanted in (pa.date32(), TIMESTAMP) else found


def _objects(values: pa.BinaryArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which values look like an object from outside."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    if data is None or not data.size or not len(values):
        return np.zeros(len(values), np.bool_)
    text = np.frombuffer(data, np.uint8)
    filled = ends[1:] > ends[:-1]
    # Where a value is empty its first byte is another's; `filled` takes it out again.
    first = text[np.minimum(ends[:-1], len(text) - 1)] == _OPEN
    last = text[np.maximum(ends[1:] - 1, 0)] == _CLOSE
    return np.asarray(filled & first & last)


def _too_deep(values: pa.BinaryArray) -> list[int]:
    """Values that are nested too deeply. Where there are few brackets, nothing is."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    if data is None or not len(values) or int(np.diff(ends).max()) <= BRACKETS_MAX:
        return []
    text = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    # Both brackets differ from each other in one bit.
    opening = np.flatnonzero((text & _EITHER) == ord("["))
    counts = np.diff(np.searchsorted(opening, ends - ends[0]))
    many = np.flatnonzero(counts > BRACKETS_MAX).tolist()
    return [row for row in many if _depth(values[row].as_py()) > NESTING_MAX]


def _depth(value: bytes) -> int:
    """How deep brackets are inside of one another, up to the first thing that is no JSON."""
    text = np.frombuffer(_TEXTS.sub(b"", value), np.uint8) & _EITHER
    steps = (text == ord("[")).astype(np.int32) - (text == ord("]"))
    return int(np.cumsum(steps).max(initial=0))


def _trimmed(values: pa.BinaryArray) -> pa.BinaryArray:
    """The values without the space around them. As text only by name: no byte is looked at as a letter."""
    return pc.ascii_trim(values.view(pa.string()), characters=_SPACE).view(pa.binary())


def _joined(values: pa.BinaryArray) -> pa.Buffer:
    text = _join(values)
    if int(np.count_nonzero(np.frombuffer(text, np.uint8) == _NEWLINE)) != len(values) - 1:
        text = _join(pc.replace_substring(values, b"\n", b" "))
    return text


def _join(values: pa.BinaryArray) -> pa.Buffer:
    lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    return pc.binary_join(lists, b"\n")[0].as_buffer()


def _why_no_object(value: bytes) -> str:
    if not value.strip():
        return "the value is empty"
    return "the value is no JSON object"
