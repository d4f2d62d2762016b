"""The shared write-ahead object `LLS1`: the batches of many partitions in one object.

    offset  size        field
    0       4           magic "LLS1"
    4       4           bytes of the header, u32 big-endian
    8       header      JSON, UTF-8
    ...     bodies      one `bytes-batch-v1` body per partition, one after the other

    header  {"version": 1, "created_at_ms": ..., "partitions": [
               {"topic": ..., "partition": ..., "msg_count": ..., "encoding": "bytes-batch-v1",
                "body_offset": ..., "body_length": ..., "crc32c": ...}, ...]}

`body_offset` counts from the start of the object, so that it is also the first byte of a range request. The
header holds no log offsets: they are assigned after the object is written. `crc32c` is ours, a checksum of
the slice; readers of other origin ignore it, and we accept headers without it.

Offsets from the start depend on the length of the header, and the header's length on the digits of the
offsets. The header is therefore padded with spaces, which JSON allows, to the length it would have with the
longest numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
from crc32c import crc32c

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt, UnsupportedEncoding
from forebay.formats.bytes_batch import ENCODING, Frame

__all__ = [
    "BLOB_BYTES_MAX",
    "HEADER_BYTES_MAX",
    "SLICES_MAX",
    "Header",
    "Part",
    "Slice",
    "buffers",
    "decode",
    "encode",
]

MAGIC: Final = b"LLS1"
VERSION: Final = 1
HEADER_BYTES_MAX: Final = 32 * 1024 * 1024
"""Longest header."""
SLICES_MAX: Final = 100_000
"""Most partitions in one object."""
BLOB_BYTES_MAX: Final = 1 << 32
"""Largest object."""

_PREFIX: Final = struct.Struct(">4sI")
_WHAT: Final = "shared blob"


class Part(msgspec.Struct, frozen=True):
    """One partition's batch, on its way into a blob."""

    topic: str
    partition: int
    msg_count: int
    body: bytes | Frame
    encoding: str = ENCODING


class Slice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Where one partition's batch lies in the blob."""

    topic: str
    partition: int
    msg_count: int
    encoding: str
    body_offset: int
    """First byte, from the start of the object."""
    body_length: int
    crc32c: int | None = None
    """Checksum of the slice, or None where the writer gave none."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The table of contents of a blob."""

    version: int
    created_at_ms: int
    partitions: list[Slice]


_decode_header = msgspec.json.Decoder(Header).decode
_encode_header = msgspec.json.Encoder().encode


def encode(parts: Sequence[Part], *, created_at_ms: int) -> tuple[bytes, list[Slice]]:
    """The blob, and where each part lies in it."""
    pieces, slices = buffers(parts, created_at_ms=created_at_ms)
    return b"".join(pieces), slices


def buffers(parts: Sequence[Part], *, created_at_ms: int) -> tuple[list[bytes | memoryview], list[Slice]]:
    """The blob as the buffers it consists of, none of them copied, and where each part lies in it."""
    if not parts:
        raise UsageError("a shared blob holds at least one part")
    if len(parts) > SLICES_MAX:
        raise LimitExceeded("SLICES_MAX", limit=SLICES_MAX, actual=len(parts), hint="flush more often")
    frames = [_framed(part.body) for part in parts]
    # No offset is written with more digits than this one.
    longest = [_slice(part, frame, BLOB_BYTES_MAX) for part, frame in zip(parts, frames, strict=True)]
    length = len(_encode_header(Header(version=VERSION, created_at_ms=created_at_ms, partitions=longest)))
    slices, start = [], _PREFIX.size + length
    for part, frame in zip(parts, frames, strict=True):
        slices.append(_slice(part, frame, start))
        start += frame.size
    header = _encode_header(Header(version=VERSION, created_at_ms=created_at_ms, partitions=slices))
    end = slices[-1].body_offset + slices[-1].body_length
    _check_sizes(length, end)
    pieces: list[bytes | memoryview] = [_PREFIX.pack(MAGIC, length), header, b" " * (length - len(header))]
    for frame in frames:
        pieces += frame.parts
    assert sum([len(piece) for piece in pieces]) == end
    return pieces, slices


def _framed(body: bytes | Frame) -> Frame:
    return body if isinstance(body, Frame) else Frame([body], len(body), crc32c(body))


def _slice(part: Part, frame: Frame, start: int) -> Slice:
    return Slice(
        topic=part.topic,
        partition=part.partition,
        msg_count=part.msg_count,
        encoding=part.encoding,
        body_offset=start,
        body_length=frame.size,
        crc32c=frame.crc32c,
    )


def _check_sizes(header_bytes: int, blob_bytes: int) -> None:
    if header_bytes > HEADER_BYTES_MAX:
        raise LimitExceeded(
            "HEADER_BYTES_MAX", limit=HEADER_BYTES_MAX, actual=header_bytes, hint="flush more often"
        )
    if blob_bytes > BLOB_BYTES_MAX:
        raise LimitExceeded(
            "BLOB_BYTES_MAX", limit=BLOB_BYTES_MAX, actual=blob_bytes, hint="flush more often"
        )


def decode(data: bytes | memoryview, *, blob_bytes: int | None = None) -> Header:
    """The header of a blob, checked against the size of the object.

    `data` may be the first bytes only, as long as they hold the header; `blob_bytes` is then its size.
    """
    view = memoryview(data).cast("B")
    size = len(view) if blob_bytes is None else blob_bytes
    if len(view) < _PREFIX.size:
        raise Corrupt(_WHAT, len(view), f"{len(view)} bytes are too short for a blob")
    magic, length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise Corrupt(_WHAT, 0, f"magic {bytes(magic)!r}, expected {MAGIC!r}")
    if length > HEADER_BYTES_MAX or length > len(view) - _PREFIX.size:
        raise Corrupt(_WHAT, 4, f"header of {length} bytes in {len(view)}")
    try:
        header = _decode_header(view[_PREFIX.size : _PREFIX.size + length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(_WHAT, _PREFIX.size, f"header: {error}") from error
    if header.version != VERSION:
        raise UnsupportedEncoding(_WHAT, f"version {header.version}")
    _check_slices(header.partitions, _PREFIX.size + length, size)
    return header


def _check_slices(slices: Sequence[Slice], start: int, size: int) -> None:
    """Every slice lies behind the one before it and inside the object; nothing overlaps."""
    if not slices:
        raise Corrupt(_WHAT, _PREFIX.size, "no partitions")
    if len(slices) > SLICES_MAX:
        raise Corrupt(_WHAT, _PREFIX.size, f"{len(slices)} partitions")
    for number, one in enumerate(slices):
        if one.msg_count < 1 or one.partition < 0 or one.body_length < 1:
            raise Corrupt(_WHAT, _PREFIX.size, f"slice {number} has impossible numbers: {one}")
        if one.body_offset < start or one.body_offset + one.body_length > size:
            where = f"bytes {one.body_offset} to {one.body_offset + one.body_length}"
            raise Corrupt(_WHAT, _PREFIX.size, f"slice {number} is {where}, expected {start} to {size}")
        start = one.body_offset + one.body_length
