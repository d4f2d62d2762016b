"""A segment file: an Arrow IPC file with Quiver's footer inside it.

    0        a      an Arrow IPC file up to its end-of-stream mark: schema, dictionaries, record batches
    a        b      padding to 8 bytes, then the Quiver footer: msgpack map, `SegmentMeta`
    a+b      24     magic "FBYQSEG\\0" | u16 version 1 | u16 size 24 | u32 length of the footer |
                    u32 crc32c of the footer | u32 crc32c of the 20 bytes before
    a+b+24   c      the footer of Arrow's file format, as Arrow wrote it
    end-10   4      its length, little-endian
    end-6    6      "ARROW1"

Arrow finds record batches by the absolute offsets in its own footer, so bytes between the last batch and that
footer do not disturb it: whatever reads Arrow files (pyarrow datasets, DuckDB, Polars, Spark) reads a segment
as it is, while Quiver finds its metadata from the same end without touching the data. One file holds one
signal type and one schema.

`SegmentMeta.parts` has a checksum for each record batch (schema and dictionaries belong to the first), and
there is one for Arrow's footer: a bad byte costs one record batch, in the first part the file.
Opening a store checks only the footers; data is checked when it is read first.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec
import pyarrow as pa
from crc32c import crc32c

from forebay.errors import LimitExceeded
from forebay.formats._errors import Corrupt, UnsupportedEncoding
from forebay.formats.quiver_ack import Runs, check_runs

__all__ = [
    "FOOTER_BYTES_MAX",
    "TAIL_BYTES",
    "Encoding",
    "Part",
    "SegmentMeta",
    "Source",
    "check_part",
    "decode_meta",
    "footer_range",
]

Piece: TypeAlias = bytes | memoryview
FOOTER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest footer of a segment, Quiver's and Arrow's each. Finalize splits what would pass it."""
COPIED_BYTES: Final = 4_096
"""Buffers below it are copied together into one piece of a segment; others are written as they lie."""
TAIL_BYTES: Final = 64 * 1024
"""What is worth reading from the end of a file first: mostly both footers."""
_TRAILER: Final = struct.Struct("<8sHHII")
_CRC: Final = struct.Struct("<I")
_TRAILER_BYTES: Final = _TRAILER.size + _CRC.size
_ARROW_END: Final = struct.Struct("<i6s")
_MAGIC: Final = b"FBYQSEG\0"
_VERSION: Final = 1
_WHAT: Final = "quiver segment"


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of the file with its checksum."""

    offset: int
    length: int
    crc: int
    rows: int


class Source(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One ingested batch within the segment."""

    rows: int
    time_ms: int
    """When it was ingested."""
    context: int
    """Index into `SegmentMeta.contexts`."""


class SegmentMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a segment says of itself."""

    segment: int
    entries: Runs
    """Sequences of the WAL entries in it."""
    signal: str
    schema_hash: bytes
    rows: int
    codec: str
    raw_bytes: int
    """Logical size of the batches."""
    ingested_ms: tuple[int, int]
    """Earliest and latest ingestion time."""
    event_ns: tuple[int, int] | None = None
    """Earliest and latest event time, where the schema has a column for it."""
    sources: list[Source]
    contexts: list[dict[str, str]]
    parts: list[Part]
    """One per record batch; the first also has schema and dictionaries."""
    arrow_footer_crc: int = 0

    @property
    def identity(self) -> str:
        """12 digits for names of what is made from the segment. When its rows came in tells stores apart that
        began to count anew. The same whether the segment is a file yet or not, so that what is made of it
        again, after a crash, gets the same name."""
        told = (self.entries, self.rows, self.raw_bytes, [each.time_ms for each in self.sources])
        return hashlib.blake2b(repr(told).encode(), digest_size=6).hexdigest()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SegmentMeta).decode


class Encoding:
    """The pieces of a segment's file, each made when it is asked for.

    A segment in memory a second time costs more, in fresh pages, than everything else that is done to it. So
    one record batch is looked at after the other, what is written can be let go of, and only what is small is
    copied: large buffers are pieces as they lie, and must not change until they are written.

    Dictionaries must be unified already; Arrow refuses a replaced one with `ArrowInvalid`. `describe` is
    asked behind the last batch: what it tells, with the checksums, is the footer.
    """

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema,
        codec: str,
        describe: Callable[[], SegmentMeta],
    ) -> None:
        self._batches = batches
        self._schema = schema
        self._codec = codec
        self._describe = describe
        self.size = 0
        """Bytes of the pieces so far."""

    @classmethod
    def of(cls, meta: SegmentMeta, batches: Sequence[pa.RecordBatch]) -> Encoding:
        """Of batches that are there, and of which everything is known."""
        return cls(batches, batches[0].schema, meta.codec, lambda: meta)

    @property
    def meta(self) -> SegmentMeta:
        """What the footer says. Known once the last piece was asked for."""
        return self._whole

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces():
            self.size += len(piece)
            yield piece

    def _pieces(self) -> Iterator[Piece]:
        sink = _Sink()
        options = pa.ipc.IpcWriteOptions(compression=None if self._codec == "none" else self._codec)
        parts: list[Part] = []
        with pa.ipc.new_file(sink, self._schema, options=options) as writer:
            for batch in self._batches:
                writer.write_batch(batch)
                # Dictionaries precede the first batch, so the head and the first batch share a part.
                pieces = sink.take()
                length, crc = sum(map(len, pieces)), 0
                for piece in pieces:
                    crc = crc32c(piece, crc)
                offset = parts[-1].offset + parts[-1].length if parts else 0
                parts.append(Part(offset, length, crc, batch.num_rows))
                yield from pieces
        yield self._end(parts, b"".join(sink.take()))

    def _end(self, parts: list[Part], end: bytes) -> bytes:
        """Both footers; `end` is what Arrow wrote behind the last batch."""
        arrow_length, _ = _ARROW_END.unpack_from(end, len(end) - _ARROW_END.size)
        cut = len(end) - _ARROW_END.size - arrow_length
        mark, arrow_footer = end[:cut], end[cut:]
        self._whole = msgspec.structs.replace(
            self._describe(), parts=parts, arrow_footer_crc=crc32c(arrow_footer)
        )
        footer = _encode(self._whole)
        longest = max(len(footer), arrow_length)
        if longest > FOOTER_BYTES_MAX:
            raise LimitExceeded("FOOTER_BYTES_MAX", limit=FOOTER_BYTES_MAX, actual=longest)
        trailer = _TRAILER.pack(_MAGIC, _VERSION, _TRAILER_BYTES, len(footer), crc32c(footer))
        trailer += _CRC.pack(crc32c(trailer))
        padding = bytes(-(self.size + len(mark)) % 8)
        return b"".join((mark, padding, footer, trailer, arrow_footer))


class _Sink:
    """A file for Arrow to write into."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._small: list[Piece] = []

    def write(self, data: bytes | pa.Buffer) -> None:
        """Arrow hands over its buffers themselves, and a copy of whatever is none."""
        view = memoryview(data)
        if len(view) < COPIED_BYTES:
            self._small.append(view)
            return
        self._join()
        self._pieces.append(view)

    def _join(self) -> None:
        if self._small:
            self._pieces.append(b"".join(self._small))
            self._small.clear()

    def take(self) -> list[Piece]:
        """What was written since the last call."""
        self._join()
        taken, self._pieces = self._pieces, []
        return taken

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is held."""


def footer_range(tail: bytes | memoryview, size: int) -> int:
    """How many bytes from the end hold both footers. `tail` is the end of a file of `size` bytes."""
    arrow_length = _arrow_length(tail, size)
    need = arrow_length + _ARROW_END.size + _TRAILER_BYTES
    if len(tail) < need:
        if size < need:
            raise Corrupt(_WHAT, size, "cut short")
        return need
    length, _ = _trailer(tail, len(tail) - need)
    return need + length


def _arrow_length(tail: bytes | memoryview, size: int) -> int:
    if len(tail) < _ARROW_END.size + _TRAILER_BYTES:
        raise Corrupt(_WHAT, size, "cut short")
    length, magic = _ARROW_END.unpack_from(tail, len(tail) - _ARROW_END.size)
    if magic != b"ARROW1" or not 0 < length <= FOOTER_BYTES_MAX:
        raise Corrupt(_WHAT, size - _ARROW_END.size, "it does not end as an Arrow file")
    return int(length)


def _trailer(tail: bytes | memoryview, position: int) -> tuple[int, int]:
    magic, version, size, length, crc = _TRAILER.unpack_from(tail, position)
    [own] = _CRC.unpack_from(tail, position + _TRAILER.size)
    if magic != _MAGIC or own != crc32c(tail[position : position + _TRAILER.size]):
        raise Corrupt(_WHAT, position, "magic or checksum of the trailer does not match")
    if version != _VERSION or size != _TRAILER_BYTES:
        raise UnsupportedEncoding(_WHAT, f"version {version}")
    if length > FOOTER_BYTES_MAX:
        raise Corrupt(_WHAT, position, f"footer of {length} bytes")
    return int(length), int(crc)


def decode_meta(tail: bytes | memoryview, size: int) -> SegmentMeta:
    """The metadata, from an end of the file that is long enough (`footer_range`). Raises `Corrupt`."""
    arrow_length = _arrow_length(tail, size)
    arrow_at = len(tail) - _ARROW_END.size - arrow_length
    if arrow_at < _TRAILER_BYTES:
        raise Corrupt(_WHAT, size, "cut short")
    length, crc = _trailer(tail, arrow_at - _TRAILER_BYTES)
    begin = arrow_at - _TRAILER_BYTES - length
    if begin < 0:
        raise Corrupt(_WHAT, size, "cut short")
    footer = tail[begin : begin + length]
    if crc32c(footer) != crc:
        raise Corrupt(_WHAT, begin, "the checksum of the footer does not match")
    try:
        meta = _decode(footer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(_WHAT, begin, str(error)) from error
    if crc32c(tail[arrow_at:]) != meta.arrow_footer_crc:
        raise Corrupt(_WHAT, arrow_at, "the checksum of Arrow's footer does not match")
    _check_meta(meta, size)
    return meta


def _check_meta(meta: SegmentMeta, size: int) -> None:
    check_runs(_WHAT, meta.entries)
    position = 0
    for part in meta.parts:
        if part.offset != position or part.length <= 0:
            raise Corrupt(_WHAT, part.offset, "the parts do not lie one behind the other")
        position += part.length
    if position > size or sum(part.rows for part in meta.parts) != meta.rows:
        raise Corrupt(_WHAT, position, "the parts do not fit the file")
    if any(not 0 <= source.context < len(meta.contexts) for source in meta.sources):
        raise Corrupt(_WHAT, position, "a context that is not there")


def check_part(data: memoryview, part: Part) -> None:
    """Compare a part of the whole file with its checksum. Raises `Corrupt`."""
    if crc32c(data[part.offset : part.offset + part.length]) != part.crc:
        raise Corrupt(_WHAT, part.offset, f"the checksum of {part.length} bytes does not match")
