"""The Osiris chunk: the unit in which RabbitMQ streams are written, replicated and delivered.

    offset  size    field
    0       1       0x50: magic 5 in the high four bits, version 0 in the low ones
    1       1       chunk type: 0 user, 1 tracking delta, 2 tracking snapshot
    2       2       number of entries (a sub-batch counts as one)
    4       4       number of records; chunk id + records = id of the next chunk
    8       8       timestamp, signed milliseconds
    16      8       epoch of the writer
    24      8       chunk id = offset of the first record
    32      4       CRC-32 of the data section alone
    36      4       bytes of the data section
    40      4       bytes of the trailer
    44      1       bytes of the bloom filter, 0 or 16 to 255
    45      3       zeros
    48      ...     bloom filter, data, trailer

All integers are big-endian. Files from before the bloom filters carry zeros in its place, so one parser reads
both.

Where a chunk begins is known only from the one before it, so a walk over a segment is a loop. The loop
touches the three sizes and nothing else, and leaps over runs of chunks of one length; every other field is
gathered afterwards for all chunks at once. Whoever has the index of a segment knows all positions and needs
no loop at all.
The checksum covers neither header nor trailer: a reader of files therefore also insists on the full length.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt, UnsupportedEncoding
from forebay.formats.osiris_entry import Entry, encode_entries, record_count

__all__ = [
    "HEADER_BYTES",
    "TRACKING_DELTA",
    "TRACKING_SNAPSHOT",
    "USER",
    "Chunk",
    "ChunkHeader",
    "Walk",
    "check_data",
    "check_run",
    "decode",
    "decode_header",
    "decode_whole",
    "encode",
    "gather_headers",
    "walk",
]

Bytes: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES: Final = 48
MAGIC: Final = 0x50
USER: Final = 0
TRACKING_DELTA: Final = 1
TRACKING_SNAPSHOT: Final = 2
BLOOM_BYTES_MIN: Final = 16
"""Smallest bloom filter of a chunk that has one."""
BLOOM_BYTES_MAX: Final = 255
"""Largest bloom filter of a chunk."""
ENTRIES_MAX: Final = 0xFFFF
"""Most entries of a chunk: the field has 16 bits."""
CHUNK_BYTES_MAX: Final = 1 << 30
"""Longest chunk we accept. RabbitMQ's are far below: a frame has at most some megabytes."""

_HEADER: Final = struct.Struct(">BBHIqQQIIIB3s")
_SIZES: Final = struct.Struct(">IIB")
_SIZES_AT: Final = 36
_WHAT: Final = "Osiris chunk"
_ALIKE: Final = 8
"""Chunks of one length in a row after which a run of them is looked for."""
_RUN_MAX: Final = 65_536
"""Most chunks of such a run that are compared at once."""
_HEADER_DTYPE: Final = np.dtype(
    [
        ("magic", "u1"),
        ("type", "u1"),
        ("entries", ">u2"),
        ("records", ">u4"),
        ("timestamp", ">i8"),
        ("epoch", ">u8"),
        ("chunk_id", ">u8"),
        ("crc", ">u4"),
        ("data_bytes", ">u4"),
        ("trailer_bytes", ">u4"),
        ("bloom_bytes", "u1"),
        ("reserved", "V3"),
    ]
)


class ChunkHeader(NamedTuple):
    """The first 48 bytes of a chunk."""

    type: int
    entries: int
    records: int
    timestamp: int
    """Signed milliseconds since the Unix epoch."""
    epoch: int
    chunk_id: int
    """Offset of the first record."""
    crc: int
    data_bytes: int
    trailer_bytes: int
    bloom_bytes: int

    @property
    def length(self) -> int:
        """Bytes of the whole chunk."""
        return HEADER_BYTES + self.bloom_bytes + self.data_bytes + self.trailer_bytes

    @property
    def next_id(self) -> int:
        """Id of the chunk that follows."""
        return self.chunk_id + self.records

    @property
    def identity(self) -> tuple[int, int, int]:
        """What tells this chunk from another one of the same offset: epoch, chunk id, checksum."""
        return self.epoch, self.chunk_id, self.crc


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk, its parts as views of the buffer it was decoded from."""

    header: ChunkHeader
    bloom: memoryview
    data: memoryview
    trailer: memoryview


class Walk(NamedTuple):
    """The complete chunks of a buffer."""

    positions: npt.NDArray[np.int64]
    """Where each begins, from the start of the buffer."""
    headers: npt.NDArray[Any]
    """Their headers, one row each, with the names of `ChunkHeader`."""
    end: int
    """Where the last complete chunk ends: what follows is a chunk still being written, or nothing."""


def decode_header(data: Bytes, at: int = 0) -> ChunkHeader:
    """The header at `at`. Its sizes are plausible; whether the chunk is complete is for the caller."""
    if at < 0 or len(data) - at < HEADER_BYTES:
        raise Corrupt(_WHAT, at, f"{max(len(data) - at, 0)} bytes are too short for a header")
    magic, *fields, reserved = _HEADER.unpack_from(data, at)
    _check_magic(magic, at)
    header = ChunkHeader(*fields)
    if reserved != b"\0\0\0":
        raise UnsupportedEncoding(_WHAT, f"reserved bytes are {reserved!r}")
    _check_header(header, at)
    return header


def _check_magic(magic: int, at: int) -> None:
    if magic >> 4 != MAGIC >> 4:
        raise Corrupt(_WHAT, at, f"magic {magic >> 4:#x}, expected {MAGIC >> 4:#x}")
    if magic != MAGIC:
        raise UnsupportedEncoding(_WHAT, f"version {magic & 15}")


def _check_header(header: ChunkHeader, at: int) -> None:
    if header.type > TRACKING_SNAPSHOT:
        raise UnsupportedEncoding(_WHAT, f"chunk type {header.type}")
    if header.records < 1 or not 1 <= header.entries <= header.records:
        raise Corrupt(_WHAT, at + 2, f"{header.entries} entries with {header.records} records")
    if header.next_id >= 1 << 63:
        raise Corrupt(_WHAT, at + 24, f"chunk id {header.chunk_id} is beyond every offset")
    if 0 < header.bloom_bytes < BLOOM_BYTES_MIN:
        raise Corrupt(_WHAT, at + 44, f"a bloom filter of {header.bloom_bytes} bytes")
    if header.length > CHUNK_BYTES_MAX:
        raise Corrupt(_WHAT, at + 36, f"a chunk of {header.length} bytes")


def decode(data: Bytes, at: int = 0, *, check: bool = True) -> Chunk:
    """The chunk at `at`; with `check`, its checksum is compared. Raises `Corrupt` where it is cut short."""
    chunk = decode_whole(data, at, check=check)
    if chunk is None:
        length = decode_header(data, at).length
        raise Corrupt(_WHAT, at, f"{len(data) - at} bytes of a chunk of {length}")
    return chunk


def decode_whole(data: Bytes, at: int = 0, *, check: bool = True) -> Chunk | None:
    """`decode`, or None where the header is there and the chunk goes on behind the end of `data`."""
    header = decode_header(data, at)
    bloom_at = at + HEADER_BYTES
    bloom_end = bloom_at + header.bloom_bytes
    data_end = bloom_end + header.data_bytes
    trailer_end = data_end + header.trailer_bytes
    if trailer_end > len(data):
        return None
    view = memoryview(data)
    body = view[bloom_end:data_end]
    if check:
        check_data(header, body, at)
    return Chunk(header, view[bloom_at:bloom_end], body, view[data_end:trailer_end])


def check_data(header: ChunkHeader, data: Bytes, at: int = 0) -> None:
    """Raise `Corrupt` unless the data section has the checksum that the header names."""
    found = zlib.crc32(data)
    if found != header.crc:
        raise Corrupt(_WHAT, at + 32, f"chunk {header.chunk_id}: checksum {found:#x} is not {header.crc:#x}")


def check_run(
    data: Bytes, positions: npt.NDArray[np.int64], *, what: str = _WHAT, at: int = 0
) -> npt.NDArray[Any]:
    """The headers of the chunks that fill `data`, one after the other, from the given positions on.

    Raises `Corrupt` unless each ends where the next begins, the ids follow each other, and every checksum is
    right: what `walk` and `decode` of each say, for whoever has an index. Where `data` is a part of something
    larger, `what` names that, and `at` is where it begins in there.
    """
    try:
        return _checked_run(data, positions)
    except Corrupt as error:
        raise Corrupt(what, at + error.position, error.reason) from error


def _checked_run(data: Bytes, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    headers = gather_headers(data, positions)
    blooms = headers["bloom_bytes"].astype(np.int64)
    starts = positions + HEADER_BYTES + blooms
    stops = starts + headers["data_bytes"]
    wrong = np.flatnonzero(stops + headers["trailer_bytes"] != np.append(positions[1:], len(data)))
    if len(wrong):
        raise Corrupt(_WHAT, int(positions[wrong[0]]), "it does not end where the next one begins")
    _check_continuous(headers, positions)
    view, crc32 = memoryview(data), zlib.crc32
    found = [crc32(view[at:end]) for at, end in zip(starts.tolist(), stops.tolist(), strict=True)]
    wrong = np.flatnonzero(np.array(found, np.uint32) != headers["crc"])
    if len(wrong):
        at = int(positions[wrong[0]])
        check_data(decode_header(data, at), view[starts[wrong[0]] : stops[wrong[0]]], at)
    return headers


def walk(data: Bytes, start: int = 0, end: int | None = None) -> Walk:
    """Every complete chunk from `start` on, contiguous in offsets. A partial last one is left out."""
    limit = len(data) if end is None else min(end, len(data))
    positions: list[int] = []
    add, sizes, at = positions.append, _SIZES.unpack_from, start
    last_header = limit - HEADER_BYTES
    length = alike = 0
    while at <= last_header:
        data_bytes, trailer_bytes, bloom_bytes = sizes(data, at + _SIZES_AT)
        before, length = length, HEADER_BYTES + data_bytes + trailer_bytes + bloom_bytes
        if at + length > limit:
            break
        add(at)
        at += length
        alike = alike + 1 if length == before else 0
        if alike == _ALIKE:
            run = _run_of(data, at, length, limit)
            positions += range(at, at + run * length, length)
            at += run * length
            alike = 0
    starts = np.array(positions, dtype=np.int64)
    headers = gather_headers(data, starts)
    _check_continuous(headers, starts)
    if at <= last_header:
        decode_header(data, at)  # A partial chunk is fine, garbage is not.
    return Walk(starts, headers, at)


def _run_of(data: Bytes, at: int, length: int, limit: int) -> int:
    """How many chunks from `at` on have the sizes of the one before it: found in one step for all of them."""
    count = min((limit - at) // length, _RUN_MAX)
    if count == 0:
        return 0
    rows = np.frombuffer(data, np.uint8, count * length, at).reshape(count, length)
    own = np.frombuffer(data, np.uint8, _SIZES.size, at - length + _SIZES_AT)
    same = (rows[:, _SIZES_AT : _SIZES_AT + _SIZES.size] == own).all(axis=1)
    return count if same.all() else int(np.argmin(same))


def gather_headers(data: Bytes, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The headers at the given positions, in one step for all of them, each one checked."""
    if len(positions) == 0:
        return np.empty(0, _HEADER_DTYPE)
    if positions.min() < 0 or positions.max() + HEADER_BYTES > len(data):
        raise Corrupt(_WHAT, int(positions.max()), f"a header outside of {len(data)} bytes")
    flat = np.frombuffer(data, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(flat, HEADER_BYTES)
    headers = np.ascontiguousarray(windows[positions]).view(_HEADER_DTYPE).reshape(-1)
    records, entries, bloom = headers["records"], headers["entries"], headers["bloom_bytes"]
    doubtful = (
        (headers["magic"] != MAGIC)
        | (headers["type"] > TRACKING_SNAPSHOT)
        | (entries < 1)
        | (records < entries)
        | ((bloom > 0) & (bloom < BLOOM_BYTES_MIN))
        | (headers["reserved"] != np.void(b"\0\0\0"))
        | (headers["chunk_id"] >= np.uint64(1 << 62))
    )
    for number in np.flatnonzero(doubtful):
        decode_header(data, int(positions[number]))  # Says what is wrong, if it is.
    return headers


def _check_continuous(headers: npt.NDArray[Any], positions: npt.NDArray[np.int64]) -> None:
    expected = headers["chunk_id"][:-1] + headers["records"][:-1]
    wrong = np.flatnonzero(headers["chunk_id"][1:] != expected)
    if len(wrong):
        number = int(wrong[0])
        found = int(headers["chunk_id"][number + 1])
        raise Corrupt(
            _WHAT, int(positions[number + 1]) + 24, f"chunk id {found}, expected {int(expected[number])}"
        )


def encode(
    entries: Sequence[Entry],
    *,
    chunk_id: int,
    timestamp: int,
    epoch: int,
    chunk_type: int = USER,
    bloom: Bytes = b"",
    trailer: Bytes = b"",
) -> bytes:
    """A chunk of these entries: bodies of simple entries, or sub-batches."""
    if len(entries) > ENTRIES_MAX:
        raise LimitExceeded("ENTRIES_MAX", limit=ENTRIES_MAX, actual=len(entries), hint="write more chunks")
    if bloom and not BLOOM_BYTES_MIN <= len(bloom) <= BLOOM_BYTES_MAX:
        raise UsageError(f"a bloom filter of {len(bloom)} bytes", hint="it has 16 to 255 bytes, or none")
    data = encode_entries(entries)
    header = ChunkHeader(
        type=chunk_type,
        entries=len(entries),
        records=record_count(entries),
        timestamp=timestamp,
        epoch=epoch,
        chunk_id=chunk_id,
        crc=zlib.crc32(data),
        data_bytes=len(data),
        trailer_bytes=len(trailer),
        bloom_bytes=len(bloom),
    )
    if header.length > CHUNK_BYTES_MAX:
        raise LimitExceeded(
            "CHUNK_BYTES_MAX", limit=CHUNK_BYTES_MAX, actual=header.length, hint="write more chunks"
        )
    try:
        head = _HEADER.pack(MAGIC, *header, b"\0\0\0")
        _check_header(header, 0)
    except (struct.error, Corrupt, UnsupportedEncoding) as error:
        raise UsageError(f"not a chunk that can be written: {error}", hint="see the byte diagram") from None
    return b"".join((head, bloom, data, trailer))
