"""What the messages of an Arrow stream hold, learned before they are read.

Compressed buffers make much of little, and Arrow has no bound for what they become; dictionaries stay as long
as the stream does and may grow with every message. So both are measured first: the length before compression
stands in front of each buffer.

    Message     header_type (field 1): 1 schema, 2 dictionary batch, 3 record batch; header (field 2)
    Dictionary  id (field 0), data (field 1), a record batch, is_delta (field 2)
    RecordBatch buffers (field 2), pairs of offset and length; compression (field 3), where there is any
    buffer      length before compression, 8 bytes, little-endian; -1: what follows is not compressed

A message is a flatbuffer; only the few fields above are looked at, each within the bytes of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

__all__ = ["DICTIONARY", "RECORDS", "SCHEMA", "MessageFacts", "message_facts"]

SCHEMA: Final = 1
DICTIONARY: Final = 2
RECORDS: Final = 3

_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_I64: Final = struct.Struct("<q")
_PAIR: Final = struct.Struct("<qq")
_PREFIX_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class MessageFacts:
    """One message."""

    kind: int
    """`SCHEMA`, `DICTIONARY`, `RECORDS`, or a number that is none of them."""
    size: int
    """Bytes of its buffers once none of them is compressed."""
    dictionary: int = -1
    """Which dictionary it is about."""
    is_delta: bool = False
    """Whether it adds to that dictionary instead of replacing it."""


def message_facts(data: bytes | memoryview) -> Iterator[MessageFacts]:
    """The messages, in order, up to the end of the data or of the stream.

    Raises `ValueError` or an Arrow error where they cannot be understood.
    """
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(data)):
        try:
            yield _facts(memoryview(message.metadata), memoryview(message.body or b""))
        except (struct.error, IndexError):
            raise ValueError("a message points beyond its end") from None


def _facts(data: memoryview, body: memoryview) -> MessageFacts:
    message = _u32(data, 0)
    kind_at, header = _field(data, message, 1), _field(data, message, 2)
    kind = data[kind_at] if kind_at else 0
    if not header or kind not in (DICTIONARY, RECORDS):
        return MessageFacts(kind, len(body))
    table = header + _u32(data, header)
    if kind == RECORDS:
        return MessageFacts(kind, _size(data, table, body))
    id_at, inner, delta_at = (_field(data, table, number) for number in (0, 1, 2))
    return MessageFacts(
        kind,
        _size(data, inner + _u32(data, inner), body) if inner else 0,
        int(_I64.unpack_from(data, id_at)[0]) if id_at else 0,
        bool(delta_at and data[delta_at]),
    )


def _size(data: memoryview, batch: int, body: memoryview) -> int:
    """Bytes of the buffers of a record batch, or of the whole body where that is more."""
    buffers = _field(data, batch, 2)
    if not buffers or not _field(data, batch, 3):
        return len(body)
    vector = buffers + _u32(data, buffers)
    total = 0
    for number in range(_u32(data, vector)):
        at, length = _PAIR.unpack_from(data, vector + 4 + _PAIR.size * number)
        if length:
            total += _unpacked(body, at, length)
    return max(total, len(body))


def _unpacked(body: memoryview, at: int, length: int) -> int:
    if at < 0 or length < _PREFIX_BYTES:
        raise ValueError("a compressed buffer outside of its message")
    size = int(_I64.unpack_from(body, at)[0])
    if size < -1:
        raise ValueError("a buffer of less than nothing")
    return length - _PREFIX_BYTES if size == -1 else size


def _u32(data: memoryview, at: int) -> int:
    return int(_U32.unpack_from(data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table is; 0 where it has none."""
    layout = table - int(_I32.unpack_from(data, table)[0])
    if layout < 0:
        raise ValueError("a table before its message")
    slot = 4 + 2 * number
    if slot >= int(_U16.unpack_from(data, layout)[0]):
        return 0
    offset = int(_U16.unpack_from(data, layout + slot)[0])
    return table + offset if offset else 0
