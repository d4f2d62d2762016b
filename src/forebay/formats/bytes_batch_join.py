"""Pieces of `bytes-batch-v1` joined into one batch without making arrays of them.

The layout keeps lengths apart from data, so the sections of a joined batch are the sections of its pieces,
one after the other: lengths with lengths, times with times, bytes with bytes.

    piece 1   | lengths 1 | times 1 | values 1 |
    piece 2   | lengths 2 | times 2 | values 2 |
    joined    | lengths 1 | lengths 2 | times 1 | times 2 | values 1 | values 2 |

Decoding every piece into Arrow and concatenating the arrays says the same and costs several times as much for
small batches, and another copy of everything in memory. `join_frame` is what compaction does, `merge` what a
writer does with what its callers gave it; the first gives every record a time of its own.

Neither copies any data: they return a `Frame`, the buffers in order with their checksum, and whoever puts
frames into an object joins them all at once, or hands them to the kernel as they are. The checksum over a
frame ends with the one stored in it, so the data is gone over once for both; a single piece that came encoded
is not gone over again.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import LimitExceeded, UsageError
from forebay.formats.bytes_batch import (
    _HEADERS,
    _KEYS,
    _TIMESTAMPS,
    RECORDS_MAX,
    BytesBatch,
    Codec,
    Frame,
    decode,
    frame_of,
    sealed_frame,
)
from forebay.formats.bytes_batch_piece import Buffer, Piece, open_piece

__all__ = ["Piece", "columns_of", "join", "join_frame", "merge", "open_piece"]


def join(pieces: Sequence[tuple[Piece, int]], *, codec: Codec = "none") -> bytes:
    """Many pieces as one batch, in order, each with the time of its append. See `join_frame`."""
    return join_frame(pieces, codec=codec).tobytes()


def join_frame(pieces: Sequence[tuple[Piece, int]], *, codec: Codec = "none") -> Frame:
    """Many pieces as one batch, in order, each with the time of its append, not yet copied.

    Every record keeps the time it had, so the result always has times. The same as `bytes_batch.concat` of
    the decoded pieces, byte for byte.
    """
    times = [piece.times_or(time_ms) for piece, time_ms in pieces]
    return _joined([piece for piece, _ in pieces], times, codec)


def merge(pieces: Sequence[Piece], *, time_ms: int, codec: Codec = "none") -> Frame:
    """Many pieces of one append as one batch, in order, not yet copied.

    Records without a time get `time_ms` where others have one; if none has, the result has no times either.
    The same as encoding `bytes_batch.merge` of their columns, byte for byte.
    """
    if len(pieces) == 1 and codec == "none":
        [piece] = pieces
        if piece.frame is not None and piece.count <= RECORDS_MAX:
            return sealed_frame(piece.frame)
    timed = any(piece.times is not None for piece in pieces)
    return _joined(pieces, [piece.times_or(time_ms) for piece in pieces] if timed else None, codec)


def columns_of(records: BytesBatch | Piece) -> BytesBatch:
    """The columns of a piece; those of columns are themselves."""
    if isinstance(records, BytesBatch):
        return records
    return decode(merge([records], time_ms=0).tobytes())


def _joined(pieces: Sequence[Piece], times: Sequence[Buffer] | None, codec: Codec) -> Frame:
    count, keyed, headed = 0, False, False
    for piece in pieces:
        count += piece.count
        keyed = keyed or piece.key_lengths is not None
        headed = headed or piece.headers is not None
    if not count:
        raise UsageError("nothing to join")
    if count > RECORDS_MAX:
        raise LimitExceeded("RECORDS_MAX", limit=RECORDS_MAX, actual=count, hint="join fewer batches")
    columns = 0
    numbers = [piece.value_lengths for piece in pieces]
    data = [piece.values for piece in pieces]
    if keyed:
        columns |= _KEYS
        numbers += [piece.key_lengths_or_none() for piece in pieces]
        data += [piece.keys for piece in pieces]
    if times is not None:
        columns |= _TIMESTAMPS
        numbers += times
    if headed:
        columns |= _HEADERS
        headers = [piece.headers_or_none() for piece in pieces]
        numbers += [each.counts for each in headers]
        numbers += [each.name_lengths for each in headers]
        numbers += [each.value_lengths for each in headers]
        data += [each.names for each in headers]
        data += [each.values for each in headers]
    if len(pieces) > 1:
        numbers = [b"".join(numbers)]  # They are short: one buffer is cheaper to go over than many.
    return frame_of(columns, count, [*numbers, *data], codec)
