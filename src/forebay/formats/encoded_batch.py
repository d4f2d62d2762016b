"""A `bytes-batch-v1` that was encoded in here a moment ago, made into columns only where somebody reads it.

Whoever keeps what was written for readers that may never come keeps this: a view of the bytes, or the buffers
they were written from. Making arrays of them costs as much for a batch that nobody reads as for one that a
hundred do.
"""

from __future__ import annotations

from forebay.formats.batch_facts import plain_bytes
from forebay.formats.bytes_batch import BytesBatch, Frame, read_back

__all__ = ["EncodedBatch"]


class EncodedBatch:
    """The bytes of a batch, and its columns from the first time they are asked for."""

    __slots__ = ("_columns", "_count", "_data")

    def __init__(self, data: bytes | memoryview | Frame, count: int) -> None:
        """`data` must be sound: it is not checked again."""
        self._data = data
        self._count = count
        self._columns: BytesBatch | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def plain_bytes(self) -> int:
        """Bytes of its body once it is not compressed: about what its columns occupy."""
        data = self._data
        # A frame begins with its prefix, as a buffer of its own or with everything else.
        return plain_bytes(data.parts[0] if isinstance(data, Frame) else data)

    def columns(self) -> BytesBatch:
        """The columns, as a reader of the log gets them."""
        if self._columns is None:
            if isinstance(self._data, Frame):
                self._data = self._data.tobytes()
            self._columns = read_back(self._data)
        return self._columns
