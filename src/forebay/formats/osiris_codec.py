"""The compressions of sub-batches, by the number they have on the wire.

    0 none    1 gzip    2 snappy (framing format)    3 lz4 (frame format)    4 zstd

The broker never looks inside: what a compressed body looks like is agreed between clients. They write gzip
members, snappy's framing format, LZ4 frames and zstd frames, so that is what we write. Raw snappy blocks are
accepted as well, since some clients write those.

How much may come out is known before, from the entry: no decoder here produces more than one byte beyond it.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, TypeAlias

import pyarrow as pa
import zstandard
from crc32c import crc32c

from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = ["CODECS", "GZIP", "LZ4", "NONE", "SNAPPY", "ZSTD", "compress", "decompress"]

Bytes: TypeAlias = bytes | bytearray | memoryview

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4
CODECS: Final = {"none": NONE, "gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}
"""Numbers by name."""

_WHAT: Final = "Osiris sub-batch"
_GZIP_WBITS: Final = 31
_SNAPPY_STREAM: Final = b"\xff\x06\x00\x00sNaPpY"
_SNAPPY_BLOCK_BYTES: Final = 65_536
"""Most uncompressed bytes of one block of the framing format."""
_CRC_MASK: Final = 0xA282EAD8


def compress(codec: int, data: Bytes) -> bytes:
    """`data` as a client of this codec would store it."""
    if codec == GZIP:
        packer = zlib.compressobj(wbits=_GZIP_WBITS)
        return packer.compress(data) + packer.flush()
    if codec == SNAPPY:
        return _snappy_frames(memoryview(data))
    if codec == LZ4:
        return _arrow("lz4").compress(data, asbytes=True)  # type: ignore[no-any-return]
    if codec == ZSTD:
        return zstandard.ZstdCompressor().compress(data)
    raise UnsupportedEncoding(_WHAT, f"compression {codec}")


def decompress(codec: int, data: Bytes, size: int) -> bytes:
    """Exactly `size` bytes, or `Corrupt`."""
    try:
        unpacked = _decompress(codec, data, size)
    except (zlib.error, zstandard.ZstdError, pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt(_WHAT, 0, f"compression {codec}: {error}") from error
    if len(unpacked) != size:
        raise Corrupt(_WHAT, 0, f"{len(unpacked)} bytes unpacked, {size} expected")
    return unpacked


def _decompress(codec: int, data: Bytes, size: int) -> bytes:
    if codec == GZIP:
        unpacker = zlib.decompressobj(wbits=_GZIP_WBITS)
        unpacked = unpacker.decompress(data, size + 1)
        if len(unpacked) == size and (not unpacker.eof or unpacker.unused_data):
            # The end of the stream, with its checksum, may still wait for a call that asks for no bytes.
            rest = unpacker.decompress(unpacker.unconsumed_tail, 1)
            if rest or not unpacker.eof or unpacker.unused_data:
                raise ValueError("the gzip member does not end with its data")
        return unpacked
    if codec == SNAPPY:
        view = memoryview(data)
        if bytes(view[: len(_SNAPPY_STREAM)]) == _SNAPPY_STREAM:
            return _snappy_unframe(view, size)
        return _snappy_raw(view, size)
    if codec == LZ4:
        # Arrow's one-shot call returns the room it was given, filled or not; the stream tells what came out.
        with pa.CompressedInputStream(pa.BufferReader(data), "lz4") as reader:
            return reader.read(size + 1)  # type: ignore[no-any-return]
    if codec == ZSTD:
        return _zstd_bounded(data, size)
    raise UnsupportedEncoding(_WHAT, f"compression {codec}")


def _zstd_bounded(data: Bytes, size: int) -> bytes:
    declared = zstandard.frame_content_size(bytes(data[:18]))
    if declared > size:
        raise ValueError(f"the zstd frame holds {declared} bytes")
    with zstandard.ZstdDecompressor().stream_reader(bytes(data)) as reader:
        return reader.read(size + 1)


def _arrow(name: str) -> Any:
    return pa.Codec(name)


def _masked_crc(data: Bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _CRC_MASK) & 0xFFFFFFFF


def _snappy_frames(view: memoryview) -> bytes:
    pieces = [_SNAPPY_STREAM]
    codec = _arrow("snappy")
    for at in range(0, len(view), _SNAPPY_BLOCK_BYTES):
        block = view[at : at + _SNAPPY_BLOCK_BYTES]
        packed = codec.compress(block, asbytes=True)
        length = len(packed) + 4
        pieces += [b"\0" + length.to_bytes(3, "little"), _masked_crc(block).to_bytes(4, "little"), packed]
    return b"".join(pieces)


def _snappy_unframe(view: memoryview, size: int) -> bytes:
    pieces: list[bytes] = []
    found, at = 0, len(_SNAPPY_STREAM)
    while at < len(view):
        kind, length = view[at], int.from_bytes(view[at + 1 : at + 4], "little")
        body = view[at + 4 : at + 4 + length]
        if len(view) - at < 4 or len(body) != length:
            raise ValueError(f"a snappy frame is cut at byte {at}")
        at += 4 + length
        if kind in (0, 1):
            block = _snappy_block(kind, body, size - found)
            pieces.append(block)
            found += len(block)
        elif kind < 0x80:
            raise ValueError(f"an unknown snappy frame {kind:#x}")
    return b"".join(pieces)


def _snappy_block(kind: int, body: memoryview, room: int) -> bytes:
    if len(body) < 4:
        raise ValueError("a snappy frame without checksum")
    packed = body[4:]
    if kind == 1:
        block = bytes(packed)
    else:
        block = _snappy_raw(packed, min(_snappy_length(packed), _SNAPPY_BLOCK_BYTES))
    if len(block) > room:
        raise ValueError("more snappy data than the entry names")
    if _masked_crc(block) != int.from_bytes(body[:4], "little"):
        raise ValueError("a snappy frame fails its checksum")
    return block


def _snappy_raw(view: memoryview, size: int) -> bytes:
    if _snappy_length(view) != size:
        raise ValueError(f"the snappy block holds {_snappy_length(view)} bytes, {size} expected")
    return _arrow("snappy").decompress(view, decompressed_size=size, asbytes=True)  # type: ignore[no-any-return]


def _snappy_length(view: memoryview) -> int:
    """The varint at the head of a raw block: how much comes out of it."""
    value = 0
    for number, byte in enumerate(view[:5]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value
    raise ValueError("a snappy block without length")
