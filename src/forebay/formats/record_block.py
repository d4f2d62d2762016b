"""A block of records, each behind its length: the body of a buffer batch.

    record 0: u32 LE length, data
    record 1: u32 LE length, data
    ...

Byte for byte this is a Parquet data page of a required BYTE_ARRAY column in PLAIN encoding. So a block of
many records is decoded by wrapping it into a minimal Parquet file and letting Arrow's compiled reader find
the record boundaries; a loop over the records in Python takes several times as long.

    "PAR1" | PageHeader | block | FileMetaData | u32 LE size of FileMetaData | "PAR1"

The page costs about a tenth of a millisecond whatever its size, so small blocks are walked in Python. Arrow's
reader checks every length against the end of the page but accepts bytes after the last record, so sizes are
added up afterwards. Where either objects, the block is walked in Python to say where it is wrong.

Encoding takes a compiled packer where one is installed (see `_packer`). It makes the block in one go, and
what stands behind the block must not cost a second one: two blocks at once are what malloc, by where its
limits happen to stand, gives back and faults in again every time, at ten times the cost. So the packer is
handed one record more, as long as leaves room for the tail, and the tail is then written over it. `BytesIO`
does that without a copy: it takes over a `bytes` that nobody else holds, and gives the same object back.

Without a packer records are joined. Records of equal length, which is what most producers send, are one
`join` with the length as the separator; others are one `join` over headers and records in turn. Arrow arrays
are joined by Arrow.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Final, NoReturn

import numpy as np
import pyarrow as pa

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt
from forebay.formats._packer import Packer, load_packer

__all__ = [
    "LENGTH_BYTES",
    "RECORD_BYTES_MAX",
    "decode_array",
    "decode_list",
    "encode",
    "encoded_size",
]

LENGTH_BYTES: Final = 4
"""Bytes of the length before each record."""
RECORD_BYTES_MAX: Final = (1 << 32) - 1
"""Longest record that a length can name."""
PAGE_RECORDS_MIN: Final = 400
"""Records from which on the Parquet page is faster than a loop."""
PAGE_BYTES_MAX: Final = (1 << 31) - 1024
"""Largest block that fits into one page: sizes there are signed 32-bit numbers."""

_LENGTH: Final = struct.Struct("<I")
_WHAT: Final = "record block"


# -- encoding


def encoded_size(records: Sequence[bytes]) -> int:
    """Bytes of the block that `encode` would make."""
    return LENGTH_BYTES * len(records) + sum(map(len, records))


def encode(records: Sequence[bytes] | pa.BinaryArray, tail: bytes = b"") -> bytes:
    """The block, and `tail` behind it (a footer, to spare whoever needs one a copy of everything)."""
    if isinstance(records, (pa.Array, pa.ChunkedArray)):
        return _encode_arrow(records, tail)
    if not records:
        return tail
    packer = load_packer()
    if packer is None:
        return _join(_as_bytes(records), tail)
    try:
        return _pack(packer, records, tail)
    except TypeError:  # It takes `bytes` only.
        return _join(_as_bytes(records), tail)


def _as_bytes(records: Sequence[bytes]) -> Sequence[bytes]:
    """The same as `bytes`: the length of whatever else has bytes may count something larger."""
    if set(map(type, records)) <= {bytes}:
        return records
    return [bytes(memoryview(record)) for record in records]


def _pack(packer: Packer, records: Sequence[bytes], tail: bytes) -> bytes:
    spare = len(tail) - LENGTH_BYTES
    room = [bytes(spare)] if spare >= 0 else []
    out = io.BytesIO(packer([*records, *room]))
    end = out.seek(0, io.SEEK_END) - (len(tail) if room else 0)
    if end > RECORD_BYTES_MAX:  # The packer would cut the length of a longer record without a word.
        _check_lengths(max(map(len, records)))
    out.seek(end)
    out.write(tail)
    return out.getvalue()


def _join(records: Sequence[bytes], tail: bytes) -> bytes:
    lengths = set(map(len, records))
    if len(lengths) == 1:
        [length] = lengths
        # The header stands between the parts of the join, so an empty part goes first. The tail belongs to
        # the last part: joined afterwards it would cost a second copy of the block.
        parts = [b"", *records]
        parts[-1] = b"".join((parts[-1], tail))
        return _header(length).join(parts)
    _check_lengths(max(lengths))
    headers = {length: _LENGTH.pack(length) for length in lengths}
    parts = [b""] * (2 * len(records) + 1)
    parts[0:-1:2] = map(headers.__getitem__, map(len, records))
    parts[1::2] = records
    parts[-1] = tail
    return b"".join(parts)


def _header(length: int) -> bytes:
    _check_lengths(length)
    return _LENGTH.pack(length)


def _check_lengths(longest: int) -> None:
    if longest > RECORD_BYTES_MAX:
        raise LimitExceeded("RECORD_BYTES_MAX", limit=RECORD_BYTES_MAX, actual=longest)


def _encode_arrow(array: pa.Array | pa.ChunkedArray, tail: bytes) -> bytes:
    import pyarrow.compute as pc

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.null_count:
        raise UsageError("a record is null", hint="an empty record is b''")
    try:
        array = array.cast(pa.large_binary())
    except pa.ArrowException as error:
        raise UsageError(f"records are {array.type}", hint="give an array of binary or of text") from error
    if not len(array):
        return tail
    lengths = np.asarray(pc.binary_length(array))
    _check_lengths(int(lengths.max()))
    buffers = [None, pa.py_buffer(lengths.astype("<u4").tobytes())]
    headers = pa.Array.from_buffers(pa.binary(LENGTH_BYTES), len(array), buffers).cast(pa.large_binary())
    joined = pc.binary_join_element_wise(headers, array, pa.scalar(b"", pa.large_binary()))
    offsets = np.frombuffer(joined.buffers()[1], np.int64, len(joined) + 1, 8 * joined.offset)
    data = memoryview(joined.buffers()[2])[int(offsets[0]) : int(offsets[-1])]
    return b"".join((data, tail))


# -- decoding


def decode_list(block: bytes | memoryview, count: int) -> list[bytes]:
    """The records of a block as a list. Raises `Corrupt` unless it holds exactly `count` of them."""
    if count < PAGE_RECORDS_MIN or len(block) > PAGE_BYTES_MAX:
        return _walk(block, count)
    records: list[bytes] = decode_array(block, count).to_pylist()
    return records


def decode_array(block: bytes | memoryview, count: int) -> pa.Array:
    """The records as an Arrow array (`binary`; `large_binary` past 2 GiB). Raises `Corrupt`."""
    _check_count(block, count)
    if count == 0:
        return pa.array([], pa.binary())
    if len(block) > PAGE_BYTES_MAX:
        return pa.array(_walk(block, count), pa.large_binary())
    try:
        array = _read_page(block, count)
    except (pa.ArrowException, OSError) as error:
        _explain(block, count, str(error))
    if LENGTH_BYTES * count + _data_bytes(array) != len(block):
        _explain(block, count, "the records do not fill the block")
    return array


def _check_count(block: bytes | memoryview, count: int) -> None:
    if LENGTH_BYTES * count > len(block):
        raise Corrupt(_WHAT, len(block), f"{count} records cannot fit into {len(block)} bytes")
    if count == 0 and len(block):
        raise Corrupt(_WHAT, 0, f"{len(block)} bytes after the last record, expected 0")


def _walk(block: bytes | memoryview, count: int) -> list[bytes]:
    _check_count(block, count)
    data = bytes(block)
    end, place = len(data), 0
    records = []
    unpack = _LENGTH.unpack_from
    for index in range(count):
        start = place + LENGTH_BYTES
        if start > end:
            raise Corrupt(_WHAT, place, f"record {index} of {count}: its length is cut off")
        [length] = unpack(data, place)
        place = start + length
        if place > end:
            raise Corrupt(
                _WHAT, start - 4, f"record {index} of {count}: {length} bytes, {end - start} are left"
            )
        records.append(data[start:place])
    if place != end:
        raise Corrupt(_WHAT, place, f"{end - place} bytes after the last record, expected 0")
    return records


def _explain(block: bytes | memoryview, count: int, reason: str) -> NoReturn:
    """Raise with the place where the block goes wrong."""
    _walk(block, count)
    raise Corrupt(_WHAT, 0, reason)


def _data_bytes(array: pa.Array) -> int:
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset)
    return int(offsets[-1]) - int(offsets[0])


# -- the Parquet file around a block (Thrift compact protocol)

_MAGIC: Final = b"PAR1"
_STRUCT_END: Final = b"\0"
_BYTE_ARRAY, _PLAIN, _RLE, _REQUIRED, _DATA_PAGE, _UNCOMPRESSED = 6, 0, 3, 0, 0, 0
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_COLUMN: Final = b"r"
_FIRST_PAGE: Final = len(_MAGIC)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _struct(*fields: tuple[int, int, bytes]) -> bytes:
    """A struct of (field id, type, encoded value), ids ascending."""
    out, last = bytearray(), 0
    for number, kind, value in fields:
        out.append((number - last) << 4 | kind)
        out += value
        last = number
    return bytes(out) + _STRUCT_END


def _number(value: int) -> bytes:
    return _varint(value << 1)  # zigzag; ours are never negative


def _text(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _list(kind: int, *values: bytes) -> bytes:
    return bytes([len(values) << 4 | kind]) + b"".join(values)


def _page_header(size: int, count: int) -> bytes:
    levels = [(3, _I32, _number(_RLE)), (4, _I32, _number(_RLE))]
    page = _struct((1, _I32, _number(count)), (2, _I32, _number(_PLAIN)), *levels)
    return _struct(
        (1, _I32, _number(_DATA_PAGE)), (2, _I32, _number(size)), (3, _I32, _number(size)), (5, _STRUCT, page)
    )


_SCHEMA: Final = _list(
    _STRUCT,
    _struct((4, _BINARY, _text(b"schema")), (5, _I32, _number(1))),
    _struct((1, _I32, _number(_BYTE_ARRAY)), (3, _I32, _number(_REQUIRED)), (4, _BINARY, _text(_COLUMN))),
)


def _file_metadata(total: int, count: int) -> bytes:
    column = _struct(
        (1, _I32, _number(_BYTE_ARRAY)),
        (2, _LIST, _list(_I32, _number(_PLAIN))),
        (3, _LIST, _list(_BINARY, _text(_COLUMN))),
        (4, _I32, _number(_UNCOMPRESSED)),
        (5, _I64, _number(count)),
        (6, _I64, _number(total)),
        (7, _I64, _number(total)),
        (9, _I64, _number(_FIRST_PAGE)),
    )
    chunk = _struct((2, _I64, _number(_FIRST_PAGE)), (3, _STRUCT, column))
    group = _struct((1, _LIST, _list(_STRUCT, chunk)), (2, _I64, _number(total)), (3, _I64, _number(count)))
    rows = (3, _I64, _number(count))
    return _struct((1, _I32, _number(1)), (2, _LIST, _SCHEMA), rows, (4, _LIST, _list(_STRUCT, group)))


def _read_page(block: bytes | memoryview, count: int) -> pa.Array:
    import pyarrow.parquet as pq

    header = _page_header(len(block), count)
    metadata = _file_metadata(len(header) + len(block), count)
    file = b"".join((_MAGIC, header, block, metadata, _LENGTH.pack(len(metadata)), _MAGIC))
    column = pq.ParquetFile(pa.BufferReader(file)).read(use_threads=False).column(0)
    # Combining copies even where there is nothing to combine.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
