"""The two files of an Osiris segment, and their names.

    segment     "OSIL", u32 version 1, then chunks back to back
    index       "OSII", u32 version 1, then one record per chunk:

    offset  size    field
    0       8       chunk id
    8       8       timestamp, signed milliseconds
    16      8       epoch
    24      4       position of the chunk in the segment file
    28      1       chunk type

Both are named `%020d` after the id of their first chunk. Records have a fixed size, so an index file is one
numpy array.
"""

from __future__ import annotations

import re
import struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.errors import UsageError
from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = [
    "FILE_HEADER_BYTES",
    "INDEX_DTYPE",
    "INDEX_HEADER",
    "INDEX_RECORD_BYTES",
    "SEGMENT_HEADER",
    "check_index",
    "check_index_header",
    "check_order",
    "check_segment_header",
    "decode_index",
    "encode_index",
    "file_name",
    "parse_file_name",
]

Bytes: TypeAlias = bytes | bytearray | memoryview

FILE_HEADER_BYTES: Final = 8
VERSION: Final = 1
_FILE_HEADER: Final = struct.Struct(">4sI")
SEGMENT_HEADER: Final = _FILE_HEADER.pack(b"OSIL", VERSION)
INDEX_HEADER: Final = _FILE_HEADER.pack(b"OSII", VERSION)
INDEX_DTYPE: Final = np.dtype(
    [("chunk_id", ">u8"), ("timestamp", ">i8"), ("epoch", ">u8"), ("position", ">u4"), ("type", "u1")]
)
INDEX_RECORD_BYTES: Final = INDEX_DTYPE.itemsize
_NAME: Final = re.compile(r"([0-9]{20})\.(segment|index)", re.ASCII)


def check_segment_header(data: Bytes) -> None:
    """Raise `Corrupt` or `UnsupportedEncoding` unless a segment begins here."""
    _check_header("Osiris segment", data, SEGMENT_HEADER)


def check_index_header(data: Bytes) -> None:
    """Raise `Corrupt` or `UnsupportedEncoding` unless an index begins here."""
    _check_header("Osiris index", data, INDEX_HEADER)


def _check_header(what: str, data: Bytes, expected: bytes) -> None:
    found = bytes(data[:FILE_HEADER_BYTES])
    if len(found) < FILE_HEADER_BYTES:
        raise Corrupt(what, len(found), f"{len(found)} bytes are too short for a header")
    if found[:4] != expected[:4]:
        raise Corrupt(what, 0, f"magic {found[:4]!r}, expected {expected[:4]!r}")
    if found != expected:
        raise UnsupportedEncoding(what, f"version {_FILE_HEADER.unpack(found)[1]}")


def decode_index(data: Bytes) -> npt.NDArray[Any]:
    """The whole records of an index file. A partial last one, still being written, is left out."""
    check_index_header(data)
    count = (len(data) - FILE_HEADER_BYTES) // INDEX_RECORD_BYTES
    return np.frombuffer(data, INDEX_DTYPE, count=count, offset=FILE_HEADER_BYTES)


def check_index(records: npt.NDArray[Any]) -> None:
    """Raise `Corrupt` unless ids and positions strictly increase from behind the file header."""
    if len(records) == 0:
        return
    at = int(records["position"][0])
    if at != FILE_HEADER_BYTES:
        raise Corrupt("Osiris index", FILE_HEADER_BYTES + 24, f"the first chunk is at {at}")
    check_order(records)


def check_order(records: npt.NDArray[Any], first: int = 0) -> None:
    """Raise `Corrupt` unless ids and positions strictly increase. `first` is the first record's number."""
    ids, positions = records["chunk_id"], records["position"]
    wrong = np.flatnonzero((ids[1:] <= ids[:-1]) | (positions[1:] <= positions[:-1]))
    if len(wrong):
        number = first + int(wrong[0]) + 1
        raise Corrupt(
            "Osiris index",
            FILE_HEADER_BYTES + number * INDEX_RECORD_BYTES,
            f"record {number} does not follow the one before it",
        )


def encode_index(records: npt.NDArray[Any]) -> bytes:
    """An index file of these records."""
    return INDEX_HEADER + records.astype(INDEX_DTYPE, copy=False).tobytes()


def file_name(chunk_id: int, kind: str) -> str:
    """The name of a `segment` or an `index` file."""
    if kind not in ("segment", "index") or not 0 <= chunk_id < 10**20:
        raise UsageError(f"no file of kind {kind!r} for chunk {chunk_id}", hint="kinds: segment, index")
    return f"{chunk_id:020d}.{kind}"


def parse_file_name(name: str) -> tuple[int, str] | None:
    """Chunk id and kind, or None where the file is not ours."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None
