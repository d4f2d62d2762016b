"""Encoded `bytes-batch-v1` batches joined into one without making arrays of them: what compaction does.

The layout keeps lengths apart from data, so the sections of a joined batch are the sections of its pieces,
one after the other: lengths with lengths, times with times, bytes with bytes.

    piece 1   | lengths 1 | times 1 | values 1 |
    piece 2   | lengths 2 | times 2 | values 2 |
    joined    | lengths 1 | lengths 2 | times 1 | times 2 | values 1 | values 2 |

Nothing is copied but once, into the result. Decoding every piece into Arrow and concatenating the arrays says
the same and costs several times as much for small batches, and another copy of everything in memory; it is
still the way where headers are involved, whose inner lists make the sections less plain.

Pieces are checked as `decode` checks them: magic, checksum, and lengths that add up to the body exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from forebay.errors import LimitExceeded, UsageError
from forebay.formats import bytes_batch
from forebay.formats._errors import Corrupt
from forebay.formats.bytes_batch import (
    _CHECKSUM,
    _HEADERS,
    _KEYS,
    _NONE,
    _PREFIX,
    _TIMESTAMPS,
    _WHAT,
    RECORDS_MAX,
    Codec,
    _Body,
    _frame,
    _read_prefix,
    _uncompressed,
)

__all__ = ["Piece", "join", "open_piece"]

_NO_KEY: Final = _NONE.to_bytes(4, "little")


@dataclass(slots=True)
class Piece:
    """One encoded batch, checked and uncompressed, with its sections found."""

    columns: int
    count: int
    """Records."""
    body: memoryview
    values_bytes: int
    """Bytes of all values. What follows them in the body are the keys."""

    @property
    def data_start(self) -> int:
        """Where the values begin in the body."""
        width = 4 + (4 if self.columns & _KEYS else 0) + (8 if self.columns & _TIMESTAMPS else 0)
        return width * self.count

    def value_lengths(self) -> memoryview:
        """The section of value lengths."""
        return self.body[: 4 * self.count]

    def key_lengths(self) -> memoryview | bytes:
        """The section of key lengths: none of them where there is no such section."""
        if self.columns & _KEYS:
            return self.body[4 * self.count : 8 * self.count]
        return _NO_KEY * self.count

    def times(self, time_ms: int) -> memoryview | bytes:
        """The section of times; `time_ms` for every record where there is no such section."""
        if self.columns & _TIMESTAMPS:
            return self.body[self.data_start - 8 * self.count : self.data_start]
        return time_ms.to_bytes(8, "little", signed=True) * self.count

    def values(self) -> memoryview:
        """The bytes of the values."""
        return self.body[self.data_start : self.data_start + self.values_bytes]

    def keys(self) -> memoryview:
        """The bytes of the keys."""
        return self.body[self.data_start + self.values_bytes :]


def open_piece(data: bytes | memoryview) -> Piece:
    """Check one encoded batch; raises `Corrupt` for anything that is not exactly one."""
    view = memoryview(data).cast("B")
    codec, columns, count, size = _read_prefix(view)
    body = _uncompressed(view[_PREFIX.size : -_CHECKSUM.size], codec, size)
    if columns & _HEADERS:
        _Body(body, count).read(columns)
        return Piece(columns, count, body, 0)
    piece = Piece(columns, count, body, 0)
    if piece.data_start > size:
        raise Corrupt(_WHAT, _PREFIX.size, f"{count} records in a body of {size} bytes")
    values_bytes = int(np.frombuffer(piece.value_lengths(), "<u4").sum(dtype=np.uint64))
    keys_bytes = 0
    if columns & _KEYS:
        lengths = np.frombuffer(piece.key_lengths(), "<u4")
        keys_bytes = int(lengths[lengths != _NONE].sum(dtype=np.uint64))
    if piece.data_start + values_bytes + keys_bytes != size:
        expected = size - piece.data_start
        raise Corrupt(_WHAT, _PREFIX.size, f"lengths add up to {values_bytes + keys_bytes} of {expected}")
    piece.values_bytes = values_bytes
    return piece


def join(pieces: Sequence[tuple[Piece, int]], *, codec: Codec = "none") -> bytes:
    """Many pieces as one batch, in order, each with the time of its append.

    Every record keeps the time it had, so the result always has times. The same as `bytes_batch.concat` of
    the decoded pieces, byte for byte.
    """
    if not pieces:
        raise UsageError("nothing to join")
    count = sum(piece.count for piece, _ in pieces)
    if count > RECORDS_MAX:
        raise LimitExceeded("RECORDS_MAX", limit=RECORDS_MAX, actual=count, hint="join fewer batches")
    columns = _TIMESTAMPS
    for piece, _ in pieces:
        columns |= piece.columns
    if columns & _HEADERS:
        decoded = [(_Body(piece.body, piece.count).read(piece.columns), time_ms) for piece, time_ms in pieces]
        return bytes_batch.concat(decoded, codec=codec)
    parts: list[bytes | memoryview] = [piece.value_lengths() for piece, _ in pieces]
    if columns & _KEYS:
        parts += [piece.key_lengths() for piece, _ in pieces]
    parts += [piece.times(time_ms) for piece, time_ms in pieces]
    parts += [piece.values() for piece, _ in pieces]
    if columns & _KEYS:
        parts += [piece.keys() for piece, _ in pieces]
    return _frame(columns, count, parts, codec)
