"""What Forebay may add behind the metadata of a manifest entry, where other readers skip it.

    "FBX1"      magic
    u16 LE      bytes of the fields that follow
    fields, each:
        u8      tag
        u16 LE  bytes of the value, then the value

    tag 1   u64 LE    bytes of the batch object
    tag 2   u32 LE    crc32c of the whole batch object
    tag 3   16 bytes  producer
    tag 4   u64 LE    number of the batch at that producer, from 0
    tag 5   u32 LE    records in the batch

Any field may be missing, unknown tags are skipped, and a tail without the magic belongs to somebody else. The
formats themselves carry no checksum; this is where one can ride. Writing it is off by default: without it our
manifests are the same bytes as everybody else's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from forebay.errors import UsageError
from forebay.formats._buffer_errors import CorruptManifest

__all__ = ["MAGIC", "EntryTail", "decode_tail", "encode_tail"]

MAGIC: Final = b"FBX1"
PRODUCER_ID_BYTES: Final = 16

_HEAD: Final = struct.Struct("<4sH")
_FIELD: Final = struct.Struct("<BH")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_SIZE, _CRC32C, _PRODUCER, _ORDINAL, _RECORDS = 1, 2, 3, 4, 5
_WIDTHS: Final = {_SIZE: 8, _CRC32C: 4, _PRODUCER: PRODUCER_ID_BYTES, _ORDINAL: 8, _RECORDS: 4}


@dataclass(frozen=True, slots=True)
class EntryTail:
    """The fields that are there."""

    object_bytes: int | None = None
    crc32c: int | None = None
    producer_id: bytes | None = None
    """16 bytes."""
    ordinal: int | None = None
    record_count: int | None = None


def encode_tail(tail: EntryTail) -> bytes:
    """The bytes to put behind the metadata of an entry."""
    if tail.producer_id is not None and len(tail.producer_id) != PRODUCER_ID_BYTES:
        raise UsageError(
            f"a producer id of {len(tail.producer_id)} bytes", hint=f"it has {PRODUCER_ID_BYTES}"
        )
    fields = b"".join(
        _FIELD.pack(tag, len(value)) + value
        for tag, value in (
            (_SIZE, None if tail.object_bytes is None else _U64.pack(tail.object_bytes)),
            (_CRC32C, None if tail.crc32c is None else _U32.pack(tail.crc32c)),
            (_PRODUCER, tail.producer_id),
            (_ORDINAL, None if tail.ordinal is None else _U64.pack(tail.ordinal)),
            (_RECORDS, None if tail.record_count is None else _U32.pack(tail.record_count)),
        )
        if value is not None
    )
    return _HEAD.pack(MAGIC, len(fields)) + fields


def decode_tail(tail: bytes, *, name: str = "buffer manifest", entry: int | None = None) -> EntryTail | None:
    """What our extension says, or None where the tail is empty or somebody else's.

    Raises `CorruptManifest` where the magic is ours and the rest is not; positions count from the magic.
    """
    if not tail.startswith(MAGIC):
        return None
    where = "tail" if entry is None else f"tail of entry {entry}"
    if len(tail) < _HEAD.size:
        raise CorruptManifest(name, 0, f"{where}: {len(tail)} bytes, expected at least {_HEAD.size}")
    _, size = _HEAD.unpack_from(tail)
    place, end = _HEAD.size, _HEAD.size + size
    if end > len(tail):
        raise CorruptManifest(name, 4, f"{where}: {size} bytes of fields, {len(tail) - place} are left")
    values: dict[int, bytes] = {}
    while place < end:
        if place + _FIELD.size > end:
            raise CorruptManifest(name, place, f"{where}: a field is cut off")
        tag, width = _FIELD.unpack_from(tail, place)
        start, place = place + _FIELD.size, place + _FIELD.size + width
        if place > end or _WIDTHS.get(tag, width) != width:
            raise CorruptManifest(name, start - 2, f"{where}: field {tag} has {width} bytes")
        values[tag] = tail[start:place]
    return EntryTail(
        object_bytes=_number(_U64, values.get(_SIZE)),
        crc32c=_number(_U32, values.get(_CRC32C)),
        producer_id=values.get(_PRODUCER),
        ordinal=_number(_U64, values.get(_ORDINAL)),
        record_count=_number(_U32, values.get(_RECORDS)),
    )


def _number(kind: struct.Struct, value: bytes | None) -> int | None:
    return None if value is None else int(kind.unpack(value)[0])
