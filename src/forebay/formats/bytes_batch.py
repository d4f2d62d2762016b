"""`bytes-batch-v1`: the records of one append, columnar, so that they become Arrow arrays without a loop.

    offset  size  field
    0       4     magic "FBB1"
    4       1     codec of the body: 0 none, 1 zstd
    5       1     columns: bit 0 keys, bit 1 timestamps, bit 2 headers
    6       2     reserved, 0
    8       4     count of records, u32 LE, at least 1
    12      4     bytes of the body before compression, u32 LE
    16      ...   body
    end-4   4     crc32c of everything before it, masked, u32 LE

    body    4 x count    length of each value, u32 LE
            4 x count    length of each key, u32 LE, 0xFFFFFFFF for none        if bit 0
            8 x count    time of each record, i64 LE, ms since the Unix epoch   if bit 1
            4 x count    number of headers of each record, u32 LE               if bit 2
            4 x headers  length of each header name, u32 LE                     if bit 2
            4 x headers  length of each header value, u32 LE, 0xFFFFFFFF: none  if bit 2
            values, keys, header names (UTF-8), header values: the bytes of each, one after the other

Lengths stand apart from the data. Decoding is then a cumulative sum over the lengths, and an Arrow array is a
view of the bytes as they were read: the cost follows the number of records, not their size. Offsets are not
stored: an append does not know them before it is committed, and compaction would have to rewrite them.

A batch without the timestamps column takes the time of its append for all records.

The checksum is masked as in LevelDB: rotated right by 15 bits, plus 0xA282EAD8. The crc32c of bytes that end
with their own crc32c is the same number whatever the bytes are, and whoever refers to a batch keeps a crc32c
of the whole of it, to know it from another one that is sound as well.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard
from crc32c import crc32c

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = [
    "BODY_BYTES_MAX",
    "ENCODING",
    "HEADERS_TYPE",
    "RECORDS_MAX",
    "BytesBatch",
    "Codec",
    "Frame",
    "concat",
    "decode",
    "encode",
    "encode_batch",
    "frame_of",
    "integers_of",
    "merge",
    "read_back",
    "sealed_frame",
]

ENCODING: Final = "bytes-batch-v1"
"""What index entries call this format."""
MAGIC: Final = b"FBB1"
BODY_BYTES_MAX: Final = (1 << 31) - 1
"""Most bytes of a body. Arrow's offsets have 31 bits, and nothing here should come near."""
RECORDS_MAX: Final = 1 << 26
"""Most records of one batch."""
ZSTD_LEVEL: Final = 3
HEADERS_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
"""Type of the headers column, as Spark's Kafka source has it."""

Codec: TypeAlias = Literal["none", "zstd"]
Headers: TypeAlias = Mapping[str, bytes | None] | Sequence[tuple[str, bytes | None]]
_Lengths: TypeAlias = npt.NDArray[np.uint32]

_CODECS: Final[dict[Codec, int]] = {"none": 0, "zstd": 1}
_PREFIX: Final = struct.Struct("<4sBBHII")
_CHECKSUM: Final = struct.Struct("<I")
_MASK_DELTA: Final = 0xA282EAD8
_KEYS, _TIMESTAMPS, _HEADERS = 1, 2, 4
_NONE: Final = 0xFFFF_FFFF
_WHAT: Final = "bytes-batch-v1"
_NOT_BYTES: Final = "records and keys are lists of bytes"
_NOT_BYTES_HINT: Final = "encode text, and put a single record into a list: [text.encode()]"


@dataclass(frozen=True, slots=True, eq=False)
class BytesBatch:
    """The columns of a batch. Values, keys and headers are views of the bytes they were decoded from."""

    values: pa.BinaryArray
    keys: pa.BinaryArray | None = None
    """None where no record has a key."""
    timestamps_ms: npt.NDArray[np.int64] | None = None
    """None where all records have the time of their append."""
    headers: pa.ListArray | None = None
    """None where no record has headers. Type `HEADERS_TYPE`."""

    @classmethod
    def of(
        cls,
        records: Sequence[bytes] | pa.BinaryArray,
        *,
        keys: Sequence[bytes | None] | pa.BinaryArray | None = None,
        timestamps_ms: Sequence[int] | npt.NDArray[np.int64] | None = None,
        headers: Sequence[Headers | None] | pa.ListArray | None = None,
    ) -> BytesBatch:
        """A batch from lists or Arrow arrays. Columns must be as long as `records`."""
        return cls(
            _binary(records),
            None if keys is None else _binary(keys),
            None if timestamps_ms is None else integers_of(timestamps_ms),
            None if headers is None else _headers(headers),
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size_bytes(self) -> int:
        """Bytes of all columns in memory."""
        columns = (self.values, self.keys, self.timestamps_ms, self.headers)
        return sum([int(column.nbytes) for column in columns if column is not None])

    def longest_bytes(self) -> int:
        """Bytes of the largest value or key."""
        return max([_longest(column) for column in (self.values, self.keys) if column is not None])

    def records(self) -> list[bytes]:
        """The values as a list. A Python object per record: for small batches and tests."""
        values: list[bytes] = self.values.to_pylist()
        return values

    def slice(self, start: int, length: int) -> BytesBatch:
        """Some of the records, without copying."""
        stop = start + length
        return BytesBatch(
            self.values.slice(start, length),
            None if self.keys is None else self.keys.slice(start, length),
            None if self.timestamps_ms is None else self.timestamps_ms[start:stop],
            None if self.headers is None else self.headers.slice(start, length),
        )


# -- encoding


def encode(
    records: Sequence[bytes] | pa.BinaryArray,
    *,
    keys: Sequence[bytes | None] | pa.BinaryArray | None = None,
    timestamps_ms: Sequence[int] | npt.NDArray[np.int64] | None = None,
    headers: Sequence[Headers | None] | pa.ListArray | None = None,
    codec: Codec = "none",
) -> bytes:
    """One batch of at least one record. Columns must be as long as `records`."""
    batch = BytesBatch.of(records, keys=keys, timestamps_ms=timestamps_ms, headers=headers)
    return encode_batch(batch, codec=codec)


def encode_batch(batch: BytesBatch, *, codec: Codec = "none") -> bytes:
    """The bytes of a batch that is columnar already."""
    count = len(batch)
    _check_columns(batch, count)
    columns, lengths, data = 0, [_lengths(batch.values)], [_data(batch.values)]
    if batch.keys is not None:
        columns |= _KEYS
        lengths.append(_lengths(batch.keys))
        data.append(_data(batch.keys))
    numbers: list[npt.NDArray[np.generic]] = [*lengths]
    if batch.timestamps_ms is not None:
        columns |= _TIMESTAMPS
        numbers.append(batch.timestamps_ms.astype("<i8", copy=False))
    if batch.headers is not None:
        columns |= _HEADERS
        header_lengths, header_data = _header_columns(batch.headers)
        numbers += header_lengths
        data += header_data
    parts: list[bytes | memoryview] = [*(column.tobytes() for column in numbers), *data]
    return frame_of(columns, count, parts, codec).tobytes()


def concat(batches: Sequence[tuple[BytesBatch, int]], *, codec: Codec = "none") -> bytes:
    """Many batches as one, in order, each with the time of its append: what compaction writes.

    Every record keeps the time it had, so the result always has timestamps.
    """
    times = [_times(batch, time_ms) for batch, time_ms in batches]
    return encode_batch(_joined([batch for batch, _ in batches], times), codec=codec)


def merge(batches: Sequence[BytesBatch], *, time_ms: int) -> BytesBatch:
    """Many batches of one append as one, in order.

    Records without a time get `time_ms` where others have one; if none has, the result has no times either.
    """
    if len(batches) == 1:
        return batches[0]
    timed = any(batch.timestamps_ms is not None for batch in batches)
    return _joined(batches, [_times(batch, time_ms) for batch in batches] if timed else None)


def _times(batch: BytesBatch, time_ms: int) -> npt.NDArray[np.int64]:
    return np.full(len(batch), time_ms, "<i8") if batch.timestamps_ms is None else batch.timestamps_ms


def _joined(batches: Sequence[BytesBatch], times: Sequence[npt.NDArray[np.int64]] | None) -> BytesBatch:
    if not batches:
        raise UsageError("nothing to concatenate")
    return BytesBatch(
        pa.concat_arrays([batch.values for batch in batches]),
        _concat_optional([(batch.keys, len(batch)) for batch in batches], pa.binary()),
        None if times is None else np.concatenate(times),
        _concat_optional([(batch.headers, len(batch)) for batch in batches], HEADERS_TYPE),
    )


def _concat_optional(columns: Sequence[tuple[pa.Array | None, int]], kind: pa.DataType) -> pa.Array | None:
    if all(column is None for column, _ in columns):
        return None
    return pa.concat_arrays([pa.nulls(n, kind) if column is None else column for column, n in columns])


@dataclass(slots=True, eq=False)
class Frame:
    """An encoded batch as the buffers it consists of, in order: copied once, by whoever puts it somewhere."""

    parts: list[bytes | memoryview]
    size: int
    """Bytes of all parts."""
    crc32c: int
    """Checksum of all parts, the one at their end included."""

    def __len__(self) -> int:
        return self.size

    def tobytes(self) -> bytes:
        """The parts as one."""
        return b"".join(self.parts)


def frame_of(columns: int, count: int, parts: list[bytes | memoryview], codec: Codec) -> Frame:
    """A batch from its sections, in the order of the layout."""
    size = sum([len(part) for part in parts])
    if size > BODY_BYTES_MAX:
        raise LimitExceeded("BODY_BYTES_MAX", limit=BODY_BYTES_MAX, actual=size, hint="send smaller batches")
    if codec not in _CODECS:
        raise UsageError(f"codec {codec!r}", hint="one of: none, zstd")
    prefix = _PREFIX.pack(MAGIC, _CODECS[codec], columns, 0, count, size)
    if codec == "zstd":
        parts = [zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(b"".join(parts))]
        size = len(parts[0])
    checksum = crc32c(prefix)
    for part in parts:
        checksum = crc32c(part, checksum)
    seal = _CHECKSUM.pack(_masked(checksum))
    return Frame([prefix, *parts, seal], _PREFIX.size + size + _CHECKSUM.size, crc32c(seal, checksum))


def sealed_frame(data: bytes | memoryview) -> Frame:
    """A batch that is encoded already, and was found to be sound: its own checksum is taken at its word."""
    seal = bytes(data[-_CHECKSUM.size :])
    [masked] = _CHECKSUM.unpack(seal)
    return Frame([data], len(data), crc32c(seal, _unmasked(masked)))


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _unmasked(masked: int) -> int:
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return (rotated << 15 | rotated >> 17) & 0xFFFFFFFF


def _check_columns(batch: BytesBatch, count: int) -> None:
    if count == 0:
        raise UsageError("a batch holds at least one record")
    if count > RECORDS_MAX:
        raise LimitExceeded("RECORDS_MAX", limit=RECORDS_MAX, actual=count, hint="send smaller batches")
    if batch.values.null_count:
        raise UsageError("a record is None", hint="an empty record is b''")
    for name in ("keys", "timestamps_ms", "headers"):
        column = getattr(batch, name)
        if column is not None and len(column) != count:
            raise UsageError(f"{len(column)} {name} for {count} records")


def _binary(values: Sequence[bytes | None] | pa.BinaryArray) -> pa.BinaryArray:
    if isinstance(values, pa.BinaryArray):
        return values
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return values.cast(pa.binary())
    # Arrow would take text, and encode it; and a lone record for a list of numbers.
    try:
        if isinstance(values, bytes | bytearray | memoryview | str) or (
            len(values) and isinstance(values[0], str)
        ):
            raise UsageError(_NOT_BYTES, hint=_NOT_BYTES_HINT)
        return pa.array(values, pa.binary())
    except (pa.ArrowTypeError, pa.ArrowInvalid, TypeError) as error:
        raise UsageError(f"{_NOT_BYTES}: {error}", hint=_NOT_BYTES_HINT) from None


def integers_of(times: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Times as a column; raises `UsageError` where they are no integers.

    Seconds with a fraction, or dates, would be taken for milliseconds since 1970 if numpy had its way.
    """
    try:
        found = np.asarray(times)
        if found.ndim == 1 and (found.dtype.kind in "iu" or not len(found)):
            return np.asarray(times, "<i8")
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(
        "times are not a list of integers", hint="milliseconds since 1970, one per record, within 64 bits"
    )


def _headers(headers: Sequence[Headers | None] | pa.ListArray) -> pa.ListArray:
    if isinstance(headers, pa.Array):
        return headers.cast(HEADERS_TYPE)
    try:
        rows = [
            None if not row else list(row.items() if isinstance(row, Mapping) else row) for row in headers
        ]
        structs = [
            None if row is None else [{"key": key, "value": value} for key, value in row] for row in rows
        ]
        return pa.array(structs, HEADERS_TYPE)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(
            f"headers that cannot be stored: {error}",
            hint="per record a dictionary of text to bytes or None, or None",
        ) from None


def _offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]


def _lengths(array: pa.BinaryArray) -> _Lengths:
    offsets = _offsets(array)
    lengths = (offsets[1:] - offsets[:-1]).astype("<u4")
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = _NONE
    return lengths


def _longest(array: pa.BinaryArray) -> int:
    offsets = _offsets(array)
    return int((offsets[1:] - offsets[:-1]).max(initial=0))


def _data(array: pa.BinaryArray) -> memoryview:
    if array.null_count:
        # Null slots may hide bytes that no length accounts for.
        array = array.fill_null(b"" if pa.types.is_binary(array.type) else "")
    offsets = _offsets(array)
    return memoryview(array.buffers()[2] or b"")[int(offsets[0]) : int(offsets[-1])]


def _header_columns(headers: pa.ListArray) -> tuple[list[_Lengths], list[memoryview]]:
    counts = np.asarray(headers.value_lengths().fill_null(0), "<u4")
    entries = headers.flatten()
    names, values = entries.field("key"), entries.field("value")
    if names.null_count:
        raise UsageError("a header has no name")
    return [counts, _lengths(names), _lengths(values)], [_data(names), _data(values)]


# -- decoding


def decode(data: bytes | memoryview) -> BytesBatch:
    """The columns of a batch; raises `Corrupt` for anything that is not exactly one."""
    view = memoryview(data).cast("B")
    codec, columns, count, size = _read_prefix(view)
    stored = view[_PREFIX.size : -_CHECKSUM.size]
    return _Body(_uncompressed(stored, codec, size), count).read(columns)


def read_back(data: bytes | memoryview) -> BytesBatch:
    """`decode` of bytes that were made in here a moment ago: their checksum is not computed once more."""
    view = memoryview(data).cast("B")
    _, codec, columns, _, count, size = _PREFIX.unpack_from(view)
    stored = view[_PREFIX.size : -_CHECKSUM.size]
    return _Body(_uncompressed(stored, codec, size), count).read(columns)


def _read_prefix(view: memoryview) -> tuple[int, int, int, int]:
    if len(view) < _PREFIX.size + _CHECKSUM.size:
        raise Corrupt(_WHAT, len(view), f"{len(view)} bytes are too short for a batch")
    magic, codec, columns, reserved, count, size = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise Corrupt(_WHAT, 0, f"magic {bytes(magic)!r}, expected {MAGIC!r}")
    [stored] = _CHECKSUM.unpack_from(view, len(view) - _CHECKSUM.size)
    computed = _masked(crc32c(view[: -_CHECKSUM.size]))
    if stored != computed:
        raise Corrupt(_WHAT, len(view) - 4, f"checksum {stored:#010x}, the bytes have {computed:#010x}")
    if codec not in _CODECS.values():
        raise UnsupportedEncoding(_WHAT, f"codec {codec}")
    if columns & ~(_KEYS | _TIMESTAMPS | _HEADERS) or reserved:
        raise UnsupportedEncoding(_WHAT, f"columns {columns:#04x}, reserved {reserved:#06x}")
    if count == 0:
        raise Corrupt(_WHAT, 8, "no records")
    if size > BODY_BYTES_MAX or 4 * count > size:
        raise Corrupt(_WHAT, 8, f"{count} records in a body of {size} bytes")
    return codec, columns, count, size


def _uncompressed(stored: memoryview, codec: int, size: int) -> memoryview:
    if codec == 0:
        body = stored
    else:
        try:
            inside = zstandard.frame_content_size(stored)
            if inside != size:
                raise Corrupt(_WHAT, 12, f"body of {size} bytes, its zstd frame holds {inside}")
            plain = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Corrupt(_WHAT, _PREFIX.size, f"zstd: {error}") from error
        body = memoryview(plain)
    if len(body) != size:
        raise Corrupt(_WHAT, 12, f"body of {size} bytes, there are {len(body)}")
    return body


class _Body:
    """A cursor over the sections of a body."""

    def __init__(self, body: memoryview, count: int) -> None:
        self._body = body
        self._buffer = pa.py_buffer(body)
        self._count = count
        self._position = 0

    def read(self, columns: int) -> BytesBatch:
        count = self._count
        values = self._lengths(count)
        keys = self._lengths(count) if columns & _KEYS else None
        times = self._numbers(count, "<i8").astype(np.int64) if columns & _TIMESTAMPS else None
        if columns & _HEADERS:
            header_counts = self._lengths(count)
            total = int(header_counts.sum(dtype=np.uint64))
            names, header_values = self._lengths(total), self._lengths(total)
        value_array = self._array(values, nullable=False)
        key_array = None if keys is None else self._array(keys, nullable=True)
        headers = None
        if columns & _HEADERS:
            headers = self._header_array(header_counts, names, header_values)
        if self._position != len(self._body):
            rest = len(self._body) - self._position
            raise Corrupt(_WHAT, _PREFIX.size + self._position, f"{rest} bytes after the last record")
        return BytesBatch(value_array, key_array, times, headers)

    def _take(self, size: int) -> int:
        start = self._position
        if size > len(self._body) - start:
            raise Corrupt(_WHAT, _PREFIX.size + start, f"{size} bytes expected, the body ends before")
        self._position += size
        return start

    def _numbers(self, count: int, kind: str) -> npt.NDArray[np.generic]:
        width = int(kind[2])
        return np.frombuffer(self._body, kind, count, self._take(width * count))

    def _lengths(self, count: int) -> _Lengths:
        return self._numbers(count, "<u4").astype(np.uint32, copy=False)

    def _array(self, lengths: _Lengths, *, nullable: bool, kind: pa.DataType | None = None) -> pa.Array:
        validity = None
        if nullable:
            missing = lengths == _NONE
            if missing.any():
                validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
                lengths = np.where(missing, np.uint32(0), lengths)
        offsets = _running_total(lengths, len(self._body))
        start = self._take(int(offsets[-1]))
        buffers = [validity, pa.py_buffer(offsets), self._buffer.slice(start, int(offsets[-1]))]
        return pa.Array.from_buffers(kind or pa.binary(), len(lengths), buffers)

    def _header_array(self, counts: _Lengths, names: _Lengths, values: _Lengths) -> pa.ListArray:
        name_array = self._array(names, nullable=False)
        try:
            name_array = name_array.cast(pa.string())
        except pa.ArrowInvalid as error:
            raise Corrupt(_WHAT, _PREFIX.size, f"a header name is not UTF-8: {error}") from error
        value_array = self._array(values, nullable=True)
        entries = pa.StructArray.from_arrays([name_array, value_array], ["key", "value"])
        offsets = pa.array(_running_total(counts, len(names)), pa.int32())
        # None, and not an empty list, as in a batch where no record has any: compaction joins the two.
        bare = counts == 0
        mask = pa.array(bare) if bare.any() else None
        return pa.ListArray.from_arrays(offsets, entries, mask=mask).cast(HEADERS_TYPE)


def _running_total(lengths: _Lengths, most: int) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Sums of u32 in i64 cannot wrap: there are fewer than 2^31 of them.
    if offsets[-1] > most:
        raise Corrupt(_WHAT, _PREFIX.size, f"lengths add up to {offsets[-1]} of at most {most}")
    return offsets.astype(np.int32)
