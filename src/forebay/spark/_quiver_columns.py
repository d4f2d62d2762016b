"""Columns of Quiver segments for Spark: which there are, and the rows of one segment as batches.

A store holds many schemas: one for each signal and version of its sender. What Spark sees is all columns by
their names, as wide as the widest, with null where a segment has none. Behind them come the columns of
Quiver itself:

    _source    the forwarder, or the core            _segment   the number of the segment
    _signal    the signal type                       _ingested  when the batch of the row was ingested
    _context   what was handed in with that batch, text by text

Arrow has more types than Spark. Dictionaries are spread out, unsigned numbers get the next larger type,
nanoseconds become microseconds; what has no counterpart at all (unions, times of day of 32 bits, intervals)
is refused by the name of the column. A value that does not fit the declared type ends the query: nothing is
wrapped around.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType, TimestampType

from forebay.errors import Unsupported, UsageError
from forebay.quiver import SegmentView
from forebay.spark._columns import BATCH_BYTES, BATCH_ROWS, arrow_schema, timestamps
from forebay.spark._quiver_segments import Segment

__all__ = ["OWN_COLUMNS", "asked_for", "merged", "rows_of", "schema_in"]

OWN_COLUMNS: Final = StructType(
    [
        StructField("_source", StringType()),
        StructField("_segment", LongType()),
        StructField("_signal", StringType()),
        StructField("_ingested", TimestampType()),
        StructField("_context", MapType(StringType(), StringType())),
    ]
)
"""What every segment has."""
_MAGIC_BYTES: Final = 8
"""Arrow's files begin with a magic, then comes what a stream would begin with."""
_NULL: Final = pa.null()
_WIDER: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}


def schema_in(head: bytes) -> pa.Schema | None:
    """The schema at the start of a segment file; None where these bytes do not hold all of it."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(head[_MAGIC_BYTES:]))
    except (pa.ArrowException, OSError, EOFError):
        return None


def merged(schemas: Sequence[pa.Schema]) -> StructType:
    """All columns of these segments, and those of Quiver."""
    for schema in schemas:
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if twice:
            raise Unsupported(f"a segment has several columns {twice[0]!r}", hint=_CHOOSE)
    simple = [pa.schema([pa.field(each.name, plain(each.type)) for each in schema]) for schema in schemas]
    try:
        whole = pa.unify_schemas(simple, promote_options="permissive")
    except pa.ArrowException as error:
        raise UsageError(
            f"the segments have columns that do not go together: {error}", hint=_CHOOSE
        ) from error
    fields: dict[str, StructField] = {}
    for each in whole:
        other = fields.setdefault(each.name.lower(), StructField(each.name, _spark_type(each)))
        if other.name != each.name:
            raise Unsupported(
                f"columns {other.name!r} and {each.name!r} are one to Spark, which looks at no case",
                hint=_CHOOSE,
            )
    return _with_own(fields)


def asked_for(schemas: Sequence[pa.Schema], chosen: StructType) -> StructType:
    """The same for segments that do not go together: a column has the type that is asked for. Whether its
    values fit is told when they are read."""
    asked = {field.name.lower(): field for field in chosen.fields}
    fields: dict[str, StructField] = {}
    for name in [name for schema in schemas for name in schema.names]:
        fields.setdefault(name.lower(), asked.get(name.lower(), StructField(name, StringType())))
    return _with_own(fields)


def _with_own(fields: Mapping[str, StructField]) -> StructType:
    own = [each for each in OWN_COLUMNS.fields if each.name not in fields]
    return StructType([*fields.values(), *own])


_CHOOSE: Final = '.option("signal", ...) for one kind of data only, or .schema(...) for the columns you want'


def _spark_type(field: pa.Field) -> Any:
    try:
        # What is null everywhere is text; what is null in some segments has its type from the others.
        found = from_arrow_type(plain(field.type, null=pa.string()))
        arrow_schema(
            StructType([StructField(field.name, found)])
        )  # Decimals of more than 38 digits fail here.
    except (PySparkException, TypeError, ValueError) as error:
        raise Unsupported(
            f"Spark has no type for column {field.name!r}, {field.type}", hint=_CHOOSE
        ) from error
    return found


def plain(kind: pa.DataType, null: pa.DataType = _NULL) -> pa.DataType:
    """The type that Spark has for it; itself where there is none. `null` is what nothing but nulls is."""
    if isinstance(kind, (pa.DictionaryType, pa.BaseExtensionType)):
        return plain(kind.value_type if isinstance(kind, pa.DictionaryType) else kind.storage_type, null)
    if pa.types.is_null(kind):
        return null
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz=None if kind.tz is None else "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, plain(each.type, null)) for each in kind.fields])
    if pa.types.is_map(kind):
        return pa.map_(plain(kind.key_type, null), plain(kind.item_type, null))
    if _is_list(kind):
        return pa.list_(plain(kind.value_type, null))
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.duration("us") if pa.types.is_duration(kind) else _WIDER.get(kind, kind)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def rows_of(
    view: SegmentView, segment: Segment, schema: pa.Schema, since_ms: int | None, until_ms: int | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a segment that came in from `since_ms` to before `until_ms`, in batches as Spark likes
    them."""
    sources = view.meta.sources
    item = np.repeat(np.arange(len(sources)), [each.rows for each in sources])[view.row_indices()]
    times = np.array([each.time_ms for each in sources], np.int64)
    wanted = np.ones(len(times), bool)
    if since_ms is not None:
        wanted &= times >= since_ms
    if until_ms is not None:
        wanted &= times < until_ms
    waiting: list[pa.RecordBatch] = []
    begin = rows = size = 0
    for batch in view.batches():
        items = item[begin : begin + batch.num_rows]
        begin += batch.num_rows
        mask = wanted[items]
        if not mask.any():
            continue
        chosen = batch if mask.all() else batch.filter(pa.array(mask))
        waiting.append(_batch(chosen, _Own(view, segment, items[mask]), schema))
        rows, size = rows + chosen.num_rows, size + waiting[-1].nbytes
        if rows >= BATCH_ROWS or size >= BATCH_BYTES:
            yield _together(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _together(waiting)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


class _Own:
    """The columns of Quiver for rows of one batch."""

    def __init__(
        self, view: SegmentView, segment: Segment, items: np.ndarray[Any, np.dtype[np.int64]]
    ) -> None:
        self._view, self._segment, self._items = view, segment, items

    def __call__(self, name: str) -> pa.Array:
        meta, rows = self._view.meta, len(self._items)
        if name == "_source":
            return pa.repeat(pa.scalar(self._segment.source), rows)
        if name == "_segment":
            return pa.repeat(pa.scalar(meta.segment, pa.int64()), rows)
        if name == "_signal":
            return pa.repeat(pa.scalar(meta.signal), rows)
        if name == "_ingested":
            times = np.array([each.time_ms for each in meta.sources], np.int64)[self._items]
            return timestamps(times, pa.timestamp("us", tz="UTC"))
        context = np.array([each.context for each in meta.sources], np.int64)[self._items]
        kinds = pa.array([[*each.items()] for each in meta.contexts], pa.map_(pa.string(), pa.string()))
        return kinds.take(pa.array(context))


def _batch(batch: pa.RecordBatch, own: _Own, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        place = _place(batch.schema.names, field.name)
        if place is not None:
            arrays.append(_fitting(batch.column(place), field))
        elif field.name.lower() in OWN_COLUMNS.fieldNames():
            arrays.append(_fitting(own(field.name.lower()), field))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _place(names: Sequence[str], wanted: str) -> int | None:
    """Where a column is: the one of this very name, else the one of this name in another case."""
    alike = [place for place, name in enumerate(names) if name.lower() == wanted.lower()]
    found = [place for place in alike if names[place] == wanted] or alike
    if len(found) > 1:
        raise UsageError(f"a segment has several columns {wanted!r}", hint=_CHOOSE)
    return found[0] if found else None


def _fitting(array: pa.Array, field: pa.Field) -> pa.Array:
    """The same values in exactly this type, or an error: never other values, but for nanoseconds."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if str(array.type) == str(field.type):
        return array
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.large_binary())
    try:
        return pc.cast(array, options=pc.CastOptions(field.type, allow_time_truncate=True))
    except (pa.ArrowException, NotImplementedError) as error:
        raise UsageError(
            f"column {field.name!r} is {array.type} in a segment, and {field.type} in the query: {error}",
            hint=_CHOOSE,
        ) from error
