"""How large an Arrow stream becomes once it is read, learned before it is read.

Three things in a stream make much of little: compressed buffers, which are decompressed when a batch is read;
dictionaries, where a small index stands for a long value; and views, many of which may show the same bytes.
Arrow has no bound for any of them. So the lengths are added up first: those of buffers as their messages tell
them (`formats/arrow_messages.py`), those of values in the arrays.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.formats.arrow_messages import message_facts

__all__ = ["is_plain", "spread_bytes", "unpacked_bytes"]

VIEW_BYTES: Final = 16
"""Bytes of one view; its first four are the length of what it shows."""


def unpacked_bytes(stream: bytes | memoryview, most: int) -> int:
    """Bytes of the buffers of a stream once none is compressed; counts no further than beyond `most`.

    Raises `ValueError` or an Arrow error where the stream cannot be understood.
    """
    total = 0
    for facts in message_facts(stream):
        total += facts.size
        if total > most:
            break
    return total


def spread_bytes(column: pa.Array) -> int:
    """Bytes that the values of a column take side by side, where each may be stored once for many."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(column.dictionary)
        return int(pc.sum(lengths.take(column.indices).cast(pa.int64())).as_py() or 0)
    if pa.types.is_binary_view(kind) or pa.types.is_string_view(kind):
        views = np.frombuffer(column.buffers()[1], np.int32)[:: VIEW_BYTES // 4]
        return int(views[column.offset : column.offset + len(column)].sum(dtype=np.int64))
    return int(column.nbytes)


def is_plain(kind: pa.DataType) -> bool:
    """Whether a type stores each value where it stands, in all its parts."""
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind):
        return is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(is_plain(kind.field(number).type) for number in range(kind.num_fields))
    plain = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary, types.is_null)
    return any(is_it(kind) for is_it in plain)
