"""How large an Arrow stream becomes once it is read, learned before it is read.

Three things in a stream make much of little: compressed buffers, which are decompressed when a batch is read;
dictionaries, where a small index stands for a long value; and views, many of which may show the same bytes.
Arrow has no bound for any of them. So the lengths are added up first: those of compressed buffers stand in
front of each of them, those of values in the arrays.

    Message     header_type (field 1): 2 dictionary batch, 3 record batch; header (field 2)
    Dictionary  data (field 1), a record batch
    RecordBatch buffers (field 2), pairs of offset and length; compression (field 3), where there is any
    buffer      length before compression, 8 bytes, little-endian; -1: what follows is not compressed

A message is a flatbuffer; only the few fields above are looked at, each within the bytes of the message.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["is_plain", "spread_bytes", "unpacked_bytes"]

_DICTIONARY: Final = 2
_RECORDS: Final = 3
VIEW_BYTES: Final = 16
"""Bytes of one view; its first four are the length of what it shows."""


def unpacked_bytes(stream: bytes, most: int) -> int:
    """Bytes of the compressed buffers of a stream once they are not; counts no further than beyond `most`.

    Raises `ValueError` or an Arrow error where the stream cannot be understood.
    """
    total = 0
    for message in pa.ipc.MessageReader.open_stream(stream):
        try:
            total += _message_bytes(memoryview(message.metadata), memoryview(message.body or b""))
        except (struct.error, IndexError):
            raise ValueError("a message points beyond its end") from None
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


def _message_bytes(data: memoryview, body: memoryview) -> int:
    message = _u32(data, 0)
    kind, header = _field(data, message, 1), _field(data, message, 2)
    if not kind or not header or data[kind] not in (_DICTIONARY, _RECORDS):
        return 0
    batch = header + _u32(data, header)
    if data[kind] == _DICTIONARY:
        inner = _field(data, batch, 1)
        batch = inner + _u32(data, inner)
    buffers = _field(data, batch, 2)
    if not buffers or not _field(data, batch, 3):
        return 0
    vector = buffers + _u32(data, buffers)
    total = 0
    for number in range(_u32(data, vector)):
        at, length = struct.unpack_from("<qq", data, vector + 4 + 16 * number)
        if length:
            total += _unpacked(body, at, length)
    return total


def _unpacked(body: memoryview, at: int, length: int) -> int:
    if at < 0:
        raise ValueError("a buffer begins before its message")
    size = int(struct.unpack_from("<q", body, at)[0])
    if size < -1:
        raise ValueError("a buffer of less than nothing")
    return length - 8 if size == -1 else size


def _u32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table is; 0 where it has none."""
    layout = table - int(struct.unpack_from("<i", data, table)[0])
    if layout < 0:
        raise ValueError("a table before its message")
    slot = 4 + 2 * number
    if slot >= int(struct.unpack_from("<H", data, layout)[0]):
        return 0
    offset = int(struct.unpack_from("<H", data, layout + slot)[0])
    return table + offset if offset else 0
