"""Room for answers: how much may be fetched, encoded and kept for clients at one time.

The server counts answers that their clients do not take (`answers_max_bytes`). Where they leave no room a
request is refused, since nobody knows when they are taken. What is just being made, from the fetch of its
records to the last byte of the answer, needs the same memory, but for a moment only: there requests wait for
each other, first come first served. One may always be made, however large.

Nobody waits while he holds some of the room, so there is no ring of waiters.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from forebay.errors import Backpressure

__all__ = ["AnswerRoom", "Share"]


class AnswerRoom:
    """The room of one broker."""

    def __init__(self, bytes_max: int, untaken: Callable[[], int]) -> None:
        """`untaken`: bytes of answers that their clients have not taken."""
        self._bytes_max = bytes_max
        self._untaken = untaken
        self.making = 0
        """Bytes of answers that are being made."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def share(self) -> Share:
        """The part of one request: nothing yet."""
        return Share(self)

    async def take(self, size: int) -> None:
        """Take so many bytes, now or when others have given some back; raises `Backpressure`."""
        self.check(size)
        if not self._waiting and self._fits(size):
            self.making += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.making -= size
            self._admit()
            raise

    def give(self, size: int) -> None:
        """Give so many bytes back."""
        self.making -= size
        if self._waiting:
            # Not before the server has counted the answer that has just been made.
            asyncio.get_running_loop().call_soon(self._admit)

    def check(self, size: int) -> None:
        """Raise `Backpressure` where clients hold too much already."""
        if (refusal := self._refusal(size)) is not None:
            raise refusal

    def _refusal(self, size: int) -> Backpressure | None:
        untaken = self._untaken()
        if not size or not untaken or untaken + size <= self._bytes_max:
            return None
        return Backpressure(
            f"answers_max_bytes: {untaken:,} bytes of answers wait to be taken", hint="take earlier answers"
        )

    def _fits(self, size: int) -> bool:
        return not self.making or self._untaken() + self.making + size <= self._bytes_max

    def _admit(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if (refusal := self._refusal(size)) is not None:
                    turn.set_exception(refusal)
                elif self._fits(size):
                    self.making += size
                    turn.set_result(None)
                else:
                    return
            self._waiting.popleft()


class Share:
    """What one request holds of the room, until the end of its `with` block."""

    __slots__ = ("_room", "_size")

    def __init__(self, room: AnswerRoom) -> None:
        self._room = room
        self._size = 0

    async def take(self, size: int) -> None:
        """Wait for room for so many bytes, in place of those before; raises `Backpressure`."""
        self._set(0)
        await self._room.take(size)
        self._size = size

    def hold(self, size: int) -> None:
        """Hold so many bytes, which are there already, in place of those before; raises `Backpressure`.

        Nothing is waited for: the memory would be in use meanwhile.
        """
        self._room.check(size)
        self._set(size)

    def _set(self, size: int) -> None:
        self._room.give(self._size - size)
        self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set(0)
