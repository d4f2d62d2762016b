"""A file of the shared tail cache: one committed append, and enough about it to trust it.

    offset  size     field
    0       4        magic "FTC1"
    4       4        bytes of the header, u32 LE
    8       header   JSON, UTF-8: {"topic", "partition", "start_offset", "msg_count", "time_ms"}
    ...     body     one `bytes-batch-v1` batch
    end-4   4        crc32c of everything before it, u32 LE

Such files are read while others write, evict and crash. Each is complete in itself: its name is a hint for
finding it and never believed. Whatever is torn, cut short or not what it claims to be is a miss.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
from crc32c import crc32c

from forebay.formats import bytes_batch
from forebay.formats._errors import Corrupt
from forebay.formats.bytes_batch import BytesBatch

__all__ = ["HEADER_BYTES_MAX", "TailHeader", "decode", "encode"]

MAGIC: Final = b"FTC1"
HEADER_BYTES_MAX: Final = 4096
"""Longest header."""

_PREFIX: Final = struct.Struct("<4sI")
_CHECKSUM: Final = struct.Struct("<I")
_WHAT: Final = "tail file"


class TailHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Whose records, and which."""

    topic: str
    partition: int
    start_offset: int
    msg_count: int
    time_ms: int
    """Time of the append."""


_decode_header = msgspec.json.Decoder(TailHeader).decode
_encode_header = msgspec.json.Encoder().encode


def encode(header: TailHeader, batch: BytesBatch) -> bytes:
    """The file of an append."""
    assert header.msg_count == len(batch)
    text = _encode_header(header)
    prefix = _PREFIX.pack(MAGIC, len(text))
    data = b"".join((prefix, text, bytes_batch.encode_batch(batch)))
    return data + _CHECKSUM.pack(crc32c(data))


def decode(data: bytes | memoryview) -> tuple[TailHeader, BytesBatch]:
    """Header and records; raises `Corrupt` for anything that is not exactly one file."""
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size + _CHECKSUM.size:
        raise Corrupt(_WHAT, len(view), f"{len(view)} bytes are too short")
    magic, length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise Corrupt(_WHAT, 0, f"magic {bytes(magic)!r}, expected {MAGIC!r}")
    if length > HEADER_BYTES_MAX or length > len(view) - _PREFIX.size - _CHECKSUM.size:
        raise Corrupt(_WHAT, 4, f"header of {length} bytes in {len(view)}")
    [stored] = _CHECKSUM.unpack_from(view, len(view) - _CHECKSUM.size)
    if stored != crc32c(view[: -_CHECKSUM.size]):
        raise Corrupt(_WHAT, len(view) - 4, "the checksum does not match")
    try:
        header = _decode_header(view[_PREFIX.size : _PREFIX.size + length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(_WHAT, _PREFIX.size, f"header: {error}") from error
    batch = bytes_batch.decode(view[_PREFIX.size + length : -_CHECKSUM.size])
    if len(batch) != header.msg_count:
        raise Corrupt(_WHAT, _PREFIX.size, f"{len(batch)} records, {header.msg_count} expected")
    return header, batch
