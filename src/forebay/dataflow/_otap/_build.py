"""Tables from rows: columns that say nothing are left out, texts become dictionaries, ids become small.

Every batch is made to be understood alone: its payloads begin their Arrow streams anew, so that one which has
to be sent again can go through any stream, and nothing has to be remembered of what the other side has got.
That costs the schemas, some kilobytes a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap._table import Table

__all__ = ["Column", "ids", "make_struct", "make_table", "parents"]

DICTIONARY_VALUES_MAX: Final = 65_535
"""Values of a dictionary; a column with more is written out."""
_DELTA: Final = {"encoding": "delta"}
_QUASI: Final = {"encoding": "quasidelta"}

Column = tuple[pa.Field, pa.Array]


def column(name: str, kind: pa.DataType, values: Sequence[Any], default: Any = None) -> Column | None:
    """A column; none where all of its values are null or the default."""
    if not set(values) - {None, default}:
        return None
    array = pa.array(values, kind)
    if pa.types.is_string(kind):
        array = _dictionary(array)
    return pa.field(name, array.type), array


def required(name: str, kind: pa.DataType, values: Sequence[Any]) -> Column:
    """A column that has to be there."""
    array = pa.array(values, kind)
    if pa.types.is_string(kind):
        array = _dictionary(array)
    return pa.field(name, array.type), array


def ids(name: str, kind: pa.DataType, values: Sequence[int]) -> Column:
    """Rising ids, as differences."""
    array = pa.array(np.diff(np.array(values, np.int64), prepend=0), kind)
    return pa.field(name, kind, metadata=_DELTA), array


def make_struct(name: str, columns: Sequence[Column | None]) -> Column | None:
    """Columns inside another; none where there are none."""
    present = [each for each in columns if each is not None]
    if not present:
        return None
    array = pa.StructArray.from_arrays([each[1] for each in present], fields=[each[0] for each in present])
    return pa.field(name, array.type), array


def make_table(columns: Sequence[Column | None]) -> pa.RecordBatch:
    """A table of the columns that are there."""
    present = [each for each in columns if each is not None]
    return pa.RecordBatch.from_arrays(
        [each[1] for each in present], schema=pa.schema([each[0] for each in present])
    )


def parents(
    kind: PayloadType,
    batch: pa.RecordBatch,
    values: Sequence[int],
    width: pa.DataType,
    alike: Callable[[Table], npt.NDArray[np.bool_] | None],
) -> pa.RecordBatch:
    """The table with rising ids of parents: differences where a row is like the one above."""
    plain = np.array(values, np.int64)
    mask = alike(Table(kind.name, batch))
    differences = np.diff(plain, prepend=0)
    encoded = differences if mask is None else np.where(mask, differences, plain)
    field = pa.field("parent_id", width, nullable=False, metadata=_DELTA if mask is None else _QUASI)
    return batch.add_column(0, field, pa.array(encoded, width))


def _dictionary(array: pa.Array) -> pa.Array:
    found = array.dictionary_encode()
    if len(found.dictionary) > DICTIONARY_VALUES_MAX:
        return array
    return pa.DictionaryArray.from_arrays(found.indices.cast(pa.uint16()), found.dictionary)
