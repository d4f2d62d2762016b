"""Many encoded `bytes-batch-v1` batches opened at once.

`open_piece` asks numpy to add up the lengths of one batch, and for small batches the asking costs more than
the adding. Here the lengths of all batches of a group are added up by one call. Only plain batches take this
way: no compression, neither keys nor headers. All others, and all that look wrong in any respect, go to
`open_piece`, which checks the same and has the words for what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from crc32c import crc32c

from forebay.formats.bytes_batch import _CHECKSUM, _PREFIX, _TIMESTAMPS, BODY_BYTES_MAX, MAGIC, _masked
from forebay.formats.bytes_batch_piece import Piece, open_piece

__all__ = ["open_pieces"]

_WIDTHS: Final = {0: 4, _TIMESTAMPS: 12}
"""Bytes that stand before the values for each record, by the columns of batches that are plain."""
_FRAME_BYTES: Final = _PREFIX.size + _CHECKSUM.size


def open_pieces(batches: Sequence[bytes]) -> list[Piece]:
    """Each batch checked, as `open_piece` does; raises `Corrupt` for the first that is not exactly one."""
    opened = [_plain(data) for data in batches]
    sections = [piece.value_lengths for piece in opened if piece is not None]
    if sections:
        counts = np.array([len(section) // 4 for section in sections], np.intp)
        starts = np.cumsum(counts) - counts
        sums = np.add.reduceat(np.frombuffer(b"".join(sections), "<u4"), starts, dtype=np.uint64)
        found = iter(sums.tolist())
        opened = [piece if piece is None or len(piece.values) == next(found) else None for piece in opened]
    return [open_piece(data) if piece is None else piece for data, piece in zip(batches, opened, strict=True)]


def _plain(data: bytes) -> Piece | None:
    """The batch with a sound frame, its lengths not yet added up; None: not here."""
    if len(data) < _FRAME_BYTES:
        return None
    magic, codec, columns, reserved, count, size = _PREFIX.unpack_from(data)
    width = _WIDTHS.get(columns)
    if magic != MAGIC or codec or reserved or width is None or not 0 < count * width <= size:
        return None
    if size > BODY_BYTES_MAX or size != len(data) - _FRAME_BYTES:
        return None
    checked = memoryview(data)[: -_CHECKSUM.size]
    [stored] = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if stored != _masked(crc32c(checked)):
        return None
    lengths_end = _PREFIX.size + 4 * count
    values_start = _PREFIX.size + width * count
    piece = Piece(count, checked[_PREFIX.size : lengths_end], checked[values_start:])
    if columns:
        piece.times = checked[lengths_end:values_start]
    piece.frame = data
    return piece
