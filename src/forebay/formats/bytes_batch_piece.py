"""Pieces: the sections of a `bytes-batch-v1` body as buffers, before they are put together.

A piece is what a batch is between its arrival and the object it ends in. It has the bytes of every section
of the layout and no arrays, so that putting many pieces together is one join of buffers:

    a frame that came ready    views of its sections, after one look at its checksum and its lengths
    lists of bytes or texts    one join for the data, one array for the lengths
    columns of Arrow           views of the data, the lengths computed from the offsets

Arrow would do the second as well, with an array per column, a copy when arrays are concatenated and another
when they are encoded; for records of a kilobyte that is several times the work of the join itself.

Sections are never changed once they are in a piece: views of a request body or of an Arrow buffer are safe as
long as their owner does not write to them, and nobody does.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.errors import UsageError
from forebay.formats._errors import Corrupt
from forebay.formats.bytes_batch import (
    _CHECKSUM,
    _HEADERS,
    _KEYS,
    _NONE,
    _PREFIX,
    _TIMESTAMPS,
    _WHAT,
    BytesBatch,
    _Body,
    _check_columns,
    _data,
    _header_columns,
    _lengths,
    _offsets,
    _read_prefix,
    _uncompressed,
    integers_of,
)

__all__ = [
    "Buffer",
    "HeaderSections",
    "Piece",
    "open_piece",
    "piece_of",
    "piece_of_lists",
    "piece_of_texts",
    "pieces_of",
]

Buffer: TypeAlias = bytes | memoryview
_NO_KEY: Final = _NONE.to_bytes(4, "little")
_NO_HEADERS: Final = bytes(4)


class HeaderSections(NamedTuple):
    """The sections of the headers of a batch."""

    counts: Buffer
    name_lengths: Buffer
    value_lengths: Buffer
    names: Buffer
    values: Buffer


@dataclass(slots=True, eq=False)
class Piece:
    """The sections of one batch."""

    count: int
    """Records."""
    value_lengths: Buffer
    values: Buffer
    key_lengths: Buffer | None = None
    """None where no record has a key."""
    keys: Buffer = b""
    times: Buffer | None = None
    """None where all records have the time of their append."""
    headers: HeaderSections | None = None
    """None where no record has headers."""
    frame: Buffer | None = None
    """The whole batch where it came encoded, sound and without compression: it can be written as it is."""

    def __len__(self) -> int:
        return self.count

    @property
    def size_bytes(self) -> int:
        """Bytes of all sections."""
        size = len(self.value_lengths) + len(self.values) + len(self.keys)
        if self.key_lengths is not None:
            size += len(self.key_lengths)
        if self.times is not None:
            size += len(self.times)
        if self.headers is not None:
            size += sum(map(len, self.headers))
        return size

    def longest_bytes(self) -> int:
        """Bytes of the largest value or key."""
        longest = int(np.frombuffer(self.value_lengths, "<u4").max())
        if self.key_lengths is not None:
            lengths = np.frombuffer(self.key_lengths, "<u4")
            longest = max(longest, int(np.where(lengths == _NONE, 0, lengths).max()))
        return longest

    def key_lengths_or_none(self) -> Buffer:
        """The section of key lengths: no key anywhere where there is no such section."""
        return _NO_KEY * self.count if self.key_lengths is None else self.key_lengths

    def times_or(self, time_ms: int) -> Buffer:
        """The section of times; `time_ms` for every record where there is no such section."""
        if self.times is None:
            return time_ms.to_bytes(8, "little", signed=True) * self.count
        return self.times

    def headers_or_none(self) -> HeaderSections:
        """The sections of headers: none for any record where there are no such sections."""
        return self.headers or HeaderSections(_NO_HEADERS * self.count, b"", b"", b"", b"")


def open_piece(data: bytes | memoryview) -> Piece:
    """Check one encoded batch; raises `Corrupt` for anything that is not exactly one."""
    view = memoryview(data).cast("B")
    codec, columns, count, size = _read_prefix(view)
    body = _uncompressed(view[_PREFIX.size : -_CHECKSUM.size], codec, size)
    piece = _headed(body, columns, count) if columns & _HEADERS else _plain(body, columns, count)
    if codec == 0:
        piece.frame = view
    return piece


def _plain(body: memoryview, columns: int, count: int) -> Piece:
    """The sections of a body without headers, whose lengths add up to it exactly."""
    size, at = len(body), 4 * count
    key_lengths = times = None
    value_lengths = body[:at]
    if columns & _KEYS:
        key_lengths = body[at : at + 4 * count]
        at += 4 * count
    if columns & _TIMESTAMPS:
        times = body[at : at + 8 * count]
        at += 8 * count
    if at > size:
        raise Corrupt(_WHAT, _PREFIX.size, f"{count} records in a body of {size} bytes")
    values_bytes = int(np.add.reduce(np.frombuffer(value_lengths, "<u4"), dtype=np.uint64))
    keys_bytes = 0
    if key_lengths is not None:
        lengths = np.frombuffer(key_lengths, "<u4")
        keys_bytes = int(lengths[lengths != _NONE].sum(dtype=np.uint64))
    if at + values_bytes + keys_bytes != size:
        raise Corrupt(_WHAT, _PREFIX.size, f"lengths add up to {values_bytes + keys_bytes} of {size - at}")
    return Piece(
        count, value_lengths, body[at : at + values_bytes], key_lengths, body[at + values_bytes :], times
    )


def _headed(body: memoryview, columns: int, count: int) -> Piece:
    # The reader checks more than lengths here: names are text, and counts are those of the lists.
    return piece_of(_Body(body, count).read(columns))


def piece_of(batch: BytesBatch) -> Piece:
    """The sections of columns; raises a `UsageError` where they are none of a batch."""
    _check_columns(batch, len(batch))
    piece = Piece(len(batch), _lengths(batch.values).tobytes(), _data(batch.values))
    if batch.keys is not None:
        piece.key_lengths, piece.keys = _lengths(batch.keys).tobytes(), _data(batch.keys)
    if batch.timestamps_ms is not None:
        piece.times = batch.timestamps_ms.astype("<i8", copy=False).tobytes()
    if batch.headers is not None:
        [counts, names, values], data = _header_columns(batch.headers)
        piece.headers = HeaderSections(counts.tobytes(), names.tobytes(), values.tobytes(), *data)
    return piece


def pieces_of(batch: BytesBatch, counts: Sequence[int]) -> list[Piece]:
    """The same for so many records each, one after the other: at least one, and together all of the batch.

    What there is to compute is computed once for all of them.
    """
    bounds = [0, *itertools.accumulate(counts)]
    if batch.headers is not None:
        return [piece_of(batch.slice(first, last - first)) for first, last in itertools.pairwise(bounds)]
    _check_columns(batch, bounds[-1])
    value_lengths, values = _cut_column(batch.values, bounds)
    pieces = [Piece(*each) for each in zip(counts, value_lengths, values, strict=True)]
    if batch.keys is not None:
        for piece, lengths, keys in zip(pieces, *_cut_column(batch.keys, bounds), strict=True):
            piece.key_lengths, piece.keys = lengths, keys
    if batch.timestamps_ms is not None:
        section = batch.timestamps_ms.astype("<i8", copy=False).tobytes()
        for piece, times in zip(pieces, _cut(section, [8 * bound for bound in bounds]), strict=True):
            piece.times = times
    return pieces


def _cut_column(column: pa.BinaryArray, bounds: Sequence[int]) -> tuple[list[memoryview], list[memoryview]]:
    """Lengths and data of the records between the bounds."""
    lengths = _lengths(column).tobytes()
    if column.null_count:
        column = column.fill_null(b"")
    offsets = _offsets(column)[bounds]
    data = _cut(column.buffers()[2] or b"", offsets.tolist())
    return _cut(lengths, [4 * bound for bound in bounds]), data


def _cut(section: Buffer | pa.Buffer, bounds: Sequence[int]) -> list[memoryview]:
    view = memoryview(section)
    return [view[first:last] for first, last in itertools.pairwise(bounds)]


def piece_of_lists(
    records: Sequence[Buffer],
    *,
    keys: Sequence[Buffer | None] | None = None,
    timestamps_ms: Sequence[int] | npt.NDArray[np.int64] | None = None,
) -> Piece:
    """The sections of lists of bytes. Raises a `TypeError` where anything else is in them."""
    piece = Piece(len(records), *_section(records))
    if keys is not None:
        piece.key_lengths, piece.keys = _section(keys, nullable=True)
    return _timed(piece, timestamps_ms)


def piece_of_texts(
    records: Sequence[str],
    *,
    keys: Sequence[str | None] | None = None,
    timestamps_ms: Sequence[int] | npt.NDArray[np.int64] | None = None,
) -> Piece:
    """The sections of lists of text, as UTF-8. Raises a `TypeError` where anything else is in them."""
    piece = Piece(len(records), *_text_section(records))
    if keys is not None:
        if None in keys:
            encoded = [None if key is None else key.encode() for key in keys]
            piece.key_lengths, piece.keys = _section(encoded, nullable=True)
        else:
            piece.key_lengths, piece.keys = _text_section(cast(Sequence[str], keys))
    return _timed(piece, timestamps_ms)


def _timed(piece: Piece, times: Sequence[int] | npt.NDArray[np.int64] | None) -> Piece:
    if times is not None:
        piece.times = integers_of(times).tobytes()
    elif piece.key_lengths is None:
        return piece
    for section, width, name in ((piece.key_lengths, 4, "keys"), (piece.times, 8, "timestamps_ms")):
        if section is not None and len(section) != width * piece.count:
            raise UsageError(f"{len(section) // width} {name} for {piece.count} records")
    return piece


def _section(values: Sequence[Buffer | None], *, nullable: bool = False) -> tuple[bytes, bytes]:
    """Lengths and data of a list of bytes. A list of texts, of numbers or of other arrays is none."""
    nulls = 0
    try:
        data = b"".join(values)  # type: ignore[arg-type]
        lengths = list(map(len, values))  # type: ignore[arg-type]
    except TypeError:
        if not nullable:
            raise
        there = [value for value in values if value is not None]
        nulls = len(values) - len(there)
        data = b"".join(there)
        lengths = [_NONE if value is None else len(value) for value in values]
    # A buffer of wider items has fewer of them than bytes.
    if sum(lengths) - _NONE * nulls != len(data):
        raise TypeError("a buffer whose items are no bytes")
    return struct.pack(f"<{len(lengths)}I", *lengths), data


def _text_section(values: Sequence[str]) -> tuple[bytes, bytes]:
    text = "".join(values)
    if not text.isascii():
        # The lengths are those of the bytes, which only each text for itself can tell.
        return _section([value.encode() for value in values])
    return struct.pack(f"<{len(values)}I", *map(len, values)), text.encode()
