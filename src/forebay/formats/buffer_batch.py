"""A data batch of the stateless buffer: what a producer uploads in one object.

    record block, compressed as a whole or not     see `record_block`
    footer, 7 bytes, never compressed:
        u8      compression: 0 none, 1 zstd
        u32 LE  record count
        u16 LE  version, 1

A zstd block is any sequence of zstd frames that together decompress to the block; writers make one frame of
level 3 with its content size in it. The footer carries no checksum.

The decoder is strict, because a batch is the only copy of acknowledged records: what follows the last record,
a frame cut short or a count that does not match is an error, never ignored. Nothing is allocated on the word
of a header: a record count is held against the bytes there are, and decompression stops at a limit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, overload

import pyarrow as pa
import zstandard

from forebay.errors import LimitExceeded, UsageError
from forebay.formats import record_block
from forebay.formats._buffer_errors import (
    CorruptBatch,
    TooLarge,
    UnsupportedCompression,
    UnsupportedVersion,
)
from forebay.formats._errors import Corrupt

__all__ = [
    "BATCH_BYTES_MAX",
    "BLOCK_BYTES_MAX",
    "COMPRESSIONS",
    "FOOTER_BYTES",
    "VERSION",
    "Batch",
    "Compression",
    "CorruptBatch",
    "Footer",
    "TooLarge",
    "UnsupportedCompression",
    "UnsupportedVersion",
    "decode",
    "decode_footer",
    "encode",
    "encode_blocks",
]

Compression: TypeAlias = Literal["none", "zstd"]
COMPRESSIONS: Final[tuple[Compression, ...]] = ("none", "zstd")
"""By the number that stands for them."""
VERSION: Final = 1
FOOTER_BYTES: Final = 7
BATCH_BYTES_MAX: Final = 1 << 30
"""Largest object that `decode` takes unless told otherwise."""
BLOCK_BYTES_MAX: Final = 1 << 30
"""Largest block that `decode` decompresses unless told otherwise."""
RECORDS_MAX: Final = (1 << 32) - 1
"""Most records that the footer can count."""
ZSTD_LEVEL: Final = 3

_FOOTER: Final = struct.Struct("<BIH")
_PIECE_BYTES: Final = 4096
"""Input handed to the decompressor at once where sizes cannot be trusted: four bytes can become 128 KiB."""
_TRUSTED_RATIO: Final = 4096
"""Bytes that a frame may claim per stored byte and still be decompressed in one go."""
FRAMES_MAX: Final = 1 << 20
"""Most zstd frames in one block: empty ones cost time and say nothing."""
_WHAT: Final = "buffer batch"


@dataclass(frozen=True, slots=True)
class Footer:
    """The last seven bytes."""

    compression: Compression
    record_count: int


class Batch(Sequence[bytes]):
    """The records of a batch. Their number is known at once, the list is made when it is asked for."""

    __slots__ = ("_array", "_count", "_records", "compression", "stored_bytes")

    def __init__(
        self,
        *,
        count: int,
        compression: Compression,
        stored_bytes: int,
        records: list[bytes] | None = None,
        array: pa.Array | None = None,
    ) -> None:
        self._count = count
        self._records = records
        self._array = array
        self.compression: Compression = compression
        self.stored_bytes = stored_bytes
        """Bytes of the object it was decoded from."""

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self.records()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.records())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Batch):
            return self.records() == other.records()
        return self.records() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Batch of {self._count:,} records, {self.compression}, {self.stored_bytes:,} bytes stored>"

    def records(self) -> list[bytes]:
        """The records as a list: one Python object each."""
        if self._records is None:
            assert self._array is not None
            self._records = self._array.to_pylist()
        return self._records

    def to_arrow(self) -> pa.Array:
        """The records as a binary array."""
        if self._array is None:
            self._array = pa.array(self._records, pa.binary())
        return self._array


# -- encoding


def encode(records: Sequence[bytes] | pa.BinaryArray, compression: Compression = "none") -> bytes:
    """One batch."""
    footer = _footer(len(records), compression)
    if compression == "none":
        return record_block.encode(records, footer)
    return _compressed(record_block.encode(records), footer)


def encode_blocks(blocks: Sequence[bytes], record_count: int, compression: Compression = "none") -> bytes:
    """One batch from blocks that `record_block.encode` made, `record_count` records in all."""
    footer = _footer(record_count, compression)
    if compression == "none":
        return b"".join((*blocks, footer))
    return _compressed(b"".join(blocks), footer)


def _footer(count: int, compression: Compression) -> bytes:
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}", hint=f"one of: {', '.join(COMPRESSIONS)}")
    if count > RECORDS_MAX:
        raise LimitExceeded("RECORDS_MAX", limit=RECORDS_MAX, actual=count, hint="send smaller batches")
    return _FOOTER.pack(COMPRESSIONS.index(compression), count, VERSION)


def _compressed(block: bytes, footer: bytes) -> bytes:
    return b"".join((zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(block), footer))


# -- decoding


def decode_footer(footer: bytes | memoryview, *, name: str = _WHAT) -> Footer:
    """The last `FOOTER_BYTES` of an object, for whoever wants the count without the records."""
    if len(footer) != FOOTER_BYTES:
        raise CorruptBatch(name, 0, f"{len(footer)} bytes, a footer has {FOOTER_BYTES}")
    compression, count, version = _FOOTER.unpack(footer)
    if version != VERSION:
        raise UnsupportedVersion(name, version, str(VERSION))
    if compression >= len(COMPRESSIONS):
        raise UnsupportedCompression(name, compression, "0 (none) or 1 (zstd)")
    return Footer(COMPRESSIONS[compression], count)


def decode(
    data: bytes | memoryview,
    *,
    name: str = _WHAT,
    batch_bytes_max: int = BATCH_BYTES_MAX,
    block_bytes_max: int = BLOCK_BYTES_MAX,
) -> Batch:
    """The records of a batch, all of them checked. `name` stands in errors, such as the key it was read from.

    Raises `CorruptBatch` for anything that is not exactly one batch, `UnsupportedVersion` and
    `UnsupportedCompression` for what a newer release may have written, and `TooLarge` above the limits.
    """
    view = memoryview(data).cast("B")
    if len(view) > batch_bytes_max:
        raise TooLarge(name, "batch_bytes_max", limit=batch_bytes_max, actual=len(view))
    if len(view) < FOOTER_BYTES:
        raise CorruptBatch(name, len(view), f"{len(view)} bytes, a batch has at least {FOOTER_BYTES}")
    footer = decode_footer(view[-FOOTER_BYTES:], name=name)
    block: bytes | memoryview = view[:-FOOTER_BYTES]
    if footer.compression == "zstd":
        block = _decompressed(view[:-FOOTER_BYTES], block_bytes_max, name)
    elif len(block) > block_bytes_max:
        raise TooLarge(name, "block_bytes_max", limit=block_bytes_max, actual=len(block))
    return _batch(block, footer, len(view), name)


def _batch(block: bytes | memoryview, footer: Footer, stored_bytes: int, name: str) -> Batch:
    count = footer.record_count
    records: list[bytes] | None = None
    array: pa.Array | None = None
    try:
        if count < record_block.PAGE_RECORDS_MIN:
            records = record_block.decode_list(block, count)
        else:
            array = record_block.decode_array(block, count)
    except Corrupt as error:
        where = "" if footer.compression == "none" else ", in the decompressed block"
        raise CorruptBatch(name, error.position, error.reason + where) from None
    return Batch(
        count=count, compression=footer.compression, stored_bytes=stored_bytes, records=records, array=array
    )


def _decompressed(stored: memoryview, limit: int, name: str) -> bytes:
    """What the frames hold together. The quick way first: one frame that says its size."""
    if not len(stored):
        raise CorruptBatch(name, 0, "0 bytes of zstd, expected at least one frame")
    try:
        size = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as error:
        raise CorruptBatch(name, 0, f"zstd: {error}") from error
    if size > limit:
        raise TooLarge(name, "block_bytes_max", limit=limit, actual=size)
    # A content size is only a claim. Nothing that was compressed from so few bytes is allocated on it.
    if 0 < size <= len(stored) * _TRUSTED_RATIO:
        try:
            plain: bytes = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
            return plain
        except zstandard.ZstdError:
            pass  # Several frames, or damage: the slow way tells which.
    return _decompressed_by_frames(stored, limit, name)


def _decompressed_by_frames(stored: memoryview, limit: int, name: str) -> bytes:
    out: list[bytes] = []
    total, place, frames = 0, 0, 0
    decompressor = zstandard.ZstdDecompressor()
    while place < len(stored):
        start, frames = place, frames + 1
        if frames > FRAMES_MAX:
            raise TooLarge(name, "FRAMES_MAX", limit=FRAMES_MAX, actual=frames)
        frame = decompressor.decompressobj()
        while not frame.eof and place < len(stored):
            piece = stored[place : place + _PIECE_BYTES]
            try:
                part = frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise CorruptBatch(name, start, f"zstd: {error}") from error
            place += len(piece) - len(frame.unused_data)
            total += len(part)
            if total > limit:
                raise TooLarge(name, "block_bytes_max", limit=limit, actual=total)
            out.append(part)
        if not frame.eof:
            raise CorruptBatch(name, start, "a zstd frame is cut short")
    return b"".join(out)
