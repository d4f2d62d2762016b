"""Frames of Quiver's two logs, the WAL and `ack.log`: one layout, so that one scanner recovers both.

    file header, 40 bytes, little-endian
    0       8    magic: "FBYQWAL\\0" or "FBYQACK\\0"
    8       2    format version, 1
    10      2    size of this header, 40
    12      4    flags: 1 = the file was longer than its frames when it was begun, see below
    16      8    generation: the number of the use of a file, never given twice
    24      8    first sequence: every frame in the file is at or above it
    32      4    reserved, 0
    36      4    crc32c of bytes 0 to 36

    frame, 40 bytes + body + 4
    0       4    sync magic 0x9E51B7F3
    4       1    type; readers skip unknown ones by their length and report them
    5       1    flags, 0
    6       2    reserved, 0
    8       4    length of the body
    12      8    generation of the file it belongs to
    20      8    sequence, rising within the log
    28      8    time in nanoseconds since the Unix epoch
    36      4    crc32c of bytes 0 to 36: it covers the length
    40      n    body
    40+n    4    crc32c of the body, seeded with the header's, so that no body fits another header

A damaged byte costs the frame it lies in and nothing else: the scanner looks for the next place where magic,
header checksum, generation and a rising sequence all fit. Magic bytes inside a payload do not fool it, nor
does a stale frame of another file. Bytes behind the last good frame are a *torn tail*, the normal trace of a
crash; bad bytes with a good frame behind them are *damage*. Zeros are neither frames nor an endless row of
empty ones, because a header of zeros has no valid checksum.

A file that was filled with zeros, or used before, is written over from its beginning: syncs that change no
size are twice as fast. Behind its last frame lie zeros, or frames of an older generation. They are neither
torn nor damaged; only a header of this generation without its body counts as torn there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from forebay.errors import LimitExceeded
from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = [
    "ACK_MAGIC",
    "BODY_BYTES_MAX",
    "FILE_HEADER_BYTES",
    "FRAME_OVERHEAD_BYTES",
    "WAL_MAGIC",
    "Damage",
    "FileHeader",
    "Frame",
    "check_body",
    "decode_file_header",
    "encode_file_header",
    "encode_frame",
    "scan",
]

WAL_MAGIC: Final = b"FBYQWAL\0"
ACK_MAGIC: Final = b"FBYQACK\0"
VERSION: Final = 1
BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest body of one frame of the WAL or of ack.log. Writers keep to it as well as readers."""

_FILE_HEADER: Final = struct.Struct("<8sHHIQQI")
_HEADER: Final = struct.Struct("<IBBHIQQq")
_CRC: Final = struct.Struct("<I")
_SYNC: Final = 0x9E51B7F3
_SYNC_BYTES: Final = _SYNC.to_bytes(4, "little")
FILE_HEADER_BYTES: Final = _FILE_HEADER.size + _CRC.size
_HEADER_BYTES: Final = _HEADER.size + _CRC.size
FRAME_OVERHEAD_BYTES: Final = _HEADER_BYTES + _CRC.size
_REUSED: Final = 1
_WHAT: Final = "quiver log"


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a log file says of itself."""

    magic: bytes
    generation: int
    first_sequence: int
    is_reused: bool = False
    """Whether bytes behind the frames may be older than the file."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One good frame. `body` is a view of the scanned buffer."""

    offset: int
    type: int
    sequence: int
    time_ns: int
    body: memoryview

    @property
    def end(self) -> int:
        """Where the next frame may begin."""
        return self.offset + FRAME_OVERHEAD_BYTES + len(self.body)


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of bytes without a good frame."""

    offset: int
    length: int
    is_tail: bool
    """Nothing good follows: the end of a write that a crash cut short."""


def encode_file_header(header: FileHeader) -> bytes:
    """The first bytes of a log file."""
    data = _FILE_HEADER.pack(
        header.magic,
        VERSION,
        FILE_HEADER_BYTES,
        _REUSED if header.is_reused else 0,
        header.generation,
        header.first_sequence,
        0,
    )
    return data + _CRC.pack(crc32c(data))


def decode_file_header(data: bytes | memoryview, magic: bytes) -> FileHeader:
    """Raises `Corrupt`, or `UnsupportedEncoding` for a later version."""
    if len(data) < FILE_HEADER_BYTES:
        raise Corrupt(_WHAT, len(data), "the file header is cut short")
    found, version, size, flags, generation, first, _ = _FILE_HEADER.unpack_from(data)
    if found != magic:
        raise Corrupt(_WHAT, 0, f"magic {found!r}, expected {magic!r}")
    if _CRC.unpack_from(data, _FILE_HEADER.size)[0] != crc32c(data[: _FILE_HEADER.size]):
        raise Corrupt(_WHAT, _FILE_HEADER.size, "the checksum of the file header does not match")
    if version != VERSION or size != FILE_HEADER_BYTES:
        raise UnsupportedEncoding(_WHAT, f"version {version} with a header of {size} bytes")
    return FileHeader(found, generation, first, bool(flags & _REUSED))


def encode_frame(
    type_: int, generation: int, sequence: int, time_ns: int, size: int, body: Sequence[bytes | memoryview]
) -> tuple[bytes, bytes]:
    """What goes before and behind the pieces of the body, which are not copied and have `size` bytes."""
    check_body(size)
    header = _HEADER.pack(_SYNC, type_, 0, 0, size, generation, sequence, time_ns)
    seed = checksum = crc32c(header)
    for piece in body:
        checksum = crc32c(piece, checksum)
    return header + seed.to_bytes(4, "little"), checksum.to_bytes(4, "little")


def check_body(size: int) -> None:
    """Raise `LimitExceeded` for a body that no frame may have."""
    if size > BODY_BYTES_MAX:
        raise LimitExceeded(
            "BODY_BYTES_MAX", limit=BODY_BYTES_MAX, actual=size, hint="ingest smaller batches"
        )


def scan(data: bytes | memoryview, header: FileHeader) -> Iterator[Frame | Damage]:
    """Every good frame behind the file header, and every range that is none, in order."""
    view = memoryview(data).cast("B")
    position, last = FILE_HEADER_BYTES, header.first_sequence - 1
    bad_from: int | None = None
    search = _Search(view)
    while position < len(view):
        frame = _frame_at(view, position, header.generation, last)
        if frame is not None:
            if bad_from is not None:
                yield Damage(bad_from, position - bad_from, is_tail=False)
                bad_from = None
            yield frame
            position, last = frame.end, frame.sequence
            continue
        if bad_from is None:
            bad_from = position
        position = search.next(position + 1)
    if bad_from is not None:
        torn = len(view) - bad_from
        if header.is_reused:
            torn = _torn_length(view, bad_from, header.generation, last)
        if torn:
            yield Damage(bad_from, torn, is_tail=True)


def _torn_length(view: memoryview, position: int, generation: int, last: int) -> int:
    """Bytes of a frame whose header was written and whose body was not, 0 where none begins here."""
    if len(view) - position < _HEADER_BYTES:
        return 0
    sync, _, _, _, length, found, sequence, _ = _HEADER.unpack_from(view, position)
    [checksum] = _CRC.unpack_from(view, position + _HEADER.size)
    if sync != _SYNC or found != generation or sequence <= last:
        return 0
    if checksum != crc32c(view[position : position + _HEADER.size]):
        return 0
    return min(int(length) + FRAME_OVERHEAD_BYTES, len(view) - position)


def _frame_at(view: memoryview, position: int, generation: int, last: int) -> Frame | None:
    """The frame at `position`, if one is there that belongs there."""
    if len(view) - position < FRAME_OVERHEAD_BYTES:
        return None
    sync, type_, _, _, length, found, sequence, time_ns = _HEADER.unpack_from(view, position)
    if sync != _SYNC or found != generation or sequence <= last or length > BODY_BYTES_MAX:
        return None
    [checksum] = _CRC.unpack_from(view, position + _HEADER.size)
    if checksum != crc32c(view[position : position + _HEADER.size]):
        return None
    begin = position + _HEADER_BYTES
    end = begin + length
    if end + _CRC.size > len(view):
        return None
    body = view[begin:end]
    if _CRC.unpack_from(view, end)[0] != crc32c(body, checksum):
        return None
    return Frame(position, type_, sequence, time_ns, body)


class _Search:
    """Where the sync magic comes next. Copies the bytes in pieces, each once, so that neither a large file
    nor one full of stale frames costs more than a look at every byte."""

    STEP: Final = 1 << 20

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._piece = b""
        self._begin = 0

    def next(self, position: int) -> int:
        """At or behind `position`; the end where there is none."""
        while position < len(self._view):
            if not self._begin <= position < self._begin + len(self._piece) - len(_SYNC_BYTES) + 1:
                self._begin = position
                self._piece = bytes(self._view[position : position + self.STEP + len(_SYNC_BYTES) - 1])
            found = self._piece.find(_SYNC_BYTES, position - self._begin)
            if found >= 0:
                return self._begin + found
            position = max(position + 1, self._begin + len(self._piece) - len(_SYNC_BYTES) + 1)
        return len(self._view)
