"""Bodies for `put_source`: what a test wants to see of them, or to go wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from forebay.storage import Source


class Pieces(Source):
    """Bytes in one buffer that is used again for every piece, as a file reader would."""

    def __init__(self, data: bytes, piece_bytes: int = 64 * 1024, size: int | None = None) -> None:
        self.size = len(data) if size is None else size
        self.reads = 0
        """How often it was read from its beginning."""
        self.given = 0
        """Bytes handed out."""
        self.closed = 0
        """How often a reading came to its end, or was let go of."""
        self.on_piece: Callable[[int], None] = lambda at: None
        """Called with the position of every piece before it is given."""
        self._data = data
        self._piece_bytes = piece_bytes

    def pieces(self) -> Iterator[memoryview]:
        self.reads += 1
        buffer = bytearray(self._piece_bytes)
        try:
            for at in range(0, len(self._data), self._piece_bytes):
                self.on_piece(at)
                piece = self._data[at : at + self._piece_bytes]
                buffer[: len(piece)] = piece
                self.given += len(piece)
                yield memoryview(buffer)[: len(piece)]
                buffer[: len(piece)] = bytes(len(piece))
        finally:
            self.closed += 1
