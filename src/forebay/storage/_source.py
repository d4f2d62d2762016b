"""Bodies that are not in memory: read piece by piece while they are stored, and again for another try.

A body of many megabytes that lies in a file need not be held by whoever stores it. A store that can asks its
source for pieces and hands each on before it asks for the next; a second try begins with the first piece
again. What a source finds wrong on the way it raises, and nothing is stored then: a file becomes an object by
its rename, a request counts only with all of its bytes. That is why a source has checked everything before it
gives its last piece.

The store that cannot, because its client wants a body whole, reads it into memory, and lets no more bytes in
at once than it has room for.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import io
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import ClassVar, TypeAlias

from forebay.errors import NotDone

__all__ = ["PIECE_BYTES", "Held", "Room", "Source", "SourceFailed", "pieces_of", "whole"]

Piece: TypeAlias = bytes | bytearray | memoryview

PIECE_BYTES = 1024 * 1024
"""Bytes that a source should give at a time: few enough for many at once, enough for few calls."""


class SourceFailed(NotDone):
    """The bytes to be stored could not be read as promised. Nothing was stored."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"writing {key!r}: {reason}", hint="look at where its bytes come from, then try again"
        )
        self.key = key


class Source(abc.ABC):
    """A body that can be read as often as it takes."""

    size: int
    """Bytes of all pieces together."""
    piece_bytes: ClassVar[int] = PIECE_BYTES
    """Bytes that a piece should have."""

    @abc.abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The body from its beginning. Blocks, and is called in threads.

        A piece is valid until the next one is asked for. Whatever is wrong is raised before the last piece is
        given; a piece once given may be on its way.
        """


class Held(Source):
    """Bytes that are in memory anyway."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def pieces(self) -> Iterator[Piece]:
        """All of them."""
        yield self._data


def pieces_of(key: str, source: Source) -> Generator[Piece, None, None]:
    """The pieces of a source, which are as many bytes as it said, or `SourceFailed`."""
    left = source.size
    pieces = source.pieces()
    try:
        while True:
            try:
                piece = next(pieces)
            except StopIteration:
                break
            except OSError as error:
                # Not to be taken for an error of the store that asks.
                raise SourceFailed(key, f"its source cannot be read: {error}") from error
            left -= len(piece)
            if left < 0:
                raise SourceFailed(key, f"its source has more than {source.size} bytes")
            yield piece
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    if left:
        raise SourceFailed(key, f"its source ended {left} bytes early")


def whole(key: str, source: Source) -> bytes:
    """All of a source in memory."""
    body = io.BytesIO()
    for piece in pieces_of(key, source):
        body.write(piece)
    # Not a copy: the bytes change hands.
    return body.getvalue()


class Room:
    """A number of bytes that may be in memory at once; who does not fit waits, first come, first served."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        """Bytes in use."""
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Have room for `size` bytes while the block lasts. More than there is at all means: alone."""
        wanted = min(size, self.bytes_max)
        await self._enter(wanted)
        try:
            yield
        finally:
            self.held -= wanted
            self._admit()

    async def _enter(self, wanted: int) -> None:
        if not self._waiting and self.held + wanted <= self.bytes_max:
            self.held += wanted
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.held -= wanted  # It was let in at the moment it gave up.
            else:
                with suppress(ValueError):
                    self._waiting.remove((wanted, turn))
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self.held + self._waiting[0][0] <= self.bytes_max:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self.held += wanted
                turn.set_result(None)
