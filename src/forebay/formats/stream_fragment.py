"""A fragment: a run of whole chunks of one segment and their index, as one object of the remote tier.

    offset      size    field
    0           8       "OSIL", u32 version 1
    8           S       chunks, copied unchanged
    8+S         8       "OSII", u32 version 1
    16+S        20 N    index, one record per chunk: u64 chunk id, i64 timestamp, u32 position in this object
    16+S+20N    54      trailer

    trailer     u64     first offset
                u64     next offset: where the following fragment begins
                i64     first timestamp
                i64     last timestamp
                u16     number of this fragment in its segment, from 0
                u32     S, bytes of chunks
                u32     chunks before it in its segment
                u32     position of its first chunk in the segment file
                u32     16+S, where the index records begin
                u32     20N, bytes of the index records

The trailer makes a chain: whoever knows one fragment finds the next without any manifest. Nothing may be
appended, since readers take the index as everything between its start and the last 54 bytes. What identifies
a fragment is inside already: its last index record leads to the header of its last chunk, with epoch, chunk
id and checksum.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt
from forebay.formats.osiris_chunk import HEADER_BYTES
from forebay.formats.osiris_file import FILE_HEADER_BYTES, INDEX_HEADER, SEGMENT_HEADER, check_segment_header
from forebay.formats.osiris_file import check_index_header as _check_index_header

__all__ = [
    "DATA_AT",
    "INDEX_DTYPE",
    "INDEX_RECORD_BYTES",
    "TAIL_BYTES",
    "TRAILER_BYTES",
    "Fragment",
    "Trailer",
    "check_index",
    "decode",
    "decode_index",
    "decode_trailer",
    "encode",
    "encode_tail",
    "object_bytes",
]

Bytes: TypeAlias = bytes | bytearray | memoryview

DATA_AT: Final = FILE_HEADER_BYTES
"""Where the chunks begin."""
TRAILER_BYTES: Final = 54
INDEX_DTYPE: Final = np.dtype([("chunk_id", ">u8"), ("timestamp", ">i8"), ("position", ">u4")])
INDEX_RECORD_BYTES: Final = INDEX_DTYPE.itemsize
TAIL_BYTES: Final = TRAILER_BYTES + INDEX_RECORD_BYTES
"""The trailer and the last index record: enough to find the last chunk."""
FRAGMENT_BYTES_MAX: Final = (1 << 32) - 1
"""Positions in a fragment have 32 bits."""

_TRAILER: Final = struct.Struct(">QQqqHIIIII")
_WHAT: Final = "stream fragment"


class Trailer(NamedTuple):
    """The last 54 bytes of a fragment."""

    first_offset: int
    next_offset: int
    first_timestamp: int
    last_timestamp: int
    sequence: int
    """Number of the fragment in its segment."""
    data_bytes: int
    """Bytes of chunks, without any header or index."""
    chunks_before: int
    """Chunks before it in its segment."""
    segment_position: int
    """Where its first chunk stands in the segment file."""
    index_at: int
    index_bytes: int

    @property
    def object_bytes(self) -> int:
        """Bytes of the whole object."""
        return self.index_at + self.index_bytes + TRAILER_BYTES

    @property
    def chunks(self) -> int:
        """Chunks in it."""
        return self.index_bytes // INDEX_RECORD_BYTES


class Fragment(NamedTuple):
    """A whole fragment, decoded."""

    trailer: Trailer
    chunks: npt.NDArray[Any]
    """Its index: one record per chunk."""
    data: memoryview
    """Its chunks, back to back."""


def object_bytes(data_bytes: int, chunks: int) -> int:
    """Bytes of a fragment with so many chunks in so many bytes."""
    return 2 * FILE_HEADER_BYTES + data_bytes + chunks * INDEX_RECORD_BYTES + TRAILER_BYTES


def encode(
    data: Bytes,
    index: npt.NDArray[Any],
    *,
    next_offset: int,
    sequence: int,
    chunks_before: int,
    segment_position: int,
) -> bytes:
    """A fragment around chunks.

    `index` are the records of the segment's index file for exactly these chunks; their positions are those in
    the segment file.
    """
    tail = encode_tail(
        len(data),
        index,
        next_offset=next_offset,
        sequence=sequence,
        chunks_before=chunks_before,
        segment_position=segment_position,
    )
    return b"".join((SEGMENT_HEADER, data, tail))


def encode_tail(
    data_bytes: int,
    index: npt.NDArray[Any],
    *,
    next_offset: int,
    sequence: int,
    chunks_before: int,
    segment_position: int,
) -> bytes:
    """Everything behind the chunks, for whoever has these in place already and wants no copy of them."""
    if len(index) == 0:
        raise UsageError("a fragment holds at least one chunk", hint="wait for one")
    size = object_bytes(data_bytes, len(index))
    if size > FRAGMENT_BYTES_MAX:
        raise LimitExceeded(
            "FRAGMENT_BYTES_MAX", limit=FRAGMENT_BYTES_MAX, actual=size, hint="cut smaller fragments"
        )
    records = np.empty(len(index), INDEX_DTYPE)
    records["chunk_id"] = index["chunk_id"]
    records["timestamp"] = index["timestamp"]
    records["position"] = index["position"].astype(np.int64) - segment_position + DATA_AT
    trailer = Trailer(
        first_offset=int(index["chunk_id"][0]),
        next_offset=next_offset,
        first_timestamp=int(index["timestamp"][0]),
        last_timestamp=int(index["timestamp"][-1]),
        # 16 bits are few for a segment cut chunk by chunk; the number informs people and decides nothing.
        sequence=min(sequence, 0xFFFF),
        data_bytes=data_bytes,
        chunks_before=chunks_before,
        segment_position=segment_position,
        index_at=2 * FILE_HEADER_BYTES + data_bytes,
        index_bytes=len(records) * INDEX_RECORD_BYTES,
    )
    _check_trailer(trailer, size)
    check_index(records, trailer)
    return b"".join((INDEX_HEADER, records.tobytes(), _TRAILER.pack(*trailer)))


def decode_trailer(tail: Bytes, size: int) -> Trailer:
    """The trailer, from the last bytes of an object of `size` bytes; checked against that size."""
    if len(tail) < TRAILER_BYTES:
        raise Corrupt(_WHAT, max(size - TRAILER_BYTES, 0), f"{len(tail)} bytes are too short for a trailer")
    trailer = Trailer(*_TRAILER.unpack_from(tail, len(tail) - TRAILER_BYTES))
    _check_trailer(trailer, size)
    return trailer


def _check_trailer(trailer: Trailer, size: int) -> None:
    at = size - TRAILER_BYTES
    if trailer.index_at != 2 * FILE_HEADER_BYTES + trailer.data_bytes or trailer.object_bytes != size:
        raise Corrupt(_WHAT, at, f"sizes do not add up to {size} bytes: {trailer}")
    if trailer.index_bytes % INDEX_RECORD_BYTES or trailer.index_bytes < INDEX_RECORD_BYTES:
        raise Corrupt(_WHAT, at, f"an index of {trailer.index_bytes} bytes")
    if trailer.data_bytes < trailer.chunks * HEADER_BYTES:
        raise Corrupt(_WHAT, at, f"{trailer.chunks} chunks in {trailer.data_bytes} bytes")
    if not trailer.first_offset < trailer.next_offset < 1 << 63:
        raise Corrupt(_WHAT, at, f"offsets {trailer.first_offset} to {trailer.next_offset}")


def decode_index(data: Bytes, trailer: Trailer) -> npt.NDArray[Any]:
    """The index records, from the bytes between the chunks and the trailer, index header included."""
    _check_index_header(data)
    if len(data) != FILE_HEADER_BYTES + trailer.index_bytes:
        raise Corrupt(_WHAT, trailer.index_at, f"{len(data)} bytes of index, {trailer.index_bytes} expected")
    records = np.frombuffer(data, INDEX_DTYPE, offset=FILE_HEADER_BYTES)
    check_index(records, trailer)
    return records


def check_index(records: npt.NDArray[Any], trailer: Trailer) -> None:
    """Raise `Corrupt` unless ids and positions strictly increase and agree with the trailer."""
    ids, positions = records["chunk_id"], records["position"].astype(np.int64)
    ends = np.append(positions[1:], DATA_AT + trailer.data_bytes)
    if positions[0] != DATA_AT or int(ids[0]) != trailer.first_offset:
        raise Corrupt(_WHAT, trailer.index_at, f"the index begins with chunk {ids[0]} at {positions[0]}")
    if int(ids[-1]) >= trailer.next_offset or (ids[1:] <= ids[:-1]).any():
        raise Corrupt(_WHAT, trailer.index_at, "chunk ids of the index do not increase to the next offset")
    if (ends - positions < HEADER_BYTES).any():
        raise Corrupt(_WHAT, trailer.index_at, "positions of the index leave no room for a chunk")


def decode(data: Bytes) -> Fragment:
    """A whole object: headers, sizes and index checked; the chunks are for `osiris_chunk`."""
    check_segment_header(data)
    trailer = decode_trailer(data[-TRAILER_BYTES:], len(data))
    view = memoryview(data)
    index = decode_index(view[trailer.index_at - FILE_HEADER_BYTES : len(data) - TRAILER_BYTES], trailer)
    return Fragment(trailer, index, view[DATA_AT : DATA_AT + trailer.data_bytes])
