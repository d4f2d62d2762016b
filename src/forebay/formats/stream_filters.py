"""The filters of a fragment's chunks, beside the fragment: what a reader need not download.

    offset      size    field
    0           4       "FBFI"
    4           4       u32 version 1
    8           8       u64 first offset of the fragment
    16          8       u64 next offset of the fragment
    24          4       u32 bytes of its chunks
    28          4       u32 N, its chunks
    32          4       u32 CRC-32 of everything behind
    36          14 N    per chunk: u64 chunk id, u32 position in the fragment, u8 type, u8 filter size
    36+14N      ...     the filters, back to back

This object is ours; the plugin's format has no place for it. It only ever saves work: whoever does not find
it, or finds one that tells of another fragment, reads the chunks themselves.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = ["RECORD_DTYPE", "Filters", "decode", "encode"]

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"FBFI"
VERSION: Final = 1
RECORD_DTYPE: Final = np.dtype(
    [("chunk_id", ">u8"), ("position", ">u4"), ("type", "u1"), ("filter_bytes", "u1")]
)
_HEADER: Final = struct.Struct(">4sIQQIII")
HEADER_BYTES: Final = _HEADER.size
_WHAT: Final = "stream filters"


class Filters(NamedTuple):
    """The filters of one fragment."""

    first_offset: int
    next_offset: int
    data_bytes: int
    chunks: npt.NDArray[Any]
    """One record per chunk."""
    blooms: tuple[bytes, ...]
    """One per chunk, empty where it has none."""


def encode(filters: Filters) -> bytes:
    """The object."""
    body = filters.chunks.tobytes() + b"".join(filters.blooms)
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        filters.first_offset,
        filters.next_offset,
        filters.data_bytes,
        len(filters.chunks),
        zlib.crc32(body),
    )
    return header + body


def decode(data: Bytes) -> Filters:
    """From the object. Raises `FormatError` where it is not exactly what was written."""
    if len(data) < HEADER_BYTES:
        raise Corrupt(_WHAT, 0, f"{len(data)} bytes are too short")
    magic, version, first, following, data_bytes, count, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt(_WHAT, 0, f"magic {magic!r}")
    if version != VERSION:
        raise UnsupportedEncoding(_WHAT, f"version {version}")
    body = memoryview(data)[HEADER_BYTES:]
    records_bytes = count * RECORD_DTYPE.itemsize
    if zlib.crc32(body) != checksum or count == 0 or len(body) < records_bytes:
        raise Corrupt(_WHAT, HEADER_BYTES, "the checksum does not fit")
    chunks = np.frombuffer(body, RECORD_DTYPE, count=count)
    ends = records_bytes + np.cumsum(chunks["filter_bytes"].astype(np.int64))
    if ends[-1] != len(body):
        raise Corrupt(_WHAT, HEADER_BYTES, f"filters end at {ends[-1]} of {len(body)}")
    starts = np.concatenate([[records_bytes], ends[:-1]]).tolist()
    blooms = tuple([bytes(body[start:end]) for start, end in zip(starts, ends.tolist(), strict=True)])
    return Filters(first, following, data_bytes, chunks, blooms)
